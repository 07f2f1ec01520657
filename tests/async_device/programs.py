"""Runs small programs on the device, as real processes with a limit; those that still live at the end are ended by their pid."""

import os
import pathlib
import socket
import subprocess
import sys
import textwrap

from device import environment, rank_environment

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT = 30  # seconds for a program that shall end
HANG = 6  # after which one that shall hang is believed to

START = """
import os, sys, time
import numpy as np
import paddle
import device
rank = int(os.environ.get("PADDLE_TRAINER_ID", 0))
paddle.set_device(f"async_device:{rank}")
"""
START_TWO = (
    START
    + """
import paddle.distributed as dist
peer = 1 - rank
dist.init_parallel_env()
device.group_batches()
def batch(*operations):
    return dist.batch_isend_irecv([dist.P2POp(kind, tensor, peer, group) for kind, tensor, group in operations])
"""
)


class Result:
    def __init__(self, codes, texts):
        self.codes, self.texts = codes, texts
        self.all = "\n".join(texts)

    @property
    def hung(self):
        return None in self.codes

    @property
    def passed(self):
        return all(code == 0 for code in self.codes)


def run(program, ranks=1, limit=LIMIT, **options):
    """What became of ``program`` on so many ranks; ``options`` as of ``environment``."""
    port = _free_port()
    processes = []
    for rank in range(ranks):
        env = {
            **os.environ,
            **environment(**options),
            "PYTHONPATH": os.pathsep.join(map(str, (HERE, ROOT, HERE.with_name("fleet")))),
            "PYTHONWARNINGS": "ignore",
            "GLOG_minloglevel": "2",
            "OMP_NUM_THREADS": "1",
        }
        if ranks > 1:
            env.update(rank_environment(rank, ranks, port))
        text = (START_TWO if ranks > 1 else START) + textwrap.dedent(program)
        processes.append(
            subprocess.Popen([sys.executable, "-c", text], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    codes, texts = [], []
    try:
        for process in processes:
            try:
                texts.append(process.communicate(timeout=limit)[0])
                codes.append(process.returncode)
            except subprocess.TimeoutExpired:
                limit = 1  # the other has had its time as well
                process.kill()
                texts.append(process.communicate()[0])
                codes.append(None)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return Result(codes, texts)


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return min(probe.getsockname()[1], 65000)
