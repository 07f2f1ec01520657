"""This rank's position in its step, and the watchdog that tells it when the rank itself is stuck.

Costs an action one append to a deque, and a wait that really waits one read of the clock.
"""
import collections
import sys
import threading
import time
import traceback
import weakref
from typing import Sequence

from ..log import logger
from ..positions import RECENT, line_of, text_of

_LOOK = 1.0  # seconds between two looks of the watchdog


class Position:
    """Written by the thread that runs the steps, read by others.

    ``recent`` takes each instruction when it begins; ``waits`` is (what, peer, since) while this rank waits.
    """

    def __init__(self, ranks: Sequence[int], rank: int, limit: float):
        self.ranks, self._rank, self.limit = list(ranks), rank, limit
        self.step, self.waits, self.recent = 0, None, collections.deque(maxlen=RECENT)
        self._program, self.thread = (), None

    def begin(self) -> None:
        """Begins a step."""
        self.step += 1
        self.thread = threading.get_ident()
        self._program = ()
        self.recent.clear()
        _watch(self)

    def run(self, program) -> collections.deque:
        """Begins the step's program; what takes the instructions."""
        self._program = program
        return self.recent

    def end(self) -> None:
        """Ends a step, well or not."""
        self.thread = None
        self._program = ()

    def describe(self, error: BaseException = None) -> dict:
        """As in positions.py."""
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

    def moved(self):
        """Changes whenever this rank goes on; None outside of a step, and while it waits: that has a limit of its own."""
        if self.thread is None or self.waits is not None:
            return None
        return self.step, id(self.recent[-1]) if self.recent else None

    def log(self, error: BaseException = None) -> None:
        """Writes the position to the log."""
        logger.error(line_of(self.describe(error)))


def _one_line(error):
    return f"{type(error).__name__}: {error}".partition("\n")[0][:500]


# ---- the watchdog: one thread of this process looks at all of its engines

_positions = weakref.WeakSet()
_watchdog = None


def _watch(position):
    global _watchdog
    _positions.add(position)
    if _watchdog is None or not _watchdog.is_alive():  # the first, or after a fork
        _watchdog = threading.Thread(target=_look_again_and_again, name="paddle_vpp_ext watchdog", daemon=True)
        _watchdog.start()


def _look_again_and_again():
    seen = weakref.WeakKeyDictionary()  # position: (how it was, since when, whether that is told)
    while True:
        time.sleep(_LOOK)
        for position in list(_positions):
            _look(position, seen)


def _look(position, seen):
    now, moved = time.monotonic(), position.moved()
    before, since, told = seen.get(position, (None, now, False))
    if moved is None or moved != before:
        seen[position] = moved, now, False
    elif not told and now - since >= position.limit:
        seen[position] = moved, since, True
        frame = sys._current_frames().get(position.thread)
        stack = "".join(traceback.format_stack(frame)) if frame else ""
        logger.error(f"not gone on for {position.limit:g} s, waiting for no other rank:\n{stack}{line_of(position.describe())}")
