"""The best schedule that can be found for given costs and a memory limit: what ``schedule_mode="auto"`` runs."""

from functools import lru_cache
from typing import NamedTuple, Optional

from ..schedule.action import Order
from ..schedule.costs import UNIT, Costs
from ..schedule.dependencies import Dependencies
from ..schedule.simulate import Stuck, peak_activations, simulate
from ..schedule.transfers import BLOCKING_PLACEMENTS, OVERLAPPED_PLACEMENT, place, programs_of
from .candidates import FREE, PATTERN, CandidatePool, Recipe
from .free_order import anneal, free_schedule, random_handicaps
from .memory import Memory, capacity_under, peak_bytes
from .problem import SearchProblem

# Pipelines with more actions are searched in a smaller one with the same costs first.
LARGE = 100_000
# Pipelines with up to so many actions are worth random tries and annealing.
SMALL = 4_000


class Found(NamedTuple):
    """The result of a search. Times in the unit of the costs, under the rule of the transport.

    ``how`` says what kind of order it is. ``bound``: below it no makespan can be. ``reference`` is the makespan
    of ``VPP:groups=first``, whether or not it has the memory. ``peak``: the most that any rank holds, in
    micro-batches (a chunk's activation counts 1/V).
    """

    orders: list[Order]
    how: str
    makespan: float
    bound: float
    reference: float
    peak: float

    @property
    def margin(self) -> float:
        """How much shorter than ``VPP:groups=first`` it is, as a share of that."""
        return 1 - self.makespan / self.reference if self.reference else 0.0

    def __str__(self) -> str:
        side = "shorter" if self.margin >= 0 else "longer"
        over = max(0.0, self.makespan / self.bound - 1) if self.bound else 0.0
        return (
            f"{self.how}: {self.makespan:.6g}, {abs(self.margin):.1%} {side} than VPP:groups=first ({self.reference:.6g}), "
            f"at most {over:.1%} above the optimum (bound {self.bound:.6g}), "
            f"peak {self.peak:.4g} micro-batches"
        )


def search(
    num_stages: int,
    num_chunks: int,
    accumulate_steps: int,
    costs: Costs = UNIT,
    memory: Optional[Memory] = None,
    blocking: bool = False,
    split: bool = True,
    effort: float = 1.0,
) -> Found:
    """The fastest order found for p >= 2 stages, V >= 1 chunks, m >= 1 micro-batches under ``costs`` and within ``memory``.

    Tried are fixed VPP and zero-bubble orders and list schedules over groupings, startup slopes and depths, with whole
    and (unless ``split`` is False) split backwards; in small pipelines also orders that follow no sequence, improved by
    annealing. ``memory`` None: not more activations than ``VPP:groups=first`` holds on its worst rank. ``blocking``:
    exchanges block, else transfers run beside computation. ``effort`` scales how much is tried. The same
    arguments give the same result on every machine. ValueError for a limit in which nothing runs.
    """
    return _search(num_stages, num_chunks, accumulate_steps, costs, memory, blocking, split, effort)


@lru_cache(maxsize=8)
def _search(p: int, v: int, m: int, costs: Costs, memory: Optional[Memory], blocking: bool, split: bool, effort: float) -> Found:
    whole = SearchProblem(p, v, m, costs, split=False)
    first = CandidatePool({False: whole}, whole.num_actions)
    first.make(Recipe("first", 1 if v == 1 else 2, 0, PATTERN, False))
    reference, _, _, numbers = first.best[0]
    vpp = whole.actions(numbers)
    if blocking:
        reference = _blocked(vpp, v, m, costs)[0]
    limits = [memory] if memory else [Memory(max(map(peak_activations, vpp)) / v, False)]
    if not memory and p < limits[0].amount:
        limits.insert(0, Memory(p, False))  # what is as fast with less is better
    best = None
    for limit in limits:
        capacity = capacity_under(limit, p, v, costs)
        problems = {mode: SearchProblem(p, v, m, costs, capacity, mode) for mode in ((False, True) if split else (False,))}
        bound = min(problem.bound() for problem in problems.values())
        found = _final(_pool(problems, bound, effort), limit, blocking)
        if best is None or found[0] < best[0] * (1 - 1e-9):
            best = found
        if best[0] <= bound * (1 + 1e-9):
            break
    assert best is not None  # there is one limit at least
    makespan, how, problem, numbers = best
    orders = problem.actions(numbers)
    return Found(orders, how, makespan, min(bound, makespan), reference, max(map(peak_activations, orders)) / v)


