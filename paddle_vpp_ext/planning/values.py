"""How the text of an option's value is read. Each reader raises a ValueError that says what would do."""

import re
from typing import Union

from ..schedule.costs import Costs
from ..schedule.grouping import GROUPINGS


def read_groups(text: str) -> Union[str, tuple[int, ...]]:
    """``first``, ``even``, or sizes as in ``7+4``."""
    if text in GROUPINGS:
        return text
    try:
        return tuple(int(size) for size in text.split("+"))
    except ValueError:
        raise ValueError(f"{text!r} is not a grouping: write {', '.join(GROUPINGS)}, or sizes as in 7+4") from None


def read_switch(text: str) -> bool:
    """``on`` or ``off``."""
    if text not in ("on", "off"):
        raise ValueError(f"{text!r} is not a switch: write on or off")
    return text == "on"


def read_slope(text: str) -> int:
    """``1`` (fewer activations) or ``2`` (transfers hide behind computation)."""
    if text not in ("1", "2"):
        raise ValueError(f"{text!r} is not a slope: write 1 or 2")
    return int(text)


def read_steps(text: str) -> int:
    """A number of training steps, at least 1."""
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
        raise ValueError(f"{text!r} is not a number of steps: write a whole number of at least 1")
    return int(text)


def read_path(text: str) -> str:
    """A file or folder, which need not exist."""
    if not text:
        raise ValueError("there is no path: write a file or a folder")
    return text


def read_costs(text: str) -> Costs:
    """The costs in a JSON file."""
    try:
        return Costs.load(text)
    except OSError as error:
        raise ValueError(f"cannot read {text}: {error.strerror or error}") from None


def read_cap(text: str) -> float:
    """A positive number of micro-batches."""
    return _positive(text, "micro-batches, as in 8 or 8.5")


def read_seconds(text: str) -> float:
    """A positive number of seconds."""
    return _positive(text, "seconds, as in 600")


def _positive(text, what):
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ValueError(f"{text!r} is not a positive number: write one of {what}")
    return number
