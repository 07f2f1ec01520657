"""GradScaler, clipping, amp, recompute and Paddle's flags: values against one process."""

import os
import subprocess
import sys
import types
from unittest import mock

import numpy as np
import paddle
import pytest
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc

from paddle_vpp_ext.planning.options import parse_schedule
from paddle_vpp_ext.planning.planner import make_plan
from pool import ROOT, get_pool
from training import Block, OneProcess, assert_same_bits, batch, build, cut, gradients, merged, named_layers, weights

P, V, M = 3, 2, 5


def blocks(count=P * V, kind=Block):
    return [LayerDesc(kind) for _ in range(count)]


def run(function, *args, **kwargs):
    return get_pool(P).run(function, *args, **kwargs)


def has_flag(name):
    """Whether this release's pp_configs have it."""
    return hasattr(fleet.DistributedStrategy().hybrid_configs["pp_configs"], name)


def wrap(schedule="VPP", m=M, descs=None, num_chunks=V, flags=None, **kwargs):
    return build(descs or blocks(), num_chunks, schedule, m, **(flags or {}), **kwargs)


# ---- GradScaler


def enabled_scaler(**kwargs):
    """Paddle's GradScaler disables itself on CPU, although all that it calls works there."""
    gpu = types.SimpleNamespace(_expected_place=types.SimpleNamespace(is_gpu_place=lambda: True))
    with mock.patch("paddle.amp.grad_scaler._dygraph_tracer", lambda: gpu):
        with mock.patch("paddle.amp.grad_scaler.tracer", gpu, create=True):
            scaler = paddle.amp.GradScaler(**kwargs)
    assert scaler.is_enable()
    return scaler


def overflowing(output, label):
    """A loss that is infinite where a label is negative."""
    loss = paddle.mean((output - label) ** 2)
    return loss if label.min().item() >= 0 else loss * float("inf")


def scaled_batch(step):
    """Step 1 overflows, in one micro-batch."""
    inputs, labels = batch(step, 2 * M)
    if step == 1:
        labels[3] = labels[3] - 2.0
    return [inputs, labels]


def train_with_scaler(schedule, delay):
    engine, _ = wrap(schedule, loss_fn=overflowing, flags={"delay_scale_loss": delay})
    optimizer = fleet.distributed_optimizer(paddle.optimizer.AdamW(0.1, parameters=engine.parameters()))
    scaler = fleet.distributed_scaler(enabled_scaler(init_loss_scaling=1024.0, incr_every_n_steps=2, decr_every_n_nan_or_inf=2))
    losses, scales = [], []
    for step in range(4):
        losses.append(engine.train_batch(scaled_batch(step), optimizer, scaler=scaler).numpy())
        scales.append(scaler._scale.item())
    return losses, scales, weights(named_layers(engine))


@pytest.mark.parametrize("schedule", ("VPP", "FthenB", "ZBVPP"))
def test_with_a_grad_scaler_a_step_that_overflows_on_one_rank_is_left_out_on_all(schedule):
    one = OneProcess(blocks(), overflowing)
    one.optimizer = paddle.optimizer.AdamW(0.1, parameters=one.parameters)
    expected = []
    for step in range(4):
        pairs = cut(scaled_batch(step), M)
        expected.append(one.step(pairs, update=step != 1).numpy())
        one.optimizer.clear_grad()
    results = run(train_with_scaler, schedule, False)
    for losses, scales, _ in results:
        np.testing.assert_array_equal(losses, expected)
        assert scales == [1024.0, 1024.0, 1024.0, 2048.0]
    # Scales are powers of two, so scaling and unscaling changes no bit.
    assert_same_bits(merged([found for *_, found in results]), weights(one.layers))


def test_a_grad_scaler_goes_with_delay_scale_loss():
    plain, delayed = run(train_with_scaler, "VPP", False), run(train_with_scaler, "VPP", True)
    for (losses, scales, found), (other_losses, other_scales, other) in zip(plain, delayed):
        np.testing.assert_allclose(losses, other_losses, rtol=1e-6)
        assert scales == other_scales
        for key in found:
            np.testing.assert_allclose(found[key], other[key], rtol=1e-5, atol=1e-7)


# ---- an exception in the middle of a step


