"""The job's key-value store, through which its processes met: texts under keys, and waits that have a limit.

Asking again and again, unlike the store's own wait, can be interrupted and can say what was waited for.
"""

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, Callable, Optional

import paddle

from . import versions

_POLL = 0.005  # seconds between two looks at the store while a text is not there yet
_ANSWER = 2.0  # seconds that the store may take; its machine may be gone, and it has no limit of its own

_times_named: dict[str, int] = {}  # name -> how many keys of that name this process has made


def fresh_key(name: str) -> str:
    """A key of that name that was not used before in this job: all processes make keys of one name in one order."""
    times = _times_named[name] = _times_named.get(name, 0) + 1
    return f"paddle_vpp_ext/{name}/{times}"


def publish(store: Any, key: str, text: str) -> None:
    """Leaves a text under a key."""
    store.set(key + "/text", text)
    store.add(key + "/there", 1)


def read(store: Any, key: str) -> Optional[str]:
    """The text under a key, or None while there is none."""
    return bytes(store.get(key + "/text")).decode() if store.add(key + "/there", 0) else None


def wait_for(store: Any, key: str, deadline: float, complaint: str) -> str:
    """The text under a key, once it is there; TimeoutError with ``complaint`` at ``deadline`` (by time.monotonic)."""
    while True:
        text = read(store, key)
        if text is not None:
            return text
        if time.monotonic() > deadline:
            raise TimeoutError(complaint)
        time.sleep(_POLL)


def gather(name: str, ranks: Sequence[int], text: str, timeout: float) -> list[str]:
    """Give ``text`` and return those of ``ranks`` (global, this process among them), in that order.

    They meet in the same order of calls. Unlike gloo's collectives, which fail when a process is
    30 seconds late, this waits ``timeout`` seconds. Raises TimeoutError naming the rank that has not come.
    """
    rank, store = paddle.distributed.get_rank(), versions.default_store()
    key = fresh_key(f"{name}/{'-'.join(map(str, ranks))}")
    publish(store, f"{key}/{rank}", text)
    waiting = f"rank {rank}: waited {timeout:g} s for rank {{}} to come to {name}"
    deadline = time.monotonic() + timeout
    return [wait_for(store, f"{key}/{other}", deadline, waiting.format(other)) for other in ranks]


class PatientStore:
    """The job's store, asked in a thread: an answer that does not come ends no later than its limit.

    While the caller waits it asks nothing itself, so the two never use the store's connection at one time.
    """

    def __init__(self) -> None:
        self._questions: Optional[queue.SimpleQueue] = None

    def call(self, function: Callable[[Any], Any]) -> Any:
        """``function(store)``. TimeoutError without an answer; at once, while an older question has none."""
        if self._questions is None:
            self._questions, self._busy = queue.SimpleQueue(), threading.Lock()
            threading.Thread(target=_answer, args=(self._questions, versions.default_store()), daemon=True).start()
        if not self._busy.acquire(blocking=False):
            raise TimeoutError("the job's store does not answer")
        answer = _Answer(function, self._busy)
        self._questions.put(answer)
        if not answer.there.wait(_ANSWER):
            raise TimeoutError("the job's store does not answer")
        if answer.error is not None:
            raise answer.error
        return answer.value

    def __del__(self) -> None:
        if self._questions is not None:
            self._questions.put(None)


class _Answer:
    def __init__(self, function: Callable[[Any], Any], busy: Any) -> None:
        self.function, self.busy, self.there = function, busy, threading.Event()
        self.value: Any = None
        self.error: Optional[BaseException] = None


def _answer(questions, store):
    for question in iter(questions.get, None):
        try:
            question.value = question.function(store)
        except BaseException as error:
            question.error = error
        question.busy.release()
        question.there.set()
