"""train_batch and eval_batch: values against one process, in every form and order."""

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.meta_parallel import LayerDesc, SharedLayerDesc

from pool import get_pool
from training import (
    WIDTH,
    Block,
    OneProcess,
    assert_same_bits,
    batch,
    build,
    cut,
    mean_square,
    merged,
    named_layers,
    weights,
)

P, V, M = 3, 2, 5


def descs():
    return [LayerDesc(Block) for _ in range(P * V)]


def run(function, *args, p=P, **kwargs):
    return get_pool(p).run(function, *args, **kwargs)


# ---- training steps


def train(schedule, steps, **pp_configs):
    engine, optimizer = build(descs(), V, schedule, M, **pp_configs)
    losses = [engine.train_batch(list(batch(s, 2 * M)), optimizer).numpy() for s in range(steps)]
    return losses, weights(named_layers(engine))


@pytest.mark.parametrize("schedule", ("VPP:groups=first", "VPP:groups=even", "VPP:slope=1", "FthenB", "ZBVPP"))
def test_weights_after_steps_are_those_of_one_process(schedule):
    one = OneProcess(descs())
    expected = [one.step(cut(batch(s, 2 * M), M)).numpy() for s in range(3)]
    results = run(train, schedule, 3)
    for losses, _ in results:
        np.testing.assert_array_equal(losses, expected)
    assert_same_bits(merged([w for _, w in results]), weights(one.layers))


def train_delayed(delay):
    engine, optimizer = build(descs(), V, "VPP", M, delay_scale_loss=delay)
    return engine.train_batch(list(batch(0, 2 * M)), optimizer).numpy(), weights(named_layers(engine))


def test_delay_scale_loss_scales_gradients_instead():
    results = run(train_delayed, True)
    plain = run(train_delayed, False)
    np.testing.assert_allclose(results[0][0], plain[0][0], rtol=1e-6)
    for (_, delayed), (_, scaled) in zip(results, plain):
        for key in scaled:
            np.testing.assert_allclose(delayed[key], scaled[key], rtol=1e-5, atol=1e-7)


def losses_per_micro_batch():
    engine, optimizer = build(descs(), V, "VPP", M)
    return engine.train_batch(list(batch(0, 2 * M)), optimizer, return_micro_batch_loss=True).numpy()


def test_return_micro_batch_loss_gives_each_loss_on_every_rank():
    one = OneProcess(descs())
    expected = [(mean_square(one.forward(x), y) / M).numpy() for x, y in cut(batch(0, 2 * M), M)]
    for losses in run(losses_per_micro_batch):
        np.testing.assert_array_equal(losses, expected)


def train_and_schedule():
    engine, optimizer = build(descs(), V, "VPP", M)
    scheduler = paddle.optimizer.lr.StepDecay(0.1, step_size=1, gamma=0.5)
    optimizer._inner_opt._learning_rate = scheduler
    rates = []
    for s in range(3):
        rates.append(optimizer.get_lr())
        engine.train_batch(list(batch(s, 2 * M)), optimizer, lr_scheduler=scheduler)
    return rates


def test_the_learning_rate_scheduler_moves_on_once_a_step():
    assert run(train_and_schedule)[0] == [0.1, 0.05, 0.025]


# ---- evaluation


def alternate(schedule, order):
    """A mix of training, evaluation with a loss and without; what each gave."""
    engine, optimizer = build(descs(), V, schedule, M)
    given = []
    for step, kind in enumerate(order):
        data = list(batch(step, 2 * M))
        if kind == "train":
            given.append(engine.train_batch(data, optimizer).numpy())
        elif kind == "loss":
            given.append(engine.eval_batch(data, compute_loss=True).numpy())
        else:
            given.append([output.numpy() for output in engine.eval_batch(data, compute_loss=False)])
    return given, weights(named_layers(engine))


@pytest.mark.parametrize(
    "order", (("loss", "train", "outputs", "train"), ("outputs", "train", "train"), ("train", "loss", "outputs", "train"))
)
@pytest.mark.parametrize("schedule", ("VPP", "ZBVPP"))
def test_evaluation_in_any_order_changes_nothing(schedule, order):
    one = OneProcess(descs())
    expected = []
    for step, kind in enumerate(order):
        pairs = cut(batch(step, 2 * M), M)
        if kind == "train":
            expected.append(one.step(pairs).numpy())
        elif kind == "loss":
            with paddle.no_grad():
                expected.append(sum((mean_square(one.forward(x), y) / M for x, y in pairs), paddle.zeros([])).numpy())
        else:
            with paddle.no_grad():
                expected.append([one.forward(x).numpy() for x, _ in pairs])
    results = run(alternate, schedule, order)
    for kind, *given, wanted in zip(order, *[given for given, _ in results], expected):
        if kind == "outputs":
            assert all(outputs == [] for outputs in given[:-1]), "outputs are the last stage's"
            np.testing.assert_array_equal(given[-1], wanted)
        else:
            for loss in given:
                np.testing.assert_array_equal(loss, wanted)
    assert_same_bits(merged([w for _, w in results]), weights(one.layers))


