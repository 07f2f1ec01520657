"""Where each rank of a pipeline is in its step, as data, and what the positions of all ranks say together. Imports no Paddle.

A position is a dict that JSON can hold:

    ranks      the global ranks of the pipeline, in the order of its stages
    rank       whose position it is
    step       how many steps it had begun
    number     how many instructions of the step it had begun, ``of`` so many; None outside of the program
    last       the last of them, the one it is at included, as text
    waits_for  what it waits for, as text; None if it computes
    peer       the global rank that it waits for
    since      when it began to wait, or None
    error      the error that ended its step, in one line; None if it goes on
"""

import json
import re
from collections.abc import Sequence
from typing import NamedTuple, Optional, Union

from .executor import Pair

# How many instructions a position tells.
RECENT = 20

MARK = "position "
_LINE = re.compile(re.escape(MARK) + r"(\{.*\})")
# Errors of a rank to which something was done, rather than of the one who did it.
_SUFFERED = ("PeerFailed", "ConnectionError", "TimeoutError")


def line_of(position: dict) -> str:
    """The position as a line of a log, which ``positions_in`` finds again."""
    return MARK + json.dumps(position, ensure_ascii=False)


def positions_in(log: str) -> list[dict]:
    """The positions in a rank's log, in their order; lines that are broken off are left out."""
    found = []
    for line in _LINE.finditer(log):
        try:
            position = json.loads(line[1])
        except ValueError:
            continue
        if _is_position(position):
            found.append(position)
    return found


def _is_position(value):
    """Whether it has the form above; a log may hold anything."""
    forms: dict[str, Union[type, tuple[type, ...]]] = {
        "ranks": list,
        "rank": int,
        "step": int,
        "number": (int, type(None)),
        "of": int,
        "last": list,
        "waits_for": (str, type(None)),
        "peer": (int, type(None)),
        "since": (str, type(None)),
        "error": (str, type(None)),
    }
    if not isinstance(value, dict) or not all(key in value and isinstance(value[key], form) for key, form in forms.items()):
        return False
    ranks = value["ranks"]
    return all(isinstance(rank, int) for rank in ranks) and value["rank"] in ranks and (not value["number"] or bool(value["last"]))


def text_of(instruction: object) -> str:
    """An instruction of a resolved program for people: ``F0.3``, ``F0.3+B1.0`` or ``send(F3.7) receive(B4.0)``."""
    if isinstance(instruction, Pair):
        return f"{instruction.forward.action}+{instruction.backward.action}"
    return str(getattr(instruction, "action", instruction))


class Verdict(NamedTuple):
    """What positions say together: the rank at fault and the broken edge (from rank, to rank), where known; and why, as text."""

    culprit: Optional[int]
    edge: Optional[tuple]
    why: str


def judge(positions: Sequence[dict], ranks: Sequence[int]) -> Verdict:
    """Who is behind in a pipeline of these ``ranks``, given the positions that are known, at most one of each rank."""
    known = {position["rank"]: position for position in positions if position["rank"] in ranks}
    for rank in ranks:  # an error of its own is the cause of all others
        error = known.get(rank, {}).get("error")
        if error and not error.startswith(_SUFFERED):
            return Verdict(rank, None, f"rank {rank} failed in {_place(known[rank])}: {error}")
    behind = [_follow(known, rank, ranks) for rank in ranks if rank in known and known[rank]["peer"] in ranks]
    ends = [end for end in behind if end[-1] not in known]
    if ends:
        by, lost = ends[0][-2:]
        return Verdict(
            lost,
            (by, lost),
            f"rank {lost} says nothing (it has ended, hangs, or cannot be reached), and rank {by} waits for it: {_wait(known[by])}",
        )
    ends = [end for end in behind if known[end[-1]]["peer"] not in ranks]
    if ends:
        rank = ends[0][-1]
        return Verdict(rank, None, f"rank {rank} is behind: it waits for nobody and is at {_place(known[rank])}")
    if behind:
        return _judge_circle(known, behind[0])
    return Verdict(None, None, "no rank says that it waits for another")


def table_of(positions: Sequence[dict]) -> str:
    """A line a rank, for people."""
    lines = []
    for position in sorted(positions, key=lambda position: position["ranks"].index(position["rank"])):
        what = _wait(position) if position.get("waits_for") else "waits for nobody"
        lines.append(f"  rank {position['rank']}: step {position['step']}, {_place(position)}; {what}")
    return "\n".join(lines)


def _follow(known: dict[int, dict], rank: int, ranks: Sequence[int]) -> list[int]:
    """From a rank to the one it waits for, and on: to one that waits for nobody, that is unknown, or that was met before."""
    path = [rank]
    while path[-1] in known and known[path[-1]]["peer"] in ranks:
        path.append(known[path[-1]]["peer"])
        if path[-1] in path[:-1]:
            break
    return path


def _judge_circle(known, path):
    """Ranks that wait for each other: a proved plan has no such circle, so something is lost on the way between two of them."""
    circle = path[path.index(path[-1]) :]
    pairs = list(zip(circle, circle[1:]))
    # Of two that wait for each other, the one who has done more has surely sent.
    late, ahead = min(pairs, key=lambda pair: (known[pair[0]].get("number") or 0) - (known[pair[1]].get("number") or 0))
    return Verdict(
        None,
        (ahead, late),
        f"ranks {' -> '.join(map(str, circle))} wait for each other, so what rank {ahead} sent to rank {late} has not come: "
        f"rank {late} {_wait(known[late])}",
    )


def _wait(position):
    return f"waits for {position['waits_for']} since {position['since']}"


def _place(position):
    if position.get("number"):
        return f"instruction {position['number']} of {position['of']}, {position['last'][-1]}"
    return "the beginning or the end of a step"
