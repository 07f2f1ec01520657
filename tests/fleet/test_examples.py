"""The examples run as the README says, under Paddle's own launcher."""

import os
import re
import subprocess
import sys

import pool

EXAMPLES = pool.ROOT / "paddle_vpp_ext" / "examples"


def launch(script, processes, folder, *arguments):
    """Standard output of the first rank, under python -m paddle.distributed.launch."""
    pool.close_pools()  # cores are scarce
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PADDLE_", "MASTER_"))}
    environment.update(PYTHONPATH=str(pool.ROOT), OMP_NUM_THREADS="1", GLOG_minloglevel="2")
    done = subprocess.run(
        [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", str(processes), "--log_dir", "log", script, *arguments],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def losses(output):
    return [float(loss) for loss in re.findall(r"step +\d+ +loss ([\d.]+)", output)]


def test_the_overlap_example_trains(tmp_path):
    found = losses(launch(str(EXAMPLES / "overlap.py"), 2, tmp_path))
    assert len(found) == 10 and found[-1] < found[0]


def test_the_gpt_example_agrees_with_one_process_and_draws(tmp_path):
    small = ("--steps", "4", "--width", "32", "--length", "32", "--micro-batch-size", "2", "--check")
    output = launch(str(EXAMPLES / "train_gpt.py"), 4, tmp_path, *small)
    assert "check passed: 4 losses equal one process's within 1e-5" in output
    assert re.search(r"idle share: planned \d+\.\d%, measured \d+\.\d%", output)
    assert (tmp_path / "output" / "trace.json").stat().st_size > 1000
    assert (tmp_path / "output" / "timeline.png").read_bytes().startswith(b"\x89PNG")
