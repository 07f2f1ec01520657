"""What a step really did: when each action ran and for whom it waited, on every rank."""
import time
from typing import Any, List, Optional, Sequence, Tuple

import paddle

from ..executor import Pending
from ..schedule.action import Action
from ..schedule.flow import Transfer

# Shorter waits say more about the recording than about the step. Seconds.
SHORTEST_WAIT = 20e-6

_WALL = time.time() - time.perf_counter()


def now() -> float:
    """Seconds of the wall clock, as it was when the process started and without its jumps since."""
    return _WALL + time.perf_counter()


def device_wait():
    """What waits until the device has done all that it was given; on CPU there is nothing to wait for."""
    return paddle.device.synchronize if paddle.is_compiled_with_cuda() else lambda: None


class RecordingStage:
    """A stage whose forwards and backwards are timed. Everything else is passed through.

    ``blocks``: (rank, start, end, kind, chunk, micro_batch), in seconds of the wall clock. A forward
    and a backward that run together get half of their time each. On a GPU each action is waited
    for, so a recorded step is a little slower than others.
    """

    def __init__(self, stage, rank: int):
        self._stage, self._rank = stage, rank
        self.blocks: List[Tuple] = []
        self._synchronize = device_wait()

    def __getattr__(self, name):
        return getattr(self._stage, name)

    def forward(self, chunk, micro_batch, inputs):
        return self._timed("F", chunk, micro_batch, self._stage.forward, inputs)

    def backward(self, chunk, micro_batch, output_grads):
        return self._timed("B", chunk, micro_batch, self._stage.backward, output_grads)

    def backward_input(self, chunk, micro_batch, output_grads):
        return self._timed("I", chunk, micro_batch, self._stage.backward_input, output_grads)

    def backward_weight(self, chunk, micro_batch):
        return self._timed("W", chunk, micro_batch, self._stage.backward_weight)

    def overlapped(self, forward: Action, backward: Action, *values):
        start = now()
        result = self._stage.overlapped(forward, backward, *values)
        self._synchronize()
        end = now()
        middle = (start + end) / 2
        self.blocks += [(self._rank, start, middle, *forward), (self._rank, middle, end, *backward)]
        return result

    def _timed(self, kind, chunk, micro_batch, compute, *values):
        start = now()
        result = compute(chunk, micro_batch, *values)
        self._synchronize()
        self.blocks.append((self._rank, start, now(), kind, chunk, micro_batch))
        return result


class RecordingTransport:
    """A transport whose waits are timed. Everything else is passed through.

    ``waits``: (transfer, or None for a gather of all ranks; start; end). ``posts``: (transfer, when
    this rank was ready to send or to receive it). Seconds of the wall clock.
    """

    def __init__(self, transport):
        self._transport = transport
        self.waits: List[Tuple[Optional[Transfer], float, float]] = []
        self.posts: List[Tuple[Transfer, float]] = []
        self._synchronize = device_wait()

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def gather(self, value: Any) -> List[Any]:
        return self.timed(None, self._transport.gather, value)

    def exchange(self, sends: Sequence[Tuple[Transfer, Any]], receives: Sequence[Transfer]) -> Pending:
        transfers = [*(transfer for transfer, _ in sends), *receives]
        start = now()
        self.posts += [(transfer, start) for transfer in transfers]
        pending = self.timed(transfers[0], self._transport.exchange, sends, receives)
        tickets = [_TimedTicket(self, *pair) for pair in zip(transfers, [*pending.sends, *pending.receives])]
        return Pending(tickets[: len(sends)], tickets[len(sends):])

    def timed(self, transfer, function, *values):
        """The function's result; the time that it took is a wait, unless it was too short."""
        start = now()
        result = function(*values)
        end = now()
        # None is always there, so that the ranks' gathers can be told apart by their number.
        if end - start > SHORTEST_WAIT or transfer is None:
            self.waits.append((transfer, start, end))
        return result

    def wait(self, ticket):
        """Waits for a ticket, on a GPU for the device too: else the next action would seem to take the time."""
        value = ticket.wait()
        self._synchronize()
        return value


class _TimedTicket:
    __slots__ = ("_transport", "_transfer", "_ticket")

    def __init__(self, transport, transfer, ticket):
        self._transport, self._transfer, self._ticket = transport, transfer, ticket

    def __getattr__(self, name):
        return getattr(self._ticket, name)

    def wait(self):
        return self._transport.timed(self._transfer, self._transport.wait, self._ticket)
