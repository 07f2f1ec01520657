"""``compare``: all schedules for one configuration in one table, best first."""

import argparse

from .. import comparison
from ..comparison import Row
from ..draw.timeline import format_time
from . import arguments
from .command import PROGRAM, STATUS

EXAMPLES = f"""examples:
  {PROGRAM} compare --pp 4 --vpp 2 --acc 11
  {PROGRAM} compare --pp 8 --vpp 4 --acc 39 --forward 1 --backward 2 --hop 0.1
  {PROGRAM} compare --pp 4 --vpp 2 --acc 11 --schedule-file my_schedule.py

Best is the shortest makespan, then the lowest peak. * marks what the selector's rule (schedule_mode "1F1B") picks.
{STATUS}"""


def add_command(commands: argparse._SubParsersAction) -> None:
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


def run(args: argparse.Namespace) -> int:
    """Prints the table; 1 if no schedule is possible."""
    arguments.need_numpy()
    costs = arguments.costs_of(args)
    arguments.register_own(args)
    rows = comparison.compare(args.pp, args.vpp, args.acc, costs, args.blocking)
    rule = "blocking transfers" if args.blocking else "transfers beside computation"
    print(f"p={args.pp} V={args.vpp} m={args.acc}  {arguments.costs_text(args)}, {rule}\n")
    print(table(rows, args.vpp))
    if not any(row.chosen for row in rows):
        print(f"* none: the selector's rule refuses m={args.acc} < p={args.pp}; name one of these in schedule_mode")
    return 0 if any(not row.problem for row in rows) else 1


def table(rows: list[Row], num_chunks: int) -> str:
    """The rows as text. A peak is given in chunks, and in micro-batches of a whole stage."""
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
