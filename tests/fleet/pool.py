"""Worker processes that stay alive for a whole pytest run, because starting four of them costs many seconds.

    pool = get_pool(4)                       # pp_degree 4
    results = pool.run(function, argument)   # runs on all ranks, returns the list of what it returned there

`function` is a module-level function of a test module (the workers import it by name). Workers have called
`fleet.init`; a function that needs other pipeline options calls `fleet.init` again with another strategy: the groups stay.
One pool is alive at a time, since memory and cores are scarce.
"""

import atexit
import contextlib
import json
import multiprocessing.connection
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]

_START_TIMEOUT = 180.0  # seconds
_GRACE = 3.0  # seconds that the others get after one has failed
_LOG_TAIL = 6000  # characters of a rank's output that an error shows

_current = None


class WorkerError(Exception):
    """A function failed, hung or died on some rank. The text shows every rank's traceback or where it hangs."""


def get_pool(num_processes, pp_degree=None, **hybrid):
    """The pool of `num_processes` workers with these degrees. Closes the pool before, if its parameters differ.

    pp_degree: number of stages, all processes by default; dp_degree is what is left unless it is given.
    hybrid: further entries of `strategy.hybrid_configs`.
    """
    global _current
    configs = {"mp_degree": 1, **hybrid, "pp_degree": pp_degree or num_processes}
    configs.setdefault("dp_degree", num_processes // (configs["pp_degree"] * configs["mp_degree"]))
    if _current is None or (_current.num_processes, _current.configs) != (num_processes, configs):
        close_pools()
        _current = Pool(num_processes, configs)
    return _current


def close_pools():
    """End all workers."""
    global _current
    if _current is not None:
        _current.close()
        _current = None


atexit.register(close_pools)


class Pool:
    def __init__(self, num_processes, configs):
        self.num_processes = num_processes
        self.configs = configs
        self.start_seconds = None  # how long the last start took
        self._workers = []

    def run(self, function, *args, timeout=60):
        """Run `function(*args)` on all ranks and return the list of their results, in the order of ranks.

        Raises WorkerError if it raises, dies or is not done after `timeout` seconds on any rank; the workers are
        ended then, and started anew by the next call.
        """
        if not self._workers:
            self._start()
        try:
            for worker in self._workers:
                with contextlib.suppress(OSError):  # a dead worker is reported by _collect
                    worker.connection.send((sys.path, function.__module__, function.__qualname__, args))
            return self._collect(f"{function.__module__}.{function.__qualname__}", timeout)
        except BaseException:  # also KeyboardInterrupt: the workers are in the middle of something
            self.close()
            raise

    def close(self):
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.connection.close()  # to a worker this is the word to exit
        deadline = time.monotonic() + 5.0
        for worker in workers:
            worker.end(deadline)

    def _start(self):
        began = time.monotonic()
        with reserved_endpoints(self.num_processes) as endpoints:
            try:
                for rank in range(self.num_processes):
                    self._workers.append(_Worker(rank, endpoints, self.configs))
                self._collect("start with fleet.init", _START_TIMEOUT)
            except BaseException:
                self.close()
                raise
        self.start_seconds = time.monotonic() - began

    def _collect(self, what, timeout):
        """Wait for one answer of every worker and return their values."""
        answers = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(self._workers):
            waiting = [worker for worker in self._workers if worker.rank not in answers]
            left = deadline - time.monotonic()
            ready = multiprocessing.connection.wait([worker.connection for worker in waiting], max(0.0, left))
            if not ready:
                break
            for worker in waiting:
                if worker.connection in ready:
                    answers[worker.rank] = worker.answer()
                    if not answers[worker.rank][0]:
                        deadline = min(deadline, time.monotonic() + _GRACE)
        if len(answers) == len(self._workers) and all(good for good, _ in answers.values()):
            return [answers[rank][1] for rank in range(len(self._workers))]
        raise WorkerError(self._report(what, timeout, answers))

    def _report(self, what, timeout, answers):
        hanging = [worker for worker in self._workers if worker.rank not in answers]
        for worker in hanging:
            worker.dump_stacks()
        lines = [f"{what} failed on some of {len(self._workers)} ranks (limit {timeout:g} s)"]
        for worker in self._workers:
            good, text = answers.get(worker.rank, (False, "not done; its threads are at the end of its output"))
            lines.append(f"---- rank {worker.rank}: {'done' if good else text}")
            if not good:
                lines += [f"output of rank {worker.rank}:", worker.output()]
        return "\n".join(lines)


class _Worker:
    def __init__(self, rank, endpoints, configs):
        self.rank = rank
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115, open as long as the worker is
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "worker.py"), str(theirs.fileno()), str(os.getpid()), json.dumps(configs)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=environment(rank, endpoints),
            )
        self.connection = multiprocessing.connection.Connection(ours.detach())

    def answer(self):
        """(True, value) or (False, text of what went wrong)."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)
            return False, f"the process has ended, exit code {self._process.poll()}"

    def dump_stacks(self):
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(0.3)  # the dump is written by a signal handler; nothing tells when it is done

    def output(self):
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-_LOG_TAIL:]

    def end(self, deadline):
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


@contextlib.contextmanager
def reserved_endpoints(count):
    """Loopback addresses with free ports, kept from others (by sockets that are bound but do not listen) meanwhile."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("", 0))
        yield [f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets]


def environment(rank, endpoints):
    """What Paddle's launcher would set, and one thread per process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PADDLE_", "MASTER_"))}
    kept.update((name, value) for name, value in os.environ.items() if name.startswith("PADDLE_VPP_"))
    return {
        **kept,
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_LOCAL_RANK": str(rank),
        "PADDLE_RANK_IN_NODE": str(rank),
        "PADDLE_TRAINERS_NUM": str(len(endpoints)),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_MASTER": endpoints[0],
        "PADDLE_DISTRI_BACKEND": "gloo",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "GLOG_minloglevel": "2",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), str(HERE), os.environ.get("PYTHONPATH")])),
    }
