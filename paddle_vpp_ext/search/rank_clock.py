"""The loop of a list schedule: whichever rank can begin first does what it has chosen."""

from heapq import heappop, heappush
from typing import Any, Callable, Optional

# When a rank would begin, and what.
Choice = tuple[float, Any]


def run_by_time(num_ranks: int, choose: Callable[[int], Optional[Choice]], act: Callable[[int, float, Any], int]) -> None:
    """Until nobody has anything to do: the rank whose choice begins first acts, and those whom that concerns choose anew.

    ``choose(rank)``: its next choice, or None. ``act(rank, start, what)`` does it, and returns the rank that it makes something
    for (or ``rank`` itself).
    """
    queue: list[tuple[float, int, int]] = []
    version, choice = [0] * num_ranks, [None] * num_ranks

    def look(rank):
        version[rank] += 1
        found = choose(rank)
        if found is not None:
            start, choice[rank] = found
            heappush(queue, (start, rank, version[rank]))

    for rank in range(num_ranks):
        look(rank)
    while queue:
        start, rank, stamp = heappop(queue)
        if stamp == version[rank]:
            peer = act(rank, start, choice[rank])
            look(rank)
            if peer != rank:
                look(peer)
