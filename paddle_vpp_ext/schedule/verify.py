"""Proves orders and programs complete, ordered and free of deadlock, before anything runs."""

from collections import deque
from collections.abc import Sequence
from typing import Optional

from .action import Action, Order
from .dependencies import NOTHING, Dependencies, Exchange, Program, Transfer
from .grouped_exchange import step_together
from .simulate import Stuck


class ScheduleError(ValueError):
    """A schedule that cannot run. The text names rank, instruction and reason, and shows the place."""


def verify_orders(orders: Sequence[Order], num_chunks: int, accumulate_steps: int, forward_only: bool = False) -> None:
    """Every action once and none else; on each rank F before B (or I), I before W. Raises ScheduleError.

    A micro-batch's backward of a chunk is whole (B) or split (I and W), not both.
    """
    for rank, order in enumerate(orders):
        seen: dict[Action, int] = {}
        for j, action in enumerate(order):
            kind, chunk, i = action
            if not (0 <= chunk < num_chunks and 0 <= i < accumulate_steps):
                _fail(orders, rank, j, f"there are chunks 0..{num_chunks - 1} and micro-batches 0..{accumulate_steps - 1}")
            if action in seen:
                _fail(orders, rank, j, "it is there a second time")
            before = {"B": "F", "I": "F", "W": "I"}.get(kind)
            if before and (before, chunk, i) not in seen:
                _fail(orders, rank, j, f"it comes before {Action(before, chunk, i)}, whose result it needs")
            if (kind == "B" and ("I", chunk, i) in seen) or (kind == "I" and ("B", chunk, i) in seen):
                _fail(orders, rank, j, "this backward is there both whole (B) and split (I, W)")
            seen[action] = j
        for chunk in range(num_chunks):
            for i in range(accumulate_steps):
                if ("F", chunk, i) not in seen:
                    raise ScheduleError(f"rank {rank} has no {Action('F', chunk, i)}")
                if forward_only or ("B", chunk, i) in seen:
                    continue
                for kind in "IW":
                    if (kind, chunk, i) not in seen:
                        raise ScheduleError(f"rank {rank} has neither {Action('B', chunk, i)} nor {Action(kind, chunk, i)}")


def explain_stuck(dependencies: Dependencies, stuck: Stuck) -> ScheduleError:
    """The error for orders whose actions wait for each other: rank, action, and what makes what it needs."""
    rank = next(r for r, j in enumerate(stuck.positions) if j < len(dependencies.orders[r]))
    j = stuck.positions[rank]
    transfer = dependencies.transfer(dependencies.needs[rank][j])
    maker = transfer.part % dependencies.num_stages
    return ScheduleError(
        f"deadlock: rank {rank} cannot start {dependencies.orders[rank][j]} (its action {j}): it needs {transfer} from rank {maker}, "
        f"and the orders wait for each other\n" + draw_around(dependencies.orders, stuck.positions)
    )


def verify_programs(dependencies: Dependencies, programs: Sequence[Program]) -> None:
    """The programs run the orders, and cannot hang under the rules of grouped exchanges. Raises ScheduleError.

    Each rank sends what it has made in the order in which it made it (both buffer queues are
    FIFO), once, and has received what an action needs before it; nothing is left in a queue at
    the end; sends and receives match pair by pair; nobody waits for ever.
    """
    for rank, program in enumerate(programs):
        _verify_buffers(dependencies, programs, rank)
        if [a for a in program if type(a) is Action] != list(dependencies.orders[rank]):
            raise ScheduleError(f"the program of rank {rank} does not run its order")
    nothing = [0.0] * dependencies.num_parts
    outcome = step_together(programs, dict.fromkeys("FBIW", nothing))
    if outcome.mismatch:
        rank, transfer, met = outcome.mismatch
        _fail(programs, rank, outcome.position[rank], f"its {transfer} meets {met} at the other end", outcome.position)
    for rank, waits in outcome.open.items():
        transfer, peer = waits[0]
        _fail(programs, rank, outcome.position[rank], f"deadlock: it waits for rank {peer} to join {transfer}", outcome.position)


def _verify_buffers(dependencies: Dependencies, programs: Sequence[Program], rank: int) -> None:
    queues: dict[str, deque[Transfer]] = {"F": deque(), "B": deque()}
    there: set[Transfer] = set()
    j = 0
    for at, instruction in enumerate(programs[rank]):
        if type(instruction) is Exchange:
            for transfer in instruction.sends:
                queue = queues[transfer.kind]
                if not queue or queue[0] != transfer:
                    reason = f"the next to be sent is {queue[0]}" if queue else "nothing is made that is not sent yet"
                    _fail(programs, rank, at, f"it sends {transfer}, but {reason}")
                queue.popleft()
            there.update(instruction.receives)
            continue
        if j == len(dependencies.orders[rank]):
            _fail(programs, rank, at, "the order has no more actions")
        need, make = dependencies.needs[rank][j], dependencies.makes[rank][j]
        j += 1
        if need != NOTHING:
            transfer = dependencies.transfer(need)
            if transfer not in there:
                _fail(programs, rank, at, f"{transfer} is not received before it")
            there.remove(transfer)
        if make != NOTHING:
            transfer = dependencies.transfer(make)
            queues[transfer.kind].append(transfer)
    for name, queue in (("forward", queues["F"]), ("backward", queues["B"])):
        if queue:
            raise ScheduleError(f"rank {rank} ends with {len(queue)} in its {name} buffer queue, the first is {queue[0]}")
    if there:
        raise ScheduleError(f"rank {rank} receives {min(there)} and never uses it")


def _fail(sequences, rank, at, reason, positions=None):
    raise ScheduleError(
        f"rank {rank}, instruction {at} ({sequences[rank][at]}): {reason}\n"
        + draw_around(sequences, positions or [at] * len(sequences), rank)
    )


def draw_around(sequences: Sequence[Sequence], positions: Sequence[int], marked: Optional[int] = None, width: int = 3) -> str:
    """The instructions of all ranks (of the nearest 16) around their positions, those in [brackets], ``marked`` in >signs<."""
    ranks = range(len(sequences))
    if marked is not None and len(sequences) > 16:
        ranks = range(max(0, marked - 8), min(len(sequences), marked + 8))
    rows = []
    for rank in ranks:
        sequence, at = sequences[rank], positions[rank]
        cells = [str(x) for x in sequence[max(0, at - width) : at]]
        if at < len(sequence):
            cells.append((">{}<" if rank == marked else "[{}]").format(sequence[at]))
        else:
            cells.append("(end)")
        cells += [str(x) for x in sequence[at + 1 : at + 1 + width]]
        rows.append(f"  rank {rank:<3}" + ("... " if at > width else "    ") + "  ".join(cells))
    return "\n".join(rows)
