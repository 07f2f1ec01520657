"""Tensor parallel next to the pipeline: Paddle's own parallel linears on 2 x 2 processes, values against one process.

CPUs have no kernels for the two ops that connect the halves; PyLayers over gloo stand in for these.
"""

from unittest import mock

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.autograd import PyLayer
from paddle.distributed import fleet
from paddle.distributed.fleet.layers.mpu import mp_ops
from paddle.distributed.fleet.meta_parallel import ColumnParallelLinear, LayerDesc, RowParallelLinear, SharedLayerDesc

from pool import get_pool
from training import WIDTH, OneProcess, assert_same_bits, batch, build, cut, named_layers

P, HALVES, V, M = 2, 2, 2, 5
SEGMENTS = "layer:Half|TiedHalf|FailsOnce"


def pool():
    return get_pool(P * HALVES, pp_degree=P, mp_degree=HALVES)


# ---- the stand-ins


def summed(tensor, group):
    total = tensor.detach().clone()
    paddle.distributed.all_reduce(total, group=group)
    return total


class Identity(PyLayer):
    """Before the columns: the halves' gradients of the input are added up."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient, ctx.group)


class Sum(PyLayer):
    """After the rows: the halves' outputs are added up."""

    @staticmethod
    def forward(ctx, x, group):
        return summed(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone()


def identity(x, group=None, **_):
    return Identity.apply(x, group)


def total(x, group=None, **_):
    return Sum.apply(x, group)


def with_stand_ins(function, *args):
    with mock.patch.object(mp_ops, "_c_identity", identity), mock.patch.object(mp_ops, "_mp_allreduce", total):
        return function(*args)


# ---- the layers, in halves on two processes and whole in one


def numbers(seed, *shape):
    return np.random.RandomState(seed).uniform(-0.5, 0.5, shape).astype("float32")


def values(number):
    """Weights of the columns' halves, their biases, weights of the rows' halves, and the rows' bias."""
    columns, rows = (numbers(3 * number + k, 2, WIDTH, WIDTH) for k in range(2))
    return columns, numbers(3 * number + 2, 2, WIDTH), rows, numbers(number, WIDTH)


class Half(nn.Layer):
    """This process's half of ``tanh(tanh(x C + c) R + r)``."""

    def __init__(self, number):
        super().__init__()
        self.column = ColumnParallelLinear(WIDTH, 2 * WIDTH, gather_output=False, has_bias=True)
        self.row = RowParallelLinear(2 * WIDTH, WIDTH, input_is_parallel=True, has_bias=True)
        columns, biases, rows, bias = values(number)
        which = fleet.get_hybrid_communicate_group().get_model_parallel_rank()
        for parameter, value in zip(self.parameters(), (columns[which], biases[which], rows[which], bias)):
            parameter.set_value(value)

    def forward(self, x):
        return paddle.tanh(self.row(paddle.tanh(self.column(x))))


def parameter(layer, value):
    return layer.create_parameter(list(value.shape), default_initializer=nn.initializer.Assign(value))


class Whole(nn.Layer):
    """Both halves, computed as the two processes do. ``of(which)``: what one of them holds."""

    def __init__(self, number):
        super().__init__()
        *halves, bias = values(number)
        self.halves = nn.LayerList()
        for which in range(HALVES):
            half = nn.Layer()
            half.column, half.bias, half.row = (parameter(half, of[which]) for of in halves)
            self.halves.append(half)
        self.bias = parameter(self, bias)

    def forward(self, x):
        inner = [paddle.tanh(nn.functional.linear(x, half.column, half.bias)) for half in self.halves]
        one, other = (nn.functional.linear(y, half.row) for y, half in zip(inner, self.halves))
        return paddle.tanh(one + other + self.bias)

    def of(self, which):
        half = self.halves[which]
        return [p.numpy() for p in (half.column, half.bias, half.row, self.bias)]


class TiedHalf(nn.Layer):
    """This process's half of ``tanh(x T) T'``."""

    def __init__(self):
        super().__init__()
        hcg = fleet.get_hybrid_communicate_group()
        self.group = hcg.get_model_parallel_group()
        self.weight = parameter(self, numbers(77, 2, WIDTH, WIDTH)[hcg.get_model_parallel_rank()])
        self.weight.is_distributed = True

    def forward(self, x):
        inner = paddle.tanh(paddle.matmul(identity(x, self.group), self.weight))
        return total(paddle.matmul(inner, self.weight, transpose_y=True), self.group)


class TiedWhole(nn.Layer):
    def __init__(self):
        super().__init__()
        self.one, self.other = (parameter(self, value) for value in numbers(77, 2, WIDTH, WIDTH))

    def forward(self, x):
        return sum(paddle.matmul(paddle.tanh(paddle.matmul(x, w)), w, transpose_y=True) for w in (self.one, self.other))

    def of(self, which):
        return [(self.one, self.other)[which].numpy()]


# ---- runs


def place():
    """(stage, half) of this process."""
    hcg = fleet.get_hybrid_communicate_group()
    return hcg.get_stage_id(), hcg.get_model_parallel_rank()


def wrapped(descs, schedule, num_chunks, partial, optimizer, **kwargs):
    fleet.fleet._user_defined_strategy.pipeline_configs = {"enable_partial_send_recv": partial}
    try:
        engine, _ = build(descs, num_chunks, schedule, M, seg_method=SEGMENTS, **kwargs)
    finally:
        fleet.fleet._user_defined_strategy.pipeline_configs = {"enable_partial_send_recv": True}
    return engine, fleet.distributed_optimizer(optimizer(engine.parameters()))


def plain(parameters):
    return paddle.optimizer.Momentum(0.5, parameters=parameters)


def clipped(parameters):
    """A clip that bites, so that a half that is not counted in the norm, or a whole that is counted twice, shows."""
    return paddle.optimizer.Momentum(0.5, parameters=parameters, grad_clip=nn.ClipGradByGlobalNorm(0.02))


def train(schedule, num_chunks, partial):
    return with_stand_ins(_train, [LayerDesc(Half, k) for k in range(P * V)], schedule, num_chunks, partial, plain)


def train_tied(optimizer):
    tied = SharedLayerDesc("tied", TiedHalf, shared_weight_attr="weight")
    descs = [tied, *(LayerDesc(Half, k) for k in range(P * V - 2)), tied]
    return with_stand_ins(_train, descs, "VPP", V, True, optimizer)


def _train(descs, schedule, num_chunks, partial, optimizer):
    engine, optimizer = wrapped(descs, schedule, num_chunks, partial, optimizer)
    losses = [engine.train_batch(list(batch(step, 2 * M)), optimizer).item() for step in range(3)]
    losses.append(engine.eval_batch(list(batch(3, 2 * M)), compute_loss=True).item())
    found = {of: [p.numpy() for p in layer.parameters()] for of, layer in named_layers(engine).items()}
    return place(), losses, found


def in_one_process(layers, optimizer):
    one = OneProcess(layers)
    one.optimizer = optimizer(list({id(p): p for p in one.parameters}.values()))
    losses = [one.step(cut(batch(step, 2 * M), M)).item() for step in range(3)]
    return [*losses, one.step(cut(batch(3, 2 * M), M), update=False).item()]


@pytest.mark.parametrize("schedule, num_chunks", (("VPP", V), ("VPP:groups=even,slope=1", V), ("FthenB", V), ("ZBVPP", V), ("1F1B", 1)))
def test_tensor_parallel_layers_train_as_one_process_to_the_last_bit(schedule, num_chunks):
    check_bits(pool().run(train, schedule, num_chunks, True))


def test_paddles_flag_for_partial_sends_has_no_effect():
    check_bits(pool().run(train, "VPP", V, False))


def check_bits(results):
    layers = [Whole(k) for k in range(P * V)]
    expected = in_one_process(layers, plain)
    assert [where for where, *_ in results] == [(stage, half) for stage in range(P) for half in range(HALVES)]
    for (_, half), losses, found in results:
        assert losses == expected
        assert len(found) == V
        for number, parameters in found.items():
            assert_same_bits(dict(enumerate(parameters)), dict(enumerate(layers[number].of(half))))


@pytest.mark.parametrize("optimizer", (plain, clipped))
def test_tied_halves_get_the_gradients_of_their_own_pipeline_and_count_once_in_the_norm(optimizer):
    tied = TiedWhole()
    layers = [tied, *(Whole(k) for k in range(P * V - 2)), tied]
    expected = in_one_process(layers, optimizer)
    for (_, half), losses, found in pool().run(train_tied, optimizer):
        np.testing.assert_allclose(losses, expected, rtol=5e-6)
        for number, parameters in found.items():
            for value, wanted in zip(parameters, layers[number].of(half)):
                np.testing.assert_allclose(value, wanted, rtol=2e-4, atol=2e-6)


# ---- who talks to whom


def talks():
    engine, _ = with_stand_ins(wrapped, [LayerDesc(Half, k) for k in range(P * V)], "VPP", V, True, plain)
    return paddle.distributed.get_rank(), engine.runner.ranks, engine.runner.transport._channels.ranks, engine.stage_id


def test_each_pipeline_has_connections_among_its_own_ranks():
    for rank, ranks, of_channels, stage in pool().run(talks):
        assert ranks == of_channels == [rank % HALVES + HALVES * s for s in range(P)]
        assert ranks[stage] == rank


def disagreement():
    """The second half's last stage has another idea of accumulate_steps."""
    options = {"accumulate_steps": M + (paddle.distributed.get_rank() == 3)}
    try:
        build([LayerDesc(Half, k) for k in range(P * V)], V, "VPP", seg_method=SEGMENTS, **options)
    except ValueError as error:
        return str(error)


def test_ranks_of_one_pipeline_that_disagree_are_named_and_those_of_the_other_go_on():
    texts = pool().run(disagreement)
    assert texts[0] is None and texts[2] is None
    assert texts[1] == texts[3] and f"accumulate_steps: rank 1: {M}, rank 3: {M + 1}" in texts[1], texts


class FailsOnce(Half):
    """Raises in its third forward, in both halves."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 3:
            raise ArithmeticError(f"fails in half {place()[1]}")
        return super().forward(x)


def fail_and_go_on():
    descs = [LayerDesc(FailsOnce if k == 1 else Half, k) for k in range(P * V)]
    engine, optimizer = wrapped(descs, "VPP", V, True, plain)
    try:
        engine.train_batch(list(batch(9, 2 * M)), optimizer)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    losses = [engine.train_batch(list(batch(step, 2 * M)), optimizer).item() for step in range(3)]
    losses.append(engine.eval_batch(list(batch(3, 2 * M)), compute_loss=True).item())
    return text, losses


def test_a_failure_is_told_in_its_own_pipeline_and_training_goes_on():
    expected = in_one_process([Whole(k) for k in range(P * V)], plain)
    for rank, (text, losses) in enumerate(pool().run(with_stand_ins, fail_and_go_on)):
        half = rank % HALVES
        named = f"PeerFailed: rank {2 + half} of the pipeline failed: " if rank < HALVES else ""
        assert text.startswith(f"{named}ArithmeticError: fails in half {half}"), text
        assert losses == expected
