"""``trace merge``: puts the recordings of all ranks together."""

import argparse
from pathlib import Path
from typing import Any

from . import arguments
from .command import PROGRAM, STATUS, CommandError

DESCRIPTION = "Aligns the clocks of all ranks' recordings; writes one trace and one picture, prints where the time went."
EXAMPLES = f"""example:
  PADDLE_VPP_TRACE=recorded python -m paddle.distributed.launch --nproc_per_node 4 paddle-vpp run train.py
  {PROGRAM} trace merge recorded

Writes DIR/trace.json (all steps, for ui.perfetto.dev) and DIR/timeline.png (one step: the plan above, the run below),
and prints for each rank where the time went.
{STATUS}"""


def add_command(commands: argparse._SubParsersAction) -> None:
    """Adds ``trace`` to the parser's commands."""
    words: dict[str, Any] = dict(epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser = commands.add_parser("trace", help="put the recordings of all ranks together", description=DESCRIPTION, **words)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    merge = actions.add_parser("merge", help="align the clocks; write trace, picture and table", description=DESCRIPTION, **words)
    merge.add_argument("folder", metavar="DIR", help="what schedule_mode's trace= or PADDLE_VPP_TRACE named")
    merge.add_argument("--step", type=arguments.whole(0), metavar="N", help="draw this step and account for it alone")
    merge.add_argument("--rank", type=arguments.whole(0), metavar="R", help="of several pipelines, that of this process")
    merge.add_argument("--out", metavar="DIR", help="write there instead")
    merge.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Writes trace and picture, prints the table."""
    arguments.need_numpy()
    from .. import recorded
    from ..draw import perfetto as trace
    from ..draw import picture

    try:
        newest, others = recorded.load(args.folder, args.rank)
    except (recorded.RecordingError, OSError) as error:
        raise CommandError(str(error)) from None
    out = Path(args.out or args.folder)
    numbers, drawn = _steps(newest, args)
    head = newest.head
    title = f"{head['schedule']}, p={head['num_stages']}, V={head['num_chunks']}, m={newest.steps[drawn][0].accumulate_steps}, step {drawn}"
    print(_about(newest, others))
    print(table(recorded.accounts([newest.steps[n] for n in numbers]), len(numbers), _which(newest, args, numbers)))
    arguments.write_file(out / "trace.json", lambda path: _save_trace(trace, recorded, newest, path))
    panels = {"plan": recorded.planned(newest, newest.steps[drawn]), "run": recorded.timeline_of(newest.steps[drawn])}
    panels = {name: [b._replace(start=b.start * 1e3, end=b.end * 1e3) for b in blocks] for name, blocks in panels.items()}
    arguments.write_file(out / "timeline.png", lambda path: picture.save(path, panels, title, unit="ms"))
    return 0


def _steps(newest, args):
    """(numbers of the steps that the table is about, the number of the one that is drawn)."""
    steps = {n: step for n, step in newest.steps.items() if step[0].blocks}
    if args.step is not None:
        if args.step not in steps:
            known = f"{min(steps)} to {max(steps)}" if steps else "none"
            raise CommandError(f"there is no step {args.step} that all ranks have recorded, there is {known}")
        return [args.step], args.step
    training = [n for n, step in steps.items() if step[0].training] or list(steps)
    if not training:
        raise CommandError(f"{args.folder} has no step that all ranks have recorded", 1)
    return training[1:] or training, training[-1]


def _about(newest, others):
    left_out = f" ({others} other recordings in the folder are left out)" if others else ""
    return f"{len(newest.steps)} steps of {newest.head['num_stages']} ranks{left_out}, clocks aligned to {newest.clock_error * 1e3:.1f} ms"


def _which(newest, args, numbers):
    if args.step is not None:
        return f"step {args.step}"
    first = " but the first" if len(numbers) < sum(step[0].training for step in newest.steps.values()) else ""
    return f"mean of {len(numbers)} training steps, all{first}" if newest.steps[numbers[0]][0].training else f"mean of {len(numbers)} steps"


def table(accounts: list, count: int, title: str) -> str:
    """Where the time of ``count`` steps went, per step."""
    lines = [f"\nwhere the time went, ms ({title})", "rank      step      compute      waiting     transfer        other   waits for"]
    for rank, account in enumerate(accounts):
        cell = lambda seconds, total=account.total: f"{seconds / count * 1e3:7.1f} {100 * seconds / total if total else 0:3.0f} %"
        longest = sorted(account.waiting.items(), key=lambda item: -item[1])
        peers = ", ".join(f"rank {peer} {seconds / count * 1e3:.1f}" for peer, seconds in longest if seconds / count > 5e-5)
        cells = "  ".join(map(cell, (account.compute, sum(account.waiting.values()), account.transfer, account.other)))
        lines.append(f"{rank:4}  {account.total / count * 1e3:8.1f}  {cells}  {peers}")
    return "\n".join(lines) + "\n"


def _save_trace(trace, recorded, newest, path):
    """All steps, the waits among them; the first begins at 0."""
    zero = min(rank.start for step in newest.steps.values() for rank in step)
    blocks, waits = [], []
    for step in newest.steps.values():
        blocks += [b._replace(start=b.start - zero, end=b.end - zero) for b in recorded.timeline_of(step)]
        waits += [
            trace.event(f"wait for {wait.transfer or 'all ranks'}", "wait", rank, (wait.start - zero) * 1e6, (wait.end - zero) * 1e6)
            for rank, of_rank in enumerate(step)
            for wait in of_rank.waits
        ]
    trace.save(path, blocks, unit_us=1e6, process=newest.head["schedule"], more=waits)
