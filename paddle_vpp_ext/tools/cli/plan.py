"""``plan``: shows a schedule as a timeline, as JSON, as a picture, a trace, a table or a page."""

import argparse
import json
from typing import TYPE_CHECKING

from . import arguments
from .command import PROGRAM, STATUS, CommandError

if TYPE_CHECKING:
    from ...schedule.costs import Costs
    from ...schedule.plan import Plan
    from ...schedule.simulate import Simulation

EXAMPLES = f"""examples:
  {PROGRAM} plan --pp 4 --vpp 2 --acc 10
  {PROGRAM} plan --pp 4 --vpp 2 --acc 11 --schedule VPP:groups=even --hop 0.1 --png plan.png
  {PROGRAM} plan --pp 4 --vpp 2 --acc 10 --html plan.html
  {PROGRAM} plan --pp 8 --acc 16 --blocking --json
{STATUS}"""


def add_command(commands: argparse._SubParsersAction) -> None:
    """Adds ``plan`` to the parser's commands."""
    parser = commands.add_parser(
        "plan",
        help="show a schedule: timeline, time, idle share, memory",
        description="Plans a schedule, proves that it cannot hang, and shows it as a timeline.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arguments.add_pipeline(parser)
    parser.add_argument(
        "--schedule",
        metavar="NAME:KEY=VALUE",
        help="as in schedule_mode, e.g. VPP:groups=even (default: the selector's rule)",
    )
    arguments.add_own_schedule(parser)
    arguments.add_costs(parser)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON instead of the timeline")
    parser.add_argument("--png", metavar="FILE", help="draw the timeline into a PNG file (needs matplotlib)")
    parser.add_argument("--svg", metavar="FILE", help="draw the timeline into an SVG file (needs matplotlib)")
    parser.add_argument("--trace", metavar="FILE", help="write a trace for Perfetto (ui.perfetto.dev) or chrome://tracing")
    parser.add_argument("--csv", metavar="FILE", help="write the orders as CSV, a rank a line, as check reads it")
    parser.add_argument("--html", metavar="FILE", help="write a page on which p, V, m, schedule and costs can be changed")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plans, prints, and writes the files that were asked for."""
    plan, costs = make(args)
    simulation = plan.simulate(costs)
    _write_files(args, plan, costs)
    if args.json:
        print(json.dumps(report(plan, simulation)))
    else:
        from ..draw import text, timeline

        text.show(timeline.from_plan(plan, costs), headline(plan, args))
        if plan.note:
            print(plan.note)
    return 0


def make(args: argparse.Namespace) -> tuple["Plan", "Costs"]:
    """(plan, costs) of the arguments. A ValueError of theirs becomes a CommandError."""
    arguments.need_numpy()
    from ...planning.options import parse_schedule
    from ...planning.planner import make_plan

    costs = arguments.costs_of(args)
    own = arguments.register_own(args)
    text = args.schedule or (own[0] if own else "1F1B")
    try:
        name, options = _schedule(parse_schedule(text, "--schedule"), args)
        return make_plan(name, args.pp, args.vpp, args.acc, options, args.blocking, costs=costs), costs
    except ValueError as error:
        raise CommandError(str(error)) from None


def _schedule(choice, args):
    from ...planning.registry import SCHEDULES
    from ...planning.select import select

    name = choice.name
    if name == "1F1B":
        try:
            name = select(args.pp, args.vpp, args.acc)
        except ValueError:
            raise CommandError(
                f"the selector's rule refuses --acc {args.acc} with --pp {args.pp} (fewer micro-batches than stages), "
                f"as Paddle does: add --schedule VPP, which runs any --acc"
            ) from None
    if name not in SCHEDULES:
        raise CommandError(f"--schedule {name} is not planned here: choose one of 1F1B, {', '.join(SCHEDULES)}")
    # The rule may pick a schedule that has not all options of VPP, which 1F1B was read with.
    return name, {key: value for key, value in choice.options.items() if key in SCHEDULES[name].keys}


def report(plan: "Plan", simulation: "Simulation") -> dict:
    """What ``--json`` prints: times in the unit of the costs, peaks in chunks."""
    return {
        "schedule": plan.schedule,
        "num_stages": plan.num_stages,
        "num_chunks": plan.num_chunks,
        "accumulate_steps": plan.accumulate_steps,
        "groups": list(plan.groups),
        "orders": [[str(action) for action in order] for order in plan.orders],
        "makespan": simulation.makespan,
        "idle_share": list(simulation.idle_share),
        "peak_activations": list(simulation.peak_activations),
        **({"note": plan.note} if plan.note else {}),
    }


def headline(plan: "Plan", args: argparse.Namespace) -> str:
    """The plan and its costs in one line."""
    groups = "+".join(map(str, plan.groups))
    if len(groups) > 40:
        groups = f"{groups[: groups.index('+', 30)]}+... ({len(plan.groups)} groups)"
    groups = "searched" if plan.note else f"groups {groups}"
    rule = "blocking transfers" if plan.blocking else "transfers beside computation"
    return (
        f"{plan.schedule}  p={plan.num_stages} V={plan.num_chunks} m={plan.accumulate_steps}  {groups}  "
        f"{arguments.costs_text(args)}, {rule}"
    )


def _write_files(args, plan, costs):
    from .. import order_file
    from ..draw import page, picture, timeline
    from ..draw import perfetto as trace

    title = headline(plan, args)
    blocks = timeline.from_plan(plan, costs)
    for path, write in (
        (args.png, lambda path: picture.save(path, {"plan": blocks}, title, format="png")),
        (args.svg, lambda path: picture.save(path, {"plan": blocks}, title, format="svg")),
        (args.trace, lambda path: trace.save(path, blocks)),
        (args.csv, lambda path: order_file.save(path, plan.orders)),
        (args.html, lambda path: page.save(path, page.start_of(plan, costs))),
    ):
        if path:
            arguments.write_file(path, write)
