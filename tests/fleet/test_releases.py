"""What some releases of Paddle lack, and ours offers on all: values against one process, text against Paddle's own."""

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.meta_parallel import LayerDesc

from paddle_vpp_ext.fleet import versions
from paddle_vpp_ext.fleet.engine import selector
from pool import get_pool
from training import (
    WIDTH,
    Block,
    OneProcess,
    assert_same_bits,
    batch,
    build,
    cut,
    gradients,
    mean_square,
    merged,
    named_layers,
    weights,
)

P, V, M = 4, 2, 6


def blocks():
    return [LayerDesc(Block) for _ in range(P * V)]


def run(function, *args):
    return get_pool(P).run(function, *args)


# ---- dicts between stages (Paddle's: 3.2 on)


class Dict(nn.Layer):
    """Gives a dict of a tensor, a list of tensors and an integer tensor; none is used more than twice, which sums in any order."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if isinstance(x, paddle.Tensor):
            x = {"x": x, "kept": [x * 0.5, x * 0.25], "ids": paddle.arange(WIDTH)}
        y = paddle.tanh(self.linear(x["x"])) + x["ids"].astype("float32") * 0.01
        return {"x": y, "kept": [y * x["kept"][0], x["kept"][1] * 1.5], "ids": x["ids"]}


class Undict(nn.Layer):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x["x"]) + x["kept"][0] - x["kept"][1]


def dicts():
    return [LayerDesc(Dict) for _ in range(P * V - 1)] + [LayerDesc(Undict)]


def step_through_dicts(schedule):
    engine, _ = build(dicts(), V, schedule, M, seg_method="layer:Dict|Undict")
    loss = engine.forward_backward_pipeline(list(batch(0, 2 * M)))
    return loss.numpy(), gradients(named_layers(engine))


@pytest.mark.parametrize("schedule", ("VPP", "FthenB", "ZBVPP"))
def test_dicts_cross_stages(schedule):
    one = OneProcess(dicts())
    expected = one.step(cut(batch(0, 2 * M), M), update=False).numpy()
    results = run(step_through_dicts, schedule)
    for loss, _ in results:
        np.testing.assert_array_equal(loss, expected)
    assert_same_bits(merged([found for _, found in results]), gradients(one.layers))


# ---- loss functions (Paddle's: 3.0 on)


def mean_distance(output, label):
    return paddle.mean(paddle.abs(output - label))


LOSSES = [mean_square, mean_distance]


def losses_in_one_process(one, step):
    """Per loss function that of each micro-batch, before the update."""
    with paddle.no_grad():
        return [np.array([(function(one.forward(x), y) / M).numpy() for x, y in cut(batch(step, 2 * M), M)]) for function in LOSSES]


def summed(losses):
    """Added up in the engines' order, for the same last bit."""
    total = np.float32(0)
    for loss in losses:
        total = np.float32(total + loss)
    return total


def train_with_losses(index, return_micro_batch_loss):
    engine, optimizer = build(blocks(), V, "VPP", M, loss_fn=LOSSES)
    steps = []
    for step in range(2):
        data = list(batch(step, 2 * M))
        evaluated = engine.eval_batch(data, compute_loss=True, loss_fn_idx=index)
        trained = engine.train_batch(data, optimizer, loss_fn_idx=index, return_micro_batch_loss=return_micro_batch_loss)
        steps.append(([loss.numpy() for loss in evaluated], [loss.numpy() for loss in trained]))
    return steps, weights(named_layers(engine))


@pytest.mark.parametrize("return_micro_batch_loss", (False, True))
@pytest.mark.parametrize("index", (0, 1))
def test_a_list_of_loss_functions_gives_all_losses_and_trains_on_one(index, return_micro_batch_loss):
    one = OneProcess(blocks(), LOSSES[index])
    expected = []
    for step in range(2):
        expected.append(losses_in_one_process(one, step))
        one.step(cut(batch(step, 2 * M), M))
    results = run(train_with_losses, index, return_micro_batch_loss)
    for steps, _ in results:
        for (evaluated, trained), of_step in zip(steps, expected):
            np.testing.assert_array_equal(evaluated, [summed(losses) for losses in of_step])
            wanted = of_step if return_micro_batch_loss else [summed(losses) for losses in of_step]
            np.testing.assert_array_equal(trained, wanted)
    assert_same_bits(merged([found for _, found in results]), weights(one.layers))


def train_with_one_loss(as_list):
    engine, optimizer = build(blocks(), V, "VPP", M, loss_fn=[mean_square] if as_list else mean_square)
    data = list(batch(0, 2 * M))
    loss = engine.train_batch(data, optimizer, None, None, 0, True)
    total = engine.total_loss
    if total is not None and versions.total_loss_is_list():
        total = total[0]
    return loss.numpy(), None if total is None else total.numpy()


@pytest.mark.parametrize("as_list", (False, True))
def test_one_loss_function_gives_no_list_and_total_loss_has_the_release_s_form(as_list):
    expected = losses_in_one_process(OneProcess(blocks()), 0)[0]
    for rank, (losses, total) in enumerate(run(train_with_one_loss, as_list)):
        np.testing.assert_array_equal(losses, expected)
        if rank == P - 1:
            np.testing.assert_array_equal(total, expected if versions.total_loss_is_list() else summed(expected))
        else:
            assert total is None


