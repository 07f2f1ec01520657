"""What ranks hold, and limits to it."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Optional

from ..schedule.action import Action
from ..schedule.costs import Costs
from ..schedule.dependencies import Program
from .problem import INFINITE, Capacity

_UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_TEXT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]?i?B)?\Z", re.ASCII | re.IGNORECASE)


class Memory(NamedTuple):
    """What each rank may hold for its micro-batches: an amount in bytes, or in micro-batches' activations of one stage."""

    amount: float
    in_bytes: bool

    def __str__(self) -> str:
        return f"{self.amount / 2**30:.4g}GiB" if self.in_bytes else f"{self.amount:g} micro-batches"


def read_memory(text: str) -> Memory:
    """``40GiB``, ``512MB`` (bytes), or ``8.5`` (micro-batches; a chunk's activation counts 1/V). ValueError for anything else."""
    found = _TEXT.match(text.strip())
    if not found or float(found[1]) <= 0:
        raise ValueError(f"{text!r} is not a memory limit: write bytes as in 40GiB or 512MB, or micro-batches as in 8.5")
    return Memory(float(found[1]) * _UNITS[(found[2] or "").upper()], bool(found[2]))


def capacity_under(memory: Optional[Memory], num_stages: int, num_chunks: int, costs: Costs) -> Capacity:
    """The room that a limit gives. Residues count from the forward on, so that no I can be short of room.

    ValueError for a limit in bytes under costs that have none, or one that cannot hold one micro-batch.
    """
    parts = num_stages * num_chunks
    if memory is None:
        return Capacity([1] * parts, [INFINITE] * num_stages)
    if not memory.in_bytes:
        if memory.amount < 1:
            raise ValueError(f"memory={memory.amount:g} micro-batches is too small: the smallest that works is 1")
        return Capacity([1] * parts, [int(memory.amount * num_chunks + 1e-9)] * num_stages)
    table = costs.bytes_table(parts)
    size = [a + r for a, r in zip(table["activation"], table["residue"])]
    if not any(size):
        raise ValueError("a memory limit in bytes needs costs with bytes: give activation, or the limit in micro-batches")
    least = max(sum(size[rank::num_stages]) for rank in range(num_stages))
    if memory.amount < least:
        raise ValueError(f"memory={memory} is too small: one micro-batch takes {least / 2**30:.4g}GiB")
    return Capacity(size, [memory.amount] * num_stages)


def peak_bytes(programs: Sequence[Program], costs: Costs, num_chunks: int) -> list[float]:
    """The most bytes that each rank holds at once in its program.

    Activations from F to B or W, residues from I to W, what is received until the action that needs it begins, what is
    made until the exchange that sends it is done: so an order that needs buffers on the receiver pays for them.
    """
    p = len(programs)
    n = p * num_chunks
    return [_peak(program, rank, p, n, costs.bytes_table(n)) for rank, program in enumerate(programs)]


def _peak(program, rank, p, n, table):
    activation, residue, message = table["activation"], table["residue"], table["message"]
    held = most = 0.0
    weigh = lambda transfer: message[transfer.part if transfer.kind == "F" else transfer.part - 1]
    kinds = Counter(action.kind for action in program if type(action) is Action)
    for instruction in program:
        if type(instruction) is not Action:
            held += sum(map(weigh, instruction.receives))
            most = max(most, held)
            held -= sum(map(weigh, instruction.sends))
            continue
        kind, part = instruction.kind, instruction.chunk * p + rank
        before, after = message[part - 1] if part else 0, message[part] if part < n - 1 else 0
        if kind == "F":
            held += (activation[part] if kinds["B"] or kinds["W"] else 0) + after - before
        elif kind in "BI":
            held += (residue[part] if kind == "I" else 0) + before - after
        most = max(most, held)
        held -= {"B": activation[part], "W": activation[part] + residue[part]}.get(kind, 0)
    return most
