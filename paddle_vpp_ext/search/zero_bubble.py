"""Zero-bubble orders: the backward is split, I goes at once to who waits for it, W fills what would be idle.

After Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), with the chunks of interleaved 1F1B.
An activation is held from its forward to its W: I frees nothing.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Optional

from ..schedule.action import Order
from ..schedule.costs import UNIT, Costs
from ..schedule.interleave import backward_sequence, forward_sequence
from .problem import INFINITE, Capacity, NumberedOrders, SearchProblem
from .rank_clock import run_by_time


class Sequences(NamedTuple):
    """The VPP sequences as (chunk, micro-batch); ``wrap`` maps an index to that of the same micro-batch's next chunk, or -1."""

    forward: list[tuple[int, int]]
    backward: list[tuple[int, int]]
    forward_wrap: list[int]
    backward_wrap: list[int]
    turn: list[int]  # where the backward of a forward stands


def sequences(num_chunks: int, groups: Sequence[int]) -> Sequences:
    """Those of ``interleave``, with the links between their entries."""
    forward = [(c, i) for _, c, i in forward_sequence(num_chunks, groups)]
    backward = [(c, i) for _, c, i in backward_sequence(num_chunks, groups)]
    at, back_at = ({x: k for k, x in enumerate(xs)} for xs in (forward, backward))
    return Sequences(
        forward,
        backward,
        [at.get((c + 1, i), -1) for c, i in forward],
        [back_at.get((c - 1, i), -1) for c, i in backward],
        [back_at[x] for x in forward],
    )


def smallest_capacities(problem: SearchProblem, groups: Sequence[int]) -> list[float]:
    """The least that each rank must be able to hold to run ``groups`` at all, in the unit of the room's sizes.

    The n-th backward of the sequence needs every forward up to that of its micro-batch in the last chunk, while at
    most n - 1 backwards are done; and nothing else can get in the way, as all ranks use the same sequences.
    """
    seqs, p = sequences(problem.num_chunks, groups), problem.num_stages
    needed = {i: k + 1 for k, (c, i) in enumerate(seqs.forward) if c == problem.num_chunks - 1}
    capacities: list[float] = []
    for rank in range(p):
        size = problem.capacity.size[rank::p]
        taken: float = 0
        freed: float = 0
        most: float = 0
        done = 0
        for chunk, i in seqs.backward:
            while done < needed[i]:
                taken += size[seqs.forward[done][0]]
                done += 1
            most = max(most, taken - freed)
            freed += size[chunk]
        capacities.append(most)
    return capacities