class FailsLater(Block):
    """Raises in its ninth forward."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 9:
            raise ArithmeticError("this layer fails once")
        return super().forward(x)


def train_through_a_failure(schedule):
    descs = blocks(3) + [LayerDesc(FailsLater)] + blocks(2)
    engine, optimizer = wrap(schedule, descs=descs, seg_method="layer:Block|FailsLater")
    given = []
    for step in range(4):
        try:
            given.append(engine.train_batch(list(batch(step, 2 * M)), optimizer).item())
        except Exception as error:
            given.append(type(error).__name__)
            optimizer.clear_grad()
    return given, weights(named_layers(engine))


@pytest.mark.parametrize("schedule", ("VPP", "FthenB", "ZBVPP"))
def test_after_an_exception_in_the_middle_of_a_step_training_goes_on(schedule):
    one = OneProcess(blocks())
    expected = [one.step(cut(batch(step, 2 * M), M)).item() for step in (0, 2, 3)]
    results = run(train_through_a_failure, schedule)
    assert [given[1] for given, _ in results] == ["ArithmeticError"] + ["PeerFailed"] * (P - 1)
    for given, _ in results:
        assert given[:1] + given[2:] == expected
    assert_same_bits(merged([found for _, found in results]), weights(one.layers))


# ---- clipping


def train_clipped(schedule, delay):
    engine, _ = wrap(schedule, flags={"delay_scale_loss": delay})
    clip = paddle.nn.ClipGradByGlobalNorm(0.01)
    optimizer = fleet.distributed_optimizer(paddle.optimizer.AdamW(0.1, parameters=engine.parameters(), grad_clip=clip))
    losses = [engine.train_batch(list(batch(step, 2 * M)), optimizer).item() for step in range(3)]
    return losses, weights(named_layers(engine))


@pytest.mark.parametrize("delay", (False, True))
def test_gradients_are_clipped_by_the_norm_over_all_stages(delay):
    one = OneProcess(blocks())
    one.optimizer = paddle.optimizer.AdamW(0.1, parameters=one.parameters, grad_clip=paddle.nn.ClipGradByGlobalNorm(0.01))
    expected = [one.step(cut(batch(step, 2 * M), M)).item() for step in range(3)]
    results = run(train_clipped, "VPP", delay)
    found = merged([found for _, found in results])
    for losses, _ in results:
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for key, value in weights(one.layers).items():
        np.testing.assert_allclose(found[key], value, rtol=2e-4, atol=1e-6)


# ---- amp and dtypes of the weights


def with_float64(function):
    """``function()`` with layers made in float64."""
    paddle.set_default_dtype("float64")
    try:
        return function()
    finally:
        paddle.set_default_dtype("float32")


class Mixed(Block):
    """Weights in float64, computed in float32: what O2 does with weights and computation in other types."""

    def forward(self, x):
        weight, bias = self.linear.weight.astype("float32"), self.linear.bias.astype("float32")
        return paddle.tanh(paddle.matmul(x.astype("float32"), weight) + bias).astype(x.dtype)


def double_batch(step):
    return [side.astype("float64") for side in batch(step, 2 * M)]


def train_mixed(kind):
    engine, optimizer = with_float64(lambda: wrap(descs=blocks(kind=kind), seg_method=f"layer:{kind.__name__}"))
    losses = [engine.train_batch(double_batch(step), optimizer).numpy() for step in range(3)]
    return losses, weights(named_layers(engine))


@pytest.mark.parametrize("kind", (Block, Mixed))
def test_weights_and_activations_in_float64(kind):
    one = with_float64(lambda: OneProcess(blocks(kind=kind)))
    expected = [one.step(cut(double_batch(step), M)).numpy() for step in range(3)]
    results = run(train_mixed, kind)
    for losses, found in results:
        assert {value.dtype for value in [*losses, *found.values()]} == {np.dtype("float64")}
        np.testing.assert_array_equal(losses, expected)
    assert_same_bits(merged([found for _, found in results]), weights(one.layers))


class Half(Block):
    """Activations in bfloat16; CPUs have no matrix product of these."""

    def forward(self, x):
        return super().forward(x.astype("float32")).astype("bfloat16")


def train_half(level):
    engine, optimizer = wrap(descs=blocks(kind=Half), seg_method="layer:Half", loss_fn=half_loss)
    with paddle.amp.auto_cast(level != "O0", level=level, dtype="bfloat16"):
        losses = [engine.train_batch(list(batch(step, 2 * M)), optimizer) for step in range(3)]
    return [loss.item() for loss in losses], weights(named_layers(engine))


def half_loss(output, label):
    return paddle.mean((output.astype("float32") - label) ** 2)


@pytest.mark.parametrize("level", ("O0", "O1", "O2"))
def test_activations_in_bfloat16(level):
    one = OneProcess(blocks(kind=Half), half_loss)
    expected = []
    for step in range(3):
        with paddle.amp.auto_cast(level != "O0", level=level, dtype="bfloat16"):
            expected.append(one.step(cut(batch(step, 2 * M), M)).item())
    results = run(train_half, level)
    for losses, _ in results:
        assert losses == expected
    assert_same_bits(merged([found for _, found in results]), weights(one.layers))


def train_with_main_grads(schedule, delay):
    from paddle.distributed.fleet.utils import mix_precision_utils

    engine, _ = wrap(schedule, flags={"delay_scale_loss": delay})
    mix_precision_utils.MixPrecisionLayer(engine._layers, dtype="bfloat16")
    optimizer = paddle.optimizer.SGD(0.1, parameters=engine.parameters())
    optimizer = fleet.distributed_optimizer(mix_precision_utils.MixPrecisionOptimizer(optimizer))
    losses = [engine.train_batch(list(batch(step, 2 * M)), optimizer).numpy() for step in range(2)]
    engine.forward_backward_pipeline(list(batch(2, 2 * M)))
    main_grads = {
        (place, k): parameter.main_grad.numpy()
        for place, layer in named_layers(engine).items()
        for k, parameter in enumerate(layer.parameters())
    }
    return losses, main_grads


@pytest.mark.parametrize("schedule", ("VPP", "ZBVPP"))
def test_main_grads(schedule):
    one = OneProcess(blocks())
    expected = [one.step(cut(batch(step, 2 * M), M)).numpy() for step in range(2)]
    one.step(cut(batch(2, 2 * M), M), update=False)
    results = run(train_with_main_grads, schedule, False)
    for losses, _ in results:
        np.testing.assert_array_equal(losses, expected)
    assert_same_bits(merged([found for _, found in results]), gradients(one.layers))
    for (losses, _), (plain, _) in zip(run(train_with_main_grads, schedule, True), results):
        np.testing.assert_allclose(losses, plain, rtol=1e-6)


# ---- recompute


def train_recomputed(schedule, interval):
    group = fleet.get_hybrid_communicate_group().get_model_parallel_group()
    model = {"recompute_interval": interval, "recompute_ctx": {"mp_group": group}}
    engine, optimizer = wrap(schedule, descs=blocks(2 * P * V), model=model)
    losses = [engine.train_batch(list(batch(step, 2 * M)), optimizer).numpy() for step in range(2)]
    engine.eval_batch(list(batch(0, 2 * M)), compute_loss=True)
    return losses, weights(named_layers(engine))


class Dropping(Block):
    """Draws random numbers, which recompute has to draw again."""

    def forward(self, x):
        return paddle.nn.functional.dropout(super().forward(x), 0.5)


def train_dropping(schedule, interval):
    group = fleet.get_hybrid_communicate_group().get_model_parallel_group()
    model = {"recompute_interval": interval, "recompute_ctx": {"mp_group": group}}
    engine, optimizer = wrap(schedule, descs=blocks(kind=Dropping), model=model, seg_method="layer:Dropping")
    paddle.seed(7)
    losses = [engine.train_batch(list(batch(step, 2 * M)), optimizer).numpy() for step in range(2)]
    return losses, weights(named_layers(engine))


@pytest.mark.parametrize("schedule", ("VPP", "ZBVPP"))
def test_recompute_draws_the_same_random_numbers(schedule):
    plain, recomputed = run(train_dropping, schedule, 0), run(train_dropping, schedule, 1)
    for (losses, found), (expected, wanted) in zip(recomputed, plain):
        np.testing.assert_array_equal(losses, expected)
        assert_same_bits(found, wanted)


@pytest.mark.parametrize("schedule", ("VPP", "ZBVPP"))
@pytest.mark.parametrize("interval", (1, 2))
def test_recompute(interval, schedule):
    one = OneProcess(blocks(2 * P * V))
    expected = [one.step(cut(batch(step, 2 * M), M)).numpy() for step in range(2)]
    results = run(train_recomputed, schedule, interval)
    for losses, _ in results:
        np.testing.assert_array_equal(losses, expected)
    assert_same_bits(merged([found for _, found in results]), weights(one.layers))


# ---- Paddle's flags


def train_with(flags, schedule="1F1B", m=2 * P, num_chunks=V, steps=3):
    engine, optimizer = wrap(schedule, m, num_chunks=num_chunks, flags=flags)
    losses = [engine.train_batch(list(batch(step, 2 * m)), optimizer).numpy() for step in range(steps)]
    return engine, losses


def check_losses(results, m=2 * P, steps=3):
    one = OneProcess(blocks())
    expected = [one.step(cut(batch(step, 2 * m), m)).numpy() for step in range(steps)]
    for losses, _ in results:
        np.testing.assert_array_equal(losses, expected)


def timers():
    engine, losses = train_with({"enable_timer": True})
    return losses, sorted(engine.timers.timers)


@pytest.mark.skipif(not has_flag("enable_timer"), reason="this Paddle has no such flag")
def test_enable_timer():
    results = run(timers)
    check_losses(results)
    for _, names in results:
        assert {"forward_step", "backward_step", "broadcast_final_loss", "allreduce_shared_weight_gradients"} <= set(names)


def profile(folder):
    before = os.getcwd()
    os.chdir(folder)
    try:
        engine, losses = train_with({"profiling": True})
    finally:
        os.chdir(before)
    return losses, engine.options.engine.trace


@pytest.mark.skipif(not has_flag("profiling"), reason="this Paddle has no such flag")
def test_profiling_records_each_rank(tmp_path):
    results = run(profile, str(tmp_path))
    check_losses(results)
    files = sorted(path.name for path in (tmp_path / "pipeline_trace").iterdir())
    assert [name.rpartition("rank")[2] for name in files] == [f"{rank}.jsonl" for rank in range(P)]
    # It also draws a picture, where there is matplotlib.
    subprocess.run([sys.executable, "-m", "paddle_vpp_ext", "trace", "merge", tmp_path / "pipeline_trace"], cwd=ROOT)
    assert (tmp_path / "pipeline_trace" / "trace.json").exists()


def gradients_left(release):
    engine, losses = train_with({"release_gradients": release})
    return losses, [parameter.grad is None for parameter in engine.parameters()]


@pytest.mark.skipif(not has_flag("release_gradients"), reason="this Paddle has no such flag")
@pytest.mark.parametrize("release", (False, True))
def test_release_gradients(release):
    results = run(gradients_left, release)
    check_losses(results)
    for _, left in results:
        assert set(left) == {release}


def plain_flag(name):
    _, losses = train_with({name: True})
    return losses, None


@pytest.mark.parametrize("name", ("clear_every_step_cache", "enable_offload_queue", "overlap_p2p_comm", "use_batch_p2p_comm"))
def test_flags_that_change_no_value(name):
    if not has_flag(name):
        pytest.skip("this Paddle has no such flag")
    check_losses(run(plain_flag, name))


def balanced(m, flags):
    engine, losses = train_with(flags, m=m)
    return losses, (type(engine).__name__, engine.schedule_text, engine.plan().simulate().peak_activations)


@pytest.mark.skipif(not has_flag("best_unbalanced_scheduler"), reason="this Paddle has no such flag")
@pytest.mark.parametrize("m", (2, P + 1, 2 * P + 1))
def test_best_unbalanced_scheduler_is_our_schedule_with_the_fewest_activations(m):
    results = run(balanced, m, {"best_unbalanced_scheduler": True})
    check_losses(results, m)
    for _, (name, text, _) in results:
        assert (name, text) == ("VirtualPipelineParallel", "VPP:groups=even,slope=1")
    peak = max(results[0][1][2])
    for schedule in ("VPP:groups=first", "VPP:groups=even", "FthenB"):
        choice = parse_schedule(schedule)
        assert peak <= max(make_plan(choice.name, P, V, m, dict(choice.options)).simulate().peak_activations)
