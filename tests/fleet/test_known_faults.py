"""Each fault that was found in an engine of Paddle's, and that ours must not have.

The numbers are those of the list of faults in the project's notes on Paddle.
"""

import os

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc

import paddle_vpp_ext
from pool import get_pool
from training import (
    WIDTH,
    Block,
    Model,
    OneProcess,
    assert_same_bits,
    batch,
    build,
    cut,
    gradients,
    mean_square,
    merged,
    named_layers,
    set_options,
)


def blocks(count):
    return [LayerDesc(Block) for _ in range(count)]


def step_and_eval(descs, num_chunks, schedule, m, seg_method="layer:Block", **pp_configs):
    """(engine class, loss of a step, gradients, loss of an evaluation before it)."""
    engine, _ = build(descs, num_chunks, schedule, m, seg_method=seg_method, **pp_configs)
    before = engine.eval_batch(list(batch(m, 2 * m)), compute_loss=True)
    engine._layers.train()
    loss = engine.forward_backward_pipeline(list(batch(m, 2 * m)))
    return type(engine).__name__, loss.numpy(), gradients(named_layers(engine)), before.numpy()


def check(results, descs, m, loss_fn=mean_square):
    one = OneProcess(descs, loss_fn)
    expected = one.step(cut(batch(m, 2 * m), m), update=False)
    for _, loss, _, before in results:
        np.testing.assert_array_equal(loss, expected.numpy())
        np.testing.assert_array_equal(before, expected.numpy())
    assert_same_bits(merged([found for _, _, found, _ in results]), gradients(one.layers))


# ---- 1, 2, 3: which m and p


@pytest.mark.parametrize(
    "m, engine", ((6, "VirtualPipelineParallelFthenB"), (4, "VirtualPipelineParallelFthenB"), (9, "VirtualPipelineParallel"))
)
def test_1_the_rule_s_choice_runs_for_every_m(m, engine):
    results = get_pool(4).run(step_and_eval, blocks(8), 2, "1F1B", m)
    assert [name for name, *_ in results] == [engine] * 4
    check(results, blocks(8), m)


def has_flag(name):
    """Whether this release's pp_configs have it."""
    from paddle.distributed import fleet

    return hasattr(fleet.DistributedStrategy().hybrid_configs["pp_configs"], name)


def balanced(m):
    return step_and_eval(blocks(8), 2, "1F1B", m, best_unbalanced_scheduler=True)


@pytest.mark.skipif(not has_flag("best_unbalanced_scheduler"), reason="this Paddle has no balanced scheduler")
@pytest.mark.parametrize("m", (6, 9))
def test_2_the_balanced_scheduler_s_flag_trains_and_evaluates(m):
    check(get_pool(4).run(balanced, m), blocks(8), m)


def test_3_with_two_stages_no_gradient_is_taken_for_an_activation():
    check(get_pool(2).run(step_and_eval, blocks(6), 3, "VPP", 5), blocks(6), 5)


# ---- 4, 5, 12: the steady phase


@pytest.mark.parametrize("m", (1, 2, 4))
def test_4_without_steady_steps(m):
    check(get_pool(4).run(step_and_eval, blocks(8), 2, "VPP:groups=first,slope=2", m), blocks(8), m)


class OverlapModel(paddle_vpp_ext.OverlapMixin, Model):
    pass


def wrap_overlap(descs, m, loss_fn=mean_square):
    set_options("VPP:overlap=on,groups=first,slope=2", m, 2)
    return fleet.distributed_model(OverlapModel(descs, loss_fn, seg_method="layer:Block", num_virtual_pipeline_stages=2))


def overlapped_step(m):
    engine = wrap_overlap(blocks(8), m)
    before = engine.eval_batch(list(batch(m, 2 * m)), compute_loss=True)
    engine._layers.train()
    loss = engine.forward_backward_pipeline(list(batch(m, 2 * m)))
    return None, loss.numpy(), gradients(named_layers(engine)), before.numpy()


@pytest.mark.parametrize("m", (4, 5, 7))
def test_5_overlap_does_no_forward_too_many(m):
    check(get_pool(4).run(overlapped_step, m), blocks(8), m)


class KeptLoss:
    """A loss function that keeps its results."""

    def __init__(self):
        self.results = []

    def __call__(self, output, label):
        loss = mean_square(output, label)
        self.results.append(loss)
        return loss


def kept_losses(m, overlap):
    loss_fn = KeptLoss()
    engine = wrap_overlap(blocks(8), m, loss_fn) if overlap else build(blocks(8), 2, "VPP", m, loss_fn=loss_fn)[0]
    engine.forward_backward_pipeline(list(batch(m, 2 * m)))
    return [loss.numpy() for loss in loss_fn.results]


