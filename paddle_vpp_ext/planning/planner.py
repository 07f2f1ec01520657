"""From a schedule's name and options to its verified plan."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..schedule.costs import UNIT, Costs
from ..schedule.fthenb import forward_only as evaluation
from ..schedule.grouping import even
from ..schedule.plan import Plan, check_size, no_garbage_collection, plan_orders
from ..schedule.verify import ScheduleError
from .registry import SCHEDULES, group_sizes

NO_OPTIONS: Mapping[str, Any] = {}


def make_plan(
    schedule: str,
    num_stages: int,
    num_chunks: int,
    accumulate_steps: int,
    options: Mapping[str, Any] = NO_OPTIONS,
    blocking: bool = False,
    forward_only: bool = False,
    costs: Costs = UNIT,
) -> Plan:
    """The plan of a registered schedule for p >= 2 stages, V >= 1 chunks and m >= 1 micro-batches.

    ``forward_only`` keeps the forwards alone (evaluation). ``costs`` decide where transfers are
    placed, and the orders of ZBVPP and auto. Raises ValueError for numbers that make no pipeline, ScheduleError (a ValueError)
    for a schedule that cannot run.
    """
    for name, value, least in (
        ("num_stages", num_stages, 2),
        ("num_chunks", num_chunks, 1),
        ("accumulate_steps", accumulate_steps, 1),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
    check_size(num_stages, num_chunks, accumulate_steps)
    options, entry = dict(options), SCHEDULES[schedule]
    with no_garbage_collection():
        groups: tuple[int, ...] = (accumulate_steps,)
        if "groups" in entry.keys:
            groups = group_sizes(num_stages, accumulate_steps, options.get("groups", entry.groups))
        if entry.by_costs and forward_only:  # there is no backward to be clever about
            orders = evaluation(num_stages, num_chunks, groups if "groups" in entry.keys else even(num_stages, accumulate_steps))
        elif entry.by_costs:
            costs = options.setdefault("costs", costs)
            options["blocking"] = blocking
            orders = entry.orders(num_stages, num_chunks, accumulate_steps, **options)
        else:
            orders = entry.orders(num_stages, num_chunks, accumulate_steps, **options)
        startups = entry.startups(num_stages, num_chunks, accumulate_steps, **options)
        if forward_only:
            orders = [[action for action in order if action.kind == "F"] for order in orders]
            startups = None
        try:
            plan = plan_orders(orders, num_chunks, accumulate_steps, schedule, groups, blocking, forward_only, costs, startups)
        except ScheduleError as error:
            raise ScheduleError(f"{_groups_out_of_order(groups)}{error}") from None
        if entry.note and not forward_only:
            plan = replace(plan, note=entry.note(num_stages, num_chunks, accumulate_steps, **options))
        return plan


def _groups_out_of_order(groups):
    """What to say before an error of groups whose first is too small for a later one: its chunks come too early."""
    if max(groups) == groups[0]:
        return ""
    wrong, right = ("+".join(map(str, sizes)) for sizes in (groups, sorted(groups, reverse=True)))
    return f"groups={wrong}: the largest group has to come first, as in groups={right}; "
