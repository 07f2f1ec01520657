"""CPU processes start reliably, whatever Paddle does with the keys of its store."""

import os

import paddle
import pytest

import pool
from paddle_vpp_ext.fleet import cpu_bridges, device

pytestmark = pytest.mark.skipif(not device.is_cpu(), reason="this Paddle is not CPU-only")

STARTS = int(os.environ.get("PADDLE_VPP_STARTS", "3"))


def make_groups_and_reduce():
    import paddle.distributed as dist

    world = list(range(dist.get_world_size()))
    sums = []
    for ranks in [world, world[:3], world[1:], world]:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            total = paddle.to_tensor([float(dist.get_rank())])
            dist.all_reduce(total, group=group)
            sums.append((ranks, total.item()))
    return sums


def synchronize_everything():
    paddle.device.synchronize()
    paddle.device.synchronize("cpu")
    paddle.device.cuda.synchronize()
    return paddle.distributed.ParallelEnv().device_id


@pytest.mark.parametrize("start", range(STARTS))
def test_four_processes_start_and_make_groups(start):
    pool.close_pools()
    fresh = pool.get_pool(4)
    for sums in fresh.run(make_groups_and_reduce):
        for ranks, total in sums:
            assert total == sum(ranks)


def test_synchronize_and_device_id_work_on_cpu():
    assert pool.get_pool(4).run(synchronize_everything) == [0] * 4


def test_a_failure_shows_every_ranks_traceback_and_the_pool_starts_anew():
    workers = pool.get_pool(4)
    with pytest.raises(pool.WorkerError) as caught:
        workers.run(fail_on_rank_1_hang_on_the_others, timeout=10)
    assert "rank 1: Traceback" in str(caught.value)
    assert "on purpose" in str(caught.value)
    assert str(caught.value).count("fail_on_rank_1_hang_on_the_others") >= 4, caught.value
    assert workers.run(paddle.distributed.get_rank) == [0, 1, 2, 3]


def fail_on_rank_1_hang_on_the_others():
    import time

    if paddle.distributed.get_rank() == 1:
        raise ValueError("on purpose")
    time.sleep(60)


def test_install_and_uninstall_are_idempotent_and_restore(monkeypatch):
    monkeypatch.delenv("PADDLE_DISTRI_BACKEND", raising=False)
    from paddle.distributed import collective, parallel

    def state():
        return (
            collective._new_process_group_impl,
            parallel._new_process_group_impl,
            paddle.device.synchronize,
            paddle.device.cuda.synchronize,
            hasattr(paddle.distributed.ParallelEnv, "_device_id"),
            os.environ.get("PADDLE_DISTRI_BACKEND"),
            paddle.Tensor.cuda,
        )

    cpu_bridges.uninstall()
    before = state()
    cpu_bridges.install()
    installed = state()
    cpu_bridges.install()
    assert state() == installed != before
    cpu_bridges.uninstall()
    cpu_bridges.uninstall()
    assert state() == before


def cuda_called_from(module, tensor):
    """What a tensor's ``cuda()`` gives to a function of a module of this name."""
    names = {"__name__": module}
    exec("def call(tensor):\n    return tensor.cuda()", names)
    return names["call"](tensor)


@pytest.mark.parametrize("module", ["paddle.distributed.flex_checkpoint.dcp.resharder", "paddle.distributed.checkpoint.load_state_dict"])
def test_paddles_checkpoint_code_gets_a_copy_where_it_asks_for_a_gpu(module):
    tensor = paddle.ones([3])
    tensor.stop_gradient = False
    cpu_bridges.install()
    try:
        copy = cuda_called_from(module, tensor)
    finally:
        cpu_bridges.uninstall()
    assert copy.place.is_cpu_place() and not copy.stop_gradient
    copy.stop_gradient = True
    copy.zero_()
    assert tensor.tolist() == [1.0, 1.0, 1.0]


def test_a_script_that_asks_for_a_gpu_hears_what_it_heard_before(monkeypatch):
    # Paddle's own answer is an exception in one release, and the end of the process in another.
    monkeypatch.setattr(paddle.Tensor, "cuda", lambda self: "Paddle's answer")
    cpu_bridges.install()
    try:
        assert cuda_called_from("train", paddle.ones([3])) == "Paddle's answer"
    finally:
        cpu_bridges.uninstall()
