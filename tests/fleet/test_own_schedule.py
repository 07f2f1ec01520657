"""A schedule that a user registers trains like ours: losses and gradients to the last bit, errors on all ranks."""

import numpy as np
import pytest

import paddle_vpp_ext
from pool import WorkerError, get_pool
from test_gradients import descs, pipeline_steps
from training import OneProcess, assert_same_bits, batch, build, cut, gradients, merged

pytestmark = pytest.mark.one_release  # of our own orders: no release of Paddle differs


def by_registered(num_layers, num_chunks, micro_batches):
    import paddle_vpp_ext.examples.own_schedule  # noqa: F401, registers Waves

    return pipeline_steps(num_layers, num_chunks, "Waves", micro_batches)


@pytest.mark.parametrize("p, num_chunks", [(2, 1), (2, 2), (4, 2)])
def test_training_with_a_registered_schedule_is_that_of_one_process(p, num_chunks):
    micro_batches = [1, p, 2 * p + 1, 4 * p + 3]
    per_rank = get_pool(p).run(by_registered, p * num_chunks, num_chunks, micro_batches)
    for k, m in enumerate(micro_batches):
        one = OneProcess(descs(p * num_chunks))
        loss = one.step(cut(batch(m, 2 * m), m), update=False)
        for rank_results in per_rank:
            np.testing.assert_array_equal(rank_results[k][0], loss.numpy())
        assert_same_bits(merged([rank_results[k][1] for rank_results in per_rank]), gradients(one.layers))


def order_that_ran():
    paddle_vpp_ext.register_schedule("Mine", lambda p, v, m: ["F0.0 F0.1 B0.1 B0.0"] * p)
    engine, optimizer = build(descs(2), 1, "Mine", accumulate_steps=2)
    with engine.recording() as blocks:
        engine.train_batch(list(batch(0, 4)), optimizer)
    return [f"{kind}{chunk}.{i}" for rank, _, _, kind, chunk, i in blocks if rank == engine.stage_id], engine.get_static_scheduler()


def test_the_orders_of_the_function_are_what_runs():
    for order, text in get_pool(2).run(order_that_ran):
        assert order == ["F0.0", "F0.1", "B0.1", "B0.0"] and text == "f0;f1;b1;b0;"


def wrap_a_wrong_one():
    paddle_vpp_ext.register_schedule("Wrong", lambda p, v, m: ["F0.0 B0.0", "B0.0 F0.0"])
    build(descs(2), 1, "Wrong", accumulate_steps=1)


def test_a_wrong_schedule_is_an_error_on_all_ranks_when_the_model_is_wrapped():
    with pytest.raises(WorkerError) as caught:
        get_pool(2).run(wrap_a_wrong_one, timeout=30)
    assert str(caught.value).count("ScheduleError: rank 1, instruction 0 (B0.0): it comes before F0.0") == 2


def wrap_different_ones(order):
    import paddle

    orders = order[paddle.distributed.get_rank()]
    paddle_vpp_ext.register_schedule("Differs", lambda p, v, m: [orders] * p)
    build(descs(2), 1, "Differs", accumulate_steps=2)


def test_ranks_that_register_different_schedules_find_out_when_the_model_is_wrapped():
    with pytest.raises(WorkerError) as caught:
        get_pool(2).run(wrap_different_ones, ["F0.0 F0.1 B0.0 B0.1", "F0.0 B0.0 F0.1 B0.1"], timeout=30)
    assert str(caught.value).count("the ranks of the pipeline disagree when the model is wrapped") == 2


def step_with_different_plans():
    """What steps with m=2, where rank 0 has another order for it, and m=3, where the function fails, say; and the loss of one with m=1."""
    import paddle

    mine = ["F0.0 F0.1 B0.0 B0.1", "F0.0 B0.0 F0.1 B0.1"][paddle.distributed.get_rank()]
    paddle_vpp_ext.register_schedule("Later", lambda p, v, m: [{1: "F0.0 B0.0", 2: mine}[m]] * p)
    engine, optimizer = build(descs(2), 1, "Later", accumulate_steps=1)
    texts = []
    for m in (2, 3):
        engine.accumulate_steps = m
        with pytest.raises(ValueError) as caught:
            engine.train_batch(list(batch(0, 2 * m)), optimizer)
        texts.append(str(caught.value))
    engine.accumulate_steps = 1
    return texts, engine.train_batch(list(batch(0, 2)), optimizer).item()


def test_a_plan_that_differs_or_cannot_be_made_is_told_before_the_step_and_the_next_one_works():
    expected = OneProcess(descs(2)).step(cut(batch(0, 2), 1)).item()
    for (different, impossible), loss in get_pool(2).run(step_with_different_plans, timeout=30):
        assert "the ranks of the pipeline disagree on the step:\n  plan: rank 0: " in different
        assert "schedule Later, called with p=2, V=1, m=3, failed with KeyError" in impossible
        assert loss == expected
