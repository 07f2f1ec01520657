"""Tied weights: on two and three stages, twice on one rank, with several attributes; values against one process."""

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc, SharedLayerDesc

from paddle_vpp_ext.fleet import versions
from pool import get_pool
from training import WIDTH, Block, OneProcess, batch, build, cut

P, V = 4, 2
# 2.6 takes one attribute only.
ATTRIBUTES = "weight" if paddle.__version__.startswith("2.") else ["weight", "scale"]


class Tied(nn.Layer):
    """``tanh(x W s)`` with weights that do not depend on the layer's place in the model."""

    def __init__(self):
        super().__init__()
        values = np.random.RandomState(7).uniform(-0.5, 0.5, [WIDTH, WIDTH]).astype("float32")
        self.weight = self.create_parameter([WIDTH, WIDTH], default_initializer=nn.initializer.Assign(values))
        self.scale = self.create_parameter([1], default_initializer=nn.initializer.Constant(1.5))

    def forward(self, x):
        y = paddle.matmul(x, self.weight)
        return paddle.tanh(y * self.scale if "scale" in ATTRIBUTES else y)


def transposed(layer, x):
    """Its gradient of the weight is a view with holes."""
    return paddle.tanh(paddle.matmul(x, layer.weight.transpose([1, 0]) * 1.0))


def tied(k, attributes):
    forward = transposed if k % 2 else None
    return SharedLayerDesc("tied", Tied, forward_func=forward, shared_weight_attr=attributes)


def descs(places, attributes):
    return [tied(k, attributes) if k in places else LayerDesc(Block) for k in range(P * V)]


class OneProcessTied(OneProcess):
    def __init__(self, places, optimizer):
        super().__init__([LayerDesc(Block) for _ in range(P * V)])
        self.tied = Tied()
        for k in places:
            self.layers[k] = (lambda x: transposed(self.tied, x)) if k % 2 else self.tied
        layers = [self.tied] + [layer for layer in self.layers.values() if isinstance(layer, Block)]
        self.optimizer = optimizer([p for layer in layers for p in layer.parameters()])


def clipped(parameters):
    """A clip that bites, so that a weight that counts twice in the norm shows."""
    return paddle.optimizer.Momentum(0.5, parameters=parameters, grad_clip=paddle.nn.ClipGradByGlobalNorm(0.02))


def plain(parameters):
    return paddle.optimizer.SGD(0.5, parameters=parameters)


def train(places, attributes, schedule, m, optimizer):
    engine, _ = build(descs(places, attributes), V, schedule, m, seg_method="layer:Block|Tied")
    wrapped = fleet.distributed_optimizer(optimizer(engine.parameters()))
    losses = [engine.train_batch(list(batch(step, 2 * m)), wrapped).item() for step in range(3)]
    layer = dict(engine._layers.shared_layers.items()).get("tied")
    return losses, layer and (layer.weight.numpy(), layer.scale.numpy())


def check(results, places, m, optimizer):
    one = OneProcessTied(places, optimizer)
    expected = [one.step(cut(batch(step, 2 * m), m)).item() for step in range(3)]
    held = [weights for _, weights in results if weights]
    assert len(held) == len({k % P for k in places})
    for losses, _ in results:
        np.testing.assert_allclose(losses, expected, rtol=2e-6)
    for weight, scale in held:
        np.testing.assert_array_equal(weight, held[0][0])
        np.testing.assert_array_equal(scale, held[0][1])
        np.testing.assert_allclose(weight, one.tied.weight.numpy(), rtol=2e-4, atol=2e-6)
        np.testing.assert_allclose(scale, one.tied.scale.numpy(), rtol=2e-5)


# Places of the tied layers among eight parts on four ranks: part k is on rank k % 4.
PLACES = {
    "both ends": (0, 7),
    "twice on one rank": (0, 4),
    "twice on one rank and on another": (0, 4, 7),
    "three ranks": (0, 5, 6),
    "three ranks, the first in the middle": (2, 4, 5),
    "every rank": (0, 1, 2, 3, 6),
}


