"""Losses and gradients are those of one process, to the last bit."""

import numpy as np
import pytest
from paddle.distributed.fleet.meta_parallel import LayerDesc

from pool import get_pool
from training import Block, OneProcess, assert_same_bits, batch, build, cut, gradients, merged, named_layers

SCHEDULES = ("VPP:groups=first", "VPP:groups=even", "FthenB", "ZBVPP", "auto")
SLOW_TO_PLAN = ("auto",)  # every third m has to do


def descs(count):
    return [LayerDesc(Block) for _ in range(count)]


def pipeline_steps(num_layers, num_chunks, schedule, micro_batches):
    """Per m in ``micro_batches``: (mean loss, gradients) of one step, with one engine whose accumulate_steps change."""
    engine, _ = build(descs(num_layers), num_chunks, schedule, accumulate_steps=micro_batches[0])
    results = []
    for m in micro_batches:
        engine.accumulate_steps = m
        loss = engine.forward_backward_pipeline(list(batch(m, 2 * m)))
        results.append((loss.numpy(), gradients(named_layers(engine))))
        for parameter in engine.parameters():
            parameter.clear_gradient(False)
    return results


@pytest.mark.parametrize("num_chunks", (1, 2, 3))
@pytest.mark.parametrize("p", (2, 3, 4))
def test_gradients_are_those_of_one_process(p, num_chunks):
    micro_batches = list(range(1, 3 * p + 2))
    num_layers = p * num_chunks
    expected = []
    for m in micro_batches:
        one = OneProcess(descs(num_layers))
        loss = one.step(cut(batch(m, 2 * m), m), update=False)
        expected.append((loss.numpy(), gradients(one.layers)))
    for schedule in SCHEDULES:
        every = 3 if schedule in SLOW_TO_PLAN else 1
        per_rank = get_pool(p).run(pipeline_steps, num_layers, num_chunks, schedule, micro_batches[::every], timeout=120)
        for k, (loss, grads) in enumerate(expected[::every]):
            for rank_results in per_rank:
                np.testing.assert_array_equal(rank_results[k][0], loss)
            assert_same_bits(merged([rank_results[k][1] for rank_results in per_rank]), grads)
