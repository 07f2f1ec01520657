"""A plan: the verified programs of all ranks, with the options that they came from."""

import contextlib
import gc
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Optional

from .action import Order, format_order
from .costs import UNIT, Costs
from .dependencies import Dependencies, Program
from .simulate import Simulation, Stuck, simulate, time_orders
from .transfers import BLOCKING_PLACEMENTS, OVERLAPPED_PAIRS, OVERLAPPED_PLACEMENT, Events, Placement, place, programs_of
from .verify import ScheduleError, explain_stuck, verify_orders, verify_programs

# A placement this near to the ideal is taken without trying the others.
NEAR_ENOUGH = 1.001
# The most forwards and backwards that a plan may have, 2 * p * V * m. Near it (p=64, V=8, m=1024) planning
# takes 30 seconds and 0.8 GB; beyond it a mistyped number would take hours and all memory.
MAX_ACTIONS = 1 << 20


@dataclass(frozen=True)
class Plan:
    """What every rank does in one step.

    ``orders[r]`` are rank r's actions, ``programs[r]`` the same with its exchanges placed for a
    transport whose exchanges block (``blocking``) or run beside the actions. With ``startups``, each
    rank's forwards before the steady phase, the pairs of that phase run together. ``note`` says why
    these orders. Made by ``plan_orders``, which verifies it.
    """

    schedule: str
    num_stages: int
    num_chunks: int
    accumulate_steps: int
    groups: tuple[int, ...]
    blocking: bool
    orders: list[Order] = field(repr=False)
    programs: list[Program] = field(repr=False)
    placement: str = ""
    events: Optional[Events] = field(repr=False, default=None)
    startups: Optional[Sequence[int]] = None
    note: str = ""

    @cached_property
    def serial_programs(self) -> list[Program]:
        """The programs with one transfer per exchange, for a step whose messages carry headers."""
        assert self.events is not None  # plan_orders gives them
        return programs_of(self._dependencies(), self.events, merge="none")

    @cached_property
    def one_kind_programs(self) -> list[Program]:
        """The programs with exchanges of one kind, for activations and gradients on a communicator each.

        A device may do one communicator's operation at a time, in the order of issue. Verified for that: as if
        each exchange blocked its rank, in the order in which both communicators' are issued.
        """
        assert self.events is not None  # plan_orders gives them
        dependencies = self._dependencies()
        programs = programs_of(dependencies, self.events, merge="kind")
        verify_programs(dependencies, programs)
        return programs

    @cached_property
    def digest(self) -> str:
        """Changes with anything that a rank would do differently."""
        text = "\n".join(map(format_order, self.orders)) + f"|{self.blocking}|{self.placement}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def simulate(self, costs: Costs = UNIT) -> Simulation:
        """Under the rule of the plan's transport: exchanges that block, or transfers that never do."""
        return simulate(self.orders, self.num_chunks, self.accumulate_steps, costs, self.programs if self.blocking else None)

    def _dependencies(self):
        return Dependencies(self.orders, self.num_chunks, self.accumulate_steps)


def plan_orders(
    orders: Sequence[Order],
    num_chunks: int,
    accumulate_steps: int,
    schedule: str = "given",
    groups: tuple[int, ...] = (),
    blocking: bool = False,
    forward_only: bool = False,
    costs: Costs = UNIT,
    startups: Optional[Sequence[int]] = None,
) -> Plan:
    """The plan of given orders, with the placement of transfers that is fastest under the transport's rule.

    With ``startups`` each forward and backward of the steady phase run together, with exchanges around them only.
    """
    check_size(len(orders), num_chunks, accumulate_steps)
    verify_orders(orders, num_chunks, accumulate_steps, forward_only)
    dependencies = Dependencies(orders, num_chunks, accumulate_steps)
    try:
        ideal = time_orders(dependencies, costs).makespan
    except Stuck as stuck:
        raise explain_stuck(dependencies, stuck) from None
    events, programs, placement = _fastest(dependencies, ideal, blocking, costs, startups)
    verify_programs(dependencies, programs)
    return Plan(
        schedule,
        len(orders),
        num_chunks,
        accumulate_steps,
        groups or (accumulate_steps,),
        blocking,
        list(orders),
        programs,
        placement,
        events,
        startups,
    )


def check_size(num_stages: int, num_chunks: int, accumulate_steps: int) -> None:
    """ValueError for a plan of more than MAX_ACTIONS forwards and backwards."""
    actions = 2 * num_stages * num_chunks * accumulate_steps
    if actions > MAX_ACTIONS:
        raise ValueError(
            f"{num_stages} stages, {num_chunks} chunks and {accumulate_steps} micro-batches are {actions} forwards and "
            f"backwards, and a plan may have {MAX_ACTIONS} at most"
        )


def _fastest(dependencies, ideal, blocking, costs, startups):
    placements: Sequence[Placement]
    if startups:
        placements = [p for p in (BLOCKING_PLACEMENTS if blocking else (OVERLAPPED_PAIRS,)) if p.pairs]
    else:
        placements = BLOCKING_PLACEMENTS if blocking else (OVERLAPPED_PLACEMENT,)
    best = None
    for placement in placements:
        try:
            events = place(dependencies, placement, costs, startups)
        except Stuck:  # pairs that wait for each other: m < p, for one
            continue
        programs = programs_of(dependencies, events)
        if len(placements) == 1:
            return events, programs, placement.name
        makespan = simulate(dependencies.orders, dependencies.num_chunks, dependencies.accumulate_steps, costs, programs).makespan
        if best is None or makespan < best[0]:
            best = makespan, (events, programs, placement.name)
        if makespan <= NEAR_ENOUGH * ideal:
            break
    if best is None:
        raise ScheduleError("the pairs of the steady phase wait for each other, so they cannot run together: leave overlap off")
    return best[1]


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A plan is many small tuples in no cycles: the collector finds nothing and takes half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
