"""The transport on CPU: messages over channels, beside the computation."""

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from ...executor import Pending
from ...schedule.dependencies import Transfer
from ..messages import Boundaries, Payload, byte_count, receive_message, send_message, tensors_of
from .channels import Channels, Ticket
from .protocol import Board, Waits


class ChannelTransport:
    """Transport over Channels. Nothing blocks: each channel has a thread of its own.

    ``timeout``: seconds that a wait may take. A wait ends within about a second when another
    rank posts a failure on the ``board``. ``waits`` learns what is waited for.
    """

    blocking = False

    def __init__(self, channels: Channels, boundaries: Boundaries, board: Board, timeout: float, waits: Waits):
        self._channels, self._boundaries, self._board, self._timeout = channels, boundaries, board, timeout
        self._waits = waits
        self._num_stages = len(channels.ranks)

    def begin(self, with_headers: bool) -> None:
        """Starts a step. A header travels ahead of its message, so exchanges are the same with them."""

    def close(self) -> None:
        """Ends all connections; the other ends get an error."""
        self._channels.close()

    def exchange(self, sends: Sequence[tuple[Transfer, Payload]], receives: Sequence[Transfer]) -> Pending:
        return Pending([self._send(*send) for send in sends], [self._receive(transfer) for transfer in receives])

    def _send(self, transfer, payload):
        if transfer.kind == "B":
            self._boundaries.check_gradients(transfer, payload.tensors)

        def job(send):
            send_message(send, payload.tensors, payload.header)

        size = None if payload.header else byte_count(payload.tensors)
        peer = transfer.to_part % self._num_stages
        return self._waiting(self._channels.send(peer, transfer.kind, job, size), ("send", transfer), peer)

    def _receive(self, transfer):
        early = self._boundaries.empty_message(transfer)

        def job(receive):
            return receive_message(receive, self._boundaries, transfer, early)

        size = None if early is None else byte_count(tensors_of(early))
        peer = transfer.part % self._num_stages
        return self._waiting(self._channels.receive(peer, transfer.kind, job, size), ("receive", transfer), peer, early)

    def gather(self, value: Any) -> list[Any]:
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

        self._waiting(self._channels.send(peer, kind, job, data.size), ("send", None), peer).wait()

    def _receive_text(self, peer, kind):
        def job(receive):
            size = paddle.zeros([1], dtype="int64")
            receive(size)
            data = paddle.zeros([int(size.item())], dtype="uint8")
            receive(data)
            return json.loads(data.numpy().tobytes())

        return self._waiting(self._channels.receive(peer, kind, job, 0), ("receive", None), peer).wait()

    def _waiting(self, ticket, what, peer, early=None):
        return _Watched(self, ticket, what, self._channels.ranks[peer], early)


class _Watched:
    """A channel's ticket with the transport's limits.

    ``what``: ("send" or "receive", the transfer, or None for a meeting of all ranks).
    """

    __slots__ = ("_early", "_peer", "_ticket", "_transport", "_what", "done")

    def __init__(self, transport: ChannelTransport, ticket: Ticket, what: tuple, peer: int, early: Any):
        self._transport, self._ticket, self._what, self._peer, self._early = transport, ticket, what, peer, early
        self.done = ticket.done

    def early(self):
        return self._early

    def wait(self):
        if self._ticket.done():
            return self._end(self._ticket.wait)
        watch = self._transport._waits
        watch.waits = self._describe, self._peer, time.time()
        value = self._end(lambda: self._ticket.wait(self._transport._timeout, self._transport._board.look))
        watch.waits = None  # after an error it stays, to be told
        return value

    def _end(self, wait):
        try:
            return wait()
        except ConnectionError as error:
            # A rank that failed has closed its connections: say why.
            if not self._transport._board.look():
                raise ConnectionError(f"{error}, and the job's store, at rank 0, does not answer: is the network cut?") from error
            raise

    def _describe(self):
        way, transfer = self._what
        if transfer is None:
            return f"the meeting of all ranks, next rank {self._peer}"
        kind, part, micro_batch = transfer
        name = "activation" if kind == "F" else "gradient"
        to = "from" if way == "receive" else "to"
        return f"the {way} of the {name} of part {part}, micro-batch {micro_batch} ({transfer}) {to} rank {self._peer}"
