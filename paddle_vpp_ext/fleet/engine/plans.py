"""The plans of one engine: one for each ``accumulate_steps``, made when it is first asked for."""

from collections.abc import Mapping
from typing import Any, Callable, Optional

from ...executor import Instruction, resolve, split_backwards
from ...log import logger
from ...planning.planner import make_plan
from ...planning.registry import SCHEDULES
from ...schedule.costs import UNIT, Costs
from ...schedule.plan import Plan
from ..transport.protocol import Promises
from .options import ScheduleOptions


class Plans:
    """Verified plans of one schedule, and this rank's programs from them.

    ``name``: the schedule's; ``text``: with its options, as one would write it in schedule_mode. ``pairs``: steady
    forwards and backwards run together in training. ``promises``: what the transport does, for which transfers are placed.
    """

    def __init__(
        self,
        name: str,
        text: str,
        options: Mapping[str, object],
        pairs: bool,
        num_stages: int,
        num_chunks: int,
        rank: int,
        promises: Promises,
    ):
        self.name, self.text, self.num_stages, self.num_chunks, self._rank = name, text, num_stages, num_chunks, rank
        self._pairs, self._promises = pairs, promises
        # With the rule's options, a schedule of the rule's choice takes those that it has.
        keys = set(SCHEDULES[name].keys) - {"overlap"}
        self._options = {key: value for key, value in options.items() if key in keys}
        self.costs: Optional[Costs] = None  # once they are measured
        self._made: dict[tuple[int, bool], Plan] = {}
        self._programs: dict[tuple[int, bool, bool, bool], list[Instruction]] = {}

    def __len__(self) -> int:
        return len(self._made)

    def plan(self, accumulate_steps: int, training: bool = True) -> Plan:
        """The verified plan. ValueError for one that cannot be."""
        key = accumulate_steps, training
        if key not in self._made:
            options = dict(self._options)
            if self.costs is not None:  # they are what was to be measured
                options = {key: value for key, value in options.items() if key not in ("profile", "save")}
            if self._pairs and training:
                options["overlap"] = True
            self._made[key] = make_plan(
                self.name,
                self.num_stages,
                self.num_chunks,
                accumulate_steps,
                options,
                self._promises.blocking,
                not training,
                self.costs or UNIT,
            )
        return self._made[key]

    def program(self, accumulate_steps: int, training: bool, with_headers: bool, split: bool = False) -> list[Instruction]:
        """This rank's resolved program; ``split``: with each whole backward in two."""
        key = accumulate_steps, training, with_headers, split
        if key not in self._programs:
            plan, rank = self.plan(accumulate_steps, training), self._rank
            programs = self._programs_for(plan, with_headers)
            startup = plan.startups[rank] if plan.startups else None
            program = resolve(programs[rank], rank, self.num_stages, self.num_chunks, startup)
            self._programs[key] = split_backwards(program) if split else program
        return self._programs[key]

    def _programs_for(self, plan, with_headers):
        if with_headers and self._promises.serial_headers:
            return plan.serial_programs
        return plan.one_kind_programs if self._promises.one_kind else plan.programs

    def replan(self, costs: Costs, agree: Callable[[], Any]) -> bool:
        """Plans anew for measured costs. Where ``agree`` raises ValueError, as no plan fits into the memory, all stays as it was: False."""
        before = self._made, self._programs
        self.costs, self._made, self._programs = costs, {}, {}
        try:
            agree()
        except ValueError as error:
            self.costs, (self._made, self._programs) = None, before
            logger.warning(f"{self.text} keeps the order that it was measured with: {error}")
            return False
        return True


def overlaps_pairs(schedule: ScheduleOptions, name: str, text: str, layers: Any) -> bool:
    """Whether steady forwards and backwards go to the model's ``overlapped_forward_backward``.

    ``overlap=on`` demands it: ValueError where it cannot be. With Paddle's flag a warning says why it is not.
    """
    asked = schedule.choice.options.get("overlap")
    if not (schedule.overlap_pairs if asked is None else asked):
        return False
    can, why_not = "overlap" in SCHEDULES[name].keys, None
    if not can:
        why_not = f"{name} has no forwards and backwards in turn"
    elif not hasattr(type(layers), "overlapped_forward_backward"):
        why_not = f"{type(layers).__name__} has no overlapped_forward_backward; derive it from paddle_vpp_ext.OverlapMixin"
    elif layers._recompute_interval > 0:
        why_not = "its layers are recomputed; set recompute_interval to 0"
    if why_not and asked and can:
        raise ValueError(f"{text}: this model cannot overlap forward and backward: {why_not}")
    if why_not:
        logger.warning(f"forward-backward overlap has no effect: {why_not}")
    return not why_not
