"""Runs one rank's program against a Stage and a Transport. Imports no Paddle."""
from collections import Counter, deque
from typing import Any, List, NamedTuple, Optional, Protocol, Sequence, Tuple, Union

from .schedule.action import Action
from .schedule.flow import Exchange, Program, Transfer


class Stage(Protocol):
    """The computation of one rank. What crosses a boundary is opaque to the executor."""

    def forward(self, chunk: int, micro_batch: int, inputs: Any) -> Any:
        """Outputs for the next part (ignored for the last); ``inputs`` is None for the first part."""

    def backward(self, chunk: int, micro_batch: int, output_grads: Any) -> Any:
        """Gradients of the inputs (ignored for the first part); ``output_grads`` is None for the last part."""

    def backward_input(self, chunk: int, micro_batch: int, output_grads: Any) -> Any:
        """The part of a backward that the previous model part waits for."""

    def backward_weight(self, chunk: int, micro_batch: int) -> None:
        """The rest of that backward."""

    def sent(self, transfer: Transfer, payload: Any) -> None:
        """``payload`` is sent: what it holds can be freed, its place in an autograd graph is kept."""

    def chunk_done(self, chunk: int) -> None:
        """The chunk's gradients are final."""


class Ticket(Protocol):
    """One transfer under way."""

    def wait(self) -> Any:
        """Returns when it is done, for a receive with what came."""

    def done(self) -> bool:
        """Whether it is done; never blocks."""


class Pending(NamedTuple):
    """An exchange under way: a ticket for each of its sends and receives, in their order."""

    sends: Sequence[Ticket]
    receives: Sequence[Ticket]


class Transport(Protocol):
    """``blocking``: an exchange has to be waited for before anything else is done."""

    blocking: bool

    def exchange(self, sends: Sequence[Tuple[Transfer, Any]], receives: Sequence[Transfer]) -> Pending:
        """Starts one grouped exchange."""


class Step(NamedTuple):
    """An action with the transfer that it needs, the one that it makes, and whether its chunk's gradients are final after it."""

    action: Action
    needs: Optional[Transfer]
    makes: Optional[Transfer]
    is_last_of_chunk: bool


def resolve(program: Program, rank: int, num_stages: int, num_chunks: int) -> List[Union[Step, Exchange]]:
    """The program with what each action needs and makes, worked out once per plan."""
    last_part = num_stages * num_chunks - 1
    left = Counter(a.chunk for a in program if type(a) is Action and a.kind in "BW")
    steps = []
    for instruction in program:
        if type(instruction) is not Action:
            steps.append(instruction)
            continue
        kind, chunk, i = instruction
        part = chunk * num_stages + rank
        needs = makes = None
        if kind == "F":
            needs = Transfer("F", part - 1, i) if part > 0 else None
            makes = Transfer("F", part, i) if part < last_part else None
        elif kind in "BI":
            needs = Transfer("B", part + 1, i) if part < last_part else None
            makes = Transfer("B", part, i) if part > 0 else None
        left[chunk] -= kind in "BW"
        steps.append(Step(instruction, needs, makes, kind in "BW" and not left[chunk]))
    return steps


def run(steps: Sequence[Union[Step, Exchange]], stage: Stage, transport: Transport) -> None:
    """Runs one rank's resolved program.

    What an action makes for another rank goes into the queue of its kind and leaves it, first in
    first out, with the exchange that sends it. On the last rank the forward queue holds the
    activations that wait for their turn at the wrap (the forward buffer queue), on the first
    rank the backward queue the gradients. Both are empty at the end.
    """
    compute = {"F": stage.forward, "B": stage.backward, "I": stage.backward_input}
    made = {"F": deque(), "B": deque()}
    leaving = {"F": deque(), "B": deque()}
    arriving = {}

    def retire(wait):
        for queue in leaving.values():
            while queue and (wait or queue[0][0].done()):
                ticket, transfer, payload = queue.popleft()
                ticket.wait()
                stage.sent(transfer, payload)

    for step in steps:
        if type(step) is Exchange:
            sends = [_take(made[transfer.kind], transfer) for transfer in step.sends]
            pending = transport.exchange(sends, step.receives)
            arriving.update(zip(step.receives, pending.receives))
            for ticket, (transfer, payload) in zip(pending.sends, sends):
                leaving[transfer.kind].append((ticket, transfer, payload))
            del sends
            if transport.blocking:
                retire(wait=True)
                for ticket in pending.receives:
                    ticket.wait()
            continue
        (kind, chunk, i), needs, makes, is_last_of_chunk = step
        if kind == "W":
            stage.backward_weight(chunk, i)
        else:
            value = arriving.pop(needs).wait() if needs else None
            result = compute[kind](chunk, i, value)
            if makes:
                made[makes.kind].append((makes, result))
            del value, result
        if is_last_of_chunk:
            stage.chunk_done(chunk)
        retire(wait=False)
    retire(wait=True)
    assert not made["F"] and not made["B"] and not arriving, f"transfers left over: {made}, {list(arriving)}"


def _take(queue, transfer):
    entry = queue.popleft()
    assert entry[0] == transfer, f"{transfer} is to be sent, but next in its queue is {entry[0]}"
    return entry
