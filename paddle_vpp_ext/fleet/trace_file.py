"""Writes what each step of a rank really did into a file of its own; ``trace merge`` puts them together.

A file is JSON lines: a head, then a line a step, written at the end of the step in one piece. Times in a
step are microseconds from its start; its ``start`` and ``end`` are seconds of the rank's own clock,
which is ``clock_offset`` seconds ahead of the first rank's. ``rank`` is the place in the pipeline, ``ranks`` are
the processes of the pipeline.

    {"run": …, "rank": 2, "ranks": [0, 1, 2, 3], "num_stages": 4, "num_chunks": 2, "schedule": "VPP", "clock_offset": 0.0, …}
    {"step": 0, "training": true, "accumulate_steps": 8, "start": …, "end": …, "actions": [["F0.0", 310, 1240], …],
     "waits": [["F1.0", 12, 305], …], "posts": [["F1.0", 10], …]}
"""
import contextlib
import itertools
import json
import os
import re
from typing import Tuple

from ..log import logger
from .recording import RecordingStage, RecordingTransport, now

ROUNDS = 8
_files = itertools.count()


def clock_offset(gather, rounds: int = ROUNDS) -> Tuple[float, float]:
    """(seconds by which this clock is ahead of the first rank's, by how much that may be wrong at most).

    Nobody leaves a gather before all have come: the first rank leaves after this one has come, this
    one after the first has come. Where the bounds that this gives allow no difference, there is none.
    """
    came, left = [], []
    for _ in range(rounds):
        came.append(now())
        gather(None)
        left.append(now())
    first_came, first_left = gather([came, left])[0]
    least = max(mine - first for mine, first in zip(came, first_left))
    most = min(mine - first for mine, first in zip(left, first_came))
    error = (most - least) / 2
    return (0.0 if least <= 0 <= most else (least + most) / 2), error


def record_steps(engine, folder: str) -> None:
    """Has ``engine`` write all its steps into ``folder``. All ranks of its pipeline call it together.

    ValueError, the same on all of them, if one cannot write there.
    """
    number = next(_files)
    path = os.path.join(folder, f"engine{number}-pipeline{engine._ranks[0]}-rank{engine.stage_id}.jsonl")
    file = problem = None
    try:
        os.makedirs(folder, exist_ok=True)
        file = open(path, "wb", buffering=0)
    except OSError as error:
        problem = str(error)
    for rank, other in zip(engine._ranks, engine._transport.gather(problem)):
        if other:
            raise ValueError(f"trace={folder}: rank {rank} cannot write there: {other}")
    offset, error = clock_offset(engine._transport.gather)
    head = {
        "run": engine._transport.gather(f"{now():.6f} {engine._ranks}")[0],
        "rank": engine.stage_id,
        "ranks": engine._ranks,
        "num_stages": engine.num_stages,
        "num_chunks": engine._num_chunks,
        "schedule": re.sub(r"trace=[^,]*,?", "", engine.schedule_text).rstrip(":,"),
        "clock_offset": offset,
        "clock_error": error,
    }
    engine._run_step = StepRecorder(engine, file, head)


class StepRecorder:
    """In place of an engine's ``_run_step``: runs it, and writes a line."""

    def __init__(self, engine, file, head: dict):
        self._engine, self._run_step, self._file, self._count = engine, engine._run_step, file, 0
        self._write(head)

    def __call__(self, data, scaler, step):
        engine = self._engine
        if engine._transport is None:
            engine._connect()
        plain = engine._stage, engine._transport
        stage, transport = RecordingStage(plain[0], engine.stage_id), RecordingTransport(plain[1])
        engine._stage, engine._transport = stage, transport
        start = now()
        try:
            result = self._run_step(data, scaler, step)
        finally:
            engine._stage = plain[0]
            if engine._transport is transport:  # None after a step that failed
                engine._transport = plain[1]
        self._write(self._line(step, start, now(), stage, transport))
        self._count += 1
        return result

    def _line(self, step, start, end, stage, transport):
        since = lambda time: round((time - start) * 1e6)
        return {
            "step": self._count,
            "training": step.training,
            "accumulate_steps": self._engine.accumulate_steps,
            "start": start,
            "end": end,
            "actions": [[f"{kind}{chunk}.{i}", since(s), since(e)] for _, s, e, kind, chunk, i in stage.blocks],
            "waits": [[transfer and str(transfer), since(s), since(e)] for transfer, s, e in transport.waits],
            "posts": [[str(transfer), since(time)] for transfer, time in transport.posts],
        }

    def _write(self, line):
        if self._file is None:
            return
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        start = self._file.tell()
        try:
            if self._file.write(data) < len(data):
                raise OSError("the disk is full")
        except OSError as error:  # no reason to end a training
            logger.warning(f"no more steps are recorded: cannot write {self._file.name}: {error}")
            with contextlib.suppress(OSError):
                self._file.truncate(start)  # no half of a line
            self._file = None
