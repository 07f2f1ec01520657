"""Runs one rank's program against a Stage and a Transport. Imports no Paddle."""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional, Protocol, Union, cast, final

from .instruments import Instruments
from .schedule.action import Action
from .schedule.dependencies import Exchange, Program, Transfer


class Stage(Protocol):
    """The computation of one rank. What crosses a boundary is opaque to the executor."""

    def forward(self, chunk: int, micro_batch: int, inputs: Any) -> Any:
        """Outputs for the next part (ignored for the last); ``inputs`` is None for the first part."""

    def backward(self, chunk: int, micro_batch: int, output_grads: Any) -> Any:
        """Gradients of the inputs (ignored for the first part); ``output_grads`` is None for the last part."""

    def backward_input(self, chunk: int, micro_batch: int, output_grads: Any) -> Any:
        """The part of a backward that the previous model part waits for. Only for schedules that split it."""

    def backward_weight(self, chunk: int, micro_batch: int) -> None:
        """The rest of that backward."""

    def overlapped(self, forward: Action, backward: Action, inputs: Any, output_grads: Any, comm: Optional["PairComm"]) -> tuple[Any, Any]:
        """A forward and a backward of different micro-batches together; what ``forward`` and ``backward`` return.

        With ``comm`` the inputs and gradients may still be on their way until ``comm.wait`` returns.
        """

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

    def early(self) -> Any:
        """What ``wait`` will return, before it has been filled; None where that is not known yet."""


class Pending(NamedTuple):
    """An exchange under way: a ticket for each of its sends and receives, in their order."""

    sends: Sequence[Ticket]
    receives: Sequence[Ticket]


class Transport(Protocol):
    """``blocking``: an exchange has to be waited for before anything else is done."""

    blocking: bool

    def exchange(self, sends: Sequence[tuple[Transfer, Any]], receives: Sequence[Transfer]) -> Pending:
        """Starts one grouped exchange."""


@final
class Step(NamedTuple):
    """An action with the transfer that it needs, the one that it makes, and whether its chunk's gradients are final after it."""

    action: Action
    needs: Optional[Transfer]
    makes: Optional[Transfer]
    is_last_of_chunk: bool


@final
class Pair(NamedTuple):
    """A forward and a backward of the steady phase that run together, and the exchange after them, if any."""

    forward: Step
    backward: Step
    exchange: Exchange


Instruction = Union[Step, Pair, Exchange]
NO_EXCHANGE = Exchange((), ())


def resolve(program: Program, rank: int, num_stages: int, num_chunks: int, startup: Optional[int] = None) -> list[Instruction]:
    """The program with what each action needs and makes, worked out once per plan.

    From the ``startup``-th action on a forward and the backward after it are a Pair; without it nothing is.
    """
    last_part = num_stages * num_chunks - 1
    left = Counter(a.chunk for a in program if type(a) is Action and a.kind in "BW")
    steps: list[Instruction] = []
    count = 0
    for instruction in program:
        if type(instruction) is not Action:
            if steps and type(steps[-1]) is Pair and steps[-1].exchange is NO_EXCHANGE:
                steps[-1] = steps[-1]._replace(exchange=instruction)
            else:
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
        step = Step(instruction, needs, makes, kind in "BW" and not left[chunk])
        if kind == "B" and startup is not None and count > startup and _is_forward(steps[-1]):
            steps[-1] = Pair(cast(Step, steps[-1]), step, NO_EXCHANGE)
        else:
            steps.append(step)
        count += 1
    return steps


def split_backwards(steps: Sequence[Instruction]) -> list[Instruction]:
    """The same program with each whole backward as I and, right after it, W: for measuring both. There are no pairs in it."""
    split: list[Instruction] = []
    for step in steps:
        if type(step) is Step and step.action.kind == "B":
            input_part, weight_part = (step.action._replace(kind=kind) for kind in "IW")
            split += [Step(input_part, step.needs, step.makes, False), Step(weight_part, None, None, step.is_last_of_chunk)]
        else:
            split.append(step)
    return split


def _is_forward(instruction):
    return type(instruction) is Step and instruction.action.kind == "F"


def run(
    steps: Sequence[Instruction],
    stage: Stage,
    transport: Transport,
    overlap_pairs: bool = False,
    look: Instruments = Instruments(),  # noqa: B008, it holds nothing
) -> None:
    """Runs one rank's resolved program.

    What an action makes for another rank goes into the queue of its kind and leaves it, first in
    first out, with the exchange that sends it. On the last rank the forward queue holds the
    activations that wait for their turn at the wrap (the forward buffer queue), on the first
    rank the backward queue the gradients. Both are empty at the end. ``overlap_pairs``: the
    transfers of a Pair run beside it, too. ``look``: who looks on.
    """
    compute = {
        "F": stage.forward,
        "B": stage.backward,
        "I": getattr(stage, "backward_input", None),
        "W": lambda chunk, micro_batch, nothing: stage.backward_weight(chunk, micro_batch),
    }
    mail = Mail(stage, transport, look)
    for step in steps:
        look.instruction(step)
        if type(step) is Exchange:
            mail.exchange(step.sends, step.receives)
        elif type(step) is Pair:
            _run_pair(step, stage, mail, overlap_pairs, look)
        else:
            _run_action(step, compute, mail, look)
            if step.is_last_of_chunk:
                stage.chunk_done(step.action.chunk)
            mail.retire()
    mail.retire(wait=True)
    mail.check_empty()