@pytest.mark.parametrize("optimizer", (plain, clipped))
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("schedule", ("VPP", "ZBVPP"))
def test_14_tied_weights_get_the_gradients_of_all_stages_and_count_once_in_the_norm(schedule, places, optimizer):
    results = get_pool(P).run(train, PLACES[places], ATTRIBUTES, schedule, 5, optimizer)
    check(results, PLACES[places], 5, optimizer)


@pytest.mark.parametrize("schedule, m", (("FthenB", 4), ("VPP", 1)))
def test_14_a_gradient_with_holes_is_summed_too(schedule, m):
    places = (1, 7)
    check(get_pool(P).run(train, places, ATTRIBUTES, schedule, m, plain), places, m, plain)


class Random(Tied):
    def __init__(self):
        super().__init__()
        self.weight.set_value(paddle.rand([WIDTH, WIDTH]))


def first_weights(places):
    shared = SharedLayerDesc("tied", Random, shared_weight_attr="weight")
    tied_layers = [shared if k in places else LayerDesc(Block) for k in range(P * V)]
    engine, _ = build(tied_layers, V, "VPP", 4, seg_method="layer:Block|Random")
    layer = dict(engine._layers.shared_layers.items()).get("tied")
    return layer and layer.weight.numpy()


@pytest.mark.parametrize("places", PLACES)
def test_14_tied_weights_start_equal(places):
    held = [weight for weight in get_pool(P).run(first_weights, PLACES[places]) if weight is not None]
    for weight in held:
        np.testing.assert_array_equal(weight, held[0])


def test_14_a_gradient_with_holes_is_replaced_by_a_whole_one():
    parameter = paddle.create_parameter([2, 3], "float32")
    values = np.arange(6, dtype="float32").reshape([3, 2])
    parameter.grad = paddle.to_tensor(values).transpose([1, 0])
    whole = versions.whole_gradient(parameter)
    whole.add_(paddle.ones([2, 3]))  # as a collective would
    np.testing.assert_array_equal(parameter.grad.numpy(), values.T + 1)
    assert parameter.grad.is_contiguous()


# ---- several names

NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")


class Named(nn.Layer):
    """``tanh(x W)`` with weights that depend on the layer's name only."""

    def __init__(self, number):
        super().__init__()
        values = np.random.RandomState(100 + number).uniform(-0.5, 0.5, [WIDTH, WIDTH]).astype("float32")
        self.weight = self.create_parameter([WIDTH, WIDTH], default_initializer=nn.initializer.Assign(values))

    def forward(self, x):
        return paddle.tanh(paddle.matmul(x, self.weight))


def train_named(places):
    """``places``: for each layer of the model the number of its name."""
    descs = [SharedLayerDesc(NAMES[n], Named, None, "weight", n) for n in places]
    engine, _ = build(descs, 1, "1F1B", 5, seg_method="uniform")
    wrapped = fleet.distributed_optimizer(plain(engine.parameters()))
    losses = [engine.train_batch(list(batch(step, 2 * 5)), wrapped).item() for step in range(3)]
    return losses, {name: layer.weight.numpy() for name, layer in engine._layers.shared_layers.items()}


@pytest.mark.parametrize(
    "places", ((0, 1, 2, 3, 4, 5, 3, 4, 5, 0, 1, 2), (0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0), (0, 1, 2, 0, 3, 4, 3, 4, 5, 1, 2, 5))
)
def test_several_shared_names_are_kept_apart_although_each_process_hashes_them_in_its_own_way(places):
    """2.6 and 3.0 make the groups in the order of a set of names, which differs from process to process."""
    results = get_pool(P).run(train_named, places)
    layers = [Named(n) for n in range(len(NAMES))]
    one = OneProcess([layers[n] for n in places])
    one.optimizer = plain([layer.weight for layer in layers])
    expected = [one.step(cut(batch(step, 2 * 5), 5)).item() for step in range(3)]
    for losses, held in results:
        np.testing.assert_allclose(losses, expected, rtol=2e-6)
        for name, weight in held.items():
            np.testing.assert_allclose(weight, layers[NAMES.index(name)].weight.numpy(), rtol=2e-4, atol=2e-6, err_msg=name)
