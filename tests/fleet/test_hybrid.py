"""Data parallel and sharding next to the pipeline, with and without overlap of the gradients' synchronisation."""

from unittest import mock

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc

from paddle_vpp_ext.fleet import versions
from pool import WorkerError, get_pool
from training import Block, OneProcess, assert_same_bits, batch, build, cut, merged, named_layers, weights

P, REPLICAS, M = 2, 2, 5
DEGREES = {"dp": {"dp_degree": REPLICAS}, "sharding": {"sharding_degree": REPLICAS, "dp_degree": 1}}


class Same(nn.Layer):
    """No weights."""

    def forward(self, x):
        return x


def descs(hole):
    """Eight parts; ``hole`` is one without weights."""
    return [LayerDesc(Same if k == hole else Block) for k in range(8)]


def pool(kind, stages=P):
    return get_pool(stages * REPLICAS, pp_degree=stages, **DEGREES[kind])


def replica():
    hcg = fleet.get_hybrid_communicate_group()
    return hcg.get_data_parallel_rank() + hcg.get_sharding_parallel_rank()


def data(step, which, m=M):
    return batch(10 * step + which, 2 * m)


def train(schedule, num_chunks, flags, hole, steps, delay=False):
    """Losses, weights, and the chunks that have buffers."""
    engine, _ = build(descs(hole), num_chunks, schedule, steps[0], seg_method="layer:Block|Same", **flags)
    optimizer = paddle.optimizer.Momentum(0.1, parameters=engine.parameters(), grad_clip=nn.ClipGradByGlobalNorm(0.05))
    optimizer = fleet.distributed_optimizer(optimizer)
    losses = []
    for step, m in enumerate(steps):
        engine.accumulate_steps = m
        losses.append(engine.train_batch(list(data(step, replica(), m)), optimizer).item())
    return engine.stage_id, replica(), losses, weights(named_layers(engine)), sorted(engine._chunk_2_comm_buffers)


