"""How one rank's exception becomes an error on all ranks within seconds."""

import contextlib
import json
import time
import traceback

from ...diagnosis import judge, table_of
from ..store import PatientStore, publish, read
from .watchdog import Watchdog

_READ = 2.0  # seconds in which the others read why, before the process that keeps the store may end
_GRACE = 3.0  # seconds in which the ranks that wait tell where they are, once one has reached its limit


class PeerFailed(RuntimeError):
    """Another rank of the pipeline failed in its step; the text has that rank's traceback."""


class FailureBoard:
    """A place in the job's store where a rank that fails leaves its traceback, and the others look while they wait.

    ``name`` tells the pipelines of a job apart, and the steps before and after a failure.
    """

    def __init__(self, name: str, rank: int, watchdog: Watchdog):
        self._store, self._rank, self._watchdog = PatientStore(), rank, watchdog
        self._key = f"paddle_vpp_ext/failure/{name}/"
        self._seen = False

    def post(self, error: BaseException) -> None:
        """Tells the others. Never raises: the error itself matters more."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))[-8000:]
        try:
            self._store.call(lambda store: self._set_first(store, [self._rank, text]))
        except Exception:
            pass

    def check_reachable(self) -> None:
        """TimeoutError if the store still owes an answer: whoever asked it now would wait without a limit."""
        self._store.call(lambda store: None)

    def meet(self, name: str, count: int, limit: float) -> None:
        """Returns once ``count`` processes of the job have come to the meeting of this name; TimeoutError after ``limit`` seconds."""
        key, deadline = f"paddle_vpp_ext/meeting/{name}", time.monotonic() + limit
        come = self._store.call(lambda store: store.add(key, 1))
        while come < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"only {come} of {count} processes of the job have come within {limit:g} s")
            time.sleep(0.02)
            come = self._store.call(lambda store: store.add(key, 0))

    def stay(self) -> None:
        """Only in the process that keeps the job's store: waits a little until the others have read why."""
        if self._rank != 0:
            return
        others, deadline = len(self._watchdog.ranks) - 1, time.monotonic() + _READ
        with contextlib.suppress(Exception):
            while self._store.call(lambda store: store.add(self._key + "seen", 0)) < others and time.monotonic() < deadline:
                time.sleep(0.02)

    def look(self) -> bool:
        """PeerFailed if another rank has posted, or if the process that keeps the store has ended. False if it does not answer."""
        try:
            posted = self._store.call(self._read_first)
        except TimeoutError:  # that machine is slow or cannot be reached: this rank's own limit counts
            return False
        except Exception as error:
            raise PeerFailed(f"rank 0, which keeps the job's store, has ended or cannot be reached: {_first_line(error)}") from None
        if posted and posted[0] != self._rank:
            rank, text = posted
            last = text.rstrip().rpartition("\n")[2]
            if last.startswith("TimeoutError"):
                text += self.who_is_behind(PeerFailed("a wait of another rank reached its limit"))
            raise PeerFailed(f"rank {rank} of the pipeline failed: {last}\n{text}")
        return True

    def who_is_behind(self, error: BaseException) -> str:
        """This rank tells where it is and hears where the others are that wait, too; text for an error."""
        position = self._watchdog.describe(error)
        ranks, positions = self._watchdog.ranks, {self._rank: position}
        deadline = time.monotonic() + _GRACE
        hint = "python -m paddle_vpp_ext diagnose LOGDIR compares the logs of all ranks"
        try:
            self._store.call(lambda store: publish(store, f"{self._key}position/{self._rank}", json.dumps(position)))
            while len(positions) < len(ranks) and time.monotonic() < deadline:
                for rank in ranks:
                    if rank not in positions:
                        found = self._position_of(rank)
                        positions.update({rank: found} if found else {})
                time.sleep(0.05)
        except Exception:
            silence = "the job's store, at rank 0, does not answer, so nothing is known of the others"
            return f"\n{silence}; {hint}\n{table_of([position])}"
        verdict = judge(list(positions.values()), ranks)
        silent = [rank for rank in ranks if rank not in positions]
        tail = f"\n  rank {', '.join(map(str, silent))}: no answer" if silent else ""
        return f"\n{verdict.why}\n{table_of(list(positions.values()))}{tail}\n{hint}"

    def _position_of(self, rank):
        return self._store.call(lambda store: _read(store, f"{self._key}position/{rank}"))

    def _set_first(self, store, value):
        if store.add(self._key + "count", 1) == 1:  # the first failure is the cause of the others
            publish(store, self._key + "first", json.dumps(value))
        else:
            store.add(self._key + "seen", 1)

    def _read_first(self, store):
        first = _read(store, self._key + "first")
        if first and not self._seen:
            self._seen = True
            store.add(self._key + "seen", 1)
        return first


def _read(store, key):
    text = read(store, key)
    return text and json.loads(text)


def _first_line(error):
    return str(error).strip().partition("\n")[0]
