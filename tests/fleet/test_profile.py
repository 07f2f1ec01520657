"""auto:profile=N measures its first steps, shares what it found, plans anew, and changes no loss."""

import logging
import time

import numpy as np
import paddle
import pytest
from paddle.distributed.fleet.meta_parallel import LayerDesc

from paddle_vpp_ext.fleet.device import Accelerator, Mark
from paddle_vpp_ext.fleet.observe.profile import SENT, Sample, joined, summary
from paddle_vpp_ext.schedule.costs import Costs
from pool import WorkerError, get_pool
from test_flags import has_flag
from training import WIDTH, Block, OneProcess, batch, build, cut

ROWS = 2  # of a micro-batch
SLOW = 0.02  # seconds


class SlowBlock(Block):
    """Sleeps in its forward: the part that has it costs more than the others."""

    def forward(self, x):
        time.sleep(SLOW)
        return super().forward(x)


def descs(count, slow=()):
    return [LayerDesc(SlowBlock if place in slow else Block) for place in range(count)]


class Lines(logging.Handler):
    """The texts that are logged while it is attached."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def train(count, slow, num_chunks, schedule, micro_batches, failing=None, **flags):
    """Per step with m of ``micro_batches`` (0: an evaluation with m=3): the loss; and the costs, the digests of the plans, the log."""
    from paddle_vpp_ext.log import logger

    lines = Lines()
    logger.addHandler(lines)
    before = logging.root.manager.disable
    logging.disable(logging.NOTSET)
    try:
        engine, optimizer = build(descs(count, slow), num_chunks, schedule, micro_batches[0], seg_method="layer:Block|SlowBlock", **flags)
        losses, digests = [], []
        for step, m in enumerate(micro_batches):
            engine.accumulate_steps = m or 3
            data = list(batch(step, ROWS * (m or 3)))
            if step == failing:
                with pytest.raises(Exception, match="rows|cannot"):
                    engine.train_batch([data[0][:1], data[1]], optimizer)
            losses.append((engine.train_batch(data, optimizer) if m else engine.eval_batch(data, compute_loss=True)).numpy())
            digests.append(engine.plan().digest)
    finally:
        logging.disable(before)
        logger.removeHandler(lines)
    return losses, engine.measured_costs, digests, lines.texts


def expected_losses(count, slow, micro_batches):
    one, losses = OneProcess(descs(count, slow)), []
    for step, m in enumerate(micro_batches):
        pairs = cut(batch(step, ROWS * (m or 3)), m or 3)
        if m:
            losses.append(one.step(pairs).numpy())
        else:
            with paddle.no_grad():
                losses.append(sum(one.loss_fn(one.forward(x), label) / 3 for x, label in pairs).numpy())
    return losses


def check_losses(per_rank, expected):
    for losses, *_ in per_rank:
        for found, wanted in zip(losses, expected):
            np.testing.assert_array_equal(found, wanted)


def test_steps_are_measured_and_planned_anew_with_the_same_losses(tmp_path):
    saved = tmp_path / "costs.json"
    micro_batches = (5, 0, 5, 5, 3, 0, 5)  # the third training step is the last that is measured
    slow = {5}
    per_rank = get_pool(3).run(train, 6, slow, 2, f"auto:profile=2,save={saved}", micro_batches, timeout=120)
    check_losses(per_rank, expected_losses(6, slow, micro_batches))
    costs = per_rank[0][1]
    assert all(other[1] == costs and other[2] == per_rank[0][2] for other in per_rank)
    assert Costs.load(saved) == costs
    assert costs.forward[5] >= 1e3 * SLOW > 2 * max(costs.forward[:5])
    assert costs.hop > 0
    assert list(costs.message) == [ROWS * WIDTH * 4] * 5 + [0]
    digests = per_rank[0][2]
    assert digests[0] == digests[2] != digests[3] == digests[6]
    log = [text for text in per_rank[0][3] if "goes on with" in text]
    assert len(log) == 1, per_rank[0][3]
    assert "shorter than VPP:groups=first" in log[0]


def test_a_limit_in_which_nothing_fits_leaves_the_order_as_it_was():
    micro_batches = (4, 4, 4)
    per_rank = get_pool(3).run(train, 6, (), 2, "auto:profile=1,memory=1B", micro_batches)
    check_losses(per_rank, expected_losses(6, (), micro_batches))
    for _, costs, digests, log in per_rank:
        assert costs is None and len(set(digests)) == 1
        assert any("memory=" in text and "too small" in text for text in log)


def test_a_limit_in_bytes_is_kept_by_measured_activations():
    micro_batches = (4, 4)
    per_rank = get_pool(3).run(train, 6, (), 2, "auto:profile=1,memory=1MiB", micro_batches)
    check_losses(per_rank, expected_losses(6, (), micro_batches))
    costs = per_rank[0][1]
    size = ROWS * WIDTH * 4  # a block keeps its input and its output, which the backward of tanh needs
    assert list(costs.activation[1:5]) == [2 * size] * 4


def train_without_cache():
    return train(2, (), 1, "auto:profile=1", (2, 2, 2), clear_every_step_cache=True)


@pytest.mark.skipif(not has_flag("clear_every_step_cache"), reason="this Paddle has no such flag")
def test_steps_are_measured_also_where_each_forgets_its_shapes():
    per_rank = get_pool(2).run(train_without_cache, timeout=60)
    check_losses(per_rank, expected_losses(2, (), (2, 2, 2)))
    assert all(costs.hop > 0 for _, costs, *_ in per_rank)


def test_a_step_that_failed_is_not_counted():
    micro_batches = (4, 4, 4)
    per_rank = get_pool(3).run(train, 6, (), 2, "auto:profile=1", micro_batches, 1, timeout=120)
    check_losses(per_rank, expected_losses(6, (), micro_batches))
    for _, costs, digests, _ in per_rank:
        assert costs is not None and digests[0] != digests[1]


@pytest.mark.parametrize("options, message", (("profile=2,costs={}", "leave one of"), ("save=x.json", "needs profile=")))
def test_options_that_do_not_go_together_are_told_when_the_model_is_wrapped(tmp_path, options, message):
    path = tmp_path / "costs.json"
    Costs(forward=2.0).save(path)
    with pytest.raises(WorkerError, match=message):
        get_pool(3).run(train, 6, (), 2, "auto:" + options.format(path), (4,))


class Clock:
    """Moments that are milliseconds."""

    def milliseconds(self, start, end):
        return end.moment - start.moment


def test_costs_are_medians_per_part():
    def samples(rank):
        for chunk in range(2):
            for k in (0, 1, 100):  # the last one is out of the way
                for kind, factor in (("F", 1), ("I", 2), ("W", 3)):
                    time = factor * (10 * chunk + rank + 1) + k
                    yield Sample(kind, chunk, Mark(0, 50), Mark(time, 50 + 8 * factor), 4, 2 if kind == "F" else 5)
                yield Sample(SENT, chunk, Mark(0, 50), Mark(0, 49), 0, 0)

    summaries = [dict(summary(list(samples(rank)), 2, Clock()), hop=hop) for rank, hop in ((0, 0.5), (1, 0.7), (2, None))]
    parts = (1, 2, 3, 11, 12, 13)
    assert joined(summaries) == Costs(
        forward=[x + 1 for x in parts],
        input_grad=[2 * x + 1 for x in parts],
        weight_grad=[3 * x + 1 for x in parts],
        hop=0.7,
        activation=[11] * 6,
        residue=[15] * 6,
        message=[2] * 6,
    )


class Event:
    """A device's event under the rules of a real one: a time can only be read between two that were recorded and have passed."""

    recorded = 0

    def __init__(self, enable_timing):
        assert enable_timing
        self.moment, self.passed = None, False

    def record(self):
        Event.recorded += 1
        self.moment = Event.recorded

    def synchronize(self):
        self.passed = True

    def elapsed_time(self, end):
        assert self.moment and end.passed, "an event that has not passed"
        return 5.0 * (end.moment - self.moment)


def test_on_a_gpu_actions_are_timed_by_events(monkeypatch):
    monkeypatch.setattr(paddle.device.cuda, "Event", Event)
    monkeypatch.setattr(paddle.device.cuda, "memory_allocated", lambda: 100 * Event.recorded)
    meter = Accelerator("gpu")
    start, end = meter.mark(), meter.mark()
    assert meter.milliseconds(start, end) == 5.0 and end.allocated - start.allocated == 100
