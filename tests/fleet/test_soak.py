"""Many steps and any timing: memory and open files stay flat, results are those of one process.

200 steps and 12 timings here; SOAK_STEPS and TIMINGS of them in ci/drills.sh.
"""

import os
import random
import threading
import time

import numpy as np
import paddle
import pytest
from paddle.distributed.fleet.meta_parallel import LayerDesc

from pool import get_pool
from training import WIDTH, Block, OneProcess, assert_same_bits, build, cut, gradients, merged, named_layers

pytestmark = pytest.mark.one_release  # of our own connections: no release of Paddle differs

P, V, SIZE = 2, 2, 2
STEPS = int(os.environ.get("SOAK_STEPS", 200))
TIMINGS = int(os.environ.get("TIMINGS", 12))
COUNTS = (3, 1, 4, 2)  # accumulate_steps
LENGTHS = (1, 5, 3)
SAMPLES = 4  # of memory and files, the first after the first quarter


def descs():
    return [LayerDesc(Block) for _ in range(P * V)]


def batch_of(step, m):
    random_numbers = np.random.RandomState(step)
    shape = [m * SIZE, LENGTHS[step % len(LENGTHS)], WIDTH]
    return [paddle.to_tensor(random_numbers.rand(*shape).astype("float32")) for _ in range(2)]


def live():
    """(bytes of tensors, open files, threads) of this process."""
    allocated = paddle.base.core.host_memory_stat_current_value("Allocated", 0)
    return allocated, len(os.listdir("/proc/self/fd")), threading.active_count()


def soak(steps):
    """Training and evaluation in turn, with another shape and another m each time."""
    engine, optimizer = build(descs(), V, "VPP", COUNTS[0], SIZE)
    one = OneProcess(descs())
    samples = []
    for step in range(steps):
        m = engine.accumulate_steps = COUNTS[step % len(COUNTS)]
        data = batch_of(step, m)
        loss = engine.train_batch(data, optimizer)
        np.testing.assert_array_equal(loss.numpy(), one.step(cut(data, m)).numpy(), err_msg=f"step {step}")
        evaluated = engine.eval_batch(data, compute_loss=True)
        with paddle.no_grad():
            expected = sum((one.loss_fn(one.forward(x), label) / m for x, label in cut(data, m)), paddle.zeros([]))
        np.testing.assert_allclose(evaluated.numpy(), expected.numpy(), rtol=1e-6, err_msg=f"step {step}")
        del data, loss, evaluated, expected
        period = len(COUNTS) * len(LENGTHS)
        if step % period == period - 1 and step >= steps // SAMPLES:
            samples.append(live())
    return samples


def test_memory_and_open_files_stay_flat_over_many_steps():
    for samples in get_pool(P).run(soak, STEPS, timeout=60 + STEPS):
        assert len(samples) >= 3
        bytes_, files, threads = zip(*samples)
        assert len(set(files)) == 1 and len(set(threads)) == 1, samples
        assert max(bytes_) == bytes_[0], samples


class Sleepy:
    """Channels whose jobs sleep before and after each transfer, in threads of their own."""

    def __init__(self, channels, pick):
        self._channels, self._pick = channels, pick

    def __getattr__(self, name):
        return getattr(self._channels, name)

    def send(self, peer, kind, job, size=None):
        return self._channels.send(peer, kind, self._late(job))

    def receive(self, peer, kind, job, size=None):
        return self._channels.receive(peer, kind, self._late(job))

    def _late(self, job):
        before, after = self._pick.random() * 0.003, self._pick.random() * 0.003

        def late(transfer):
            time.sleep(before)
            value = job(transfer)
            time.sleep(after)
            return value

        return late


class SleepyStage:
    def __init__(self, stage, pick):
        self._stage, self._pick = stage, pick

    def __getattr__(self, name):
        return getattr(self._stage, name)

    def forward(self, *args):
        time.sleep(self._pick.random() * 0.004)
        return self._stage.forward(*args)

    def backward(self, *args):
        time.sleep(self._pick.random() * 0.004)
        return self._stage.backward(*args)

    def backward_input(self, *args):
        time.sleep(self._pick.random() * 0.004)
        return self._stage.backward_input(*args)

    def backward_weight(self, *args):
        time.sleep(self._pick.random() * 0.004)
        return self._stage.backward_weight(*args)


def train_sleepily(p, seeds):
    """(seed, gradients of one step) for each seed."""
    found = []
    for seed in seeds:
        schedule, m = timing_of(seed)
        engine, _ = build([LayerDesc(Block) for _ in range(p * V)], V, schedule, m, SIZE)
        pick = random.Random(1000 * seed + engine.stage_id)
        engine.runner.transport._channels = Sleepy(engine.runner.transport._channels, pick)
        engine.runner.stage = SleepyStage(engine.runner.stage, pick)
        engine.forward_backward_pipeline(batch_of(seed, m))
        engine.forward_backward_pipeline(batch_of(seed + 1, m))
        found.append((seed, gradients(named_layers(engine))))
        engine.runner.transport.close()
    return found


def timing_of(seed):
    pick = random.Random(seed)
    return pick.choice(("VPP:groups=first", "VPP:groups=even", "VPP:slope=1", "FthenB", "ZBVPP")), pick.randint(1, 7)


def test_random_sleeps_of_computations_and_transfers_change_no_bit():
    p = 3
    per_rank = get_pool(p).run(train_sleepily, p, range(TIMINGS), timeout=60 + 3 * TIMINGS)
    for number, seed in enumerate(range(TIMINGS)):
        _, m = timing_of(seed)
        one = OneProcess([LayerDesc(Block) for _ in range(p * V)])
        for step in (seed, seed + 1):
            one.step(cut(batch_of(step, m), m), update=False)
        assert_same_bits(merged([found[number][1] for found in per_rank]), gradients(one.layers))
