"""The transport on CPU: messages over channels, beside the computation."""

from collections.abc import Sequence

from ...executor import Pending
from ...schedule.dependencies import Transfer
from ..messages import Boundaries, Payload, byte_count, receive_message, send_message, tensors_of
from .meeting import Meeting


class ChannelTransport:
    """Transport over the channels of a meeting. Nothing blocks: each channel has a thread of its own."""

    blocking = False

    def __init__(self, meeting: Meeting, boundaries: Boundaries):
        self._meeting, self._channels, self._boundaries = meeting, meeting.channels, boundaries
        self._num_stages = len(meeting.channels.ranks)
        self.gather = meeting.gather

    def begin(self, with_headers: bool) -> None:
        """Starts a step. A header travels ahead of its message, so exchanges are the same with them."""

    def close(self) -> None:
        """Ends all connections; the other ends get an error."""
        self._meeting.close()

    def exchange(self, sends: Sequence[tuple[Transfer, Payload]], receives: Sequence[Transfer]) -> Pending:
        return Pending([self._send(*send) for send in sends], [self._receive(transfer) for transfer in receives])

    def _send(self, transfer, payload):
        if transfer.kind == "B":
            self._boundaries.check_gradients(transfer, payload.tensors)

        def job(send):
            send_message(send, payload.tensors, payload.header)

        size = None if payload.header else byte_count(payload.tensors)
        peer = transfer.to_part % self._num_stages
        return self._meeting.watched(self._channels.send(peer, transfer.kind, job, size), ("send", transfer), peer)

    def _receive(self, transfer):
        early = self._boundaries.empty_message(transfer)

        def job(receive):
            return receive_message(receive, self._boundaries, transfer, early)

        size = None if early is None else byte_count(tensors_of(early))
        peer = transfer.part % self._num_stages
        return self._meeting.watched(self._channels.receive(peer, transfer.kind, job, size), ("receive", transfer), peer, early)
