"""Orders as a file: a line a rank, its actions in their order.

    rank 0,F0.0,F0.1,B0.0,B0.1        or        rank 0: F0.0 F0.1 B0.0 B0.1
    rank 1,F0.0,B0.0,F0.1,B0.1                  rank 1: F0.0 B0.0 F0.1 B0.1

Commas, semicolons, tabs and blanks all separate, so that what a spreadsheet saves or a person
types is read alike. Empty cells, empty lines and lines that start with # say nothing.
"""

import csv
import os
import re
from collections.abc import Sequence
from typing import Union

from ..schedule.action import Action, Order

_RANK = re.compile(r"rank[\s,;]*(\d+)[\s,;:]*", re.ASCII | re.IGNORECASE)


class OrderFileError(ValueError):
    """A file that has no orders, or none that can be read; the text names line and rank."""


def save(path: Union[str, os.PathLike], orders: Sequence[Order]) -> None:
    """Writes orders as CSV. OSError if ``path`` cannot be written."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([f"rank {rank}", *order] for rank, order in enumerate(orders))


def load(path: Union[str, os.PathLike]) -> list[Order]:
    """The orders of all ranks. OSError or OrderFileError."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            return parse(file.read())
    except UnicodeDecodeError:
        raise OrderFileError("this is not a text file: save the orders as CSV or plain text in UTF-8") from None


def parse(text: str) -> list[Order]:
    """The orders that a text of lines holds; ranks in the order of the lines, or as ``rank N`` says."""
    orders: dict[int, Order] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.replace('"', " ").strip(" \t,;")
        if not line or line.startswith("#"):
            continue
        prefix = _RANK.match(line)
        rank = int(prefix[1]) if prefix else len(orders)
        if rank in orders:
            raise OrderFileError(f"line {number}: rank {rank} is there a second time")
        words = re.split(r"[\s,;]+", line[prefix.end() if prefix else 0 :])
        orders[rank] = [_action(number, rank, at, word) for at, word in enumerate(filter(None, words))]
    missing = [rank for rank in range(len(orders)) if rank not in orders]
    if missing or len(orders) < 2:
        what = f"there is no rank {missing[0]}" if missing else f"there are {len(orders)} lines with actions"
        raise OrderFileError(f"{what}, but a pipeline has ranks 0, 1 and so on, each in a line of its own")
    if not any(orders.values()):
        raise OrderFileError("there is no action in it")
    return [orders[rank] for rank in sorted(orders)]


def _action(line, rank, at, word):
    try:
        return Action.parse(word)
    except ValueError as error:
        raise OrderFileError(f"line {line}: rank {rank}, instruction {at}: {error}") from None
