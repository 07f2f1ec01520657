"""``compare``: all schedules for one configuration in one table, best first."""
import argparse
from typing import List, NamedTuple, Optional

from . import arguments
from .command import PROGRAM, STATUS

EXAMPLES = f"""examples:
  {PROGRAM} compare --pp 4 --vpp 2 --acc 11
  {PROGRAM} compare --pp 8 --vpp 4 --acc 39 --forward 1 --backward 2 --hop 0.1
  {PROGRAM} compare --pp 4 --vpp 2 --acc 11 --schedule-file my_schedule.py

Best is the shortest makespan, then the lowest peak. * marks what the selector's rule (schedule_mode "1F1B") picks.
{STATUS}"""

# The options of a schedule that are worth comparing; of all others their defaults.
VARIANTS = {"VPP": [f"VPP:groups={groups},slope={slope}" for groups in ("first", "even") for slope in (2, 1)]}


class Row(NamedTuple):
    """A schedule's figures, or why it is not possible. ``peak``: chunks held on the worst rank; ``same``: others with the same orders."""

    schedule: str
    chosen: bool
    makespan: float = float("inf")
    idle: float = 0.0
    peak: int = 0
    same: Optional[List[str]] = None
    problem: str = ""


def add_command(commands) -> None:
    """Adds ``compare`` to the parser's commands."""
    parser = commands.add_parser(
        "compare",
        help="compare all schedules for one configuration",
        description="Plans every schedule for one configuration and shows time, idle share and memory in one table, best first.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arguments.add_pipeline(parser)
    arguments.add_own_schedule(parser)
    arguments.add_costs(parser)
    parser.set_defaults(run=run)


def run(args) -> int:
    """Prints the table; 1 if no schedule is possible."""
    arguments.need_numpy()
    costs = arguments.costs_of(args)
    arguments.register_own(args)
    rows = compare(args.pp, args.vpp, args.acc, costs, args.blocking)
    rule = "blocking transfers" if args.blocking else "transfers beside computation"
    print(f"p={args.pp} V={args.vpp} m={args.acc}  {arguments.costs_text(args)}, {rule}\n")
    print(table(rows, args.vpp))
    if not any(row.chosen for row in rows):
        print(f"* none: the selector's rule refuses m={args.acc} < p={args.pp}; name one of these in schedule_mode")
    return 0 if any(not row.problem for row in rows) else 1


def compare(num_stages, num_chunks, accumulate_steps, costs, blocking) -> List[Row]:
    """A row per schedule, best first; variants that come to the same orders share one."""
    from ..config import parse_schedule
    from ..schedule.plan import make_plan
    from ..schedule.registry import SCHEDULES
    from ..schedule.select import select

    try:
        chosen = make_plan(select(num_stages, num_chunks, accumulate_steps), num_stages, num_chunks, accumulate_steps).orders
    except ValueError:
        chosen = None
    rows, orders = [], []
    for text in (text for name in SCHEDULES for text in VARIANTS.get(name, [name])):
        choice = parse_schedule(text)
        try:
            plan = make_plan(choice.name, num_stages, num_chunks, accumulate_steps, choice.options, blocking, costs=costs)
        except ValueError as error:
            rows.append(Row(text, False, problem=str(error).splitlines()[0]))
            orders.append(None)
            continue
        if plan.orders in orders:
            rows[orders.index(plan.orders)].same.append(text)
            continue
        total = plan.simulate(costs)
        idle = sum(total.idle_share) / num_stages
        rows.append(Row(text, plan.orders == chosen, total.makespan, idle, max(total.peak_activations), []))
        orders.append(plan.orders)
    return sorted(rows, key=lambda row: (round(row.makespan, 9), row.peak))


def table(rows: List[Row], num_chunks: int) -> str:
    """The rows as text. A peak is given in chunks, and in micro-batches of a whole stage."""
    from .timeline import format_time

    width = max(len(row.schedule) for row in rows)
    lines = [f"  {'schedule':{width}}  makespan    idle   peak: chunks  micro-batches"]
    for row in rows:
        start = f"{'*' if row.chosen else ' '} {row.schedule:{width}}"
        if row.problem:
            lines.append(f"{start}  not possible: {row.problem}")
            continue
        same = f"  also {', '.join(row.same)}" if row.same else ""
        figures = f"{format_time(row.makespan):>8}  {100 * row.idle:4.1f} %  {row.peak:12}  {row.peak / num_chunks:13g}"
        lines.append(f"{start}  {figures}{same}")
    return "\n".join(lines)
