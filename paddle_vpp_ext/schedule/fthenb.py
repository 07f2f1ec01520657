"""FthenB: all forwards, then all backwards."""

from collections.abc import Sequence

from .action import Order
from .interleave import backward_sequence, forward_sequence


def fthenb(num_stages: int, num_chunks: int, accumulate_steps: int) -> list[Order]:
    """Orders of all ranks, which are the same on each. V=2, m=2:

        F0.0 F0.1 F1.0 F1.1 B1.0 B1.1 B0.0 B0.1

    As fast as VPP, but every rank holds the activations of all micro-batches at once.
    """
    groups = (accumulate_steps,)
    order = forward_sequence(num_chunks, groups) + backward_sequence(num_chunks, groups)
    return [list(order) for _ in range(num_stages)]


def forward_only(num_stages: int, num_chunks: int, groups: Sequence[int]) -> list[Order]:
    """Orders of an evaluation: the forward sequence alone."""
    return [forward_sequence(num_chunks, groups) for _ in range(num_stages)]
