"""The transport on GPUs: Paddle's public P2POp and batch_isend_irecv."""
import json
from typing import Any, List, Sequence, Tuple

import numpy as np
import paddle
import paddle.distributed as dist

from ..executor import Pending
from ..schedule.flow import Transfer
from .messages import Boundaries, receive_message, send_message


class NcclTransport:
    """Each exchange is one grouped call on the pipeline group.

    ``overlap``: the computation goes on beside it, and waits for it on the device when it needs
    what comes; else the device waits at once. The host never waits, but for headers.
    """

    def __init__(self, ranks: Sequence[int], stage: int, group, boundaries: Boundaries, overlap: bool):
        self._ranks, self._stage, self._group = list(ranks), stage, group
        self._boundaries, self._overlap = boundaries, overlap
        self.blocking = not overlap
        self._with_headers = False

    def begin(self, with_headers: bool) -> None:
        """Starts a step. With headers each message is several calls, so its exchanges hold one transfer each and block."""
        self._with_headers = with_headers
        self.blocking = with_headers or not self._overlap

    def close(self) -> None:
        """Nothing to end: the group belongs to fleet."""

    def gather(self, value: Any) -> List[Any]:
        """Everybody's ``value`` (plain data that JSON can hold), in the order of the stages. The host waits."""
        data = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
        sizes = self._all_gather(np.array([data.size], dtype=np.int64))
        padded = np.zeros(int(max(sizes)), dtype=np.uint8)
        padded[: data.size] = data
        return [json.loads(other[: int(size)].tobytes()) for other, size in zip(self._all_gather(padded), sizes)]

    def _all_gather(self, array):
        everybody = []
        dist.all_gather(everybody, paddle.to_tensor(array), group=self._group)
        return [tensor.numpy() for tensor in everybody]

    def exchange(self, sends: Sequence[Tuple[Transfer, object]], receives: Sequence[Transfer]) -> Pending:
        if self._with_headers:
            return self._one_message(sends, receives)
        operations, values = [], []
        for transfer, payload in sends:
            for tensor in payload.tensors:
                operations.append(self._operation(dist.isend, tensor.contiguous(), transfer.to_part))
        for transfer in receives:
            signature, specs = self._expected(transfer)
            tensors = [spec.empty() for spec in specs]
            operations += [self._operation(dist.irecv, tensor, transfer.part) for tensor in tensors]
            values.append((signature, tensors) if signature else tensors)
        tasks = dist.batch_isend_irecv(operations) if operations else []
        # What is sent may be a contiguous copy: the tickets keep it until the exchange is done.
        return Pending(
            [_Ticket(tasks, None, operations) for _ in sends], [_Ticket(tasks, value, operations) for value in values]
        )

    def _expected(self, transfer):
        if transfer.kind == "B":
            return None, self._boundaries.gradient_specs(transfer)
        signature = self._boundaries.expected(transfer)
        return signature, signature.specs

    def _one_message(self, sends, receives):
        assert len(sends) + len(receives) == 1, "with headers an exchange holds one transfer"
        for transfer, payload in sends:
            send_message(lambda tensor: self._now(dist.isend, tensor, transfer.to_part), payload.tensors, payload.header)
            return Pending([_Ticket((), None, ())], [])
        transfer = receives[0]
        value = receive_message(lambda tensor: self._now(dist.irecv, tensor, transfer.part), self._boundaries, transfer)
        return Pending([], [_Ticket((), value, ())])

    def _now(self, function, tensor, part):
        for task in dist.batch_isend_irecv([self._operation(function, tensor.contiguous(), part)]):
            task.wait()

    def _operation(self, function, tensor, part):
        return dist.P2POp(function, tensor, self._ranks[part % len(self._ranks)], self._group)


class _Ticket:
    """A grouped call under way; ``wait`` makes the device's computation wait for it, not the host."""

    def __init__(self, tasks, value, keeps):
        self._tasks, self._value, self._keeps = tasks, value, keeps

    def wait(self):
        for task in self._tasks:
            task.wait()
        self._tasks, self._keeps = (), ()
        value, self._value = self._value, None
        return value

    def done(self):
        return all(task.is_completed() for task in self._tasks)
