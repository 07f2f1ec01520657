"""Paddle's own pipeline engines train on CPU over our channels: what ours is compared with."""

import contextlib

import numpy
import paddle
import pytest
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer

import pool
from paddle_vpp_ext.fleet import cpu_bridges, device
from paddle_vpp_ext.fleet.engine import selector
from paddle_vpp_ext.fleet.paddle_sockets import _tcp_sockets
from paddle_vpp_ext.fleet.transport.channels import Channels
from paddle_vpp_ext.fleet.transport.paddle_p2p import route_paddle_p2p
from training import set_options

pytestmark = pytest.mark.skipif(not device.is_cpu(), reason="this Paddle is not CPU-only")

WIDTH, BLOCKS, STEPS, ROWS = 8, 8, 3, 2


class Block(paddle.nn.Layer):
    """A layer whose weights depend on nothing but its place in the model."""

    def __init__(self, index):
        super().__init__()
        self.linear = paddle.nn.Linear(WIDTH, WIDTH)
        generator = numpy.random.RandomState(index)
        self.linear.weight.set_value(generator.uniform(-0.5, 0.5, [WIDTH, WIDTH]).astype("float32"))
        self.linear.bias.set_value(generator.uniform(-0.5, 0.5, [WIDTH]).astype("float32"))

    def forward(self, x):
        return paddle.tanh(self.linear(x))


def batch(step, micro_batches):
    x = numpy.random.RandomState(100 + step).rand(ROWS * micro_batches, WIDTH).astype("float32")
    return paddle.to_tensor(x), paddle.to_tensor(x)


def losses_in_one_process(micro_batches):
    model = paddle.nn.Sequential(*[Block(i) for i in range(BLOCKS)])
    optimizer = paddle.optimizer.SGD(0.5, parameters=model.parameters())
    losses = []
    for step in range(STEPS):
        x, y = batch(step, micro_batches)
        total = 0.0
        for i in range(micro_batches):
            rows = slice(ROWS * i, ROWS * (i + 1))
            loss = paddle.nn.functional.mse_loss(model(x[rows]), y[rows]) / micro_batches
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(total)
    return losses


def losses_of_paddle(num_chunks, micro_batches, overlap):
    from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer

    world_size = paddle.distributed.get_world_size()
    strategy = fleet.DistributedStrategy()
    configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": world_size}
    if overlap:
        configs["pp_configs"] = {"overlap_p2p_comm": True, "use_batch_p2p_comm": False}
    strategy.hybrid_configs = configs
    strategy.pipeline_configs = {"accumulate_steps": micro_batches, "micro_batch_size": ROWS}
    fleet.init(is_collective=True, strategy=strategy)
    hcg = fleet.get_hybrid_communicate_group()
    channels = Channels(hcg.get_pipe_parallel_group().ranks)
    undo = route_paddle_p2p(channels)
    selector.disable()  # for Paddle's own classes,
    cpu_bridges.install()  # which still need this
    try:
        layers = PipelineLayer(
            layers=[LayerDesc(Block, i) for i in range(BLOCKS)],
            loss_fn=paddle.nn.MSELoss(),
            topology=hcg.topology(),
            seg_method="layer:Block",
            num_virtual_pipeline_stages=num_chunks if num_chunks > 1 else None,
        )
        model = fleet.distributed_model(layers)
        optimizer = paddle.optimizer.SGD(0.5, parameters=model.parameters())
        optimizer = fleet.distributed_optimizer(optimizer)
        losses = [model.train_batch(batch(step, micro_batches), optimizer).item() for step in range(STEPS)]
        return type(model).__module__ + "." + type(model).__name__, losses
    finally:
        undo()
        channels.close()
        selector.enable()


@pytest.mark.parametrize(
    "stages, num_chunks, micro_batches, overlap, engine",
    [
        (2, 1, 4, False, "PipelineParallel"),
        (4, 1, 8, False, "PipelineParallel"),
        (4, 2, 8, False, "PipelineParallelWithInterleave"),
        (4, 2, 8, True, "PipelineParallelWithInterleave"),
    ],
)
def test_paddles_engines_train_as_one_process(stages, num_chunks, micro_batches, overlap, engine):
    if overlap and paddle.__version__.startswith("2."):
        pytest.skip("this Paddle has no overlap_p2p_comm")
    results = pool.get_pool(stages).run(losses_of_paddle, num_chunks, micro_batches, overlap, timeout=120)
    expected = losses_in_one_process(micro_batches)
    for name, losses in results:
        assert name.startswith("paddle.") and name.endswith("." + engine)
        numpy.testing.assert_allclose(losses, expected, rtol=1e-6)


def wrap_paddles_own_and_disable():
    """What enable() has made for Paddle's own engine, before and after disable()."""
    from paddle.distributed.fleet.meta_parallel.pp_utils import p2p_communication as module

    set_options("paddle", 4)
    look = lambda: (type(module.paddle).__name__, count_connections())
    before = look()
    hcg = fleet.get_hybrid_communicate_group()
    layers = PipelineLayer(layers=[LayerDesc(Block, i) for i in range(BLOCKS)], loss_fn=paddle.nn.MSELoss(), topology=hcg.topology())
    fleet.distributed_model(layers)
    during = look()
    selector.disable()
    try:
        return before, during, look()
    finally:
        selector.enable()


def count_connections():
    """How many TCP connections this process has open."""
    count = 0
    for sock in _tcp_sockets():
        with contextlib.suppress(OSError):
            sock.getpeername()
            count += 1
    return count


def test_disable_takes_back_what_paddles_own_engine_got():
    for before, during, after in pool.get_pool(2).run(wrap_paddles_own_and_disable):
        assert before == after and during == ("_Overlay", before[1] + 4)  # two directions for each of two kinds
