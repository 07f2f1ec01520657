"""The transport on devices: Paddle's public P2POp and batch_isend_irecv."""

from collections.abc import Sequence
from typing import Any

import paddle
import paddle.distributed as dist

from ...executor import Pending
from ...schedule.dependencies import Transfer
from .. import device, versions
from ..messages import Boundaries, Payload, receive_message, send_message, tensors_of
from .meeting import Meeting


class DeviceTransport:
    """Each exchange is one grouped call on the pipeline group.

    With two ``groups``, for activations (F) and for gradients (B), exchanges run beside the
    computation, one grouped call for each kind: the device waits for what comes when it needs it.
    With one it waits at once; on Paddle 2.6, which has no wait to rely on, the computing stream does the transfers itself.
    The host never waits, but for headers; what ranks agree on goes over the hosts' ``meeting``.
    """

    def __init__(self, meeting: Meeting, groups: dict[str, Any], boundaries: Boundaries):
        self._ranks, self._groups = meeting.channels.ranks, groups
        self._meeting, self.gather = meeting, meeting.gather
        self._boundaries = boundaries
        self._overlap = groups["F"] is not groups["B"]
        self.blocking = not self._overlap
        self._with_headers = False

    def warm_up(self) -> None:
        """Has every communicator made and connected now, on all ranks in one order, and not within the first step. The host waits."""
        me, count = self._meeting.channels.stage, len(self._ranks)
        for kind, way in (("F", 1), ("B", -1)):
            sent, received = paddle.zeros([1]), paddle.zeros([1])
            to, of = (me + way) % count, (me - way) % count
            _Call([self._operation(dist.isend, sent, kind, to), self._operation(dist.irecv, received, kind, of)]).wait()
            device.current().synchronize()

    def begin(self, with_headers: bool) -> None:
        """Starts a step. With headers each message is several calls, so its exchanges hold one transfer each and block."""
        self._with_headers = with_headers
        self.blocking = with_headers or not self._overlap

    def close(self) -> None:
        """Ends the meeting, by which the others learn of it; the groups belong to fleet."""
        self._meeting.close()

    def exchange(self, sends: Sequence[tuple[Transfer, Payload]], receives: Sequence[Transfer]) -> Pending:
        for transfer, payload in sends:
            if transfer.kind == "B":
                self._boundaries.check_gradients(transfer, payload.tensors)
        if self._with_headers:
            return self._one_message(sends, receives)
        operations: dict[int, list[Any]] = {id(group): [] for group in self._groups.values()}
        of = lambda transfer: operations[id(self._groups[transfer.kind])]
        values = []
        for transfer, payload in sends:
            for tensor in payload.tensors:
                of(transfer).append(self._operation(dist.isend, tensor.contiguous(), transfer.kind, transfer.to_part))
        for transfer in receives:
            message = self._boundaries.empty_message(transfer)
            assert message is not None, "without headers it is known what comes"
            for tensor in tensors_of(message):
                of(transfer).append(self._operation(dist.irecv, tensor, transfer.kind, transfer.part))
            values.append(message)
        calls = {group: _Call(of_group) for group, of_group in operations.items()}
        call_of = lambda transfer: calls[id(self._groups[transfer.kind])]
        return Pending(
            [_Ticket(call_of(transfer), None) for transfer, _ in sends],
            [_Ticket(call_of(transfer), value) for transfer, value in zip(receives, values)],
        )

    def _one_message(self, sends, receives):
        assert len(sends) + len(receives) == 1, "with headers an exchange holds one transfer"
        if sends:
            transfer, payload = sends[0]
            send_message(lambda tensor: self._now(dist.isend, tensor, transfer.kind, transfer.to_part), payload.tensors, payload.header)
            return Pending([_Ticket(_Call([]), None)], [])
        transfer = receives[0]
        receive = lambda tensor: self._now(dist.irecv, tensor, transfer.kind, transfer.part)
        return Pending([], [_Ticket(_Call([]), receive_message(receive, self._boundaries, transfer))])

    def _now(self, function, tensor, kind, part):
        _Call([self._operation(function, tensor.contiguous(), kind, part)]).wait()

    def _operation(self, function, tensor, kind, part):
        return dist.P2POp(function, tensor, self._ranks[part % len(self._ranks)], self._groups[kind])


def _start(operations):
    """Tasks whose wait has the computing stream wait; none where it does the transfers itself."""
    if versions.p2p_tasks_order_the_device():
        return dist.batch_isend_irecv(operations)
    with versions.p2p_group(operations[0].group.backend):
        for operation in operations:
            transfer = dist.stream.send if operation.op is dist.isend else dist.stream.recv
            transfer(operation.tensor, operation.peer, operation.group, sync_op=True, use_calc_stream=True)
    return []


class _Call:
    """A grouped call under way. It keeps what is sent, maybe a contiguous copy, until it is done."""

    def __init__(self, operations: list[Any]) -> None:
        self._operations = operations
        self._tasks = _start(operations) if operations else []

    def wait(self):
        for task in self._tasks:
            task.wait()
        self._tasks, self._operations = [], []

    def done(self):
        return all(task.is_completed() for task in self._tasks)


class _Ticket:
    """One transfer of a call; ``wait`` makes the device's computation wait for it, not the host."""

    def __init__(self, call: _Call, value: Any) -> None:
        self._call, self._value = call, value
        self.done = call.done

    def wait(self):
        self._call.wait()
        return self._value

    def early(self):
        return self._value