def check(results, hole, steps):
    """Replicas differ in their data, and train on the mean of their gradients."""
    one = OneProcess(descs(hole))
    one.optimizer = paddle.optimizer.Momentum(0.1, parameters=one.parameters, grad_clip=nn.ClipGradByGlobalNorm(0.05))
    expected = []
    for step, m in enumerate(steps):
        pairs = [cut(data(step, which, m), m) for which in range(REPLICAS)]
        expected.append([sum(one.loss_fn(one.forward(x), y).item() for x, y in of) / m for of in pairs])
        one.step([pair for of in pairs for pair in of])
    wanted = weights(one.layers)
    for _, which, losses, found, _ in results:
        np.testing.assert_allclose(losses, [loss[which] for loss in expected], rtol=2e-5)
        for key, value in found.items():
            np.testing.assert_allclose(value, wanted[key], rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize("schedule", ("VPP", "ZBVPP"))
@pytest.mark.parametrize("hole", (0, 5))
def test_13_a_chunk_without_weights_does_not_end_the_synchronisation_of_the_others(hole, schedule):
    results = pool("dp").run(train, schedule, 4, {"dp_comm_overlap": True}, hole, (M, M))
    check(results, hole, (M, M))
    for stage, *_, chunks in results:
        assert chunks == [c for c in range(4) if c * P + stage != hole]


def paddles_buffers(hole):
    """The chunks for which Paddle's own loop makes buffers, with a stand-in for the buffers, which want a GPU."""
    engine, _ = build(descs(hole), 4, "VPP", M, seg_method="layer:Block|Same")
    with mock.patch.object(versions.pipeline_module(), "FusedCommBuffer", lambda *args, **kwargs: args[1]):
        buffers = engine.fused_gradient(engine._layers, engine.dp_group, M, True)
    return engine.stage_id, {c: sum(map(len, of_chunk)) for c, of_chunk in buffers.items()}


@pytest.mark.parametrize("hole", (0, 5, None))
def test_13_paddles_buffers_too(hole):
    for stage, buffers in pool("dp").run(paddles_buffers, hole):
        assert buffers == {c: 2 for c in range(4) if c * P + stage != hole}


@pytest.mark.parametrize("schedule, num_chunks", (("VPP", 2), ("FthenB", 2), ("1F1B", 1), ("ZBVPP", 2)))
@pytest.mark.parametrize("overlap", (False, True))
@pytest.mark.parametrize("kind", DEGREES)
def test_replicas_train_on_the_mean_of_their_gradients(kind, overlap, schedule, num_chunks):
    flags = {f"{kind}_comm_overlap": True} if overlap else {}
    steps = (M, 3, M + 1)
    results = pool(kind).run(train, schedule, num_chunks, flags, None, steps)
    check(results, None, steps)
    for *_, chunks in results:
        assert chunks == (list(range(num_chunks)) if overlap else [])


# ---- six processes: three stages, and to the last bit, since halves are exact and nothing clips

STAGES, CHUNKS = 3, 2


def train_three_stages(kind, schedule, overlap):
    engine, _ = build([LayerDesc(Block)] * (STAGES * CHUNKS), CHUNKS, schedule, M, **{f"{kind}_comm_overlap": overlap})
    optimizer = fleet.distributed_optimizer(paddle.optimizer.Momentum(0.1, parameters=engine.parameters()))
    losses = []
    for step, m in enumerate((M, 2, 7)):
        engine.accumulate_steps = m
        losses.append(engine.train_batch(list(data(step, replica(), m)), optimizer).item())
    return replica(), losses, weights(named_layers(engine)), sorted(engine._chunk_2_comm_buffers)


def one_process_of_replicas(counts):
    """Losses by step and replica, and the weights, where each step takes the mean of the replicas' gradients."""
    one = OneProcess([LayerDesc(Block)] * (STAGES * CHUNKS))
    one.optimizer = paddle.optimizer.Momentum(0.1, parameters=one.parameters)
    losses = []
    for step, m in enumerate(counts):
        losses.append([])
        sums = [0.0] * len(one.parameters)
        for which in range(REPLICAS):
            losses[-1].append(one.step(cut(data(step, which, m), m), update=False).item())
            sums = [total + parameter.grad for total, parameter in zip(sums, one.parameters)]
            one.optimizer.clear_grad()
        for parameter, total in zip(one.parameters, sums):
            parameter.grad = total / REPLICAS
        one.optimizer.step()
        one.optimizer.clear_grad()
    return losses, weights(one.layers)


@pytest.mark.parametrize("schedule", ("VPP", "ZBVPP"))
@pytest.mark.parametrize("overlap", (False, True))
@pytest.mark.parametrize("kind", DEGREES)
def test_three_stages_of_two_replicas_train_on_the_mean_to_the_last_bit(kind, overlap, schedule):
    losses, wanted = one_process_of_replicas((M, 2, 7))
    results = pool(kind, STAGES).run(train_three_stages, kind, schedule, overlap)
    for which, found, _, chunks in results:
        assert found == [of[which] for of in losses]
        assert chunks == (list(range(CHUNKS)) if overlap else [])
    for which in range(REPLICAS):
        assert_same_bits(merged([found for of, _, found, _ in results if of == which]), wanted)


class Fails(Exception):
    pass


class FailsOnce(Block):
    """Raises in its first backward, in the replicas of ``failing``."""

    failing = set()

    def forward(self, x):
        out = super().forward(x)
        out.register_hook(lambda grad: self.fail())
        return out

    def fail(self):
        if replica() in self.failing:
            self.failing.clear()
            raise Fails


def train_after_a_failure(failing, schedule, catch):
    """The losses of two steps, the first of which fails at first in some replicas; ``catch``: those that go on then."""
    engine, optimizer = build(
        [LayerDesc(FailsOnce if k == 1 else Block) for k in range(4)], 2, schedule, M, seg_method="layer:Block|FailsOnce"
    )
    FailsOnce.failing = set(failing)
    losses = []
    if replica() in catch:
        with pytest.raises(Exception, match="Fails"):
            engine.train_batch(list(data(0, replica())), optimizer)
    for step in range(2):
        losses.append(engine.train_batch(list(data(step, replica())), optimizer).item())
    return replica(), losses


def test_a_step_that_failed_in_all_replicas_can_be_done_again():
    everybody = tuple(range(REPLICAS))
    plain = pool("dp").run(train_after_a_failure, (), "VPP", ())
    assert pool("dp").run(train_after_a_failure, everybody, "VPP", everybody) == plain


def test_a_step_that_failed_in_one_replica_is_not_followed_by_another():
    with pytest.raises(WorkerError, match="if it failed in all replicas: only 2 of 4 processes"):
        pool("dp").run(train_after_a_failure, (0,), "VPP:timeout=3", (0,))
