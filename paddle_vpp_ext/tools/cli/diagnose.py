"""``diagnose``: reads the logs of all ranks after a hang or a crash, and says which rank or edge was at fault."""

import argparse
import re
from pathlib import Path

from ...diagnosis import judge, positions_in, table_of
from .command import PROGRAM, STATUS, CommandError

EXAMPLES = f"""example:
  python -m paddle.distributed.launch --nproc_per_node 4 --log_dir log train.py ; {PROGRAM} diagnose log

A rank whose step ends with an error writes its position into its log, and so does one that has not gone on
for as long as the option timeout says. With several hosts put their logs into one folder, sub-folders are read too.
{STATUS}"""

# The launcher's name for the log of a rank's process, with a restart's count maybe.
_LOG = re.compile(r"workerlog\.\d+(\.\d+)?\Z")
_BIGGEST = 64 << 20  # bytes of a log that are read, from its end
# What Paddle, Python or the system write last when a process ends badly.
_LAST_WORDS = re.compile(
    r"^(\w*(Error|Exception|Interrupt)\b.*|.*(Segmentation fault|SIGABRT|SIGSEGV|SIGBUS|Killed|Out of memory).*)$", re.M
)


def add_command(commands: argparse._SubParsersAction) -> None:
    """Adds ``diagnose`` to the parser's commands."""
    parser = commands.add_parser(
        "diagnose",
        help="say which rank or edge was at fault, from the ranks' logs",
        description="Reads the ranks' logs after a hang or a crash, and names the culprit and the broken edge.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="LOGDIR", help="the launcher's --log_dir, or any folder of logs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints a verdict and a table for each pipeline in trouble; 1 if there is one."""
    texts = _read(Path(args.folder))
    pipelines = _last_positions(texts)
    if not pipelines:
        print(f"no rank in {len(texts)} logs says that it was in trouble")
        return 0
    for ranks, positions in sorted(pipelines.items()):
        print(f"pipeline of ranks {', '.join(map(str, ranks))}:")
        verdict = judge(list(positions.values()), ranks)
        print(f"  {verdict.why}")
        if verdict.culprit is not None:
            print(f"  culprit: rank {verdict.culprit}")
        if verdict.edge:
            print(f"  broken edge: rank {verdict.edge[0]} - rank {verdict.edge[1]}")
        print(table_of(list(positions.values())))
        for rank in ranks:
            if rank not in positions:
                print(f"  rank {rank}: told no position{_last_words(texts, rank)}")
    return 1


def _read(folder: Path) -> dict[Path, str]:
    """The text of each log in a folder: those with the launcher's names, or all files where there are none."""
    if not folder.is_dir():
        raise CommandError(f"there is no folder {folder}")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    logs = [path for path in files if _LOG.match(path.name)] or files
    if not logs:
        raise CommandError(f"there is no log in {folder}")
    return {path: _end_of(path) for path in logs}


def _end_of(path):
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - _BIGGEST))
            return file.read().decode(errors="replace")
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror or error}", 1) from None


def _last_positions(texts: dict[Path, str]) -> dict[tuple, dict[int, dict]]:
    """By pipeline and rank the last position that was told. A rank's position of an earlier step says nothing of the last."""
    pipelines: dict[tuple, dict[int, dict]] = {}
    for text in texts.values():
        for position in positions_in(text):
            pipelines.setdefault(tuple(position["ranks"]), {})[position["rank"]] = position
    for positions in pipelines.values():
        step = max(position["step"] for position in positions.values())
        for rank in [rank for rank, position in positions.items() if position["step"] < step]:
            if positions[rank]["error"]:  # it had gone on since
                del positions[rank]
    return pipelines


def _last_words(texts, rank):
    """The last line that looks like a reason, in the log that the launcher named after this rank."""
    words: list[str] = []
    for path, text in texts.items():
        if path.name.startswith(f"workerlog.{rank}") and path.name[len(f"workerlog.{rank}") :][:1] in ("", "."):
            words += [found[0].strip() for found in _LAST_WORDS.finditer(text)]
    return f"; the last words of its log: {words[-1][:300]}" if words else ""