def other_shapes():
    engine, optimizer = build([LayerDesc(Pointwise) for _ in range(P * V)], V, "VPP", M, seg_method="layer:Pointwise")
    losses = []
    for width in (4, 7, 4, 2):
        losses.append(engine.train_batch(list(batch(width, 2 * M, width)), optimizer).numpy())
        losses.append(engine.eval_batch(list(batch(width, 2 * M, width + 1)), compute_loss=True).numpy())
    return losses


class Pointwise(nn.Layer):
    """Any width goes through."""

    def __init__(self):
        super().__init__()
        self.scale = self.create_parameter([1], default_initializer=nn.initializer.Constant(1.1))

    def forward(self, x):
        return paddle.tanh(x * self.scale)


def test_a_batch_of_another_shape_just_works():
    one = OneProcess([LayerDesc(Pointwise) for _ in range(P * V)])
    expected = []
    for width in (4, 7, 4, 2):
        expected.append(one.step(cut(batch(width, 2 * M, width), M)).numpy())
        with paddle.no_grad():
            pairs = cut(batch(width, 2 * M, width + 1), M)
            expected.append(sum((mean_square(one.forward(x), y) / M for x, y in pairs), paddle.zeros([])).numpy())
    for losses in run(other_shapes):
        np.testing.assert_array_equal(losses, expected)


# ---- data


def train_on(form):
    engine, optimizer = build(descs(), V, "VPP", M)
    inputs, labels = batch(0, 2 * M)
    pairs = cut((inputs, labels), M)
    data = {
        "tensors": lambda: (inputs, labels),
        "lists": lambda: [[x for x, _ in pairs], [y for _, y in pairs]],
        "iterator": lambda: iter(pairs),
        "generator": lambda: (pair for pair in pairs),
        "none in the middle": lambda: None if engine.stage_id == 1 else (inputs, labels),
        "only what a rank needs": lambda: (inputs if engine.stage_id == 0 else None, labels if engine.stage_id == P - 1 else None),
    }[form]()
    return engine.train_batch(data, optimizer).numpy()


@pytest.mark.parametrize("form", ("tensors", "lists", "iterator", "generator", "none in the middle", "only what a rank needs"))
def test_data_in_every_form(form):
    expected = OneProcess(descs()).step(cut(batch(0, 2 * M), M)).numpy()
    for loss in run(train_on, form):
        np.testing.assert_array_equal(loss, expected)


# ---- tied weights


class Tied(nn.Layer):
    def __init__(self):
        super().__init__()
        self.weight = self.create_parameter([WIDTH, WIDTH])

    def forward(self, x):
        return paddle.matmul(x, self.weight)


def transposed(layer, x):
    return paddle.matmul(x, layer.weight, transpose_y=True)


def tied_descs():
    shared = dict(shared_weight_attr="weight")
    return [
        SharedLayerDesc("tied", Tied, **shared),
        *descs(),
        SharedLayerDesc("tied", Tied, forward_func=transposed, **shared),
    ]


def train_tied(schedule):
    engine, optimizer = build(tied_descs(), V, schedule, M)
    return [engine.train_batch(list(batch(s, 2 * M)), optimizer).numpy() for s in range(4)]


@pytest.mark.parametrize("schedule", ("VPP", "FthenB", "ZBVPP"))
def test_tied_weights_get_the_gradients_of_both_ends(schedule):
    paddle.seed(1234)
    tied = Tied()
    one = OneProcess([tied, *descs()])
    one.layers[P * V + 1] = lambda x: transposed(tied, x)
    for place, block in enumerate(one.layers[k] for k in range(1, P * V + 1)):
        assert isinstance(block, Block), place
    expected = [one.step(cut(batch(s, 2 * M), M)).numpy() for s in range(4)]
    for losses in run(train_tied, schedule):
        np.testing.assert_allclose(losses, expected, rtol=1e-6)


# ---- the engine's other answers


def answers():
    from paddle.distributed.fleet.meta_parallel import PipelineParallel, PipelineParallelWithInterleave

    engine, _ = build(descs(), V, "VPP:groups=first", 8)
    steps = range(8 * V)
    chunks = [[engine._get_virtual_pp_rank(k, forward) for k in steps] for forward in (True, False)]
    kinds = isinstance(engine, PipelineParallel), isinstance(engine, PipelineParallelWithInterleave)
    engine_1f1b, _ = build(descs(), 1, "1F1B", 4)
    engine_fthenb, _ = build(descs(), V, "FthenB", 3)
    return chunks, kinds, engine.get_static_scheduler(), engine_1f1b.get_static_scheduler(), engine_fthenb.get_static_scheduler()


def test_virtual_pp_rank_and_static_scheduler():
    for rank, (chunks, kinds, vpp, one_f_one_b, fthenb) in enumerate(run(answers)):
        first = 8 % P + P
        closed = [k // first if k < first * V else (k - first * V) % (P * V) // P for k in range(8 * V)]
        assert chunks == [closed, [V - 1 - c for c in closed]]
        assert kinds == (True, True)
        assert vpp.startswith("f0_vp0;f1_vp0;") and vpp.count(";") == 2 * 8 * V
        assert fthenb == "".join(
            [f"f{i}_vp{c};" for c in range(V) for i in range(3)] + [f"b{i}_vp{c};" for c in reversed(range(V)) for i in range(3)]
        )
        if rank == P - 1:
            assert one_f_one_b == "f0;b0;f1;b1;f2;b2;f3;b3;"
