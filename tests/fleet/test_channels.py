"""Point-to-point between stages: values, order, failures of peers, and the end of the process."""

import os
import signal
import subprocess
import sys
import threading
import time

import paddle
import pytest

import pool
from paddle_vpp_ext.fleet import device
from paddle_vpp_ext.fleet.transport.channels import Channels

pytestmark = pytest.mark.skipif(not device.is_cpu(), reason="this Paddle is not CPU-only")

DTYPES = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64"]
SHAPES = [[5], [2, 3], [], [0, 3], [1]]


def sample(dtype, shape, start):
    count = 1
    for size in shape:
        count *= size
    values = paddle.arange(start, start + count, dtype="float32").reshape(shape or [1]) % 7
    values = values if shape else values[0]
    return (values % 2 if dtype == "bool" else values).astype(dtype)


def as_list(tensor):
    if tensor.dtype in (paddle.complex64,):
        return tensor.numpy().tolist()
    return tensor.astype("float64").numpy().tolist()


def world():
    return range(paddle.distributed.get_world_size())


def one(tensor):
    return lambda transfer: transfer(tensor)


def exchange_all_dtypes():
    """Both ranks: an activation 0 -> 1 and a gradient 1 -> 0, and activations over the wrap 1 -> 0 at the same time."""
    channels = Channels(world())
    me, other = channels.stage, 1 - channels.stage
    wrong = []
    for dtype in DTYPES:
        for shape in SHAPES:
            tickets = []
            for kind, start in (("F", 0), ("B", 3)):
                channels.send(other, kind, one(sample(dtype, shape, start + me)))
                received = sample(dtype, shape, 1) * 0 if dtype != "bool" else sample(dtype, shape, 0)
                ticket = channels.receive(other, kind, one(received))
                tickets.append((ticket, received, sample(dtype, shape, start + other)))
            for ticket, received, expected in tickets:
                ticket.wait(20)
                if as_list(received) != as_list(expected) or received.dtype != expected.dtype:
                    wrong.append((dtype, shape, received, expected))
    strided = paddle.arange(6, dtype="float32").reshape([2, 3]).t()
    sent = channels.send(other, "F", one(strided))
    received = paddle.zeros([3, 2])
    channels.receive(other, "F", one(received)).wait(20)
    sent.wait(20)  # close() fails what is not sent yet
    if as_list(received) != [[0, 3], [1, 4], [2, 5]]:
        wrong.append(("strided", received))
    channels.close()
    return [str(w) for w in wrong]


def test_all_dtypes_cross_and_kinds_stay_apart_with_two_stages():
    assert pool.get_pool(2).run(exchange_all_dtypes) == [[], []]


def exchange_in_a_ring(rounds, elements):
    channels = Channels(world())
    p, me = len(channels.ranks), channels.stage
    after, before = (me + 1) % p, (me - 1) % p
    for step in range(rounds):
        forward, backward = paddle.empty([elements]), paddle.empty([elements])
        tickets = [
            channels.send(after, "F", one(paddle.full([elements], 100.0 * step + me))),
            channels.send(before, "B", one(paddle.full([elements], 100.0 * step + 50 + me))),
            channels.receive(before, "F", one(forward)),
            channels.receive(after, "B", one(backward)),
        ]
        for ticket in tickets:
            ticket.wait(30)
        assert (forward == 100.0 * step + before).all().item(), (step, forward)
        assert (backward == 100.0 * step + 50 + after).all().item(), (step, backward)
    channels.close()
    return rounds


def test_large_tensors_go_both_ways_round_a_ring():
    assert pool.get_pool(4).run(exchange_in_a_ring, 8, 1 << 20) == [8] * 4


def send_many_then_receive():
    """All sends first, without waiting; then messages of several tensors, with a header that says what comes."""
    channels = Channels(world())
    if channels.stage == 0:
        tickets = []
        for index in range(50):
            header, payload = paddle.to_tensor([index, index % 5]), paddle.full([index % 5], float(index))

            def job(transfer, header=header, payload=payload):
                transfer(header)
                transfer(payload)
                return header[0].item()

            tickets.append(channels.send(1, "F", job))
        result = [ticket.wait(20) for ticket in tickets]
    else:

        def receive(transfer):
            assert not paddle.is_grad_enabled()
            header = paddle.empty([2], "int64")
            transfer(header)
            payload = paddle.empty([header[1].item()])
            transfer(payload)
            assert payload.numpy().tolist() == [header[0].item()] * header[1].item()
            return header[0].item()

        tickets = [channels.receive(0, "F", receive) for _ in range(50)]
        result = [ticket.wait(20) for ticket in tickets]
    channels.close()
    return result


def test_jobs_of_a_channel_run_in_order_and_return_values():
    assert pool.get_pool(2).run(send_many_then_receive) == [list(range(50))] * 2


def pipelines_side_by_side():
    rank = paddle.distributed.get_rank()
    channels = Channels([rank % 2, rank % 2 + 2])
    other = 1 - channels.stage
    received = paddle.empty([1])
    if channels.stage == 0:
        channels.send(other, "F", one(paddle.to_tensor([float(channels.rank)])))
        channels.receive(other, "B", one(received)).wait(20)
    else:
        channels.receive(other, "F", one(received)).wait(20)
        channels.send(other, "B", one(paddle.to_tensor([float(channels.rank)]))).wait(20)
        # the other end reads it before this closes the connection, or else gets it from the kernel
    paddle.distributed.barrier()
    channels.close()
    return received.item()


def test_two_pipelines_in_one_world():
    assert pool.get_pool(4, pp_degree=2).run(pipelines_side_by_side) == [2, 3, 0, 1]


