"""Orders -> programs: places every send and receive.

Every transfer happens at one instant of one global order of events, at both its ends: so
programs cannot wait for each other in a circle, and both ends of an ordered pair list their
transfers alike, also for p = 2, where the next and the previous rank are the same one.

At the wrap (last rank of chunk c to first rank of chunk c+1; for gradients first to last) an
output can exist before its receiver has room in its order for it. It waits on the sender, in
the last rank's forward buffer queue or the first rank's backward buffer queue, and its event
is when its receiver is about to need it, or when what was made after it is sent, if that is
earlier: both queues are first in first out.
"""

from collections.abc import Sequence
from typing import NamedTuple, Optional

import numpy as np

from .action import Order
from .costs import UNIT, Costs
from .dependencies import NOTHING, Dependencies, Exchange, Program, Transfer
from .simulate import time_orders


class Placement(NamedTuple):
    """A way to place transfers.

    ``late``: an event is when the receiver is about to need it, else when the transfer is made
    (at the wrap it is always the former). ``pairs``: a forward and a backward of the steady
    phase are one unit with exchanges before and after it only. ``ahead``: a receive is posted
    this many units before its need, so that the transfer runs beside them.
    """

    name: str
    late: bool
    pairs: bool
    ahead: int = 0


# Which blocks least depends on p, V and m; neither wins everywhere.
BLOCKING_PLACEMENTS = (
    Placement("pairs, late", late=True, pairs=True),
    Placement("single, late", late=True, pairs=False),
)
OVERLAPPED_PLACEMENT = Placement("early", late=False, pairs=False, ahead=1)
OVERLAPPED_PAIRS = Placement("pairs, early", late=False, pairs=True, ahead=1)


def steady_pairs(order: Order, startup: int = 0) -> list[int]:
    """The units of an order, as the indices of their ends: a forward with the backward after it, else single actions.

    The first ``startup`` actions stay single. F0.0 F0.1 | F1.0 B1.0 | F1.1 B1.1 | B0.0 ...: 1 2 4 6 7 ...
    """
    ends, j = [], 0
    while j < len(order):
        paired = j >= startup and order[j].kind == "F" and j + 1 < len(order) and order[j + 1].kind in "BI"
        j += 2 if paired else 1
        ends.append(j)
    return ends


class Events(NamedTuple):
    """All transfers in global order: number, ranks of both ends, and before which action of each end they happen."""

    number: np.ndarray
    sender: np.ndarray
    sender_at: np.ndarray
    receiver: np.ndarray
    receiver_at: np.ndarray


def place(dependencies: Dependencies, placement: Placement, costs: Costs = UNIT, startups: Optional[Sequence[int]] = None) -> Events:
    """The global order of events under ``placement``, with pairs from each rank's ``startups`` on.

    Raises Stuck if units wait for each other.
    """
    startups = startups or [0] * dependencies.num_stages
    if placement.pairs:
        bounds = [steady_pairs(order, startup) for order, startup in zip(dependencies.orders, startups)]
    else:
        bounds = [list(range(1, len(order) + 1)) for order in dependencies.orders]
    timing = time_orders(dependencies, costs.bounded(), bounds)
    cuts = [np.concatenate(([0], b)).astype(int) for b in bounds]
    number, made_by, _ = _ends(dependencies.makes)
    needed_by, needed_at = _find(dependencies.needs, dependencies.size, number)
    made = timing.made[number]
    wanted = np.empty_like(made)
    latest = np.empty_like(needed_at)
    for rank in range(dependencies.num_stages):
        mine = needed_by == rank
        unit = np.searchsorted(cuts[rank], needed_at[mine], side="right") - 1
        wanted[mine] = _free_times(timing, cuts[rank], rank, placement.ahead)[unit]
        latest[mine] = cuts[rank][unit]
    last = dependencies.num_stages - 1
    gradient = number >= dependencies.num_parts * dependencies.accumulate_steps
    wrap = np.where(gradient, made_by == 0, made_by == last)
    at = np.where(wrap | placement.late, np.maximum(made, wanted), made)
    at = _first_in_first_out(at, timing.sequence[number], 2 * made_by + gradient)
    order = np.lexsort((timing.sequence[number], at))
    number, made_by, needed_by, at, latest = (a[order] for a in (number, made_by, needed_by, at, latest))
    sender_at, receiver_at = np.empty_like(needed_by), np.empty_like(needed_by)
    slack = 1e-9 * max(timing.makespan, 1e-300)
    for rank in range(dependencies.num_stages):
        unit_ends = timing.end[rank][cuts[rank][1:] - 1]
        ended = lambda times, rank=rank, unit_ends=unit_ends: cuts[rank][np.searchsorted(unit_ends, times + slack, side="right")]
        mine = made_by == rank
        sender_at[mine] = ended(at[mine])
        mine = needed_by == rank
        receiver_at[mine] = np.minimum(ended(at[mine]), latest[mine])
    return Events(number, made_by, sender_at, needed_by, receiver_at)


