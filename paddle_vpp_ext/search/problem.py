"""The actions of a pipeline as numbers, with what each waits for: what the search for an order works on.

Micro-batches are alike, so every part does its forwards, its I and its W in the order of the micro-batches;
what is left to choose is how each rank mixes these streams.
"""

from collections.abc import Sequence
from typing import NamedTuple, Optional

import numpy as np

from ..schedule.action import Action, Order
from ..schedule.costs import UNIT, Costs

# Orders of all ranks with actions as numbers.
NumberedOrders = list[list[int]]
INFINITE = float("inf")


class Capacity(NamedTuple):
    """What ranks may hold: ``size[s]`` is held from a forward of part s to its B or W, ``limit[r]`` is what rank r has."""

    size: Sequence[float]
    limit: Sequence[float]


class SearchProblem:
    """All actions of p stages, V chunks and m micro-batches under given costs.

    Action k of part s and micro-batch i has the number (k*n + s)*m + i, with n = p*V parts and k the index of its
    kind in ``kinds``: FIW, or FB where backwards are whole. ``time[k][s]`` is its duration. ``room`` bounds what
    ranks hold (None: no bound). ValueError for costs of another number of parts.
    """

    def __init__(
        self,
        num_stages: int,
        num_chunks: int,
        accumulate_steps: int,
        costs: Costs = UNIT,
        capacity: Optional[Capacity] = None,
        split: bool = True,
    ):
        self.num_stages, self.num_chunks, self.accumulate_steps = num_stages, num_chunks, accumulate_steps
        self.num_parts = n = num_stages * num_chunks
        table = costs.table(n)
        self.costs, self.split, self.kinds = costs, split, "FIW" if split else "FB"
        self.time = [table[kind] for kind in self.kinds]
        self.hop = costs.hop
        self.capacity = capacity or Capacity([1] * n, [INFINITE] * num_stages)
        self.num_actions = len(self.kinds) * n * accumulate_steps
        self._built = False

    def build(self) -> "SearchProblem":
        """Fills ``duration``, ``need`` (the number that an action waits for, or -1), ``lag``, ``tail``, ``stream``, ``change``."""
        if self._built:
            return self
        m, n, kinds = self.accumulate_steps, self.num_parts, len(self.kinds)
        per_stream = lambda rows: np.repeat(np.concatenate(rows), m)
        size = np.array(self.capacity.size)
        number = np.arange(n * m)
        forward = np.where(number < m, -1, number - m)
        backward = np.where(number < (n - 1) * m, n * m + number + m, number)
        self.need = np.concatenate([forward, backward, n * m + number][:kinds]).tolist()
        crosses = [np.arange(n) > 0, np.arange(n) < n - 1, np.zeros(n, bool)][:kinds]
        self.lag = (per_stream(crosses) * self.hop).tolist()
        self.duration = per_stream(self.time).tolist()
        self.change = per_stream([size, size * (0 if self.split else -1), -size][:kinds]).tolist()
        self.stream = np.repeat(np.arange(kinds * n), m).tolist()
        self.tail = per_stream(self.tails()).tolist()
        self._built = True
        return self

    def tails(self) -> list[list[float]]:
        """For each kind and part, the least time from the end of such an action to the end of the step."""
        n, hop = self.num_parts, self.hop
        own = self.time[2] if self.split else [0.0] * n
        back = [own[0]]
        for s in range(1, n):
            back.append(max(own[s], hop + self.time[1][s - 1] + back[-1]))
        ahead = [self.time[1][-1] + back[-1]]
        for s in range(n - 1, 0, -1):
            ahead.append(hop + self.time[0][s] + ahead[-1])
        return [ahead[::-1], back, [0.0] * n][: len(self.kinds)]

    def bound(self) -> float:
        """A makespan below which no order can be, whatever may be held.

        The longest of: a micro-batch's way through all parts and back, with those that one part does before it;
        and for each rank the way to it, all its work, and the way back from it (with W last there is none, but
        then the way back starts after its last I).
        """
        p, m, hop, tails = self.num_stages, self.accumulate_steps, self.hop, self.tails()
        through = self.time[0][0] + tails[0][0]
        bounds = [through + (m - 1) * max(*self.time[0], *self.time[1])]
        way_to = 0.0
        for rank in range(p):
            work = [m * sum(times[rank::p]) for times in self.time]
            bounds += [way_to + sum(work), way_to + sum(work[:2]) + tails[1][rank]]
            way_to += self.time[0][rank] + hop
        return max(bounds)

    def evaluate(self, orders: NumberedOrders, limit: float = INFINITE) -> Optional[tuple[float, list[float]]]:
        """(makespan, end of each action) when transfers never block; None if orders wait for each other or exceed ``limit``."""
        duration, need, lag, tail = self.duration, self.need, self.lag, self.tail
        limit += 1e-9 * abs(limit) if limit < INFINITE else 0.0
        p, left = self.num_stages, self.num_actions
        ends, waiting = [-1.0] * left, [-1] * left
        position, clock, todo = [0] * p, [0.0] * p, list(range(p))
        while todo:
            rank = todo.pop()
            order, j, now = orders[rank], position[rank], clock[rank]
            left += j
            count = len(order)
            while j < count:
                action = order[j]
                other = need[action]
                if other >= 0:
                    there = ends[other]
                    if there < 0:
                        waiting[other] = rank
                        break
                    there += lag[action]
                    if there > now:
                        now = there
                now += duration[action]
                if now + tail[action] > limit:
                    return None
                ends[action] = now
                j += 1
                if waiting[action] >= 0:
                    todo.append(waiting[action])
            left -= j
            position[rank], clock[rank] = j, now
        return None if left else (max(clock), ends)

    def fits(self, rank: int, order: Sequence[int], start: int = 0, stop: Optional[int] = None) -> bool:
        """Whether ``order`` never holds more than the rank's room between ``start`` and ``stop``."""
        change, limit = self.change, self.capacity.limit[rank]
        held = sum([change[action] for action in order[:start]])
        for action in order[start:stop]:
            held += change[action]
            if held > limit:
                return False
        return True

    def actions(self, orders: NumberedOrders) -> list[Order]:
        """The orders as actions. Ranks share them, as they do in the orders of the other schedules."""
        m, p, n = self.accumulate_steps, self.num_stages, self.num_parts
        shared = [Action(kind, c, i) for kind in self.kinds for c in range(self.num_chunks) for i in range(m)]
        result = []
        for order in orders:
            kinds, rest = np.divmod(np.asarray(order, dtype=np.int64), n * m)
            parts, micro_batches = np.divmod(rest, m)
            index = (kinds * self.num_chunks + parts // p) * m + micro_batches
            result.append([shared[k] for k in index.tolist()])
        return result
