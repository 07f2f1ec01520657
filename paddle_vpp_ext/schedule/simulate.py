"""Time and memory of orders and programs under given costs."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Optional

import numpy as np

from .action import Order
from .costs import UNIT, Costs
from .dependencies import NOTHING, Dependencies, Program
from .grouped_exchange import step_together


class Timing(NamedTuple):
    """When each action runs: ``start[r][j]`` and ``end[r][j]``, in the unit of the costs.

    ``made[k]`` is when transfer k of the flow is there to be sent (NaN: never), ``sequence[k]``
    a number that grows along every chain of dependencies.
    """

    start: list[np.ndarray]
    end: list[np.ndarray]
    made: np.ndarray
    sequence: np.ndarray

    @property
    def makespan(self) -> float:
        return max((float(end[-1]) for end in self.end if len(end)), default=0.0)


class Stuck(ValueError):
    """Orders that wait for each other; ``positions[r]`` is the action that rank r cannot start."""

    def __init__(self, positions: Sequence[int]) -> None:
        super().__init__(f"the orders wait for each other at positions {positions}")
        self.positions = positions


def time_orders(dependencies: Dependencies, costs: Costs = UNIT, bounds: Optional[Sequence[Sequence[int]]] = None) -> Timing:
    """Each action as early as its order allows, when transfers never block: they take ``costs.hop``, no rank waits to send.

    ``bounds[r]`` cuts rank r's order into units (ends of the units, as indices): a unit starts
    when all that it needs is there and gives away what it makes at its end. Raises Stuck.
    """
    p = dependencies.num_stages
    durations, hop = costs.table(dependencies.num_parts), costs.hop
    made: list[Optional[float]] = [None] * dependencies.size
    sequence = [0] * dependencies.size
    waiting: list[Optional[int]] = [None] * dependencies.size  # the rank that waits for a transfer
    starts: list[list[float]] = [[] for _ in range(p)]
    ends: list[list[float]] = [[] for _ in range(p)]
    if bounds is None:
        bounds = [range(1, len(order) + 1) for order in dependencies.orders]
    unit, clock, count = [0] * p, [0.0] * p, 0
    todo = list(range(p))
    while todo:
        rank = todo.pop()
        order, needs, makes, cuts = dependencies.orders[rank], dependencies.needs[rank], dependencies.makes[rank], bounds[rank]
        begin = cuts[unit[rank] - 1] if unit[rank] else 0
        now, blocked = clock[rank], False
        for cut in cuts[unit[rank] :]:
            start = now
            for need in needs[begin:cut]:
                if need != NOTHING:
                    there = made[need]
                    if there is None:
                        waiting[need] = rank
                        blocked = True
                        break
                    if there + hop > start:
                        start = there + hop
            if blocked:
                break
            now = start
            for action in order[begin:cut]:
                starts[rank].append(now)
                now += durations[action[0]][action[1] * p + rank]
                ends[rank].append(now)
            for make in makes[begin:cut]:
                if make != NOTHING:
                    made[make] = now
                    count += 1
                    sequence[make] = count
                    waiter = waiting[make]
                    if waiter is not None:
                        todo.append(waiter)
            begin = cut
            unit[rank] += 1
        clock[rank] = now
    if any(unit[r] < len(bounds[r]) for r in range(p)):
        raise Stuck([bounds[r][unit[r] - 1] if unit[r] else 0 for r in range(p)])
    as_array = lambda lists: [np.array(times, dtype=float) for times in lists]
    return Timing(as_array(starts), as_array(ends), np.array(made, dtype=float), np.array(sequence))


class Simulation(NamedTuple):
    """``makespan``: first forward to last action, over all ranks. ``idle_share[r]``: 1 - busy/makespan.

    ``peak_activations[r]``: most activations that rank r holds at once, in chunks.
    ``spans[r][j]``: start and end of its j-th action.
    """

    makespan: float
    idle_share: list[float]
    peak_activations: list[int]
    spans: list[list[tuple[float, float]]]


def simulate(
    orders: Sequence[Order],
    num_chunks: int,
    accumulate_steps: int,
    costs: Costs = UNIT,
    programs: Optional[Sequence[Program]] = None,
) -> Simulation:
    """With transfers that never block; given ``programs``, with their exchanges blocking (synchronous NCCL)."""
    if programs is None:
        timing = time_orders(Dependencies(orders, num_chunks, accumulate_steps), costs)
        spans = [list(zip(s.tolist(), e.tolist())) for s, e in zip(timing.start, timing.end)]
    else:
        outcome = step_together(programs, costs.table(len(orders) * num_chunks), costs.hop)
        if outcome.mismatch or any(at < len(q) for at, q in zip(outcome.position, programs)):
            raise Stuck(outcome.position)
        spans = outcome.spans
    makespan = max((s[-1][1] for s in spans if s), default=0.0)
    busy = [busy_time(s) for s in spans]
    idle = [1 - b / makespan if makespan else 0.0 for b in busy]
    return Simulation(makespan, idle, [peak_activations(order) for order in orders], spans)


def busy_time(spans: Iterable[tuple[float, float]]) -> float:
    """The lengths of all (start, end), added up one after the other.

    Not by ``sum``, which since Python 3.12 rounds otherwise: figures do not depend on the Python.
    """
    busy = 0.0
    for start, end in spans:
        busy += end - start
    return busy


def peak_activations(order: Order) -> int:
    """Most activations held at once, in chunks: from a forward to its backward, or to its W where the backward is split.

    Without any backward (an evaluation) nothing is held beyond the forward itself.
    """
    kinds = {kind for kind, _, _ in order}
    if kinds <= {"F"}:
        return min(1, len(order))
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    held = np.cumsum([change[kind] for kind, _, _ in order])
    return int(held.max()) if len(held) else 0
