"""A timeline as a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing."""

import json
import os
from collections.abc import Sequence
from typing import Union

from .palette import NAMES
from .timeline import Timeline, to_timeline

# Names from chrome://tracing's fixed palette. Perfetto colours by the name's letters: by kind, too.
COLOURS = {"F": "thread_state_runnable", "B": "thread_state_running", "I": "olive", "W": "yellow"}


def events(blocks: Timeline, unit_us: float = 1000.0, process: str = "pipeline") -> list[dict]:
    """One complete event per block, on one track per rank. ``unit_us``: microseconds in one unit of the timeline."""
    blocks = to_timeline(blocks)
    named = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": process}}]
    for rank in sorted({block.rank for block in blocks}):
        track = {"ph": "M", "pid": 0, "tid": rank}
        named.append({**track, "name": "thread_name", "args": {"name": f"rank {rank}"}})
        named.append({**track, "name": "thread_sort_index", "args": {"sort_index": rank}})
    return named + [
        {
            **event(str(block.action), NAMES[block.kind], block.rank, block.start * unit_us, block.end * unit_us),
            "cname": COLOURS[block.kind],
            "args": {"chunk": block.chunk, "micro_batch": block.micro_batch},
        }
        for block in blocks
    ]


def event(name: str, category: str, rank: int, start_us: float, end_us: float) -> dict:
    """A complete event on a rank's track."""
    return {"ph": "X", "name": name, "cat": category, "pid": 0, "tid": rank, "ts": start_us, "dur": end_us - start_us}


def save(
    path: Union[str, os.PathLike],
    blocks: Timeline,
    unit_us: float = 1000.0,
    process: str = "pipeline",
    more: Sequence[dict] = (),
) -> None:
    """Writes the trace. ``unit_us``: microseconds in one unit of the timeline (1e6 for one in seconds); ``more``: other events.

    ValueError for what is not a block, OSError if ``path`` cannot be written.
    """
    trace = {"displayTimeUnit": "ms", "traceEvents": [*events(blocks, unit_us, process), *more]}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(trace, file)
