"""Failure drills: real processes, one fault, and what has to hold for all of them afterwards.

    result = run(fault="kill", at=1, phase="steady")     # 3 ranks on loopback; see rank.py for the faults

Checked for every drill: all processes end by themselves within ``timeout`` plus 10 seconds of the fault, nothing that
they started is left over, and the ports that they were given are free again.
"""

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "fleet"))

import forks  # noqa: E402
import pool  # noqa: E402

LIMIT = 20  # seconds: the option `timeout` of the drills
MARGIN = 10  # seconds after it in which all have to end
_START = 180  # seconds for the start of all processes on a busy machine


class Result(NamedTuple):
    """``codes`` and ``outputs`` by rank; ``seconds`` from the fault to each rank's error; ``end``: to the last process's end."""

    codes: list[int]
    outputs: list[str]
    errors: dict[int, str]
    seconds: dict[int, float]
    end: float

    @property
    def slowest(self):
        return max(self.seconds.values(), default=0.0)


def run(
    fault,
    at=0,
    phase="steady",
    p=3,
    schedule=f"VPP:timeout={LIMIT}",
    wait=LIMIT + MARGIN,
    enter=None,
    endpoints=None,
    logs=None,
    environment=None,
    replicas=1,
    **task,
) -> Result:
    """Runs a drill on ``replicas`` pipelines of p ranks.

    ``enter(rank)``: a command that goes before a rank's own (into a network namespace, say).
    """
    task = json.dumps({"fault": fault, "at": at, "phase": phase, "p": p, "schedule": schedule, "replicas": replicas, **task})
    ranks = p * replicas
    with contextlib.ExitStack() as stack:
        if endpoints is None:
            endpoints = stack.enter_context(pool.reserved_endpoints(ranks))
        processes = [
            stack.enter_context(_process(rank, task, endpoints, enter(rank) if enter else [], environment or {})) for rank in range(ranks)
        ]
        _wait_ready(processes)
        began = time.time()
        ended = _wait_ended(processes, began + wait + task_seconds(task))
        result = _result(processes, ended)
    name = "hang" if fault == "sleep" and result.errors else fault
    _note({"fault": name, "at": at, "phase": phase, "ranks": ranks, "slowest error": result.slowest, "end": result.end})
    if enter is None:
        _check_ports(endpoints)
    if logs:
        for rank, output in enumerate(result.outputs):
            (Path(logs) / f"workerlog.{rank}").write_text(output)
    return result


def together(*drills):
    """The results of several drills that mostly wait, run at the same time; each is a function without arguments."""
    with concurrent.futures.ThreadPoolExecutor(len(drills)) as threads:
        return [started.result() for started in [threads.submit(of_one) for of_one in drills]]


def task_seconds(task):
    return json.loads(task).get("seconds", 0)


@contextlib.contextmanager
def _process(rank, task, endpoints, before, environment):
    environment = {**pool.environment(rank, endpoints), **environment}
    with tempfile.NamedTemporaryFile("w+b", buffering=0) as log:
        process = _started(before, task, environment, log) if before else forks.start(environment, [task], log.name)
        process.log = log
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _started(before, task, environment, log):
    return subprocess.Popen(
        [*before, sys.executable, str(HERE / "rank.py"), task],
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _output(process):
    process.log.seek(0)
    return process.log.read().decode(errors="replace")


def _wait_ready(processes):
    deadline = time.monotonic() + _START
    for rank, process in enumerate(processes):
        while "READY " not in _output(process):
            assert process.poll() is None, f"rank {rank} ended before it was ready:\n{_output(process)}"
            assert time.monotonic() < deadline, f"rank {rank} is not ready:\n{_output(process)}"
            time.sleep(0.05)


def _wait_ended(processes, deadline):
    """When the last one has ended."""
    while any(process.poll() is None for process in processes):
        if time.time() > deadline:
            texts = [f"rank {r} ({p.poll()}):\n{_output(p)[-3000:]}" for r, p in enumerate(processes)]
            raise AssertionError("these have not ended in time:\n" + "\n".join(texts))
        time.sleep(0.05)
    ended = time.time()
    for rank, process in enumerate(processes):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 0)
            raise AssertionError(f"rank {rank} has left a process behind")
    return ended


def _result(processes, ended):
    outputs = [_output(process) for process in processes]
    faults = [float(found[1]) for output in outputs if (found := re.search(r"^FAULT ([\d.]+)", output, re.M))]
    fault = min(faults, default=ended)
    found = {rank: re.search(r"^ERROR ([\d.]+) (.*)$", output, re.M) for rank, output in enumerate(outputs)}
    return Result(
        [process.returncode for process in processes],
        outputs,
        {rank: error[2] for rank, error in found.items() if error},
        {rank: float(error[1]) - fault for rank, error in found.items() if error},
        ended - fault,
    )


def _note(figures):
    """For ci/drills.sh: a line of figures a drill."""
    if os.environ.get("DRILLS_REPORT"):
        with open(os.environ["DRILLS_REPORT"], "a") as file:
            file.write(json.dumps(figures) + "\n")


def _check_ports(endpoints):
    for endpoint in endpoints:
        host, port = endpoint.rsplit(":", 1)
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, int(port)))
            sock.listen()
