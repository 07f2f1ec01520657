"""The transport on CPU: messages over channels, beside the computation."""
import json
import math
from typing import Any, List, Sequence, Tuple

import numpy as np
import paddle

from ..executor import Pending
from ..schedule.flow import Transfer
from .channels import Channels, Ticket
from .failure import FailureBoard
from .messages import Boundaries, Payload, receive_message, send_message


class ChannelTransport:
    """Transport over Channels. Nothing blocks: each channel has a thread of its own.

    ``timeout``: seconds that a wait may take. A wait ends within about a second when another
    rank posts a failure on the ``board``.
    """

    blocking = False

    def __init__(self, channels: Channels, boundaries: Boundaries, board: FailureBoard, timeout: float):
        self._channels, self._boundaries, self._board, self._timeout = channels, boundaries, board, timeout
        self._num_stages = len(channels.ranks)

    def begin(self, with_headers: bool) -> None:
        """Starts a step. A header travels ahead of its message, so exchanges are the same with them."""

    def close(self) -> None:
        """Ends all connections; the other ends get an error."""
        self._channels.close()

    def exchange(self, sends: Sequence[Tuple[Transfer, Payload]], receives: Sequence[Transfer]) -> Pending:
        return Pending([self._send(*send) for send in sends], [self._receive(transfer) for transfer in receives])

    def _send(self, transfer, payload):
        def job(send):
            send_message(send, payload.tensors, payload.header)

        size = None if payload.header else _bytes_of(payload.tensors)
        return self._waiting(self._channels.send(transfer.to_part % self._num_stages, transfer.kind, job, size))

    def _receive(self, transfer):
        early = self._boundaries.empty_message(transfer)

        def job(receive):
            return receive_message(receive, self._boundaries, transfer, early)

        size = early and _bytes_of(early if transfer.kind == "B" else early[1])
        return self._waiting(self._channels.receive(transfer.part % self._num_stages, transfer.kind, job, size), early)

    def gather(self, value: Any) -> List[Any]:
        """Everybody's ``value`` (plain data that JSON can hold), in the order of the stages.

        It goes from the last stage to the first and back, so when it is there all ranks have come this far.
        """
        me, last = self._channels.stage, self._num_stages - 1
        values = [value]
        if me < last:
            values += self._receive_text(me + 1, "B")
        if me > 0:
            self._send_text(me - 1, "B", values)
            values = self._receive_text(me - 1, "F")
        if me < last:
            self._send_text(me + 1, "F", values)
        return values

    def _send_text(self, peer, kind, values):
        data = np.frombuffer(json.dumps(values).encode(), dtype=np.uint8)

        def job(send):
            send(paddle.to_tensor(np.array([data.size], dtype=np.int64)))
            send(paddle.to_tensor(np.array(data)))

        self._waiting(self._channels.send(peer, kind, job, data.size)).wait()

    def _receive_text(self, peer, kind):
        def job(receive):
            size = paddle.zeros([1], dtype="int64")
            receive(size)
            data = paddle.zeros([int(size.item())], dtype="uint8")
            receive(data)
            return json.loads(data.numpy().tobytes())

        return self._waiting(self._channels.receive(peer, kind, job, 0)).wait()

    def _waiting(self, ticket, early=None):
        return _Watched(ticket, early, self._board, self._timeout)


def _bytes_of(tensors):
    return sum(math.prod(tensor.shape) * tensor.element_size() for tensor in tensors)


class _Watched:
    """A channel's ticket with the transport's limits."""

    __slots__ = ("_ticket", "_early", "_board", "_timeout", "done")

    def __init__(self, ticket: Ticket, early: Any, board: FailureBoard, timeout: float):
        self._ticket, self._early, self._board, self._timeout, self.done = ticket, early, board, timeout, ticket.done

    def early(self):
        return self._early

    def wait(self):
        try:
            return self._ticket.wait(self._timeout, self._board.look)
        except ConnectionError:
            self._board.look()  # a rank that failed has closed its connections: say why
            raise
