"""Point-to-point between pipeline stages where there is no NCCL: the companion of gloo's collectives on CPU.

gloo itself cannot carry a pipeline's transfers. It gives up after 30 seconds, which cannot be changed from Python, so
that a stage may not wait for a slow neighbour; a receive that has given up spoils its group for good; an unknown dtype
ends the process; and messages are matched by a counter per group that the two directions share. So each channel has
a TCP connection of its own. Like gloo it sends what it is given, unencrypted.
"""

import collections
import contextlib
import functools
import logging
import os
import queue
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, Callable, Optional

import paddle

from .. import store
from ..group_stores import own_host
from .wire import has_room, listen, receive_into, receive_tensor, send_tensor, tune

KINDS = {"F": "activation", "B": "gradient"}

_logger = logging.getLogger("paddle_vpp_ext")
_HELLO = struct.Struct("!16sIs")  # the receiver's token, the sender's global rank, the kind
_SETUP_TIMEOUT = 60.0  # seconds for the connections, once all processes have come
_TICK = 1.0  # seconds between two calls of on_tick
_SMALL = 64 * 1024  # bytes that take less time than a change of thread

_Job = Callable[[Callable[[paddle.Tensor], None]], Any]
_Key = collections.namedtuple("_Key", "source destination kind")  # stage, stage, "F" or "B"


class Ticket:
    """The outcome of one job of a channel, some time. It serves as the task that Paddle's engines wait for."""

    def __init__(self, channel: "_Channel") -> None:
        self._channel = channel
        self._finished = threading.Event()
        self._value: Any = None
        self._error: Optional[BaseException] = None
        self.seen = False  # whether somebody has waited to the end, and so knows of an error

    def done(self) -> bool:
        """Whether the job has ended, well or not."""
        return self._finished.is_set()

    is_completed = done  # Paddle's word for it

    def wait(self, timeout: Optional[float] = None, on_tick: Optional[Callable[[], Any]] = None) -> Any:
        """Wait for the job and return its value.

        `timeout` is in seconds, None for the limit of the channels. `on_tick()` is called about every second
        meanwhile; what it raises ends the wait. Raises what the job raised, ConnectionError when the process at
        the other end is gone or the channel is closed, and TimeoutError.
        """
        if not self._finished.is_set():
            self._wait(_Limit(self._channel, timeout, on_tick))
        self.seen = True
        if self._error is not None:
            raise self._error
        return self._value

    def _wait(self, limit):
        while not self._finished.is_set():
            if not self._channel.run_here(self, limit) and not self._finished.wait(limit.until_tick()):
                limit.tick()

    def _finish(self, value=None, error=None):
        self._value, self._error = value, error
        self._finished.set()


class _Limit:
    """How long one wait may take, and what is called about every second of it."""

    def __init__(self, channel: "_Channel", timeout: Optional[float], on_tick: Optional[Callable[[], Any]]) -> None:
        self._what = channel.what
        self._seconds = channel.limit if timeout is None else timeout
        self._deadline = time.monotonic() + self._seconds
        self._on_tick = on_tick

    def until_tick(self):
        """Seconds to wait before the next call of `tick`."""
        return max(0.0, min(_TICK, self._deadline - time.monotonic()))

    def tick(self):
        if time.monotonic() >= self._deadline:
            raise TimeoutError(f"{self._what}: not done after {self._seconds:g} s")
        if self._on_tick is not None:
            self._on_tick()


