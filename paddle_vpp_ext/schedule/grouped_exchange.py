"""Steps all programs together under the rules by which NCCL executes grouped exchanges.

An exchange is one grouped call. A send and its receive complete only together (nothing is
buffered in between). For an ordered pair of ranks the k-th send meets the k-th receive,
whatever they carry. A rank leaves an exchange when all of it is done.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

from .action import Action
from .dependencies import Program, Transfer


class Outcome(NamedTuple):
    """How far each rank came.

    ``position[r]`` is rank r's next instruction, ``spans[r]`` the start and end of the actions it did.
    ``open[r]`` has what a stopped rank waits for: (its exchange's transfer, the rank at the other end).
    ``mismatch`` is (rank, the transfer that it posted, the other one that met it), or None.
    """

    position: list[int]
    spans: list[list[tuple[float, float]]]
    open: dict[int, list[tuple[Transfer, int]]]
    mismatch: Optional[tuple[int, Transfer, Transfer]] = None


def step_together(programs: Sequence[Program], durations: Mapping[str, Sequence[float]], hop: float = 0.0) -> Outcome:
    """Runs until nobody can go on. ``durations``: {kind: [time of part 0, ...]}."""
    p = len(programs)
    clock, position = [0.0] * p, [0] * p
    spans: list[list[tuple[float, float]]] = [[] for _ in range(p)]
    sent: list[list[tuple[float, Transfer]]] = [[] for _ in range(p * p)]  # per ordered pair sender*p + receiver: (when posted, transfer)
    received: list[list[tuple[float, Transfer]]] = [[] for _ in range(p * p)]
    posted: list[Any] = [None] * p  # the ends of a rank's posted exchange: (its transfer, the peer's list, index in it)
    todo, queued = deque(range(p)), [True] * p

    def post(rank, exchange, now):
        ends = []
        for transfer in exchange.sends:
            peer = transfer.to_part % p
            ends.append((transfer, received[rank * p + peer], len(sent[rank * p + peer])))
            sent[rank * p + peer].append((now, transfer))
        for transfer in exchange.receives:
            peer = transfer.part % p
            ends.append((transfer, sent[peer * p + rank], len(received[peer * p + rank])))
            received[peer * p + rank].append((now, transfer))
        for transfer in exchange.sends + exchange.receives:
            peer = (transfer.to_part if transfer.part % p == rank else transfer.part) % p
            if not queued[peer]:
                queued[peer] = True
                todo.append(peer)
        return ends

    while todo:
        rank = todo.popleft()
        queued[rank] = False
        program, at, now = programs[rank], position[rank], clock[rank]
        while at < len(program):
            instruction = program[at]
            if type(instruction) is Action:
                start = now
                now += durations[instruction.kind][instruction.chunk * p + rank]
                spans[rank].append((start, now))
            else:
                ends = posted[rank]
                if ends is None:
                    ends = posted[rank] = post(rank, instruction, now)
                if any(index >= len(peers) for _, peers, index in ends):
                    break
                for transfer, peers, index in ends:
                    when, met = peers[index]
                    if met != transfer:
                        position[rank] = at
                        return Outcome(position, spans, {}, (rank, transfer, met))
                    if when > now:
                        now = when
                now += hop
                posted[rank] = None
            at += 1
        clock[rank], position[rank] = now, at
    return Outcome(position, spans, _open_ends(programs, position, posted))


def _open_ends(programs, position, posted):
    p, waits = len(programs), {}
    for rank, ends in enumerate(posted):
        if ends is not None:
            sends = programs[rank][position[rank]].sends
            waits[rank] = [
                (transfer, (transfer.to_part if transfer in sends else transfer.part) % p)
                for transfer, peers, index in ends
                if index >= len(peers)
            ]
    return waits
