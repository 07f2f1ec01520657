"""How one rank's exception becomes an error on all ranks within seconds."""
import json
import traceback

from . import versions


class PeerFailed(RuntimeError):
    """Another rank of the pipeline failed in its step; the text has that rank's traceback."""


class FailureBoard:
    """A place in the job's store where a rank that fails leaves its traceback, and the others look while they wait.

    ``name`` tells the pipelines of a job apart, and the steps before and after a failure.
    """

    def __init__(self, name: str, rank: int):
        self._store, self._rank = versions.default_store(), rank
        self._key = f"paddle_vpp_ext/failure/{name}/"

    def post(self, error: BaseException) -> None:
        """Tells the others. Never raises: the error itself matters more."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))[-8000:]
        try:
            if self._store.add(self._key + "count", 1) == 1:  # the first failure is the cause of the others
                self._store.set(self._key + "text", json.dumps([self._rank, text]))
                self._store.add(self._key + "there", 1)
        except Exception:
            pass

    def look(self) -> None:
        """PeerFailed if another rank has posted."""
        if self._store.add(self._key + "there", 0):
            rank, text = json.loads(bytes(self._store.get(self._key + "text")))
            if rank != self._rank:
                raise PeerFailed(f"rank {rank} of the pipeline failed:\n{text}")
