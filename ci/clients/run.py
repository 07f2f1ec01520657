"""Trains a tiny Llama through a client's own Trainer, in one process and over stages with paddle_vpp_ext, and compares.

    python run.py FOLDER CLIENT=ENVIRONMENT…

CLIENT is one of those in clients.py, ENVIRONMENT the folder of the virtual environment with the client in it; FOLDER
gets models, logs and checkpoints. Exit status 1 if a loss differs by more than 1e-6, or a training fails.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import cli_files
from clients import CLIENTS
from sizes import EVERY, STEPS

HERE = Path(__file__).resolve().parent
TOLERANCE = 1e-6
LIMIT = 170  # seconds that a training may take
GRACE = 30  # seconds in which it may end when it is told to
OURS = "pipeline schedule "  # what our engine logs at its start
NUMBER = r"\d+(?:\.\d+)?(?:e-?\d+)?"


class Case(NamedTuple):
    """A training over stages.

    ``way``: trainer, resumed (from the checkpoint of the same case by trainer), or cli. ``schedule``: none is the selector's rule.
    """

    stages: int
    accumulate_steps: int
    ragged: bool = False
    way: str = "trainer"
    schedule: str = ""

    @property
    def name(self):
        how = {"trainer": "", "resumed": " resumed", "cli": " by its CLI"}[self.way]
        ragged, schedule = " ragged" if self.ragged else "", f" {self.schedule}" if self.schedule else ""
        return f"p={self.stages} V=2 m={self.accumulate_steps}{schedule}{ragged}{how}"

    @property
    def reference(self):
        """The same training in one process."""
        return self._replace(stages=1, way="cli" if self.way == "cli" else "trainer", schedule="")

    @property
    def saved(self):
        """The case from whose checkpoint a resumed one starts."""
        return self._replace(way="trainer", schedule="")


CASES = [
    Case(4, 8),
    Case(4, 9),
    Case(2, 5),
    Case(4, 5),
    Case(4, 5, way="resumed", schedule="VPP:groups=even"),  # not the schedule under which it was saved
    Case(4, 9, ragged=True),
    Case(4, 5, way="cli", schedule="VPP"),
]
SAVED = [case.saved for case in CASES if case.way == "resumed"]


class Failed(Exception):
    """A training that did not come to its end, or not as it should."""


class Losses(NamedTuple):
    train: list
    eval: list

    @staticmethod
    def read(output):
        """Those that a Trainer prints for each step and evaluation."""
        plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
        train = re.findall(rf"(?<!\w)loss: ({NUMBER}), learning_rate", plain)
        evaluated = re.findall(rf"(?<!\w)eval_loss: ({NUMBER})", plain)
        return Losses([float(loss) for loss in train], [float(loss) for loss in evaluated])

    def since_checkpoint(self):
        """What a training that is resumed from the checkpoint repeats."""
        return Losses(self.train[EVERY:], self.eval[1:])

    def difference(self, other):
        """The greatest between two; Failed if they are not of as many steps."""
        if not self.train or tuple(map(len, self)) != tuple(map(len, other)):
            raise Failed(
                f"{len(self.train)} steps and {len(self.eval)} evaluations, {len(other.train)} and {len(other.eval)} in one process"
            )
        return max(abs(a - b) for mine, others in zip(self, other) for a, b in zip(mine, others))


class Runner:
    """Runs the cases of one client in its environment."""

    def __init__(self, client, environment, folder):
        self.client, self.bin, self.folder = client, Path(environment).resolve() / "bin", Path(folder).resolve() / client.name
        self.references = {}
        shutil.rmtree(self.folder, ignore_errors=True)
        self.model = self.folder / "model"

    def compare(self, case):
        """(greatest difference, seconds in one process, seconds over stages)."""
        if not self.model.exists():
            self._make_model()
        if case.reference not in self.references:
            self.references[case.reference] = self._train(case.reference)
        expected, seconds_of_one, _ = self.references[case.reference]
        found, seconds, output = self._train(case)
        if OURS not in output:
            raise Failed("the engine is not that of paddle_vpp_ext")
        if case.way == "resumed":
            expected = expected.since_checkpoint()
        return found.difference(expected), seconds_of_one, seconds

    def _make_model(self):
        """The weights from which all cases start."""
        self._run("make", [self.bin / "python", HERE / self.client.script, *_flags({**self._options(Case(1, 1)), "make_model": True})])

    def _train(self, case):
        folder = self._folder(case)
        folder.mkdir(parents=True)
        environment = dict(self.client.environment_when_ragged) if case.ragged else {}
        if case.schedule:
            environment["PADDLE_VPP_SCHEDULE"] = case.schedule
        if case.way == "cli":
            config = cli_files.write_config(folder, self.model, {**self._options(case), "save_strategy": "no"})
            command = [self.bin / "paddleformers-cli", "train", config]
            environment.update(CUDA_VISIBLE_DEVICES=",".join(map(str, range(case.stages))), MASTER_PORT=str(_free_port()))
        else:
            launch = ["-m", "paddle.distributed.launch", "--nproc_per_node", str(case.stages), "--log_dir", folder / "log"]
            command = [self.bin / "python", *(launch if case.stages > 1 else []), HERE / self.client.script, *_flags(self._options(case))]
        began = time.monotonic()
        output = self._run(_slug(case), command, environment)
        return Losses.read(output), time.monotonic() - began, output

    def _options(self, case):
        options = {
            **self.client.options,
            "output_dir": str(self._folder(case) / "out"),
            "overwrite_output_dir": True,
            "device": "cpu",
            "do_train": True,
            "do_eval": True,
            "max_steps": STEPS,
            "evaluation_strategy": "steps",
            "eval_steps": EVERY,
            "logging_steps": 1,
            "learning_rate": 0.01,
            "per_device_train_batch_size": 1,
            "per_device_eval_batch_size": 1,
            "gradient_accumulation_steps": case.accumulate_steps,
            "save_strategy": "steps" if case in SAVED else "no",
            "save_steps": EVERY,
            "report_to": "none",
            "disable_tqdm": True,
        }
        if case.way != "cli":
            options.update(model=str(self.model), ragged=case.ragged)
        if case.stages > 1:
            options.update({self.client.stages: case.stages, self.client.chunks: 2})
            options.update(self.client.options_when_ragged if case.ragged else {})
        if case.way == "resumed":
            options["resume_from_checkpoint"] = str(self._folder(case.saved) / "out" / f"checkpoint-{EVERY}")
        return options

    def _folder(self, case):
        return self.folder / _slug(case)

    def _run(self, name, command, environment=None):
        """The output of a command that does not mention paddle_vpp_ext: PADDLE_VPP_EXT=1 brings it in."""
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / f"{name}.txt"
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PADDLE_", "MASTER_", "FLAGS_"))}
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        with open(log, "w", encoding="utf-8") as file:
            process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={**kept, "OMP_NUM_THREADS": "1", "GLOG_minloglevel": "2", "PATH": path, "PADDLE_VPP_EXT": "1", **(environment or {})},
                start_new_session=True,  # a group, for _end
            )
            try:
                status = process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                status = f"none within {LIMIT} s"
            finally:
                _end(process)
        output = log.read_text(encoding="utf-8", errors="replace")
        if status != 0:
            tail = "\n".join(output.splitlines()[-30:])
            raise Failed(f"exit status {status}, the whole output is in {log}\n{tail}")
        return output


def _end(process):
    """Ends a command that runs still. Paddle's launcher, when it is told to end, ends the processes that it has started."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)