def train_on_the_third_loss():
    engine, optimizer = build(blocks(), V, "VPP", M, loss_fn=LOSSES)
    try:
        engine.train_batch(list(batch(0, 2 * M)), optimizer, loss_fn_idx=2)
    except ValueError as error:
        return str(error)


def test_a_loss_function_that_is_not_there_is_an_error_on_all_ranks():
    assert run(train_on_the_third_loss) == ["loss_fn_idx=2, but the model has 2 loss functions"] * P


def wrap_with_paddles_own():
    try:
        return type(build(blocks(), V, "paddle", 2 * P, loss_fn=LOSSES)[0]).__name__
    except ValueError as error:
        return str(error)


def test_where_paddles_own_engines_take_no_list_of_loss_functions_they_say_so():
    for answer in run(wrap_with_paddles_own):
        if versions.total_loss_is_list():
            assert answer == "PipelineParallelWithInterleave"
        else:
            assert "take one loss function, not a list" in answer


# ---- evaluation's outputs on the host (Paddle's: 3.2 on, not on CPU)


def outputs_on_the_host(host):
    engine, _ = build(blocks(), V, "VPP", M)
    outputs = engine.eval_batch(list(batch(0, 2 * M)), return_host_tensor=host)
    return [(output.numpy(), output.place.is_gpu_place()) for output in outputs]


def test_outputs_on_the_host_are_the_same():
    on_device, on_host = run(outputs_on_the_host, False)[-1], run(outputs_on_the_host, True)[-1]
    for (expected, _), (output, is_on_gpu) in zip(on_device, on_host):
        np.testing.assert_array_equal(output, expected)
        assert not is_on_gpu
    assert len(on_host) == M


# ---- options that old releases have no flag for


class Longer(Block):
    """Gives a row more than it gets."""

    def forward(self, x):
        return super().forward(paddle.concat([x, x[:1]]))


def loss_of_any_length(output, label):
    return paddle.mean(output**2) + paddle.mean(label)


def longer():
    return [LayerDesc(Longer) for _ in range(P * V)]


def ragged_step():
    engine, _ = build(
        longer(), V, "VPP:enable_dynamic_shape=on,overlap_p2p_comm=on", M, seg_method="layer:Longer", loss_fn=loss_of_any_length
    )
    assert engine.options.engine.dynamic_shape and engine.options.engine.overlap_p2p
    loss = engine.forward_backward_pipeline([[x for x, _ in ragged()], [y for _, y in ragged()]])
    return loss.numpy(), gradients(named_layers(engine))


def ragged():
    return [batch(i, 1 + i % 3) for i in range(M)]


def test_flags_of_newer_releases_can_be_set_in_schedule_mode():
    one = OneProcess(longer(), loss_of_any_length)
    expected = one.step(ragged(), update=False).numpy()
    results = run(ragged_step)
    for loss, _ in results:
        np.testing.assert_array_equal(loss, expected)
    assert_same_bits(merged([found for _, found in results]), gradients(one.layers))


# ---- a training run


def train_the_example(folder):
    """(losses of the run, exit status) of the example with --check."""
    from paddle_vpp_ext.examples import train_gpt

    losses, train = [], train_gpt.train
    train_gpt.train = lambda *args: losses.extend(train(*args)) or losses
    try:
        size = ["--layers", str(P * V), "--width", "32", "--length", "32", "--acc", "6", "--steps", "4"]
        return losses, train_gpt.main([*size, "--untied", "--check", "--out", folder])
    finally:
        train_gpt.train = train


def test_the_example_trains_as_in_one_process(tmp_path, record_property):
    results = run(train_the_example, str(tmp_path))
    assert [status for _, status in results] == [0] * P
    assert all(losses == results[0][0] for losses, _ in results)
    assert results[0][0][-1] < results[0][0][0]
    record_property("losses", results[0][0])  # ci/matrix.sh compares those of all releases


# ---- answers as text


def static_schedulers(num_chunks, m):
    """Ours and that of Paddle's own engine."""
    ours = "VPP:groups=first,slope=2" if num_chunks > 1 else "1F1B"
    return [build(blocks(), num_chunks, schedule, m)[0].get_static_scheduler() for schedule in (ours, "paddle")]


@pytest.mark.parametrize("num_chunks, m", ((1, 3), (1, 8), (2, 8), (2, 12)))
def test_the_static_scheduler_is_that_of_paddles_engine(num_chunks, m):
    for ours, paddles in run(static_schedulers, num_chunks, m):
        assert ours == paddles


# ---- what is too old


@pytest.mark.parametrize("version", ("2.6.1", "2.5.2", "1.8.5"))
def test_an_older_paddle_is_refused_in_one_sentence(monkeypatch, version):
    monkeypatch.setattr(paddle, "__version__", version)
    before = paddle.distributed.fleet.distributed_model
    with pytest.raises(RuntimeError) as caught:
        selector.enable()
    assert str(caught.value) == f"paddle_vpp_ext needs Paddle 2.6.2 or newer, but this is {version}"
    assert paddle.distributed.fleet.distributed_model is before


@pytest.mark.parametrize("version", ("2.6.2", "3.0.0b2", "3.3.1", "4.0.0.dev20260101", "0.0.0"))
def test_newer_ones_and_builds_from_source_are_not(monkeypatch, version):
    monkeypatch.setattr(paddle, "__version__", version)
    versions.check_supported()