@pytest.mark.parametrize("overlap", (False, True))
def test_12_the_loss_function_s_own_result_is_not_divided(overlap):
    one = OneProcess(blocks(8))
    expected = [mean_square(one.forward(x), y).numpy() for x, y in cut(batch(9, 18), 9)]
    *others, last = get_pool(4).run(kept_losses, 9, overlap)
    assert others == [[], [], []]
    np.testing.assert_array_equal(last, expected)


# ---- 7, 8: answers that leave something behind


def static_scheduler_with_hooks():
    engine, _ = build(blocks(8), 2, "VPP", 8)
    ran = []
    if hasattr(engine, "register_forward_pipeline_parallel_hook"):
        engine.register_forward_pipeline_parallel_hook(0, ran.append)
        engine.register_bubble_pipeline_parallel_hook(0, ran.append)
    text = engine.get_static_scheduler()
    loss = engine.forward_backward_pipeline(list(batch(8, 16)))
    return text.count(";"), len(ran), loss.item()


def test_7_the_static_scheduler_runs_no_hooks():
    for count, ran, loss in get_pool(4).run(static_scheduler_with_hooks):
        assert count == 32 and ran in (0, 2) and loss > 0


class FailsOnce(Block):
    """Raises in its first forward, on the stage that has it."""

    def forward(self, x):
        if not getattr(self, "failed", False):
            self.failed = True
            raise ArithmeticError("this layer fails once")
        return super().forward(x)


def eval_that_fails():
    engine, _ = build(blocks(5) + [LayerDesc(FailsOnce)] + blocks(2), 2, "VPP", 8, seg_method="layer:Block|FailsOnce")
    try:
        engine.eval_batch(list(batch(8, 16)), compute_loss=False)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    engine._layers.train()
    loss = engine.forward_backward_pipeline(list(batch(8, 16)))
    return text, engine._compute_loss, loss.numpy(), gradients(named_layers(engine))


def test_8_an_evaluation_that_fails_leaves_training_intact():
    results = get_pool(4).run(eval_that_fails)
    assert [text.split(":")[0] for text, *_ in results] == ["PeerFailed", "ArithmeticError", "PeerFailed", "PeerFailed"]
    for text, compute_loss, _, _ in results:
        assert "this layer fails once" in text and compute_loss
    one = OneProcess(blocks(8))
    expected = one.step(cut(batch(8, 16), 8), update=False)
    np.testing.assert_array_equal([loss for _, _, loss, _ in results], [expected.numpy()] * 4)
    assert_same_bits(merged([found for *_, found in results]), gradients(one.layers))


# ---- 9, 10, 17: what crosses a boundary


class Tuple(nn.Layer):
    """Tensors of all sorts in one tuple: no gradient first, an integer in the middle, a bool, two that need gradients."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if isinstance(x, paddle.Tensor):
            ids = paddle.arange(WIDTH)
            fixed = paddle.full([1], 0.5)
            return fixed, self.linear(x), ids, x.sum() > 0, paddle.tanh(self.linear(x))
        fixed, y, ids, flag, z = x
        assert fixed.stop_gradient and ids.stop_gradient and flag.stop_gradient
        y = self.linear(y) * fixed + z * ids.astype("float32") * 0.01 + flag.astype("float32")
        return fixed, y, ids, flag, z


class Untuple(nn.Layer):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x[1]) + x[4]


def tuple_descs(count):
    return [LayerDesc(Tuple) for _ in range(count - 1)] + [LayerDesc(Untuple)]


@pytest.mark.parametrize("m", (2, 8))
def test_9_10_17_tuples_cross_in_training_after_an_evaluation(m):
    results = get_pool(4).run(step_and_eval, tuple_descs(8), 2, "VPP", m, "layer:Tuple|Untuple")
    check(results, tuple_descs(8), m)


class InPlace(Block):
    """Changes its input in place."""

    def forward(self, x):
        if x.stop_gradient:
            x = x.clone()
        return super().forward(x.scale_(0.5))


def in_place_descs(count):
    # In one process the input is a tanh's output, which tanh keeps for its backward: it must not be changed there.
    return [LayerDesc(Scaled if k % 2 == 0 else InPlace) for k in range(count)]


class Scaled(Block):
    """Ends with an operation that does not need its own output in the backward."""

    def forward(self, x):
        return super().forward(x) * 1.5


def test_17_a_consumer_may_change_an_activation_in_place():
    results = get_pool(4).run(step_and_eval, in_place_descs(8), 2, "VPP", 5, "layer:Scaled|InPlace")
    check(results, in_place_descs(8), 5)


class Same(nn.Layer):
    """No parameters."""

    def forward(self, x):
        return x


class Half(nn.Layer):
    def forward(self, x):
        return x * 0.5


@pytest.mark.parametrize("schedule", ("VPP", "ZBVPP"))
@pytest.mark.parametrize("place", (0, 3, 4, 7))
def test_17_chunks_without_parameters(place, schedule):
    for layer in (Same, Half):
        descs = blocks(place) + [LayerDesc(layer)] + blocks(7 - place)
        results = get_pool(4).run(step_and_eval, descs, 2, schedule, 5, f"layer:Block|{layer.__name__}")
        check(results, descs, 5)


def loss_of_some(output, label):
    """Depends on the activations only where a label is large enough."""
    loss = mean_square(output, label)
    return loss if label[0, 0].item() > 0.5 else label.mean()


def step_with_loss(schedule, m):
    engine, _ = build(blocks(8), 2, schedule, m, loss_fn=loss_of_some)
    loss = engine.forward_backward_pipeline(list(batch(m, 2 * m)))
    return None, loss.numpy(), gradients(named_layers(engine)), loss.numpy()


@pytest.mark.parametrize("schedule", ("VPP", "ZBVPP"))
def test_17_a_loss_that_does_not_depend_on_some_micro_batch(schedule):
    m = 9
    flags = [y[0, 0].item() > 0.5 for _, y in cut(batch(m, 2 * m), m)]
    assert any(flags) and not all(flags)
    check(get_pool(4).run(step_with_loss, schedule, m), blocks(8), m, loss_of_some)


class Ignores(nn.Layer):
    """Its output does not depend on part of its input."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        kept, _dropped = x if isinstance(x, tuple) else (x, x * 2)
        return self.linear(kept), paddle.tanh(kept)


