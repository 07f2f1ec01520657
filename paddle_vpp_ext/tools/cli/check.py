"""``check``: proves that a schedule in a file can run, or shows where it cannot."""

import argparse

from . import arguments
from .command import PROGRAM, STATUS, CommandError

EXAMPLES = f"""examples:
  {PROGRAM} plan --pp 4 --vpp 2 --acc 10 --csv plan.csv && {PROGRAM} check plan.csv
  printf 'F0.0 F0.1 B0.0 B0.1\\nF0.0 B0.0 F0.1 B0.1\\n' | {PROGRAM} check /dev/stdin

The file has a line a rank with its actions, F0.1 say: forward of chunk 0, micro-batch 1 (B: backward,
I and W: its two parts). Blanks or commas separate; "rank 0:" may stand before them.
{STATUS}"""


def add_command(commands: argparse._SubParsersAction) -> None:
    """Adds ``check`` to the parser's commands."""
    parser = commands.add_parser(
        "check",
        help="verify a schedule from a file, ours or by hand",
        description="Proves that a schedule is complete, ordered and free of deadlock, or shows the place where it is not.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="CSV or text")
    arguments.add_costs(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the timeline and ok, or the fault; 1 if there is one."""
    arguments.need_numpy()
    from ...schedule.plan import plan_orders
    from .. import order_file
    from ..draw import text, timeline

    costs = arguments.costs_of(args)
    try:
        orders = order_file.load(args.file)
        num_chunks = 1 + max(a.chunk for order in orders for a in order)
        accumulate_steps = 1 + max(a.micro_batch for order in orders for a in order)
        forward_only = all(a.kind == "F" for order in orders for a in order)
        plan = plan_orders(orders, num_chunks, accumulate_steps, blocking=args.blocking, forward_only=forward_only, costs=costs)
    except OSError as error:
        raise CommandError(f"cannot read {args.file}: {error.strerror or error}") from None
    except ValueError as error:
        print(f"{args.file} cannot run: {error}")
        return 1
    shape = f"p={plan.num_stages} V={num_chunks} m={accumulate_steps}"
    rule = "blocking transfers" if args.blocking else "transfers beside computation"
    text.show(timeline.from_plan(plan, costs), f"{args.file}: {shape}, {rule}")
    print("ok: complete, ordered, free of deadlock")
    return 0