class Channels:
    """The connections of this process's stage with its neighbours in the pipeline.

    A channel is told apart by (source stage, destination stage, kind), with kind "F" for activations and "B" for
    gradients, so that with two stages an activation never meets a gradient. There is one of each kind between
    neighbours, and one from the last stage to the first (gradients: the reverse).

    ranks: the global ranks of the pipeline in the order of its stages. They make their Channels together.
    timeout: seconds that a wait without a limit of its own may take.

    Raises ValueError if this process is not one of them, TimeoutError if others do not connect.
    """

    def __init__(self, ranks: Sequence[int], timeout: float = 1800.0) -> None:
        self.rank = paddle.distributed.get_rank()
        self.ranks = list(ranks)
        if self.rank not in self.ranks:
            raise ValueError(f"rank {self.rank} is not in the pipeline {self.ranks}")
        self.stage = self.ranks.index(self.rank)
        self._timeout = timeout
        self._channels: dict[_Key, _Channel] = {}
        _all.add(self)
        self._close = weakref.finalize(self, _close, self._channels)  # also when the process ends
        try:
            self._connect(_keys(len(self.ranks)))
        except BaseException:
            self.close()
            raise

    def send(self, peer_stage: int, kind: str, job: _Job, size: Optional[int] = None) -> Ticket:
        """Run `job(transfer)`, and return its Ticket.

        `transfer(tensor)` blocks until that tensor is on its way: it may be changed or freed then. The jobs of one
        channel run in the order in which they were given, under no_grad, in the channel's thread; a job whose `size`
        in bytes is known to be small runs at once, where the connection has room for it.
        """
        return self._post(_Key(self.stage, peer_stage, kind), job, size)

    def receive(self, peer_stage: int, kind: str, job: _Job, size: Optional[int] = None) -> Ticket:
        """Like `send` for the other direction: `transfer(tensor)` blocks until the tensor is filled.

        Tensors arrive in the order in which they were sent; one of another size than the sent one is a ValueError. A
        small job is run by whoever waits for it; until then the connection holds what has come.
        """
        return self._post(_Key(peer_stage, self.stage, kind), job, size)

    def close(self) -> None:
        """End all threads and connections. Jobs that are not done fail with ConnectionError, here and at the peers."""
        self._close()

    def _post(self, key, job, size):
        channel = self._channels.get(key)
        if channel is None:
            raise ValueError(
                f"rank {self.rank} (stage {self.stage}): there is no channel for {KINDS.get(key.kind, key.kind)}s "
                f"from stage {key.source} to stage {key.destination}; there are {[tuple(k) for k in self._channels]}"
            )
        return channel.post(job, size is not None and size <= _SMALL and size)

    def _connect(self, keys):
        outgoing = [key for key in keys if key.source == self.stage]
        incoming = {(self.ranks[key.source], key.kind): key for key in keys if key.destination == self.stage}
        token = secrets.token_bytes(16)  # so that nobody is taken for a neighbour by accident
        with contextlib.closing(listen(own_host(), len(incoming))) as listener:
            address = f"{own_host()} {listener.getsockname()[1]} {token.hex()}"
            addresses = store.gather("channels", self.ranks, address, self._timeout)
            deadline = time.monotonic() + _SETUP_TIMEOUT
            for key in outgoing:
                host, port, peer_token = addresses[key.destination].split(" ")
                sock = socket.create_connection((host, int(port)), timeout=_SETUP_TIMEOUT)
                self._add(key, sock)
                sock.sendall(_HELLO.pack(bytes.fromhex(peer_token), self.rank, key.kind.encode()))
            while incoming:
                listener.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    sock, _ = listener.accept()
                except OSError as error:
                    raise TimeoutError(
                        f"rank {self.rank} (stage {self.stage}): after {_SETUP_TIMEOUT:g} s there was no connection "
                        f"from (rank, kind) {sorted(incoming)}"
                    ) from error
                key = incoming.pop(_read_hello(sock, token), None)
                if key is None:
                    sock.close()  # a stranger
                else:
                    self._add(key, sock)

    def _add(self, key, sock):
        outgoing = key.source == self.stage
        peer = key.destination if outgoing else key.source
        what = (
            f"rank {self.rank} (stage {self.stage}): {'send' if outgoing else 'receive'} of {KINDS[key.kind]} "
            f"({key.kind}) {'to' if outgoing else 'from'} stage {peer} (rank {self.ranks[peer]})"
        )
        tune(sock)
        self._channels[key] = (_Outgoing if outgoing else _Incoming)(what, sock, self._timeout)


def _close(channels):
    for channel in channels.values():
        channel.shut_down()
    for channel in channels.values():
        channel.join()


_all: weakref.WeakSet[Channels] = weakref.WeakSet()


def _let_go_in_child():
    # A forked data loader would keep the connections open, and hide from the neighbours that this process has died.
    for channels in list(_all):
        for channel in channels._channels.values():
            channel.let_go()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)


