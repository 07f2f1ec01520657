"""How accumulate_steps is cut into groups of micro-batches.

The chunks of a rank take turns group by group. A group of at least p micro-batches keeps
the pipeline full; a larger one gives transfers more slack and holds more activations.
"""

from collections.abc import Sequence
from typing import Callable


def first(num_stages: int, accumulate_steps: int) -> tuple[int, ...]:
    """Paddle's own cut (3.0 and newer): what does not divide by p goes into the first group.

    p=4, m=11: 7, 4.
    """
    head = min(accumulate_steps % num_stages + num_stages, accumulate_steps)
    return (head,) + (num_stages,) * ((accumulate_steps - head) // num_stages)


def even(num_stages: int, accumulate_steps: int) -> tuple[int, ...]:
    """As many groups as have p micro-batches each, sizes differing by at most one, larger first.

    p=4, m=11: 6, 5. Holds fewer activations than ``first`` and loses less to transfer time.
    """
    count = max(1, accumulate_steps // num_stages)
    size, larger = divmod(accumulate_steps, count)
    return (size + 1,) * larger + (size,) * (count - larger)


GROUPINGS: dict[str, Callable[[int, int], tuple[int, ...]]] = {"first": first, "even": even}


def check_groups(groups: Sequence[int], accumulate_steps: int) -> tuple[int, ...]:
    """``groups`` as a tuple; ValueError unless they are positive and add up to accumulate_steps."""
    groups = tuple(groups)
    if any(size < 1 for size in groups) or sum(groups) != accumulate_steps:
        raise ValueError(f"groups {'+'.join(map(str, groups))} must be positive and add up to accumulate_steps={accumulate_steps}")
    return groups