class First(nn.Layer):
    def forward(self, x):
        return x[0]


@pytest.mark.parametrize("schedule", ("VPP", "ZBVPP"))
def test_17_an_activation_that_its_consumer_ignores(schedule):
    descs = [LayerDesc(Ignores) for _ in range(7)] + [LayerDesc(First)]
    check(get_pool(4).run(step_and_eval, descs, 2, schedule, 5, "layer:Ignores|First"), descs, 5)


# ---- 15


def environment_after_a_step():
    engine, _ = build(blocks(8), 2, "VPP", 8)
    before = dict(os.environ)
    engine.forward_backward_pipeline(list(batch(8, 16)))
    return {key for key in os.environ if os.environ[key] != before.get(key)}


def test_15_no_environment_variable_is_left_behind():
    assert get_pool(4).run(environment_after_a_step) == [set()] * 4


# ---- memory


def sent_activations_held(schedule):
    """Activations of this rank's outputs that still have their memory: most at once, and at the end of a step."""
    engine, _ = build(blocks(8), 2, schedule, 12)
    made, held = [], []
    stage = engine.runner.stage
    forward = stage.forward

    def watched(chunk, i, inputs):
        payload = forward(chunk, i, inputs)
        if payload:
            made.extend(payload.tensors)
        held.append(sum(t._is_initialized() for t in made))
        return payload

    stage.forward = watched
    engine.forward_backward_pipeline(list(batch(12, 24)))
    return max(held), sum(t._is_initialized() for t in made)


@pytest.mark.parametrize("schedule", ("VPP", "VPP:overlap_p2p_comm=on", "ZBVPP"))
def test_6_outputs_are_freed_once_they_are_sent(schedule):
    for rank, (most, at_the_end) in enumerate(get_pool(4).run(sent_activations_held, schedule)):
        assert at_the_end == 0
        assert most < 12, f"rank {rank} holds {most} of 24"


def sent_too_early():
    """Activations whose memory was freed while they were under way."""
    engine, _ = build(blocks(8), 2, "VPP:overlap_p2p_comm=on", 12)
    under_way, early = {}, []
    exchange, sent = engine.runner.transport.exchange, engine.runner.stage.sent

    def watched_exchange(sends, receives):
        pending = exchange(sends, receives)
        under_way.update((transfer, ticket) for (transfer, _), ticket in zip(sends, pending.sends))
        return pending

    def watched_sent(transfer, payload):
        if not under_way.pop(transfer).done():
            early.append(str(transfer))
        sent(transfer, payload)

    engine.runner.transport.exchange, engine.runner.stage.sent = watched_exchange, watched_sent
    engine.forward_backward_pipeline(list(batch(12, 24)))
    return early, len(under_way)


def test_6_no_output_is_freed_while_it_is_under_way():
    assert get_pool(4).run(sent_too_early) == [([], 0)] * 4
