"""The command line: ``python -m paddle_vpp_ext COMMAND``.

Exit status: 0 fine, 1 trouble (a problem found, a file that cannot be written, a missing
package), 2 what was typed is wrong. Only ``run`` imports Paddle.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn, Optional

from .command import PROGRAM, STATUS, CommandError


class Parser(argparse.ArgumentParser):
    """argparse with errors of one sentence, without the usage text around them."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (try --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each puts its function into ``run``."""
    # Imported here, so that a command needs only what it uses: doctor runs even where numpy is missing.
    from . import (
        check as check_command,
    )
    from . import (
        compare as compare_command,
    )
    from . import (
        diagnose as diagnose_command,
    )
    from . import (
        doctor,
    )
    from . import (
        plan as plan_command,
    )
    from . import (
        recordings as trace_command,
    )
    from . import (
        run as run_command,
    )

    parser = Parser(
        prog=PROGRAM,
        description="Plan and look at pipeline schedules for PaddlePaddle fleet. Only run needs Paddle.",
        epilog=f"example: {PROGRAM} plan --pp 4 --vpp 2 --acc 10\n{STATUS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for module in (plan_command, compare_command, check_command, run_command, trace_command, doctor, diagnose_command):
        module.add_command(commands)
    return parser


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Runs one command and returns its exit status."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        status = args.run(args)
        sys.stdout.flush()
        return status
    except CommandError as error:
        print(f"{PROGRAM} {args.command}: {error}", file=sys.stderr)
        return error.status
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
