"""All schedules for one configuration, best first."""

from typing import NamedTuple, Optional

from ..planning.options import parse_schedule
from ..planning.planner import make_plan
from ..planning.registry import SCHEDULES, VARIANTS
from ..planning.select import select
from ..schedule.action import Order
from ..schedule.costs import Costs


class Row(NamedTuple):
    """A schedule's figures, or why it is not possible. ``peak``: chunks held on the worst rank; ``same``: others with the same orders."""

    schedule: str
    chosen: bool
    makespan: float = float("inf")
    idle: float = 0.0
    peak: int = 0
    same: Optional[list[str]] = None
    problem: str = ""


def compare(num_stages: int, num_chunks: int, accumulate_steps: int, costs: Costs, blocking: bool) -> list[Row]:
    """A row per schedule, best first; variants that come to the same orders share one."""
    try:
        chosen = make_plan(select(num_stages, num_chunks, accumulate_steps), num_stages, num_chunks, accumulate_steps).orders
    except ValueError:
        chosen = None
    rows: list[Row] = []
    orders: list[Optional[list[Order]]] = []
    for text in (text for name in SCHEDULES for text in VARIANTS.get(name, [name])):
        choice = parse_schedule(text)
        try:
            plan = make_plan(choice.name, num_stages, num_chunks, accumulate_steps, choice.options, blocking, costs=costs)
        except ValueError as error:
            rows.append(Row(text, False, problem=str(error).splitlines()[0]))
            orders.append(None)
            continue
        if plan.orders in orders:
            same = rows[orders.index(plan.orders)].same
            assert same is not None  # it has a plan
            same.append(text)
            continue
        total = plan.simulate(costs)
        idle = sum(total.idle_share) / num_stages
        rows.append(Row(text, plan.orders == chosen, total.makespan, idle, max(total.peak_activations), []))
        orders.append(plan.orders)
    return sorted(rows, key=lambda row: (round(row.makespan, 9), row.peak))
