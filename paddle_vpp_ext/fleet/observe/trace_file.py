"""Writes what each step of a rank really did into a file of its own; ``trace merge`` puts them together.

A file is JSON lines: a head, then a line a step, written at the end of the step in one piece. Times in a
step are microseconds from its start; its ``start`` and ``end`` are seconds of the rank's own clock,
which is ``clock_offset`` seconds ahead of the first rank's. ``rank`` is the place in the pipeline, ``ranks`` are
the processes of the pipeline.

    {"run": …, "rank": 2, "ranks": [0, 1, 2, 3], "num_stages": 4, "num_chunks": 2, "schedule": "VPP", "clock_offset": 0.0, …}
    {"step": 0, "training": true, "accumulate_steps": 8, "start": …, "end": …, "actions": [["F0.0", 310, 1240], …],
     "waits": [["F1.0", 12, 305], …], "posts": [["F1.0", 10], …]}
"""

import contextlib
import itertools
import json
import os
import re
from typing import Any, Callable

from ...log import logger
from .recording import Recording, now

ROUNDS = 8
_files = itertools.count()


def clock_offset(gather: Callable[[Any], list[Any]], rounds: int = ROUNDS) -> tuple[float, float]:
    """(seconds by which this clock is ahead of the first rank's, by how much that may be wrong at most).

    Nobody leaves a gather before all have come: the first rank leaves after this one has come, this
    one after the first has come. Where the bounds that this gives allow no difference, there is none.
    """
    came: list[float] = []
    left: list[float] = []
    for _ in range(rounds):
        came.append(now())
        gather(None)
        left.append(now())
    first_came, first_left = gather([came, left])[0]
    least = max(mine - first for mine, first in zip(came, first_left))
    most = min(mine - first for mine, first in zip(left, first_came))
    error = (most - least) / 2
    return (0.0 if least <= 0 <= most else (least + most) / 2), error


def open_recorder(runner: Any, folder: str) -> "StepRecorder":
    """What writes all steps of ``runner`` into ``folder``. All ranks of its pipeline call it together.

    ValueError, the same on all of them, if one cannot write there.
    """
    number, gather = next(_files), runner.transport.gather
    path = os.path.join(folder, f"engine{number}-pipeline{runner.ranks[0]}-rank{runner.stage_id}.jsonl")
    file = problem = None
    try:
        os.makedirs(folder, exist_ok=True)
        file = open(path, "wb", buffering=0)  # noqa: SIM115, open as long as the training goes on
    except OSError as error:
        problem = str(error)
    for rank, other in zip(runner.ranks, gather(problem)):
        if other:
            raise ValueError(f"trace={folder}: rank {rank} cannot write there: {other}")
    offset, uncertainty = clock_offset(gather)
    head = {
        "run": gather(f"{now():.6f} {runner.ranks}")[0],
        "rank": runner.stage_id,
        "ranks": runner.ranks,
        "num_stages": len(runner.ranks),
        "num_chunks": runner.plans.num_chunks,
        "schedule": re.sub(r"trace=[^,]*,?", "", runner.plans.text).rstrip(":,"),
        "clock_offset": offset,
        "clock_error": uncertainty,
    }
    return StepRecorder(runner, file, head)


class StepRecorder(Recording):
    """Writes a line a step."""

    def __init__(self, runner: Any, file: Any, head: dict):
        super().__init__(runner.stage_id)
        self._runner, self._file, self._count = runner, file, 0
        self._write(head)

    def begin_step(self, training: bool) -> None:
        self.clear()
        self._training, self._step_start = training, now()

    def end_step(self) -> None:
        self._write(self._line(self._step_start, now()))
        self._count += 1

    def _line(self, start, end):
        since = lambda time: round((time - start) * 1e6)
        return {
            "step": self._count,
            "training": self._training,
            "accumulate_steps": self._runner.accumulate_steps,
            "start": start,
            "end": end,
            "actions": [[f"{kind}{chunk}.{i}", since(s), since(e)] for _, s, e, kind, chunk, i in self.blocks],
            "waits": [[transfer and str(transfer), since(s), since(e)] for transfer, s, e in self.waits],
            "posts": [[str(transfer), since(time)] for transfer, time in self.posts],
        }

    def _write(self, line):
        if self._file is None:
            return
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        start = self._file.tell()
        try:
            if self._file.write(data) < len(data):
                raise OSError("the disk is full")
        except OSError as error:  # no reason to end a training
            logger.warning(f"no more steps are recorded: cannot write {self._file.name}: {error}")
            with contextlib.suppress(OSError):
                self._file.truncate(start)  # no half of a line
            self._file = None
