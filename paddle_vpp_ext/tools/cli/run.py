"""``run``: an unmodified training script with the extension enabled."""

import argparse
import runpy
import sys
from pathlib import Path

from .command import PROGRAM, STATUS, CommandError

EXAMPLES = f"""examples:
  python -m paddle.distributed.launch --nproc_per_node 4 paddle-vpp run train.py --epochs 3
  {PROGRAM} run train.py

Paddle's launcher starts what it is given by its name, so paddle-vpp (installed beside this package) must be in PATH.
{STATUS}, else the script's own"""


def add_command(commands: argparse._SubParsersAction) -> None:
    """Adds ``run`` to the parser's commands."""
    parser = commands.add_parser(
        "run",
        help="run an unmodified training script with the extension enabled",
        description="Calls paddle_vpp_ext.enable(), then runs the script as python would.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("script", metavar="SCRIPT", help="the training script")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own arguments")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the script as ``__main__``. What it raises goes through, a SystemExit too."""
    if not Path(args.script).is_file():
        raise CommandError(f"there is no script {args.script}")
    try:
        from ... import enable

        enable()
    except (ImportError, RuntimeError) as error:
        raise CommandError(f"{error} ({PROGRAM} doctor says more)", 1) from None
    sys.argv = [args.script, *args.args]
    sys.path[0] = str(Path(args.script).resolve().parent)
    runpy.run_path(args.script, run_name="__main__")
    return 0
