"""Recorded runs: the files of all ranks read, their clocks aligned, and where the time went."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Optional, Union

from ..schedule.action import Action
from ..schedule.costs import Costs
from ..schedule.plan import plan_orders
from .draw.timeline import Block, Timeline, from_plan, num_chunks


class RecordingError(ValueError):
    """A folder without a complete recording; the text says what is missing."""


class Wait(NamedTuple):
    """A rank's wait; ``transfer`` is its text form, or None where all ranks wait for each other. Seconds."""

    transfer: Optional[str]
    start: float
    end: float


class RankStep(NamedTuple):
    """One rank's step in seconds of the first rank's clock. ``posts``: when the rank was ready for a transfer."""

    training: bool
    accumulate_steps: int
    start: float
    end: float
    blocks: list[Block]
    waits: list[Wait]
    posts: dict[str, float]


class Run(NamedTuple):
    """``head`` is the first rank's; ``steps``: {number: each rank's step}, of the steps that all ranks have."""

    head: dict
    steps: dict[int, list[RankStep]]
    clock_error: float


def load(folder: Union[str, os.PathLike], rank: Optional[int] = None) -> tuple[Run, int]:
    """(the newest run in a folder, how many others there are); with ``rank`` of those in which this process was.

    RecordingError; OSError if a file cannot be read.
    """
    files: dict[str, dict[int, tuple[dict, dict[int, RankStep]]]] = {}
    for path in sorted(Path(folder).glob("*-rank*.jsonl")):
        run, stage, head, steps = _read(path)
        if rank is None or rank in head["ranks"]:
            files.setdefault(run, {})[stage] = head, steps
    if not files:
        raise RecordingError(
            f"{folder} has no recording"
            + (f" with rank {rank}" if rank is not None else "")
            + ': train with schedule_mode="…:trace=DIR" or PADDLE_VPP_TRACE=DIR'
        )
    newest = max(files, key=lambda run: float(run.split()[0]))
    return _run(folder, files[newest]), len(files) - 1


def _read(path):
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last newline was cut off by the run's end
    try:
        head, *steps = map(json.loads, lines)
        return head["run"], head["rank"], head, {step["step"]: _step(head, step) for step in steps}
    except (KeyError, TypeError, ValueError) as error:
        raise RecordingError(
            f"{path} is not a recording of paddle_vpp_ext, as trace=DIR writes it ({type(error).__name__}: {error})"
        ) from None


def _step(head, step):
    start = step["start"] - head["clock_offset"]
    at = lambda microseconds: start + microseconds * 1e-6
    return RankStep(
        step["training"],
        step["accumulate_steps"],
        start,
        step["end"] - head["clock_offset"],
        [Block(head["rank"], at(s), at(e), *Action.parse(action)) for action, s, e in step["actions"]],
        [Wait(transfer, at(s), at(e)) for transfer, s, e in step["waits"]],
        {transfer: at(time) for transfer, time in step["posts"]},
    )


def _run(folder, ranks):
    head = next(iter(ranks.values()))[0]
    missing = [rank for rank in range(head["num_stages"]) if rank not in ranks]
    if missing:
        raise RecordingError(f"{folder} has no file of rank {missing[0]}: copy the files of all {head['num_stages']} ranks into it")
    common = set.intersection(*(set(steps) for _, steps in ranks.values()))
    steps = {number: [ranks[rank][1][number] for rank in sorted(ranks)] for number in sorted(common)}
    return Run(ranks[0][0], steps, max(head["clock_error"] for head, _ in ranks.values()))


def timeline_of(step: Sequence[RankStep]) -> Timeline:
    """The blocks of all ranks."""
    return [block for rank in step for block in rank.blocks]


def planned(run: Run, step: Sequence[RankStep]) -> Timeline:
    """The same orders as they would have run with the mean times of their model parts, and transfers that cost nothing."""
    blocks, p = timeline_of(step), len(step)
    orders = [[block.action for block in rank.blocks] for rank in step]
    chunks = max(num_chunks(blocks), run.head["num_chunks"])
    times: dict[tuple[str, int], list[float]] = {}
    for block in blocks:
        times.setdefault((block.kind, block.chunk * p + block.rank), []).append(block.end - block.start)
    mean = {key: sum(values) / len(values) for key, values in times.items()}
    part = lambda kind, s: mean.get((kind, s), mean.get(("B", s), 0.0) / 2)
    forward, input_grad, weight_grad = ([part(kind, s) for s in range(p * chunks)] for kind in "FIW")
    costs = Costs(forward, input_grad, weight_grad)
    plan = plan_orders(orders, chunks, step[0].accumulate_steps, forward_only=not step[0].training, costs=costs)
    return from_plan(plan, costs)


class Account(NamedTuple):
    """Where one rank's time went, in seconds; ``waiting``: {rank that it waited for: seconds}."""

    total: float
    compute: float
    waiting: dict[int, float]
    transfer: float

    @property
    def other(self) -> float:
        """What is left: the engine itself, the data, hooks."""
        return self.total - self.compute - sum(self.waiting.values()) - self.transfer


def accounts(steps: Sequence[Sequence[RankStep]]) -> list[Account]:
    """Each rank's account over all given steps.

    A wait is for the rank at the other end until that one was ready for the transfer, and
    transfer from then on; where all wait for each other, it is for the rank that came last.
    """
    return [_sum([_account(step, rank) for step in steps]) for rank in range(len(steps[0]))]


def _sum(parts):
    waiting: dict[int, float] = {}
    for part in parts:
        for peer, seconds in part.waiting.items():
            waiting[peer] = waiting.get(peer, 0.0) + seconds
    add = lambda name: sum(getattr(part, name) for part in parts)
    return Account(add("total"), add("compute"), waiting, add("transfer"))


def _account(step, rank):
    waiting: dict[int, float] = {}
    mine, transfer, gathers = step[rank], 0.0, 0
    compute = sum(block.end - block.start for block in mine.blocks)
    for wait in mine.waits:
        peer, ready = _other_end(step, rank, wait, gathers)
        gathers += wait.transfer is None
        split = min(max(ready, wait.start), wait.end)
        if split > wait.start:
            waiting[peer] = waiting.get(peer, 0.0) + split - wait.start
        transfer += wait.end - split
        # Where transfers are in the hands of a pair, it waits inside of its actions.
        compute -= sum(max(0.0, min(wait.end, b.end) - max(wait.start, b.start)) for b in mine.blocks)
    return Account(mine.end - mine.start, compute, waiting, transfer)


def _other_end(step, rank, wait, gathers):
    """(the rank that is waited for, when it was ready)."""
    if wait.transfer is None:
        came = [[w.start for w in other.waits if w.transfer is None][gathers : gathers + 1] for other in step]
        return max(((peer, times[0]) for peer, times in enumerate(came) if times), key=lambda pair: pair[1])
    p, part = len(step), int(wait.transfer[1:].partition(".")[0])
    to = (part + (1 if wait.transfer[0] == "F" else -1)) % p
    peer = to if part % p == rank else part % p
    return peer, step[peer].posts.get(wait.transfer, wait.start)
