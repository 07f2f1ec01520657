"""The schedules by name, and the options that each takes.

A new schedule is one function from (num_stages, num_chunks, accumulate_steps, **options) to
the orders of all ranks, and one entry here.
"""
from typing import Callable, Dict, List, NamedTuple, Optional

from .action import Order
from .fthenb import fthenb
from .grouping import GROUPINGS, check_groups
from .interleave import interleaved, startup_forwards


def vpp(num_stages, num_chunks, accumulate_steps, groups="first", slope=None, overlap=False) -> List[Order]:
    """Interleaved 1F1B; with one chunk it is 1F1B. ``groups``: a name of GROUPINGS or sizes."""
    sizes = group_sizes(num_stages, accumulate_steps, groups)
    return interleaved(num_stages, num_chunks, sizes, slope, overlap)


def vpp_startups(num_stages, num_chunks, accumulate_steps, groups="first", slope=None, overlap=False) -> Optional[List[int]]:
    """Each rank's forwards before its first pair of a forward and a backward that run together; None without ``overlap``."""
    if not overlap:
        return None
    if accumulate_steps < num_stages:
        raise ValueError(
            f"overlap=on needs accumulate_steps of at least pp_degree={num_stages}, but it is {accumulate_steps}: leave it off"
        )
    sizes = group_sizes(num_stages, accumulate_steps, groups)
    return [startup_forwards(rank, num_stages, num_chunks, sizes, slope, overlap) for rank in range(num_stages)]


def no_startups(*args, **options) -> None:
    """Of a schedule in which no forward runs together with a backward."""


def group_sizes(num_stages, accumulate_steps, groups="first"):
    """The sizes that ``groups`` means; ValueError for an unknown name, or sizes that do not add up to accumulate_steps."""
    if isinstance(groups, str):
        if groups not in GROUPINGS:
            raise ValueError(f"groups={groups!r} is none of {', '.join(GROUPINGS)}")
        return GROUPINGS[groups](num_stages, accumulate_steps)
    return check_groups(groups, accumulate_steps)


def read_groups(text: str):
    """``first``, ``even``, or sizes as in ``7+4``."""
    if text in GROUPINGS:
        return text
    try:
        return tuple(int(size) for size in text.split("+"))
    except ValueError:
        raise ValueError(f"{text!r} is none of {', '.join(GROUPINGS)}, nor sizes as in 7+4") from None


def read_switch(text: str) -> bool:
    """``on`` or ``off``."""
    if text not in ("on", "off"):
        raise ValueError(f"{text!r} is neither on nor off")
    return text == "on"


def read_slope(text: str) -> int:
    """``1`` (fewer activations) or ``2`` (transfers hide behind computation)."""
    if text not in ("1", "2"):
        raise ValueError(f"{text!r} is neither 1 nor 2")
    return int(text)


class Schedule(NamedTuple):
    """``orders`` makes the orders; ``keys`` are its options and how their text is read; ``startups`` as vpp_startups."""

    orders: Callable[..., List[Order]]
    keys: Dict[str, Callable[[str], object]]
    startups: Callable[..., Optional[List[int]]] = no_startups


SCHEDULES: Dict[str, Schedule] = {
    "VPP": Schedule(vpp, {"groups": read_groups, "slope": read_slope, "overlap": read_switch}, vpp_startups),
    "FthenB": Schedule(fthenb, {}),
}
