"""What the ranks of a pipeline tell each other from host to host, on every device: plain data, and that one of them has failed."""

import json
import time
from typing import Any

import numpy as np

from .channels import Channels, Ticket
from .protocol import Board, Waits


class Meeting:
    """The hosts' own connections, with the limits of waits.

    ``timeout``: seconds that a wait may take. A wait ends within about a second when another
    rank posts a failure on the ``board``. ``waits`` learns what is waited for.
    """

    def __init__(self, channels: Channels, board: Board, timeout: float, waits: Waits):
        self.channels, self.board, self.timeout, self.waits = channels, board, timeout, waits

    def close(self) -> None:
        """Ends all connections; the other ends get an error."""
        self.channels.close()

    def gather(self, value: Any) -> list[Any]:
        """Everybody's ``value`` (plain data that JSON can hold), in the order of the stages.

        It goes from the last stage to the first and back, so when it is there all ranks have come this far. No device is asked.
        """
        me, last = self.channels.stage, len(self.channels.ranks) - 1
        values = [value]
        if me < last:
            values += self._receive_text(me + 1, "B")
        if me > 0:
            self._send_text(me - 1, "B", values)
            values = self._receive_text(me - 1, "F")
        if me < last:
            self._send_text(me + 1, "F", values)
        return values

    def watched(self, ticket: Ticket, what: tuple, peer: int, early: Any = None) -> "_Watched":
        """A channel's ticket with the limits of this meeting; ``what`` as in _Watched, ``peer`` a stage."""
        return _Watched(self, ticket, what, self.channels.ranks[peer], early)

    def _send_text(self, peer, kind, values):
        data = np.frombuffer(json.dumps(values).encode(), dtype=np.uint8)

        def job(send):
            send(np.array([data.size], dtype=np.int64))
            send(data)

        self.watched(self.channels.send(peer, kind, job, data.size), ("send", None), peer).wait()

    def _receive_text(self, peer, kind):
        def job(receive):
            size = np.zeros([1], dtype=np.int64)
            receive(size)
            data = np.zeros([int(size[0])], dtype=np.uint8)
            receive(data)
            return json.loads(data.tobytes())

        return self.watched(self.channels.receive(peer, kind, job, 0), ("receive", None), peer).wait()


class _Watched:
    """A channel's ticket with the meeting's limits.

    ``what``: ("send" or "receive", the transfer, or None for a meeting of all ranks).
    """

    __slots__ = ("_early", "_meeting", "_peer", "_ticket", "_what", "done")

    def __init__(self, meeting: Meeting, ticket: Ticket, what: tuple, peer: int, early: Any):
        self._meeting, self._ticket, self._what, self._peer, self._early = meeting, ticket, what, peer, early
        self.done = ticket.done

    def early(self):
        return self._early

    def wait(self):
        if self._ticket.done():
            return self._end(self._ticket.wait)
        watch = self._meeting.waits
        watch.waits = self._describe, self._peer, time.time()
        value = self._end(lambda: self._ticket.wait(self._meeting.timeout, self._meeting.board.look))
        watch.waits = None  # after an error it stays, to be told
        return value

    def _end(self, wait):
        try:
            return wait()
        except ConnectionError as error:
            # A rank that failed has closed its connections: say why.
            if not self._meeting.board.look():
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
