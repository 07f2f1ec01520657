"""The schedules by name, and the options that each takes.

A new schedule is one function from (num_stages, num_chunks, accumulate_steps, **options) to
the orders of all ranks, and one entry here.
"""

import re
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple, Optional, Union

from ..schedule.action import Action, Order
from ..schedule.costs import UNIT, Costs
from ..schedule.fthenb import fthenb
from ..schedule.grouping import GROUPINGS, check_groups
from ..schedule.interleave import interleaved, startup_forwards
from ..schedule.verify import ScheduleError
from ..search.memory import Memory, read_memory
from ..search.search import search
from ..search.zero_bubble import zero_bubble
from .values import read_cap, read_costs, read_groups, read_path, read_slope, read_steps, read_switch

Groups = Union[str, Sequence[int]]  # a name of GROUPINGS, or sizes


def vpp(
    num_stages: int,
    num_chunks: int,
    accumulate_steps: int,
    groups: Groups = "first",
    slope: Optional[int] = None,
    overlap: bool = False,
) -> list[Order]:
    """Interleaved 1F1B; with one chunk it is 1F1B. ``groups``: a name of GROUPINGS or sizes."""
    sizes = group_sizes(num_stages, accumulate_steps, groups)
    return interleaved(num_stages, num_chunks, sizes, slope, overlap)


def vpp_startups(
    num_stages: int,
    num_chunks: int,
    accumulate_steps: int,
    groups: Groups = "first",
    slope: Optional[int] = None,
    overlap: bool = False,
) -> Optional[list[int]]:
    """Each rank's forwards before its first pair of a forward and a backward that run together; None without ``overlap``."""
    if not overlap:
        return None
    if accumulate_steps < num_stages:
        raise ValueError(
            f"overlap=on needs accumulate_steps of at least pp_degree={num_stages}, but it is {accumulate_steps}: leave it off"
        )
    sizes = group_sizes(num_stages, accumulate_steps, groups)
    return [startup_forwards(rank, num_stages, num_chunks, sizes, slope, overlap) for rank in range(num_stages)]


def zbvpp(
    num_stages: int,
    num_chunks: int,
    accumulate_steps: int,
    groups: Groups = "even",
    cap: Optional[float] = None,
    costs: Costs = UNIT,
    blocking: bool = False,
) -> list[Order]:
    """VPP with split backwards and no bubble but the first; ``cap``: micro-batches' activations that a rank may hold."""
    sizes = group_sizes(num_stages, accumulate_steps, groups)
    return zero_bubble(num_stages, num_chunks, accumulate_steps, sizes, cap, costs)


def auto(
    num_stages: int,
    num_chunks: int,
    accumulate_steps: int,
    memory: Optional[Memory] = None,
    costs: Costs = UNIT,
    blocking: bool = False,
    profile: Optional[int] = None,
    save: Optional[str] = None,
) -> list[Order]:
    """The fastest orders that ``search`` finds; with ``profile`` those with which costs are measured first."""
    if save and not profile:
        raise ValueError(f"save={save} is where measured costs go: it needs profile=, the number of steps to measure")
    if not profile:
        return search(num_stages, num_chunks, accumulate_steps, costs, memory, blocking).orders
    if costs != UNIT:
        raise ValueError(f"profile={profile} measures costs that are given already: leave one of profile and costs out")
    return vpp(num_stages, num_chunks, accumulate_steps, groups="even")


def auto_note(
    num_stages: int,
    num_chunks: int,
    accumulate_steps: int,
    memory: Optional[Memory] = None,
    costs: Costs = UNIT,
    blocking: bool = False,
    profile: Optional[int] = None,
    save: Optional[str] = None,
) -> str:
    """What ``auto`` chose and what it expects (the search is done once)."""
    if profile:
        return f"VPP:groups=even until {profile} training steps after the first are measured"
    return str(search(num_stages, num_chunks, accumulate_steps, costs, memory, blocking))


def no_startups(*args: object, **options: object) -> None:
    """Of a schedule in which no forward runs together with a backward."""


