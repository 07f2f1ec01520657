"""What the actions of given orders need from, and make for, other ranks."""

from collections.abc import Sequence
from typing import NamedTuple, Union, final

from .action import Action, Order

NOTHING = -1


class Transfer(NamedTuple):
    """An activation (kind F, part s -> s+1) or a gradient (kind B, part s -> s-1) of one micro-batch.

    ``part`` is the model part that made it. Text form: ``F3.7`` is what part 3 made in the
    forward of micro-batch 7.
    """

    kind: str
    part: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.part}.{self.micro_batch}"

    @property
    def to_part(self) -> int:
        """The model part that needs it."""
        return self.part + 1 if self.kind == "F" else self.part - 1


@final
class Exchange(NamedTuple):
    """The transfers that a rank does at one point, as one grouped call."""

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]

    def __str__(self) -> str:
        return " ".join([f"send({t})" for t in self.sends] + [f"receive({t})" for t in self.receives])


Instruction = Union[Action, Exchange]
Program = list[Instruction]


class Dependencies:
    """The transfers between the actions of all ranks' orders, numbered.

    ``needs[rank][j]`` and ``makes[rank][j]`` are the numbers of the transfer that the j-th
    action of a rank waits for and makes, or NOTHING. Number k < n*m is the activation k of
    (part, micro-batch) = divmod(k, m), n*m + k the gradient. Actions outside p, V, m are a
    ValueError, so that what comes after can rely on every number.
    """

    def __init__(self, orders: Sequence[Order], num_chunks: int, accumulate_steps: int):
        self.orders = orders
        self.num_stages = p = len(orders)
        self.num_chunks = num_chunks
        self.accumulate_steps = m = accumulate_steps
        self.num_parts = p * num_chunks
        self.size = 2 * self.num_parts * m
        self.needs, self.makes = [], []
        for rank, order in enumerate(orders):
            table = self._numbers(rank)
            try:
                numbers = [table[action] for action in order]
            except KeyError as missing:
                raise ValueError(
                    f"rank {rank} has {Action(*missing.args[0])}, but there are chunks 0..{num_chunks - 1} and micro-batches 0..{m - 1}"
                ) from None
            self.needs.append([need for need, _ in numbers])
            self.makes.append([make for _, make in numbers])

    def _numbers(self, rank):
        """{action: (number of what it needs, number of what it makes)}"""
        p, m, n = self.num_stages, self.accumulate_steps, self.num_parts
        table = {}
        for chunk in range(self.num_chunks):
            part = chunk * p + rank
            is_first, is_last = part == 0, part == n - 1
            for i in range(m):
                activation = part * m + i
                gradient = n * m + activation
                table["F", chunk, i] = (
                    NOTHING if is_first else activation - m,
                    NOTHING if is_last else activation,
                )
                table["B", chunk, i] = table["I", chunk, i] = (
                    NOTHING if is_last else gradient + m,
                    NOTHING if is_first else gradient,
                )
                table["W", chunk, i] = NOTHING, NOTHING
        return table

    def transfer(self, number: int) -> Transfer:
        """The transfer with this number."""
        gradient, number = divmod(number, self.num_parts * self.accumulate_steps)
        return Transfer("B" if gradient else "F", *divmod(number, self.accumulate_steps))
