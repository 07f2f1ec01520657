"""What steps really did: when each action ran and for whom it waited, on one rank."""

import time
from collections.abc import Sequence
from typing import Any, Optional

from ...instruments import Instrument
from ...schedule.action import Action
from ...schedule.dependencies import Transfer
from .. import device

# Shorter waits say more about the recording than about the step. Seconds.
SHORTEST_WAIT = 20e-6

_WALL = time.time() - time.perf_counter()


def now() -> float:
    """Seconds of the wall clock, as it was when the process started and without its jumps since."""
    return _WALL + time.perf_counter()


class Recording(Instrument):
    """Times actions, waits and posts. On a device each action is waited for, so a recorded step is a little slower than others.

    ``blocks``: (rank, start, end, kind, chunk, micro_batch), in seconds of the wall clock. A forward
    and a backward that run together get half of their time each. ``waits``: (transfer, or None where all
    ranks met; start; end). ``posts``: (transfer, when this rank was ready to send or to receive it).
    """

    def __init__(self, rank: int):
        self._rank, self._device = rank, device.current()
        self.clear()

    def clear(self) -> None:
        """Forgets what was recorded."""
        self.blocks: list[tuple] = []
        self.waits: list[tuple[Optional[Transfer], float, float]] = []
        self.posts: list[tuple[Transfer, float]] = []

    def before(self, actions: Sequence[Action]) -> None:
        self._start = now()

    def after(self, actions: Sequence[Action], received: Sequence[Any], made: Sequence[Any]) -> None:
        self._device.synchronize()
        start, share = self._start, (now() - self._start) / len(actions)
        for k, action in enumerate(actions):
            self.blocks.append((self._rank, start + k * share, start + (k + 1) * share, *action))

    def posting(self, sends: Sequence[tuple[Transfer, Any]], receives: Sequence[Transfer]) -> None:
        self._wait_start = start = now()
        self.posts += [(transfer, start) for transfer, _ in sends]
        self.posts += [(transfer, start) for transfer in receives]

    def posted(self, sends: Sequence[tuple[Transfer, Any]], receives: Sequence[Transfer]) -> None:
        self._add_wait(sends[0][0] if sends else receives[0])

    def waiting(self, transfer: Optional[Transfer]) -> None:
        self._wait_start = now()

    def waited(self, transfer: Optional[Transfer]) -> None:
        if transfer is not None:  # else the next action would seem to take the time
            self._device.synchronize()
        self._add_wait(transfer)

    def _add_wait(self, transfer):
        start, end = self._wait_start, now()
        # None is always there, so that the ranks' meetings can be told apart by their number.
        if end - start > SHORTEST_WAIT or transfer is None:
            self.waits.append((transfer, start, end))