def group_sizes(num_stages: int, accumulate_steps: int, groups: Groups = "first") -> tuple[int, ...]:
    """The sizes that ``groups`` means; ValueError for an unknown name, or sizes that do not add up to accumulate_steps."""
    if isinstance(groups, str):
        if groups not in GROUPINGS:
            raise ValueError(f"groups={groups!r} is not a grouping: choose one of {', '.join(GROUPINGS)}, or give sizes")
        return GROUPINGS[groups](num_stages, accumulate_steps)
    return check_groups(groups, accumulate_steps)


class Schedule(NamedTuple):
    """``orders`` makes the orders; ``keys`` are its options and how their text is read; ``startups`` as vpp_startups.

    ``by_costs``: ``orders`` also takes ``costs`` and ``blocking``, and what it makes depends on them. ``groups``: the
    grouping where the option is not given. ``note``, called like ``orders``, says in a sentence why these.
    ``splits``: a backward may be split into I and W.
    """

    orders: Callable[..., list[Order]]
    keys: dict[str, Callable[[str], object]]
    startups: Callable[..., Optional[list[int]]] = no_startups
    by_costs: bool = False
    groups: str = "first"
    note: Optional[Callable[..., str]] = None
    splits: bool = True


SCHEDULES: dict[str, Schedule] = {
    "VPP": Schedule(vpp, {"groups": read_groups, "slope": read_slope, "overlap": read_switch}, vpp_startups, splits=False),
    "FthenB": Schedule(fthenb, {}, splits=False),
    "ZBVPP": Schedule(zbvpp, {"groups": read_groups, "cap": read_cap}, by_costs=True, groups="even"),
    "auto": Schedule(
        auto, {"memory": read_memory, "costs": read_costs, "profile": read_steps, "save": read_path}, by_costs=True, note=auto_note
    ),
}

# The options of a schedule that are worth comparing; of all others their defaults.
VARIANTS = {"VPP": [f"VPP:groups={groups},slope={slope}" for groups in ("first", "even") for slope in (2, 1)]}

_BUILT_IN = frozenset(SCHEDULES)
_RESERVED = frozenset(("1F1B", "ZBVPP", "auto", "paddle"))  # words of schedule_mode that are no user's to give


def register_schedule(name: str, function: Callable[[int, int, int], Sequence[Union[str, Sequence[Action]]]]) -> None:
    """Makes ``name`` a schedule like those of this package: for ``schedule_mode``, plans, proofs and pictures.

    ``function(p, V, m)`` returns the orders of ranks 0..p-1, each a text like ``"F0.0 B0.0"`` or a list of
    actions (Action, or their text). It is called when a plan is made; every process of a run must register
    the same. A name can be registered anew. ValueError for a name that cannot be one or is built in,
    TypeError for a function that cannot be called.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name, re.ASCII):
        raise ValueError(f"{name!r} cannot be a schedule's name: write letters, digits and _, a letter first")
    if name in _BUILT_IN or name in _RESERVED:
        raise ValueError(f"{name!r} is the name of a built-in schedule, choose another one")
    if not callable(function):
        raise TypeError(f"schedule {name}: {function!r} is not a function: give one of p, V and m that returns all ranks' orders")
    SCHEDULES[name] = Schedule(lambda p, num_chunks, m: _orders_from(name, function, p, num_chunks, m), {})


def _orders_from(
    name: str, function: Callable[[int, int, int], Sequence[Any]], num_stages: int, num_chunks: int, accumulate_steps: int
) -> list[Order]:
    """What a user's function gives, as orders; ScheduleError if it is none."""
    call = f"schedule {name}, called with p={num_stages}, V={num_chunks}, m={accumulate_steps},"
    try:
        given = [order.split() if isinstance(order, str) else list(order) for order in function(num_stages, num_chunks, accumulate_steps)]
    except Exception as error:
        raise ScheduleError(f"{call} failed with {type(error).__name__}: {error}") from error
    if len(given) != num_stages:
        raise ScheduleError(f"{call} gave orders for {len(given)} ranks, not for {num_stages}")
    return [[_action(call, rank, at, action) for at, action in enumerate(order)] for rank, order in enumerate(given)]


def _action(call: str, rank: int, at: int, given: Any) -> Action:
    try:
        # Through the text form in any case, so that a tuple of the wrong things is refused, too.
        return Action.parse(given if isinstance(given, str) else str(Action(*given)))
    except (TypeError, ValueError) as error:
        raise ScheduleError(f"{call} gave rank {rank} as its action {at}: {error}") from None