def _pool(problems, bound, effort):
    """The best candidates as (makespan, how, net, orders), best first."""
    largest = max(problem.num_actions for problem in problems.values())
    stop = bound * (1 + 1e-9)
    if largest > LARGE:
        candidates = _scaled(problems, effort)
    else:
        candidates = CandidatePool(problems, int(effort * 600_000))
        candidates.descend(stop)
    pool = [(makespan, str(recipe), problems[recipe.split], orders) for makespan, _, recipe, orders in candidates.best]
    if largest <= SMALL and (not pool or pool[0][0] > stop):
        pool = sorted(_improved(problems, pool, stop, effort) + pool, key=lambda entry: entry[0])
    return pool


def _scaled(problems, effort):
    """Finds the best recipes with few micro-batches, and makes them with all."""
    some = next(iter(problems.values()))
    p, m = some.num_stages, some.accumulate_steps
    fewer = min(m, 2 * p + m % p)
    small = {mode: SearchProblem(p, n.num_chunks, fewer, n.costs, n.capacity, mode) for mode, n in problems.items()}
    scout = CandidatePool(small, int(effort * max(2_000_000, 20 * some.num_actions * fewer / m)))
    scout.descend(min(problem.bound() for problem in small.values()) * (1 + 1e-9))
    candidates = CandidatePool(problems, 3 * sum(problem.num_actions for problem in problems.values()))
    for _, _, recipe, _ in scout.best[:4]:
        candidates.make(recipe, keep=2)
    for recipe in (Recipe(p, FREE, 0, 0.5, True), Recipe(p, 2, 0, PATTERN, False), Recipe(1, 1, 0, PATTERN, False)):
        if not candidates.best:
            candidates.make(recipe)
    return candidates


def _improved(problems, pool, stop, effort):
    """Orders that follow no sequence, as (makespan, how, net, orders): list schedules with handicaps, and the best annealed."""
    # A whole backward is a split one whose W comes at once: where splitting is allowed, nothing else needs a look.
    problem = problems.get(True) or problems[False]
    tried = [entry for entry in pool if entry[2] is problem]
    for seed in range(int(effort * min(60, 60_000 // problem.num_actions))):
        made = free_schedule(problem, random_handicaps(problem, seed))
        if made:
            tried.append((made[0], "list schedule without sequence", problem, made[1]))
    if not tried:
        return []
    tried.sort(key=lambda entry: entry[0])
    best, vain = tried[0], 0
    tries = int(effort * min(20_000, 2_500_000 // problem.num_actions))
    for seed in range(30):
        if best[0] <= stop or vain == 6:
            break
        start = tried[seed % min(4, len(tried))]
        makespan, orders = anneal(problem, start[3], start[0], tries, seed)
        vain += 1
        if makespan < best[0] * (1 - 1e-9):
            best, vain = (makespan, "annealed order", problem, orders), 0
    return [best]


def _final(pool, memory, blocking):
    """The best of the pool once transfers are placed: when they block, and when what waits to be sent or used is counted."""
    if not pool:
        raise ValueError(f"nothing was found that runs within memory={memory}")
    some = pool[0][2]
    exact_bytes = memory is not None and memory.in_bytes and any(some.costs.bytes_table(some.num_parts)["message"])
    if not blocking and not exact_bytes:
        return pool[0]
    best, over = None, []
    for makespan, how, problem, orders in pool[: 3 if some.num_actions > LARGE else 12]:
        if best and best[0] <= makespan:
            break
        actions = problem.actions(orders)
        makespan, programs = (
            _blocked(actions, problem.num_chunks, problem.accumulate_steps, problem.costs)
            if blocking
            else (makespan, _overlapped(actions, problem.num_chunks, problem.accumulate_steps, problem.costs))
        )
        if exact_bytes:
            peak = max(peak_bytes(programs, problem.costs, problem.num_chunks))
            if peak > memory.amount:
                over.append(peak)
                continue
        if best is None or makespan < best[0]:
            best = makespan, how, problem, orders
    if best is None:
        raise ValueError(
            f"memory={memory} is too small: with the messages on their way the smallest found takes {min(over) / 2**30:.4g}GiB"
        )
    return best


def _blocked(orders, num_chunks, accumulate_steps, costs):
    """(makespan, programs) of the better placement when exchanges block."""
    dependencies, best = Dependencies(orders, num_chunks, accumulate_steps), None
    for placement in BLOCKING_PLACEMENTS:
        try:
            programs = programs_of(dependencies, place(dependencies, placement, costs))
        except Stuck:
            continue
        makespan = simulate(orders, num_chunks, accumulate_steps, costs, programs).makespan
        if best is None or makespan < best[0]:
            best = makespan, programs
    return best


def _overlapped(orders, num_chunks, accumulate_steps, costs):
    dependencies = Dependencies(orders, num_chunks, accumulate_steps)
    return programs_of(dependencies, place(dependencies, OVERLAPPED_PLACEMENT, costs))
