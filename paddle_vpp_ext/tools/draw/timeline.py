"""When each rank does what: what text, picture and trace draw from.

A timeline is a list of blocks, in any order; it comes from a plan (``from_plan``) or from a
measured run. Times are in any one unit, from any one start.
"""

from collections.abc import Iterable
from typing import NamedTuple

from ...schedule.action import KINDS, Action
from ...schedule.costs import UNIT, Costs
from ...schedule.plan import Plan
from ...schedule.simulate import busy_time, peak_activations


class Block(NamedTuple):
    """One action of one rank, from ``start`` to ``end``."""

    rank: int
    start: float
    end: float
    kind: str
    chunk: int
    micro_batch: int

    @property
    def action(self) -> Action:
        """What is computed."""
        return Action(self.kind, self.chunk, self.micro_batch)


Timeline = list[Block]


def from_plan(plan: Plan, costs: Costs = UNIT) -> Timeline:
    """The timeline of a plan, simulated under the rule of its transport. Times in the unit of ``costs``."""
    spans = plan.simulate(costs).spans
    return [Block(rank, start, end, *action) for rank, order in enumerate(plan.orders) for action, (start, end) in zip(order, spans[rank])]


def to_timeline(values: Iterable) -> Timeline:
    """Blocks, or plain sequences of their six values, as a timeline; ValueError for one that is not a block."""
    blocks = []
    for given in values:
        try:
            rank, start, end, kind, chunk, micro_batch = given
            block = Block(int(rank), float(start), float(end), kind, int(chunk), int(micro_batch))
        except (TypeError, ValueError):
            raise ValueError(f"{given!r} is not a block: write (rank, start, end, kind, chunk, micro_batch)") from None
        if kind not in tuple(KINDS) or not block.start <= block.end:
            raise ValueError(f"{given!r} is not a block: kinds are {', '.join(KINDS)}, and it must not end before its start")
        blocks.append(block)
    return blocks


def from_zero(blocks: Timeline) -> Timeline:
    """The timeline with the earliest start moved to 0."""
    zero = min((block.start for block in blocks), default=0.0)
    return [block._replace(start=block.start - zero, end=block.end - zero) for block in blocks]


def by_rank(blocks: Timeline) -> dict[int, Timeline]:
    """Each rank's blocks in order of time; every rank from 0 to the last is there."""
    ranks: dict[int, Timeline] = {rank: [] for rank in range(max((block.rank for block in blocks), default=-1) + 1)}
    # Sorted by time alone: blocks of no length must stay in the order in which they were given.
    for block in sorted(blocks, key=lambda b: (b.start, b.end)):
        ranks[block.rank].append(block)
    return ranks


class Summary(NamedTuple):
    """``makespan``: first start to last end. Per rank: share of it without work, and most activations held, in chunks."""

    makespan: float
    idle_share: list[float]
    peak_activations: list[int]

    @property
    def mean_idle(self) -> float:
        """The idle share of all ranks together."""
        return sum(self.idle_share) / len(self.idle_share) if self.idle_share else 0.0


def summary(blocks: Timeline) -> Summary:
    """Time, idle shares and peaks of a timeline, planned or measured."""
    makespan = max((b.end for b in blocks), default=0.0) - min((b.start for b in blocks), default=0.0)
    ranks = by_rank(blocks).values()
    idle = [1 - busy_time((b.start, b.end) for b in blocks) / makespan if makespan else 0.0 for blocks in ranks]
    return Summary(makespan, idle, [peak_activations([b.action for b in blocks]) for blocks in ranks])


def num_chunks(blocks: Timeline) -> int:
    """Chunks per rank, as far as the timeline tells."""
    return max((block.chunk for block in blocks), default=0) + 1


def short_duration(blocks: Timeline) -> float:
    """A duration that three quarters of the blocks reach: what a scale must keep readable. 0 without any that takes time."""
    durations = sorted(b.end - b.start for b in blocks if b.end > b.start)
    return durations[len(durations) // 4] if durations else 0.0


def format_time(time: float) -> str:
    """A time as people read it: five digits, more only before the point."""
    return f"{time:.5g}" if time < 1e5 else f"{time:.0f}"