def list_schedule(
    problem: SearchProblem, groups: Sequence[int], ahead: Optional[Sequence[int]] = None, patience: float = 0.5
) -> Optional[tuple[float, NumberedOrders]]:
    """(makespan, orders): each rank always does the most useful ready action: I (or B) before F before W.

    Forwards and backwards come in the sequences of VPP. A forward has to find room; rank r is never more than
    ``ahead[r]`` forwards before its backwards (None: as far as there is room). A W is done where nothing else will be
    ready for ``patience`` of its time. None if the room is too small. p=2, V=1, m=3, all times 1, room for 2:

        rank 0  F0.0 F0.1 I0.0 W0.0 I0.1 F0.2 W0.1 I0.2 W0.2
        rank 1  F0.0 I0.0 F0.1 I0.1 W0.0 W0.1 F0.2 I0.2 W0.2
    """
    p, m, n, hop, split = problem.num_stages, problem.accumulate_steps, problem.num_parts, problem.hop, problem.split
    seqs = sequences(problem.num_chunks, groups)
    forward, backward, count = seqs.forward, seqs.backward, len(seqs.forward)
    ahead = ahead or [count] * p
    size, limit, times = problem.capacity.size, problem.capacity.limit, problem.time
    activations = [[INFINITE] * (count + 1) for _ in range(p)]  # when the input of a forward is there, by place in the sequence
    gradients = [[INFINITE] * (count + 1) for _ in range(p)]
    activations[0][:-1] = [INFINITE if c else 0.0 for c, _ in forward]
    forwards, inputs, weights = [0] * p, [0] * p, [0] * p  # how many of each a rank has begun
    clock, held = [0.0] * p, [0] * p
    orders: NumberedOrders = [[] for _ in range(p)]

    def choose(rank):
        now, k = clock[rank], forwards[rank]
        start, kind = gradients[rank][inputs[rank]], 1
        if k < count and k - inputs[rank] < ahead[rank] and held[rank] + size[forward[k][0] * p + rank] <= limit[rank]:
            if max(activations[rank][k], now) < max(start, now):
                start, kind = activations[rank][k], 0
        start = max(start, now)
        if weights[rank] < inputs[rank] and start - now >= patience * times[2][backward[weights[rank]][0] * p + rank]:
            start, kind = now, 2
        return (start, kind) if start < INFINITE else None

    def act(rank, now, kind):
        peer = rank
        at = (forwards, inputs, weights)[kind]
        k = at[rank]
        at[rank] += 1
        chunk, i = (forward if kind == 0 else backward)[k]
        part = chunk * p + rank
        clock[rank] = end = now + times[kind][part]
        orders[rank].append((kind * n + part) * m + i)
        if kind == 0:
            held[rank] += size[part]
            if part == n - 1:
                gradients[rank][seqs.turn[k]] = end
            else:
                peer, place = (rank + 1, k) if rank < p - 1 else (0, seqs.forward_wrap[k])
                activations[peer][place] = end + hop
        elif kind == 1 and part:
            peer, place = (rank - 1, k) if rank else (p - 1, seqs.backward_wrap[k])
            gradients[peer][place] = end + hop
        if kind == 2 or kind == 1 and not split:
            held[rank] -= size[part]
            weights[rank] = k + 1
        return peer

    run_by_time(p, choose, act)
    return (max(clock), orders) if all(done == count for done in weights) else None


def steady_pattern(problem: SearchProblem, groups: Sequence[int], slope: float = 1, extra: int = 0) -> NumberedOrders:
    """Orders in a fixed rhythm: startup forwards, then forward, I and W in turn, W once the room is full, whatever things cost.

    With whole backwards it is forward and B in turn, the order of VPP. The startup of rank r is
    ``slope`` * (p-1-r) + (V-1) * g_0 + ``extra`` forwards. With slope 1 and room for
    p micro-batches it is the interleaved zero-bubble 1F1B of torch.distributed.pipelining: makespan
    m(F+I+W) + (p-1)(F+I-W)/V at a peak of p micro-batches. p=2, V=1, m=3, room for 2:

        rank 0  F0.0 F0.1 I0.0 W0.0 F0.2 I0.1 W0.1 I0.2 W0.2
        rank 1  F0.0 I0.0 F0.1 I0.1 W0.0 F0.2 I0.2 W0.1 W0.2
    """
    p, m, n = problem.num_stages, problem.accumulate_steps, problem.num_parts
    seqs = sequences(problem.num_chunks, groups)
    count = len(seqs.forward)
    orders = []
    for rank in range(p):
        size, limit = problem.capacity.size[rank::p], problem.capacity.limit[rank]
        place = lambda kind, entry, rank=rank: (kind * n + entry[0] * p + rank) * m + entry[1]
        startup = min(count, int(slope * (p - 1 - rank)) + (problem.num_chunks - 1) * groups[0] + extra)
        order = [place(0, entry) for entry in seqs.forward[:startup]]
        held, weights = sum(size[chunk] for chunk, _ in seqs.forward[:startup]), 0
        for done, entry in enumerate(seqs.backward):
            following = seqs.forward[startup + done] if startup + done < count else None
            if following:
                order.append(place(0, following))
                held += size[following[0]]
            order.append(place(1, entry))
            following = seqs.forward[startup + done + 1] if startup + done + 1 < count else None
            while weights <= done and (not problem.split or following is None or held + size[following[0]] > limit):
                freed = seqs.backward[weights]
                held -= size[freed[0]]
                weights += 1
                if problem.split:
                    order.append(place(2, freed))
                if following is None:
                    break  # the rest of the W one by one between the last I
        order += [place(2, entry) for entry in seqs.backward[weights:]] if problem.split else []
        orders.append(order)
    return orders


def capacity_of(cap: float, num_stages: int, num_chunks: int) -> Capacity:
    """Room for ``cap`` micro-batches' activations on each rank; a chunk's counts 1/V."""
    return Capacity([1] * (num_stages * num_chunks), [int(cap * num_chunks + 1e-9)] * num_stages)


