"""Gradients of a split backward are those of the whole one to the last bit, and nothing outside notices. One process."""

import gc
import threading
import weakref

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.utils import recompute

from paddle_vpp_ext.fleet.stage.split_backward import SplitBackward

MICRO_BATCHES = 4


class Mlp(nn.Layer):
    def __init__(self, bias=None):
        super().__init__()
        self.one, self.two = nn.Linear(6, 8, bias_attr=bias), nn.Linear(8, 6, bias_attr=bias)

    def forward(self, x):
        return self.two(nn.functional.gelu(self.one(x))) + x


class Attention(nn.Layer):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(6), nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, axis=-1)
        return self.out(nn.functional.softmax(paddle.matmul(q, k, transpose_y=True)) @ v)


class Twice(Mlp):
    def forward(self, x):
        return self.two(self.one(self.two(self.one(x))))


class Forms(nn.Layer):
    """Products in all forms, of which some are not split."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (self.create_parameter([6, 6]) for _ in range(3))

    def forward(self, x):
        x = x @ self.a + paddle.matmul(x, self.b, transpose_y=True) + paddle.matmul(x=x, y=self.c)
        left = paddle.matmul(self.c, x, transpose_y=True).transpose([0, 2, 1])
        return x + paddle.einsum("bsd,de->bse", x, self.a) + left + nn.functional.linear(x, self.b)


class Frozen(Mlp):
    def __init__(self):
        super().__init__()
        self.one.weight.stop_gradient = True
        self.two.bias.stop_gradient = True


class Recomputed(Mlp):
    def forward(self, x):
        return recompute(super().forward, x)


class InPlace(Mlp):
    def forward(self, x):
        y = self.one(x)
        y.scale_(2.0)
        return self.two(y.reshape([-1, 8])).reshape(x.shape)


MODELS = {
    "mlp": Mlp,
    "no bias": lambda: Mlp(False),
    "attention": Attention,
    "twice": Twice,
    "forms": Forms,
    "frozen": Frozen,
    "recompute": Recomputed,
    "in place": InPlace,
    "deep": lambda: nn.Sequential(Mlp(), Attention(), Mlp(False)),
}


def made(build):
    paddle.seed(7)
    return build()


def batches(input_needs_gradient):
    rng = np.random.default_rng(3)
    for _ in range(MICRO_BATCHES):
        x, g = (paddle.to_tensor(rng.standard_normal((2, 3, 6)).astype("float32")) for _ in range(2))
        x.stop_gradient = not input_needs_gradient
        yield x, g


def whole(layer, data):
    inputs = []
    for x, g in data:
        paddle.autograd.backward([layer(x)], [g])
        inputs.append(x.grad)
    return inputs


def in_two(layer, data, delay=2):
    """W of a micro-batch runs ``delay`` micro-batches after its I."""
    split, inputs = SplitBackward(), []
    for i, (x, g) in enumerate(data):
        with split.forward(0):
            y = layer(x)
        split.built(0, [y])
        with split.input_pass((0, i)):
            paddle.autograd.backward([y], [g])
        inputs.append(x.grad)
        if i >= delay:
            split.weight_pass((0, i - delay))
    for i in range(max(0, MICRO_BATCHES - delay), MICRO_BATCHES):
        split.weight_pass((0, i))
    assert not split._deferred
    return inputs


def assert_same(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other):
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_array_equal(a.numpy(), b.numpy())


def gradients(layer):
    return [p.grad for p in layer.parameters()]


@pytest.mark.parametrize("input_needs_gradient", (True, False))
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_whole_backward_to_the_last_bit(name, input_needs_gradient):
    one, other = made(MODELS[name]), made(MODELS[name])
    assert_same(whole(one, batches(input_needs_gradient)), in_two(other, batches(input_needs_gradient)))
    assert_same(gradients(one), gradients(other))


def test_the_input_pass_leaves_the_weights_alone_after_the_first_micro_batch():
    layer, split = made(Mlp), SplitBackward()
    data = list(batches(True))
    for i, (x, g) in enumerate(data[:2]):
        with split.forward(0):
            y = layer(x)
        split.built(0, [y])
        before = [None if p.grad is None else p.grad.numpy().copy() for p in layer.parameters()]
        with split.input_pass((0, i)):
            paddle.autograd.backward([y], [g])
    for p, value in zip(layer.parameters(), before):
        np.testing.assert_array_equal(p.grad.numpy(), value)
    split.weight_pass((0, 1))
    assert all((p.grad.numpy() != value).any() for p, value in zip(layer.parameters(), before))


class Tied(nn.Layer):
    def __init__(self):
        super().__init__()
        self.table, self.mix = nn.Embedding(5, 6), nn.Linear(6, 6)

    def forward(self, x):
        return paddle.matmul(self.mix(self.table(paddle.to_tensor([[1, 2, 0]])) + x), self.table.weight, transpose_y=True)


@pytest.mark.parametrize("build", (Mlp, Attention, Twice, Tied, Recomputed))
def test_hooks_of_a_weight_fire_once_per_micro_batch(build):
    counts = []
    for run in (whole, in_two):
        layer, fired = made(build), {}
        for name, parameter in layer.named_parameters():
            parameter.register_hook(lambda grad, name=name, fired=fired: fired.__setitem__(name, fired.get(name, 0) + 1))
            parameter._register_backward_hook(lambda *_, name=name, fired=fired: fired.__setitem__((name,), fired.get((name,), 0) + 1))
        run(layer, [(x, g if build is not Tied else paddle.ones([2, 3, 5])) for x, g in batches(True)])
        counts.append(fired)
    assert counts[0] == counts[1] and set(counts[1].values()) == {MICRO_BATCHES}


def test_a_tied_weight_stays_whole_and_right():
    one, other = made(Tied), made(Tied)
    data = lambda: [(x, paddle.full([2, 3, 5], 0.1 * i)) for i, (x, _) in enumerate(batches(True))]
    assert_same(whole(one, data()), in_two(other, data()))
    assert_same(gradients(one), gradients(other))


def test_a_whole_backward_through_a_graph_made_for_splitting_is_right():
    one, other = made(Attention), made(Attention)
    whole(one, batches(True))
    split = SplitBackward()
    for x, g in batches(True):
        with split.forward(0):
            y = other(x)
        split.built(0, [y])
        paddle.autograd.backward([y], [g])
    assert_same(gradients(one), gradients(other))


def test_the_patch_is_there_inside_only_also_after_an_error_and_in_no_other_thread():
    from paddle import _C_ops

    before = _C_ops.linear, _C_ops.matmul, paddle.Tensor.__matmul__
    now = lambda: (_C_ops.linear, _C_ops.matmul, paddle.Tensor.__matmul__)
    split = SplitBackward()
    with pytest.raises(KeyError):
        with split.forward(0):
            assert now() != before
            raise KeyError
    assert now() == before
    with pytest.raises(KeyError):
        with split.input_pass((0, 0)):
            raise KeyError
    assert now() == before and not split._deferred
    one, other = made(Mlp), made(Mlp)
    whole(one, batches(True))
    split.built(0, [])
    with split.forward(0):
        thread = threading.Thread(target=whole, args=(other, list(batches(True))))
        thread.start()
        thread.join()
    assert_same(gradients(one), gradients(other))


def test_two_threads_split_at_the_same_time():
    expected = made(Mlp)
    whole(expected, batches(True))
    layers = [made(Mlp) for _ in range(4)]
    errors = []

    def work(layer):
        try:
            in_two(layer, list(batches(True)))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(layer,)) for layer in layers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for layer in layers:
        assert_same(gradients(expected), gradients(layer))


def test_nothing_of_a_micro_batch_lives_after_its_w():
    layer, split = made(Mlp), SplitBackward()
    for i in range(2):
        x, g = next(iter(batches(True)))
        with split.forward(0):
            y = layer(x)
        split.built(0, [y])
        with split.input_pass((0, i)):
            paddle.autograd.backward([y], [g])
    products = [weakref.ref(compute.__self__ if hasattr(compute, "__self__") else compute) for _, compute in split._deferred[0, 1]]
    assert products and all(product() is not None for product in products)
    split.weight_pass((0, 1))
    del y
    gc.collect()
    assert all(product() is None for product in products)


def test_an_input_modified_after_its_i_is_an_error_not_a_wrong_gradient():
    layer, split = made(Mlp), SplitBackward()
    for i, (x, g) in enumerate(list(batches(False))[:2]):
        with split.forward(0):
            y = layer(x)
        split.built(0, [y])
        with split.input_pass((0, i)):
            paddle.autograd.backward([y], [g])
    x.add_(paddle.ones_like(x))
    with pytest.raises(RuntimeError, match="modified in place"):
        split.weight_pass((0, 1))
