"""The arguments that commands share, and what they mean."""

import argparse
import importlib
import math
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

from .command import CommandError

if TYPE_CHECKING:
    from ...schedule.costs import Costs


def add_pipeline(parser: argparse.ArgumentParser) -> None:
    """``--pp``, ``--vpp`` and ``--acc``."""
    parser.add_argument("--pp", type=whole(2), required=True, metavar="P", help="pipeline stages (pp_degree)")
    parser.add_argument("--vpp", type=whole(1), default=1, metavar="V", help="chunks per stage (default 1)")
    parser.add_argument("--acc", type=whole(1), required=True, metavar="M", help="micro-batches (accumulate_steps)")


def add_costs(parser: argparse.ArgumentParser) -> None:
    """``--forward``, ``--backward``, ``--weight``, ``--hop``, ``--costs`` and ``--blocking``."""
    parser.add_argument("--forward", type=time, default=1.0, metavar="F", help="time of a chunk's forward (default 1)")
    parser.add_argument("--backward", type=time, default=2.0, metavar="B", help="time of a chunk's backward (default 2)")
    parser.add_argument(
        "--weight",
        type=time,
        metavar="W",
        help="the weight gradient's part of B, for schedules that split the backward (default half)",
    )
    parser.add_argument("--hop", type=time, default=0.0, metavar="H", help="time of a transfer (default 0)")
    parser.add_argument("--costs", metavar="FILE", help="times and bytes of every model part from a JSON file, instead of the above")
    parser.add_argument("--blocking", action="store_true", help="transfers block both ranks (synchronous NCCL)")


def add_own_schedule(parser: argparse.ArgumentParser) -> None:
    """``--schedule-file``."""
    parser.add_argument(
        "--schedule-file",
        metavar="FILE.py",
        action="append",
        default=[],
        help="run a file that calls paddle_vpp_ext.register_schedule, or register MODULE:FUNCTION under the function's name",
    )


def whole(least: int) -> Callable[[str], int]:
    """A reader of whole numbers of at least ``least``."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return value

    return read


def time(text: str) -> float:
    """Reads a time: a number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: write a number of at least 0")
    return value


def need_numpy() -> None:
    """CommandError where numpy is missing, without which nothing can be planned."""
    try:
        import numpy  # noqa: F401
    except ImportError as error:
        raise CommandError(f"planning needs numpy, and importing it failed ({error}): pip install numpy", 1) from None


def costs_of(args: argparse.Namespace) -> "Costs":
    """The Costs of the arguments. A whole backward is I + W; halves add up to exactly what was asked for."""
    from ...schedule.costs import Costs

    if args.costs:
        try:
            return Costs.load(args.costs)
        except OSError as error:
            raise CommandError(f"cannot read {args.costs}: {error.strerror or error}") from None
        except ValueError as error:
            raise CommandError(str(error)) from None
    weight = args.backward / 2 if args.weight is None else args.weight
    if weight > args.backward:
        raise CommandError(f"--weight {weight:g} is a part of --backward {args.backward:g} and cannot be more")
    return Costs(args.forward, args.backward - weight, weight, args.hop)


def costs_text(args: argparse.Namespace) -> str:
    """The costs of the arguments, for people."""
    return f"costs of {args.costs}" if args.costs else f"F={args.forward:g} B={args.backward:g} hop={args.hop:g}"


def register_own(args: argparse.Namespace) -> list[str]:
    """Makes the schedules of ``--schedule-file`` known and returns their names."""
    from ...planning.registry import SCHEDULES

    names = []
    for source in args.schedule_file:
        before = dict(SCHEDULES)
        _load(source)
        new = [name for name, schedule in SCHEDULES.items() if before.get(name) is not schedule]
        if not new:
            raise CommandError(f"{source} registers no schedule: it has to call paddle_vpp_ext.register_schedule(name, function)")
        names += new
    return names


def _load(source):
    """Runs a file, or registers a module's function. What it raises is told in one sentence."""
    from ...planning.registry import register_schedule

    module, colon, name = source.rpartition(":")
    try:
        if source.endswith(".py"):
            if not Path(source).is_file():
                raise CommandError(f"there is no file {source}")
            runpy.run_path(source, run_name="schedule_file")
        elif colon:
            sys.path.insert(0, "")
            register_schedule(name, getattr(importlib.import_module(module), name))
        else:
            raise CommandError(f"--schedule-file {source} is neither FILE.py nor MODULE:FUNCTION")
    except CommandError:
        raise
    except (Exception, SystemExit) as error:
        raise CommandError(f"{source} failed with {type(error).__name__}: {error}") from None


def write_file(path: Any, write: Callable[[Any], None]) -> None:
    """``write(path)`` with its failures as CommandErrors, and a line on stderr that says that it is written."""
    try:
        write(path)
    except ImportError as error:
        raise CommandError(str(error), 1) from None
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror or error}", 1) from None
    print(f"wrote {path}", file=sys.stderr)
