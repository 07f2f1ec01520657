"""Failure drills on real processes, the quick ones. All of them: ci/drills.sh."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DRILLS = Path(__file__).resolve().parents[1] / "drills"
sys.path.insert(0, str(DRILLS))

import drill  # noqa: E402
import expect  # noqa: E402
import forks  # noqa: E402
import pool  # noqa: E402

pytestmark = pytest.mark.one_release  # of our own connections: no release of Paddle differs


@pytest.fixture(autouse=True, scope="module")
def room_for_the_drills():
    pool.close_pools()
    yield
    forks.close()


@pytest.mark.parametrize("at, phase", [(0, "startup"), (1, "steady")])
def test_a_killed_rank_is_named_by_all_others_within_seconds(at, phase):
    expect.lost(drill.run("kill", at=at, phase=phase), at)


def test_a_rank_that_leaves_early_is_named_by_all_others():
    expect.lost(drill.run("leave", at=1), 1)


@pytest.mark.parametrize(
    "fault, at, phase, text",
    [
        ("fail", 1, "cooldown", "the layer fails"),
        ("fail_data", 0, "", "the data iterator fails"),
    ],
)
def test_after_an_exception_that_all_ranks_catch_training_goes_on_as_in_one_process(fault, at, phase, text):
    expect.failed_and_recovered(drill.run(fault, at=at, phase=phase, recover=True), at, text)


def test_a_message_of_the_wrong_size_is_an_error_on_all_ranks():
    result = drill.run("wrong_size", at=0)
    expect.ended_with_errors_naming(result, None, "the sent tensor has 128 bytes, the one to be filled 64")


def test_a_rank_that_hangs_is_named_by_the_others_and_by_diagnose(tmp_path):
    limit = 3
    result = drill.run("sleep", at=1, seconds=9, schedule=f"VPP:timeout={limit}", logs=tmp_path)
    expect.ended_with_errors_naming(result, 1, "rank 1 says nothing", limit=limit)
    assert "not gone on for 3 s, waiting for no other rank" in result.outputs[1] and "time.sleep(" in result.outputs[1]
    found = subprocess.run(
        [sys.executable, "-m", "paddle_vpp_ext", "diagnose", str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(pool.ROOT)},
    )
    assert found.returncode == 1 and "rank 1 is behind" in found.stdout and "culprit: rank 1" in found.stdout, found


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of 16 kB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system of its own wants root")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_while_tracing_leaves_whole_lines_and_ends_nothing(small_disk):
    result = drill.run("none", schedule=f"VPP:trace={small_disk}", steps_before=6)
    expect.survived(result)
    assert any("no more steps are recorded" in output for output in result.outputs)
    files = list(small_disk.glob("*.jsonl"))
    assert files
    for file in files:
        text = file.read_text()
        assert text == "" or text.endswith("\n")
        list(map(json.loads, text.splitlines()))
