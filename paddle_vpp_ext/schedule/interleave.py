"""1F1B and interleaved 1F1B (virtual pipeline, VPP) orders."""

from collections.abc import Iterable, Sequence
from typing import Optional

from .action import Action, Order


def forward_sequence(num_chunks: int, groups: Sequence[int], kind: str = "F") -> Order:
    """For each group, for each chunk, each micro-batch of the group. V=2, groups 2, 1:

    F0.0 F0.1 F1.0 F1.1 | F0.2 F1.2
    """
    return _sequence(kind, range(num_chunks), groups)


def backward_sequence(num_chunks: int, groups: Sequence[int], kind: str = "B") -> Order:
    """As the forward sequence with the chunks from last to first. V=2, groups 2, 1:

    B1.0 B1.1 B0.0 B0.1 | B1.2 B0.2
    """
    return _sequence(kind, range(num_chunks - 1, -1, -1), groups)


def _sequence(kind: str, chunks: Iterable[int], groups: Sequence[int]) -> Order:
    sequence: Order = []
    start = 0
    for size in groups:
        sequence += [Action(kind, c, i) for c in chunks for i in range(start, start + size)]
        start += size
    return sequence


def startup_forwards(
    rank: int, num_stages: int, num_chunks: int, groups: Sequence[int], slope: Optional[int] = None, overlap: bool = False
) -> int:
    """Forwards that ``rank`` does before its first backward.

    ``slope`` * (p-1-rank) + (V-1) * g_0, one more with ``overlap``, never more than there are.
    With slope 1 a rank is one forward ahead of the next rank; with 2 there is slack of one
    action for a transfer in each direction (None: 2 for V > 1, 1 for V = 1, as Paddle and Megatron-LM).
    """
    if slope is None:
        slope = 1 if num_chunks == 1 else 2
    ahead = slope * (num_stages - 1 - rank) + (num_chunks - 1) * groups[0] + bool(overlap)
    return min(ahead, num_chunks * sum(groups))


def interleaved(num_stages: int, num_chunks: int, groups: Sequence[int], slope: Optional[int] = None, overlap: bool = False) -> list[Order]:
    """Orders of all ranks: startup forwards, one forward and one backward in turn, the rest of the backwards.

    p=2, V=2, groups 2, 2 (startup | steady | cooldown):

        rank 0  F0.0 F0.1 F1.0 F1.1 | F0.2 B1.0 F0.3 B1.1 F1.2 B0.0 F1.3 B0.1 | B1.2 B1.3 B0.2 B0.3
        rank 1  F0.0 F0.1 | F1.0 B1.0 F1.1 B1.1 F0.2 B0.0 F0.3 B0.1 F1.2 B1.2 F1.3 B1.3 | B0.2 B0.3

    With V=1 and slope 1 it is 1F1B. Time (m + (p-1)/V) * V * (F+B) of a chunk when every group
    has at least p micro-batches and transfers cost nothing (Narayanan et al. 2021, arXiv 2104.04473).
    """
    forwards = forward_sequence(num_chunks, groups)
    backwards = backward_sequence(num_chunks, groups)
    orders = []
    for rank in range(num_stages):
        startup = startup_forwards(rank, num_stages, num_chunks, groups, slope, overlap)
        order = forwards[:startup]
        for pair in zip(forwards[startup:], backwards):
            order += pair
        order += backwards[len(forwards) - startup :]
        orders.append(order)
    return orders