def failures():
    """Errors of jobs, wrong sizes, limits and closed channels, each with what the user needs to know."""
    channels = Channels(world())
    me, other = channels.stage, 1 - channels.stage
    texts = {}

    def note(name, call):
        try:
            call()
        except Exception as error:
            texts[name] = f"{type(error).__name__}: {error}"

    note("no channel", lambda: channels.send(5, "F", one(paddle.ones([1]))))
    ticks = []
    ticket = channels.receive(other, "F", one(paddle.empty([2])))
    began = time.monotonic()
    note("timeout", lambda: ticket.wait(2.5, on_tick=lambda: ticks.append(1)))
    assert 2.4 < time.monotonic() - began < 4, "a wait did not end at its limit"
    assert len(ticks) == 2 and not ticket.done()

    def failing_tick():
        raise KeyError("peer failed")

    note("tick", lambda: ticket.wait(30, on_tick=failing_tick))
    paddle.distributed.barrier()
    channels.send(other, "F", one(paddle.ones([3])))
    note("wrong size", lambda: ticket.wait(20))
    note("after a failure", lambda: channels.receive(other, "F", one(paddle.empty([2]))).wait(20))
    if me == 0:

        def job(transfer):
            raise RuntimeError("job on purpose")

        note("job", lambda: channels.send(1, "B", job).wait(20))
    else:
        note("peer's job failed", lambda: channels.receive(0, "B", one(paddle.empty([1]))).wait(20))
    paddle.distributed.barrier()
    blocked = channels.receive(1, "B", one(paddle.empty([1]))) if me == 0 else None
    channels.close()
    if blocked is not None:
        note("closed meanwhile", lambda: blocked.wait(5))
    note("closed", lambda: channels.send(other, "B", one(paddle.ones([1]))).wait(5))
    channels.close()
    left = [t.name for t in threading.enumerate() if t.name.startswith("rank ")]
    return texts, left


def test_failures_say_rank_and_what_was_waited_for():
    (texts, left), (texts_1, left_1) = pool.get_pool(2).run(failures)
    assert left == left_1 == []
    here = "rank 0 (stage 0): receive of activation (F) from stage 1 (rank 1)"
    assert texts["no channel"].startswith("ValueError: rank 0 (stage 0): there is no channel")
    assert texts["timeout"] == f"TimeoutError: {here}: not done after 2.5 s"
    assert texts["tick"] == "KeyError: 'peer failed'"
    assert texts["wrong size"].startswith("ValueError: the sent tensor has 12 bytes, the one to be filled 8")
    assert texts["after a failure"] == f"ConnectionError: {here}: impossible after an earlier failure"
    assert texts["job"] == "RuntimeError: job on purpose"
    assert texts_1["peer's job failed"].startswith(
        "ConnectionError: rank 1 (stage 1): receive of gradient (B) from stage 0 (rank 0): the other process has ended"
    )
    assert texts["closed meanwhile"].startswith("ConnectionError: rank 0 (stage 0): receive of gradient")
    assert texts["closed"].endswith("the channel is closed")


def lose_a_peer(folder):
    channels = Channels(world())
    paddle.distributed.barrier()
    if channels.stage == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    big = paddle.ones([1 << 23])  # more than the kernel's buffers hold
    tickets = [channels.receive(1, "B", one(paddle.empty([1]))), channels.send(1, "F", one(big))]
    began = time.monotonic()
    errors = []
    for ticket in tickets:
        try:
            ticket.wait(30)
        except ConnectionError as error:
            errors.append(str(error))
    with open(os.path.join(folder, "survivor"), "w") as file:
        file.write(f"{time.monotonic() - began} {errors}")


def test_a_killed_peer_ends_waiting_in_seconds(tmp_path):
    with pytest.raises(pool.WorkerError, match="exit code -9"):
        pool.get_pool(2).run(lose_a_peer, str(tmp_path))
    seconds, errors = (tmp_path / "survivor").read_text().split(" ", 1)
    assert float(seconds) < 3
    assert "receive of gradient (B) from stage 1 (rank 1)" in errors
    assert "send of activation (F) to stage 1 (rank 1)" in errors


ENDINGS = """
import os, signal, sys, time, paddle
from paddle_vpp_ext.fleet.transport import channels as c
from paddle_vpp_ext.fleet import cpu_bridges, device
cpu_bridges.install()
paddle.distributed.init_parallel_env()
channels = c.Channels([0, 1])
rank = channels.stage
paddle.distributed.barrier()
one = lambda tensor: lambda transfer: transfer(tensor)
blocked = channels.receive(1 - rank, "B" if rank == 0 else "F", one(paddle.empty([1])))
if rank == 0:
    time.sleep(0.3)
    print("ending", time.time(), flush=True)
    if {ending!r} == "exception":
        raise ValueError("on purpose")
    if {ending!r} == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
    if {ending!r} == "exit code":
        sys.exit(5)
else:
    blocked.wait(30)
"""


@pytest.mark.parametrize("ending, code", [("normal", 0), ("exception", 1), ("SIGTERM", -signal.SIGTERM), ("exit code", 5)])
def test_a_process_with_blocked_threads_exits_at_once(ending, code, tmp_path):
    pool.close_pools()
    with pool.reserved_endpoints(2) as endpoints:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", ENDINGS.format(ending=ending)],
                env=pool.environment(rank, endpoints),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            first, _ = processes[0].communicate(timeout=60)
            ended = time.time()
            second, _ = processes[1].communicate(timeout=10)
        finally:
            for process in processes:
                process.kill()
    assert processes[0].returncode == code, first
    began = float(first[first.index("ending") :].split()[1])
    assert ended - began < 3, first
    assert "ConnectionError" in second and processes[1].returncode == 1, second
    assert "terminate called" not in first + second
