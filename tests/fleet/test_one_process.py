"""A world of one process, with the extension enabled."""

import numpy as np
import paddle
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer

from pool import get_pool
from training import WIDTH, Block, Model, OneProcess, batch, cut, mean_square, set_options

M = 4


def train_plain():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    wrapped = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(0.1, parameters=model.parameters()))
    x, y = batch(0, 4)
    losses = []
    for _ in range(3):
        loss = mean_square(wrapped(x), y)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(loss.item())
    return losses


def test_16_one_process_trains_a_model_that_is_no_pipeline_layer():
    losses = get_pool(1).run(train_plain)[0]
    assert losses[0] > losses[1] > losses[2]


def train_pipeline_layer():
    set_options("VPP", M)
    try:
        model = Model([LayerDesc(Block) for _ in range(4)])
    except AttributeError:
        return None  # releases before 3.1 cannot even make the layer
    wrapped = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(0.1, parameters=model.parameters()))
    if isinstance(wrapped, PipelineLayer):
        return None  # before 3.3 the layer itself comes back, which has no train_batch
    return [wrapped.train_batch(list(batch(step, 2 * M)), optimizer).numpy() for step in range(2)]


def test_16_one_process_trains_a_pipeline_layer_where_paddle_does():
    one = OneProcess([LayerDesc(Block) for _ in range(4)])
    expected = [one.step(cut(batch(step, 2 * M), M)).numpy() for step in range(2)]
    losses = get_pool(1).run(train_pipeline_layer)[0]
    if losses is not None:
        np.testing.assert_array_equal(losses, expected)