def _first_in_first_out(at, sequence, queue):
    """``at`` with nothing later than what is made after it in the same queue, for orders that use things in another order.

    Such a transfer is early for its receiver, which buffers it.
    """
    order = np.lexsort((sequence, queue))
    result = at.copy()
    for mine in np.split(order, np.nonzero(np.diff(queue[order]))[0] + 1):
        result[mine] = np.minimum.accumulate(at[mine][::-1])[::-1]
    return result


def _ends(numbers):
    """(number, rank, index) of every transfer that the lists name."""
    rank = np.repeat(np.arange(len(numbers)), [len(n) for n in numbers])
    index = np.concatenate([np.arange(len(n)) for n in numbers])
    number = np.concatenate([np.asarray(n, dtype=np.int64) for n in numbers])
    there = number != NOTHING
    return number[there], rank[there], index[there]


def _find(numbers, size, wanted):
    """Rank and index at which the lists name the wanted numbers."""
    number, rank, index = _ends(numbers)
    ranks, indices = np.full(size, NOTHING), np.full(size, NOTHING)
    ranks[number], indices[number] = rank, index
    if (ranks[wanted] == NOTHING).any():
        raise ValueError("an action makes what no action needs: the orders are not complete")
    return ranks[wanted], indices[wanted]


def _free_times(timing, cuts, rank, ahead):
    """For each unit of a rank, when the unit ``ahead`` before the one before it ended."""
    ends = np.concatenate(([0.0], timing.end[rank][cuts[1:] - 1]))[:-1]
    return np.concatenate((np.zeros(ahead), ends))[: len(ends)]


def programs_of(dependencies: Dependencies, events: Events, merge: str = "all") -> list[Program]:
    """The programs with the events placed.

    ``merge``: which neighbours of the global order, at one point of a rank, are one exchange. ``all``; ``kind``: those of
    one kind, where activations and gradients have a communicator each; ``none``: each event is an exchange of its
    own, slower, but each can be done in several messages (a header, then the payload).

        events      F3.1 F4.0 B6.0 F5.0
        all         (F3.1 F4.0 B6.0 F5.0)
        kind        (F3.1 F4.0) (B6.0) (F5.0)
        none        (F3.1) (F4.0) (B6.0) (F5.0)
    """
    transfers = [dependencies.transfer(k) for k in events.number.tolist()]
    return [_program(dependencies, events, transfers, rank, merge) for rank in range(dependencies.num_stages)]


def _program(dependencies, events, transfers, rank, merge):
    program: Program = []
    order, done = dependencies.orders[rank], 0
    mine = np.nonzero((events.sender == rank) | (events.receiver == rank))[0]
    is_send = events.sender[mine] == rank
    before = np.where(is_send, events.sender_at[mine], events.receiver_at[mine])
    before = np.maximum.accumulate(before) if len(before) else before
    sends: list[Transfer] = []
    receives: list[Transfer] = []

    def is_open_to(transfer):
        there = sends or receives
        return merge == "all" or (merge == "kind" and bool(there) and there[0].kind == transfer.kind)

    def close():
        if sends or receives:
            program.append(Exchange(tuple(sends), tuple(receives)))
            sends.clear()
            receives.clear()

    for event, send, at in zip(mine.tolist(), is_send.tolist(), before.tolist()):
        if at > done or not is_open_to(transfers[event]):
            close()
            program += order[done:at]
            done = at
        (sends if send else receives).append(transfers[event])
    close()
    program += order[done:]
    return program