def _slug(case):
    return re.sub(r"\W+", "-", case.name)


def _flags(options):
    return [word for key, value in options.items() for word in (f"--{key}", str(value))]


def _free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def main(folder, *clients):
    rows = []
    for name, environment in (client.split("=", 1) for client in clients):
        for row in compare_all(Runner(CLIENTS[name], environment, folder)):
            print(*row, sep="  ", flush=True)
            rows.append(row)
    print_table(("client", "case", "greatest difference", "s, one process", "s, stages", ""), rows)
    return 1 if any(row[-1] for row in rows) else 0


def compare_all(runner):
    """A row of the table for each case; its last cell says what is wrong, if anything."""
    client = runner.client
    for case in CASES:
        if case.way == "cli" and not client.cli:
            continue
        try:
            difference, one, seconds = runner.compare(case)
        except Failed as error:
            print(f"{client.name}, {case.name}: {error}", file=sys.stderr)
            yield client.name, case.name, "", "", "", "FAILED"
        else:
            wrong = "" if difference <= TOLERANCE else "DIFFERS"
            yield client.name, case.name, f"{difference:.1e}", f"{one:.0f}", f"{seconds:.0f}", wrong


def print_table(head, rows):
    """In columns, with a line above."""
    widths = [max(len(row[k]) for row in (head, *rows)) for k in range(len(head))]
    print()
    for row in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