def fastest(problem: SearchProblem, groups: Sequence[int], budget: int) -> tuple[float, NumberedOrders]:
    """(makespan, orders) of the fastest of many list schedules and patterns for these groups, within the net's room.

    Stops at the bound, or when ``budget`` actions have been placed (never before four tries). The room must be
    large enough for the groups.
    """
    bound = problem.bound() * (1 + 1e-9)
    best, left = None, max(budget, 4 * problem.num_actions)
    for make in _recipes(problem, groups):
        found = make()
        left -= problem.num_actions
        if found and (best is None or found[0] < best[0] * (1 - 1e-9)):
            best = found
        if best and (best[0] <= bound or left < problem.num_actions):
            break
    assert best is not None  # the room is large enough
    return best


def _recipes(problem, groups):
    yield partial(list_schedule, problem, groups)
    yield partial(try_pattern, problem, groups, 1)
    for slope in (1, 1.5, 2):
        yield partial(try_pattern, problem, groups, slope)
        for patience in (0.5, 0.1, 0.3, 0.7, 0.9):
            for extra in (0, 1, 2):
                yield partial(list_schedule, problem, groups, ahead_of(problem, groups, slope, extra), patience)
    for patience in (0.1, 0.3, 0.7, 0.9):
        yield partial(list_schedule, problem, groups, None, patience)


def ahead_of(problem: SearchProblem, groups: Sequence[int], slope: float, extra: int = 0) -> list[int]:
    """How many forwards each rank may be before its backwards, when its startup is that of ``steady_pattern``."""
    p = problem.num_stages
    return [int(slope * (p - 1 - rank)) + (problem.num_chunks - 1) * groups[0] + 1 + extra for rank in range(p)]


def try_pattern(problem: SearchProblem, groups: Sequence[int], slope: float = 1, extra: int = 0) -> Optional[tuple[float, NumberedOrders]]:
    """(makespan, orders) of a ``steady_pattern``; None if it holds more than there is room for, or cannot run."""
    orders = steady_pattern(problem.build(), groups, slope, extra)
    if not all(problem.fits(rank, order) for rank, order in enumerate(orders)):
        return None
    result = problem.evaluate(orders)
    return result and (result[0], orders)


def zero_bubble(
    num_stages: int, num_chunks: int, accumulate_steps: int, groups: Sequence[int], cap: Optional[float] = None, costs: Costs = UNIT
) -> list[Order]:
    """The orders of the schedule ``ZBVPP``: the fastest found under ``costs``, any p >= 2, V >= 1, m >= 1.

    ``cap``: how many micro-batches' activations a rank may hold (a chunk's counts 1/V). Without it: p where p divides
    m, else the first of p, ((V-1)g_0 + p + 1)/V and ((V-1)g_0 + 2p)/V that leaves nothing to gain; with F = I = W
    these reach m(F+I+W) + (p-1)F/V, below which nothing is, for every m >= p. ValueError for a cap that the groups
    cannot run in; it names the smallest that works.
    """
    p, v, m = num_stages, num_chunks, accumulate_steps
    least = max(smallest_capacities(SearchProblem(p, v, m), groups)) / v
    if cap is None:
        caps = [max(least, c) for c in (p, ((v - 1) * groups[0] + p + 1) / v, ((v - 1) * groups[0] + 2 * p) / v)]
        caps = caps[:1] if m % p == 0 else caps
    elif cap < least:
        raise ValueError(
            f"cap={cap:g} micro-batches is too small for groups {'+'.join(map(str, groups))} in {v} chunks: "
            f"the smallest that works is {least:g}, or smaller groups"
        )
    else:
        caps = [cap]
    problems = [SearchProblem(p, v, m, costs, capacity_of(cap, p, v)) for cap in caps]
    for problem in problems[:-1]:  # less memory where a few tries show that it costs nothing
        makespan, orders = fastest(problem, groups, budget=0)
        if makespan <= problem.bound() * (1 + 1e-9):
            return problem.actions(orders)
    return problems[-1].actions(fastest(problems[-1], groups, budget=400_000)[1])
