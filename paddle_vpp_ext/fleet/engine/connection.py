"""A pipeline's connection: its transport, and the board on which failures are told; made anew after a step that failed."""

import itertools
from typing import Any, Optional

import paddle

from ...log import logger
from .. import device, versions
from ..messages import Boundaries
from ..observe.failure import FailureBoard
from ..observe.watchdog import Watchdog
from ..transport.channel_transport import ChannelTransport
from ..transport.channels import Channels
from ..transport.device_transport import DeviceTransport
from ..transport.meeting import Meeting
from ..transport.protocol import PipelineTransport, Promises

_engines = itertools.count()


class Connection:
    """All ranks of a pipeline make it, open it and close it together.

    ``transport`` is None while it is closed. ``promises``: what the transport will do, before it is there.
    """

    def __init__(self, engine: Any, overlap_p2p: bool, timeout: float, boundaries: Boundaries, watchdog: Watchdog):
        self._on_channels = device.is_cpu()
        if overlap_p2p and not self._on_channels and not versions.p2p_tasks_order_the_device():
            overlap_p2p = False
            if engine.stage_id == 0:
                logger.warning(
                    "overlap_p2p_comm has no effect: with this Paddle a device cannot wait for a transfer that runs beside its "
                    "computation, so transfers take their turn in it; Paddle 3.0 can"
                )
        self._engine, self._overlap_p2p, self._timeout = engine, overlap_p2p, timeout
        self._boundaries, self._watchdog = boundaries, watchdog
        self.ranks = list(engine.pp_group.ranks)
        self._number = next(_engines)  # the same on all ranks, which make their engines in one order
        self._attempts = 0
        self.promises = Promises(False, False, False) if self._on_channels else Promises(not overlap_p2p, True, overlap_p2p)
        self.transport: Optional[PipelineTransport] = None
        self.board: Optional[FailureBoard] = None

    def open(self) -> None:
        """At first, and after a step that failed."""
        if self.transport is not None:
            return
        if self.board is not None:
            self.board.check_reachable()
            self._meet_replicas(self.board)
        self._attempts += 1
        rank = self._engine.global_rank
        self.board = FailureBoard(f"{'-'.join(map(str, self.ranks))}/{self._number}/{self._attempts}", rank, self._watchdog)
        self.transport = self._make_transport(self.board)

    def close(self) -> None:
        """Ends what is under way here and, by the closed connections, at the other ranks."""
        if self.transport is not None:
            self.transport.close()
        self.transport = None

    def _make_transport(self, board):
        meeting = Meeting(Channels(self.ranks, self._timeout), board, self._timeout, self._watchdog)
        if self._on_channels:
            return ChannelTransport(meeting, self._boundaries)
        self._watchdog.board = board
        groups = {"F": self._engine.pp_group, "B": self._second_group() if self._overlap_p2p else self._engine.pp_group}
        transport = DeviceTransport(meeting, groups, self._boundaries)
        if self._attempts == 1:
            transport.warm_up()
        return transport

    def _meet_replicas(self, board):
        """A replica in which the step did not fail is still summing its gradients: they must not meet those of the next step."""
        count = paddle.distributed.get_world_size()
        if count > len(self.ranks):
            try:
                board.meet(f"{self._number}/{self._attempts}", count, self._timeout)
            except TimeoutError as error:
                raise TimeoutError(
                    f"a step failed here, and can only be followed by another if it failed in all replicas: {error}"
                ) from None

    def _second_group(self):
        """A second communicator of this pipeline; every process of the job takes part in making those of all pipelines."""
        for ranks in self._engine._hcg.topology().get_comm_list("pipe"):
            group = paddle.distributed.new_group(ranks)
            if self._engine.global_rank in ranks:
                mine = group
        return mine
