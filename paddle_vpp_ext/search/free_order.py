"""Orders that follow no sequence: list schedules with handicaps, and annealing. For pipelines small enough to try many.

Makes the difference where room is scarce or parts are uneven; on large pipelines the orders of ``zero_bubble`` do.
"""

import math
import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Optional

from .problem import INFINITE, NumberedOrders, SearchProblem
from .rank_clock import run_by_time


def free_schedule(problem: SearchProblem, handicap: Sequence[Sequence[float]]) -> Optional[tuple[float, NumberedOrders]]:
    """(makespan, orders): each rank does the action with the least start + ``handicap[kind][part]``.

    A forward is only done if its rank can still finish all that it has begun, oldest micro-batch first (the
    banker's rule), so that it never deadlocks. None if the room is too small for one micro-batch.
    """
    p, m, n, hop = problem.num_stages, problem.accumulate_steps, problem.num_parts, problem.hop
    kinds, times, size = len(problem.kinds), problem.time, problem.capacity.size
    there = [[[INFINITE] * (m + 1) for _ in range(n)] for _ in range(2)]  # when the input of F, and of I or B, is there
    there[0][0][:m] = [0.0] * m
    done = [[0] * n for _ in range(3)]  # how many of each kind a part has begun
    clock, held = [0.0] * p, [0] * p
    orders: NumberedOrders = [[] for _ in range(p)]
    is_safe = _bankers_rule(problem, held, done)

    def choose(rank):
        now, best = clock[rank], None
        for part in range(rank, n, p):
            for kind in (1, 0):
                start = there[kind][part][done[kind][part]]
                if start < INFINITE and (kind or is_safe(rank, part)):
                    start = max(start, now)
                    entry = start + handicap[kind][part], start, kind, part
                    if best is None or entry < best:
                        best = entry
            if kinds == 3 and done[2][part] < done[1][part]:
                entry = now + handicap[2][part], now, 2, part
                if best is None or entry < best:
                    best = entry
        return best and (best[1], best[2:])

    def act(rank, now, chosen):
        kind, part = chosen
        i, peer = done[kind][part], rank
        done[kind][part] = i + 1
        clock[rank] = end = now + times[kind][part]
        orders[rank].append((kind * n + part) * m + i)
        if kind == 0:
            held[rank] += size[part]
            target, later = (there[0][part + 1], end + hop) if part < n - 1 else (there[1][part], end)
            target[i] = later
            peer = (rank + 1) % p if part < n - 1 else rank
        elif kind == 1 and part:
            there[1][part - 1][i] = end + hop
            peer = (rank - 1) % p
        if kind == 2 or kind == 1 and kinds == 2:
            held[rank] -= size[part]
            done[2][part] = i + 1
        return peer

    run_by_time(p, choose, act)
    return (max(clock), orders) if all(count == m for count in done[2]) else None


def _bankers_rule(problem, held, done):
    """Whether a rank may do one more forward of a part, given what each rank holds and how much each part has done.

    For every micro-batch that is begun: with those after it holding what they hold, there is room for all of it.
    """
    p, n, size = problem.num_stages, problem.num_parts, problem.capacity.size
    reserve = [list(accumulate(size[rank::p])) for rank in range(p)]  # what chunks 0..c of a micro-batch take

    def is_safe(rank, part):
        limit = problem.capacity.limit[rank]
        if held[rank] + size[part] > limit:
            return False
        forwards, freed, i = done[0], done[2], done[0][part]
        for chunk in range(problem.num_chunks):
            # The oldest micro-batch with this chunk not freed. Chunks 0..this are at least what it still takes; a later one
            # whose last chunk not freed is this one takes no more, and has less after it.
            oldest = freed[chunk * p + rank]
            if oldest < i:
                later = size[part]
                for s in range(rank, n, p):
                    later += size[s] * max(0, forwards[s] - max(freed[s], oldest + 1))
                if later + reserve[rank][chunk] > limit:
                    return False
        return True

    return is_safe


def random_handicaps(problem: SearchProblem, seed: int) -> list[list[float]]:
    """Handicaps of the ``seed``-th try: alike on all ranks or each its own, from slight to twice an action's time."""
    rnd = random.Random(seed)
    n, p = problem.num_parts, problem.num_stages
    unit = sum(map(sum, problem.time)) / (len(problem.kinds) * n)
    scale = rnd.choice((0.2, 0.5, 1, 2)) * unit
    draw = lambda kind: rnd.random() * scale + (0.5 * unit if kind == 2 else 0)
    if seed % 2:
        by_chunk = [[draw(kind) for _ in range(problem.num_chunks)] for kind in range(3)]
        return [[row[s // p] for s in range(n)] for row in by_chunk]
    return [[draw(kind) for _ in range(n)] for kind in range(3)]


def anneal(problem: SearchProblem, orders: NumberedOrders, makespan: float, tries: int, seed: int) -> tuple[float, NumberedOrders]:
    """The best (makespan, orders) met while actions are moved within their ranks, worse ones accepted ever more rarely.

    Simulated annealing (Kirkpatrick et al. 1983) from a temperature of nearly an action's time down to nothing.
    Never leaves the room, and stops at the net's bound.
    """
    problem.build()
    rnd = random.Random(seed)
    bound = problem.bound() * (1 + 1e-9)
    current, now = [list(order) for order in orders], makespan
    best = makespan, orders
    hottest = 0.9 * sum(map(sum, problem.time)) / (len(problem.kinds) * problem.num_parts)
    steps, p = (-6, -4, -3, -2, -1, -1, -1, 1, 1, 1, 2, 3, 4, 6), problem.num_stages
    for count in range(tries):
        if best[0] <= bound:
            break
        rank = int(rnd.random() * p)
        order = current[rank]
        at = int(rnd.random() * len(order))
        to = at + steps[int(rnd.random() * len(steps))]
        moved = _moved(problem, order, at, to)
        if moved is None or not problem.fits(rank, moved, min(at, to), max(at, to) + 1):
            continue
        current[rank] = moved
        heat = hottest * (1 - count / tries)
        result = problem.evaluate(current, now - heat * math.log(1 - rnd.random()))
        if result is None:
            current[rank] = order
            continue
        now = result[0]
        if now < best[0]:
            best = now, [list(order) for order in current]
    return best


def _moved(problem, order, at, to):
    """``order`` with the action at ``at`` moved to ``to``; None if it would pass its own stream, or what it needs or makes."""
    if not 0 <= to < len(order):
        return None
    action, stream, need = order[at], problem.stream, problem.need
    passed = order[at + 1 : to + 1] if to > at else order[to:at]
    for other in passed:
        if stream[other] == stream[action] or need[other] == action or need[action] == other:
            return None
    if to > at:
        return order[:at] + passed + [action] + order[to + 1 :]
    return order[:to] + [action] + passed + order[at + 1 :]