def _run_action(step, compute, mail, look):
    # A function of its own, so that what came in and went out is held no longer than this.
    action, needs, makes, _ = step
    kind, chunk, i = action
    received = mail.take(needs)
    look.before((action,))
    made = compute[kind](chunk, i, received)
    look.after((action,), (received,), (made,))
    mail.put(makes, made)


def _run_pair(pair, stage, mail, overlap, look):
    forward, backward, exchange = pair
    actions = forward.action, backward.action
    comm = PairComm(pair, mail) if overlap else None
    take = mail.take_early if overlap else mail.take
    received = take(forward.needs), take(backward.needs)
    look.before(actions)
    made = stage.overlapped(*actions, *received, comm)
    look.after(actions, received, made)
    if comm is not None:
        comm.start("F", made[0])
        comm.start("B", made[1])
    else:
        mail.put(forward.makes, made[0])
        mail.put(backward.makes, made[1])
        if exchange is not NO_EXCHANGE:
            mail.exchange(exchange.sends, exchange.receives)
    mail.retire()  # and no chunk is done: its last backward comes after the last forward


class PairComm:
    """The transfers of one Pair, in the hands of the stage that computes it."""

    def __init__(self, pair: Pair, mail: "Mail"):
        self._needs = {"F": pair.forward.needs, "B": pair.backward.needs}
        self._makes = {"F": pair.forward.makes, "B": pair.backward.makes}
        self._exchange, self._mail = pair.exchange, mail
        self._started: set[str] = set()

    def wait(self, kind: str) -> None:
        """Returns when the forward's input (F) or the backward's gradients (B) are there."""
        if self._needs[kind]:
            self._mail.take(self._needs[kind])
            self._needs[kind] = None

    def start(self, kind: str, payload: Any) -> None:
        """Starts to send what the forward or the backward made, and to receive what the next ones of this kind need; once."""
        self.wait(kind)
        if kind in self._started:
            return
        self._started.add(kind)
        self._mail.put(self._makes[kind], payload)
        of_kind = lambda transfers: [t for t in transfers if t.kind == kind]
        self._mail.exchange(of_kind(self._exchange.sends), of_kind(self._exchange.receives))


class Mail:
    """What a rank has made, sends, and receives in one step."""

    def __init__(self, stage: Stage, transport: Transport, look: Instruments):
        self._stage, self._transport, self._look = stage, transport, look
        self._made: dict[str, deque[tuple[Transfer, Any]]] = {"F": deque(), "B": deque()}
        self._leaving: dict[str, deque[tuple[Ticket, Transfer, Any]]] = {"F": deque(), "B": deque()}
        self._arriving: dict[Transfer, Union[Ticket, _Arrived]] = {}

    def take(self, transfer: Optional[Transfer]) -> Any:
        """What ``transfer`` brought; waits for it."""
        return self._wait(self._arriving.pop(transfer), transfer) if transfer else None

    def take_early(self, transfer: Optional[Transfer]) -> Any:
        """What ``transfer`` will have brought once it is taken; waits only where that is not known."""
        if not transfer:
            return None
        value = self._arriving[transfer].early()
        if value is None:
            value = self.take(transfer)
            self._arriving[transfer] = _Arrived(value)
        return value

    def put(self, transfer: Optional[Transfer], payload: Any) -> None:
        """Queues what an action made."""
        if transfer:
            self._made[transfer.kind].append((transfer, payload))

    def exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> None:
        """Starts one exchange; with a blocking transport also waits for it."""
        if not sends and not receives:  # of a pair's exchange, those of one kind
            return
        going = [_next(self._made[transfer.kind], transfer) for transfer in sends]
        self._look.posting(going, receives)
        pending = self._transport.exchange(going, receives)
        self._look.posted(going, receives)
        self._arriving.update(zip(receives, pending.receives))
        for ticket, (transfer, payload) in zip(pending.sends, going):
            self._leaving[transfer.kind].append((ticket, transfer, payload))
        if self._transport.blocking:
            self.retire(wait=True)
            for transfer, ticket in zip(receives, pending.receives):
                self._arriving[transfer] = _Arrived(self._wait(ticket, transfer))

    def retire(self, wait: bool = False) -> None:
        """Has the stage free what is sent; with ``wait`` everything."""
        for queue in self._leaving.values():
            while queue and (wait or queue[0][0].done()):
                ticket, transfer, payload = queue.popleft()
                self._wait(ticket, transfer)
                self._look.freeing(transfer)
                self._stage.sent(transfer, payload)
                self._look.freed(transfer)

    def _wait(self, ticket, transfer):
        self._look.waiting(transfer)
        value = ticket.wait()
        self._look.waited(transfer)
        return value

    def check_empty(self) -> None:
        """Nothing is left over at the end of a step."""
        left = [*self._made["F"], *self._made["B"], *self._arriving]
        assert not left, f"transfers left over: {left}"


class _Arrived:
    """The ticket of a transfer that has been waited for."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def wait(self):
        return self._value

    early = wait


def _next(queue, transfer):
    entry = queue.popleft()
    assert entry[0] == transfer, f"{transfer} is to be sent, but next in its queue is {entry[0]}"
    return entry
