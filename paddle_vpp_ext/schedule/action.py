"""Action: one computation of one rank, and its text form."""

import re
from collections.abc import Iterable
from typing import NamedTuple, final

KINDS = "FBIW"

_TEXT = re.compile(r"([FBIW])(\d+)\.(\d+)\Z", re.ASCII)


@final
class Action(NamedTuple):
    """One computation: forward (F), backward (B), or a backward's two parts (I then W).

    I is the gradient of the chunk's input, W that of its weights; B is both at once.
    The text form is kind, chunk, dot, micro-batch: ``F1.7`` is the forward of chunk 1 for
    micro-batch 7. It says nothing of the rank, so all ranks share their actions.
    """

    kind: str
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.chunk}.{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The action that ``text`` names; ValueError with the text if it names none."""
        found = _TEXT.match(text)
        if not found:
            raise ValueError(f"{text!r} is not an action: write a kind ({', '.join(KINDS)}), a chunk, a dot and a micro-batch, as in F1.7")
        return cls(found[1], int(found[2]), int(found[3]))


Order = list[Action]


def parse_order(text: str) -> Order:
    """A rank's order from its actions joined by blanks: ``F0.0 F0.1 B0.0 B0.1``."""
    return [Action.parse(word) for word in text.split()]


def format_order(order: Iterable[Action]) -> str:
    """The inverse of ``parse_order``."""
    return " ".join(map(str, order))