class _Channel:
    """One connection, used in one direction, and its jobs, which run one after the other.

    They run in a thread of the channel's, so that large messages move beside the computation. For small ones two
    changes of thread would take longer than the message: those run in the thread that posts or waits.
    """

    _transfer: Callable[[Optional[_Limit], paddle.Tensor], None]  # a method, by direction

    def __init__(self, what: str, sock: socket.socket, limit: float) -> None:
        self.what, self.limit = what, limit
        self._sock = sock
        self._jobs: collections.deque[tuple[_Job, Ticket]] = collections.deque()
        self._wakes: queue.SimpleQueue[Optional[bool]] = queue.SimpleQueue()  # one for each reason to look at the jobs, None to end
        self._running = threading.Lock()  # held by who runs jobs
        self._thread: Optional[threading.Thread] = None
        self._closed = False
        self._first_failure: Optional[Ticket] = None  # the ticket that broke the channel

    def post(self, job, small):
        """`small`: the job's size in bytes if it is known and small, else False."""
        ticket = Ticket(self)
        if self._run_at_once(job, ticket, small):
            return ticket
        if self._closed:
            ticket._finish(error=ConnectionError(f"{self.what}: the channel is closed"))
            return ticket
        self._jobs.append((job, ticket))
        if not self._left_to_waiter(small):
            self._wakes.put(True)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self.what, daemon=True)
                self._thread.start()
        return ticket

    def _run_at_once(self, job, ticket, small):
        return False

    def _left_to_waiter(self, small):
        return False

    def run_here(self, ticket, limit):
        """Run jobs in the calling thread until that of `ticket` is done. False if that is for the channel's thread."""
        return False

    def shut_down(self):
        if self._closed:
            return
        self._closed = True
        self._break_connection()
        self._wakes.put(None)

    def join(self):
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)  # longer only if a job itself does not return; the thread is a daemon
        self._run_all()
        failure = self._first_failure
        if failure is not None and not failure.seen:
            failure.seen = True
            _logger.error("%s failed and nobody waited for it: %r", self.what, failure._error)
        self._sock.close()

    def let_go(self):
        """Close this process's copy of the connection without a word to the other end. Only for a forked child."""
        self._closed = True
        self._sock.close()

    def _work(self):
        with paddle.no_grad():  # it is a state of the thread
            while self._wakes.get():
                self._run_all()
            self._run_all()

    def _run_all(self):
        # Whoever holds the lock runs what is there, and looks again after letting go of it.
        while self._jobs and self._running.acquire(blocking=not self._closed):
            try:
                self._run_next(None)
            finally:
                self._running.release()

    def _run_next(self, limit):
        try:
            job, ticket = self._jobs.popleft()
        except IndexError:
            return
        if self._closed:
            ticket._finish(error=ConnectionError(f"{self.what}: the channel was closed before this"))
        elif self._first_failure is not None:
            # The two ends may be out of step: what comes now could be taken for something else.
            error = ConnectionError(f"{self.what}: impossible after an earlier failure")
            ticket._finish(error=_with_cause(error, self._first_failure._error))
        else:
            self._run_job(job, ticket, limit)

    def _run_job(self, job, ticket, limit):
        try:
            value = job(functools.partial(self._transfer, limit))
        except BaseException as error:  # whoever waits gets it, whatever it is
            if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                text = "the channel was closed meanwhile" if self._closed else error
                error = _with_cause(ConnectionError(f"{self.what}: {text}"), error)
            if not self._closed:
                self._first_failure = ticket
            ticket._finish(error=error)
            self._break_connection()  # the other end must not wait for what will not come
        else:
            ticket._finish(value)

    def _break_connection(self):
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


class _Outgoing(_Channel):
    def _run_at_once(self, job, ticket, small):
        if small is False or self._jobs or self._closed or not self._running.acquire(blocking=False):
            return False
        try:
            if self._jobs or self._first_failure is not None or not has_room(self._sock, small):
                return False
            with paddle.no_grad():
                self._run_job(job, ticket, None)
            return True
        finally:
            self._running.release()

    def _transfer(self, limit, tensor):
        send_tensor(self._sock, tensor)


class _Incoming(_Channel):
    def _left_to_waiter(self, small):
        return small is not False

    def run_here(self, ticket, limit):
        if self._closed or not self._running.acquire(blocking=False):
            return False
        try:
            with paddle.no_grad():
                while self._jobs and not ticket.done():
                    self._run_next(limit)
        finally:
            self._running.release()
        return ticket.done()

    def _transfer(self, limit, tensor):
        receive_tensor(self._sock, tensor, limit)


def _with_cause(error, cause):
    error.__cause__ = cause
    return error


def _keys(num_stages):
    """The channels of a pipeline: p = 3 has F 0>1 1>2 2>0 and B the other way.

    The wrap from last to first stage is there also for one chunk, so that the ranks can meet before they compare options.
    """
    hops = [(s, (s + 1) % num_stages) for s in range(num_stages)]
    return [_Key(a, b, "F") for a, b in hops] + [_Key(b, a, "B") for a, b in hops]


def _read_hello(sock, token):
    """(rank, kind) of who has connected, or None if it is no neighbour of ours."""
    try:
        sock.settimeout(10.0)
        data = bytearray(_HELLO.size)
        receive_into(sock, memoryview(data))
    except OSError:
        return None
    their_token, rank, kind = _HELLO.unpack(data)
    if not secrets.compare_digest(their_token, token):
        return None
    return rank, kind.decode("ascii", "replace")
