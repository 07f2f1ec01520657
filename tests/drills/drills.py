"""All failure drills. Takes minutes, so it is no part of a plain pytest run: bash ci/drills.sh"""

import os
import subprocess
import sys
from functools import partial

import pytest

import drill
import expect
import hosts
import pool

PHASES = ("startup", "steady", "cooldown")
RANKS = (0, 1, 2)
LAST = RANKS[-1]
CUT = ("not done after 10 s", "rank 0, which keeps the job's store, has ended", "does not answer: is the network cut?")
needs_hosts = pytest.mark.skipif(not hosts.available(), reason="two hosts on one machine want root, iproute2 and /dev/net/tun")


@pytest.mark.parametrize("at", RANKS)
@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_rank_is_named_by_all_others_within_seconds(at, phase):
    expect.lost(drill.run("kill", at=at, phase=phase), at)


@pytest.mark.parametrize("at", RANKS)
def test_a_rank_that_leaves_early_is_named_by_all_others(at):
    expect.lost(drill.run("leave", at=at), at)


@pytest.mark.parametrize("at", RANKS)
@pytest.mark.parametrize("phase", PHASES)
def test_after_an_exception_in_a_forward_or_a_backward_training_goes_on(at, phase):
    expect.failed_and_recovered(drill.run("fail", at=at, phase=phase, recover=True), at, "the layer fails")


@pytest.mark.parametrize(
    "fault, at, text",
    [
        ("fail_loss", LAST, "the loss fails"),
        ("fail_data", 0, "the data iterator fails"),
        ("fail_data", LAST, "the data iterator fails"),
    ],
)
def test_after_an_exception_in_the_loss_or_the_data_training_goes_on(fault, at, text):
    expect.failed_and_recovered(drill.run(fault, at=at, phase="", recover=True), at, text)


OTHER_SCHEDULES = ("ZBVPP", "VPP:overlap=on", "VPP:overlap=on,overlap_p2p_comm=on")


def other(schedule):
    """Arguments of a drill with enough micro-batches for steady pairs on all ranks."""
    return {"schedule": f"{schedule}{',' if ':' in schedule else ':'}timeout={drill.LIMIT}", "m": 7}


@pytest.mark.parametrize("at", (0, 1))
@pytest.mark.parametrize("schedule", OTHER_SCHEDULES)
def test_with_split_and_with_overlapped_backwards_a_killed_rank_is_named_by_all_others(schedule, at):
    expect.lost(drill.run("kill", at=at, phase="steady", **other(schedule)), at)


@pytest.mark.parametrize("fault, text", [("fail", "the layer fails"), ("fail_backward", "the backward fails")])
@pytest.mark.parametrize("schedule", OTHER_SCHEDULES)
def test_with_split_and_with_overlapped_backwards_training_goes_on_after_an_exception(schedule, fault, text):
    expect.failed_and_recovered(drill.run(fault, at=1, phase="steady", recover=True, **other(schedule)), 1, text)


@pytest.mark.parametrize("phase", PHASES)
def test_with_two_replicas_a_killed_rank_ends_both_pipelines(phase):
    """The other pipeline learns of it where it sums gradients with this one: from gloo, which names no rank."""
    result = drill.run("kill", at=3, phase=phase, p=2, replicas=2)
    closed, by_gloo = "(rank 3): the other process has ended", "gloo/transport/tcp"
    expect.ended_with_errors_naming(result, 3, closed, by_gloo)
    assert closed in result.errors[2] and result.slowest < 10


@pytest.mark.parametrize("at", RANKS)
def test_after_an_exception_inside_a_backward_training_goes_on(at):
    expect.failed_and_recovered(drill.run("fail_backward", at=at, recover=True), at, "the backward fails")


def test_a_rank_that_sleeps_half_a_minute_is_waited_for():
    for result in drill.together(*(partial(drill.run, "sleep", at=at, seconds=30, schedule="VPP", wait=60) for at in RANKS)):
        expect.survived(result)


def test_a_rank_that_hangs_is_named():
    results = drill.together(*(partial(drill.run, "sleep", at=at, seconds=14, schedule="VPP:timeout=5") for at in RANKS))
    for at, result in zip(RANKS, results):
        expect.ended_with_errors_naming(result, at, f"rank {at} says nothing", limit=5)


@pytest.mark.parametrize("at", RANKS)
def test_a_message_of_the_wrong_size_is_an_error_on_all_ranks(at):
    result = drill.run("wrong_size", at=at)
    at_the_receiver, at_the_sender = "the sent tensor has 128 bytes, the one to be filled 64", "made gradients (float32[4, 8])"
    expect.ended_with_errors_naming(result, None, at_the_receiver, at_the_sender)


@needs_hosts
def test_two_hosts_with_latency_train_as_one_process(tmp_path):
    with hosts.two_hosts(tmp_path, latency=0.005) as two:
        expect.survived(drill.run("none", p=4, enter=two.enter, endpoints=two.endpoints, wait=120))
        assert two.listening() == []


def cut_network(phase, folder, limit):
    """A drill whose wire is cut in that phase, and what diagnose finds in its logs."""
    folder.mkdir()
    with hosts.two_hosts(folder, latency=0.001) as two:
        result = drill.run(
            "cut_the_network",
            at=1,
            phase=phase,
            p=4,
            enter=two.enter,
            endpoints=two.endpoints,
            command=two.cut(),
            schedule=f"VPP:timeout={limit}",
            logs=folder,
        )
        assert two.listening() == []
    command = [sys.executable, "-m", "paddle_vpp_ext", "diagnose", str(folder)]
    return result, subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(pool.ROOT)})


@needs_hosts
def test_a_cut_network_is_an_error_on_all_ranks_and_diagnose_names_the_edge(tmp_path):
    limit = 10
    for result, found in drill.together(*(partial(cut_network, phase, tmp_path / phase, limit) for phase in PHASES)):
        expect.ended_with_errors_naming(result, None, *CUT, limit=limit)
        assert any(f"broken edge: rank {a} - rank {b}\n" in found.stdout for a, b in ((1, 2), (2, 1), (0, 3), (3, 0))), found
