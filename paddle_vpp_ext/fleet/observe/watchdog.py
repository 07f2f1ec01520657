"""This rank's position in its step, and the watchdog that tells it when the rank itself is stuck.

Costs an action one append to a deque, and a wait that really waits one read of the clock.
"""

import collections
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Sequence
from typing import Any, Callable, Optional

from ...diagnosis import RECENT, line_of, text_of
from ...instruments import Instrument
from ...log import logger

_LOOK = 0.5  # seconds between two looks of the watchdog
_STUCK = 0.5  # seconds without going on after which a rank on a device looks whether another has failed: before that one may end


class Watchdog(Instrument):
    """Written by the thread that runs the steps, read by others.

    ``recent`` takes each instruction when it begins; ``waits`` is (what, peer, since) while this rank waits.
    """

    def __init__(self, ranks: Sequence[int], rank: int, limit: float):
        self.ranks, self._rank, self.limit = list(ranks), rank, limit
        self.step = 0
        self.waits: Optional[tuple[Callable[[], str], int, float]] = None
        self.recent: collections.deque[Any] = collections.deque(maxlen=RECENT)
        # On a device, where the host may wait in an operation that ends only if a peer does its part: where failures are told.
        self.board: Any = None
        self.instruction = self.recent.append  # type: ignore[method-assign, assignment]  # an event costs no more than this
        self._program: Sequence[Any] = ()
        self.thread: Optional[int] = None

    def begin(self) -> None:
        """Begins a step."""
        self.step += 1
        self.thread = threading.get_ident()
        self._program = ()
        self.recent.clear()
        _watch(self)

    def begin_program(self, training: bool, program: Sequence[Any]) -> None:
        self._program = program

    def end(self) -> None:
        """Ends a step, well or not."""
        self.thread = None
        self._program = ()

    def describe(self, error: Optional[BaseException] = None) -> dict:
        """As in diagnosis.py."""
        recent, waits = list(self.recent), self.waits
        numbers = [number for number, step in enumerate(self._program, 1) if recent and step is recent[-1]]
        what, peer, since = waits or (None, None, None)
        return {
            "ranks": self.ranks,
            "rank": self._rank,
            "step": self.step,
            "number": numbers[0] if numbers else None,
            "of": len(self._program),
            "last": [text_of(step) for step in recent],
            "waits_for": what and str(what()),
            "peer": peer,
            "since": since and time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since)),
            "error": error and _one_line(error),
        }

    def moved(self) -> Optional[tuple[int, Optional[int]]]:
        """Changes whenever this rank goes on; None outside of a step, and while it waits: that has a limit of its own."""
        if self.thread is None or self.waits is not None:
            return None
        return self.step, id(self.recent[-1]) if self.recent else None

    def log(self, error: Optional[BaseException] = None) -> None:
        """Writes the position to the log."""
        logger.error(line_of(self.describe(error)))


def _one_line(error):
    return f"{type(error).__name__}: {error}".partition("\n")[0][:500]


# ---- the watchdog: one thread of this process looks after all of its engines

_watchdogs: weakref.WeakSet[Watchdog] = weakref.WeakSet()
_thread: Optional[threading.Thread] = None


def _watch(watchdog):
    global _thread
    _watchdogs.add(watchdog)
    if _thread is None or not _thread.is_alive():  # the first, or after a fork
        _thread = threading.Thread(target=_look_again_and_again, name="paddle_vpp_ext watchdog", daemon=True)
        _thread.start()


def _look_again_and_again():
    # watchdog: (how it was, since when, whether that is told)
    seen: weakref.WeakKeyDictionary[Watchdog, tuple] = weakref.WeakKeyDictionary()
    while True:
        time.sleep(_LOOK)
        for watchdog in list(_watchdogs):
            _look(watchdog, seen)


def _look(watchdog, seen):
    now, moved = time.monotonic(), watchdog.moved()
    before, since, told = seen.get(watchdog, (None, now, False))
    if moved is None or moved != before:
        seen[watchdog] = moved, now, False
        return
    if watchdog.board is not None and now - since >= _STUCK:
        _end_if_a_peer_failed(watchdog)
    if not told and now - since >= watchdog.limit:
        seen[watchdog] = moved, since, True
        frame = sys._current_frames().get(watchdog.thread)
        stack = "".join(traceback.format_stack(frame)) if frame else ""
        logger.error(f"not gone on for {watchdog.limit:g} s, waiting for no other rank:\n{stack}{line_of(watchdog.describe())}")


def _end_if_a_peer_failed(watchdog):
    """Ends this process with the words of the rank that failed: what the device waits for will not come, and nothing interrupts it."""
    try:
        watchdog.board.look()
    except Exception as error:
        watchdog.log(error)
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(1)
