"""Pipelines train on a device where kernels and transfers are asynchronous: bit by bit as one process there, and no wait is forgotten."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from programs import run

START = """
import paddle_vpp_ext
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc
paddle_vpp_ext.enable()
strategy = fleet.DistributedStrategy()
strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 2}
fleet.init(is_collective=True, strategy=strategy)
device.group_batches()
from training import Block, OneProcess, batch, build, cut, named_layers, weights
descs = lambda: [LayerDesc(Block) for _ in range(4)]
"""

TRAIN = (
    START
    + """
for schedule, num_chunks in SCHEDULES:
    engine, optimizer = build(descs(), num_chunks, schedule, 5)
    one = OneProcess(descs())
    for step, m in enumerate((5, 5, 2)):
        engine.accumulate_steps = m
        data = batch(step, 2 * m)
        loss = engine.train_batch(list(data), optimizer)
        assert loss.item() == one.step(cut(data, m)).item(), f"{schedule}: another loss in step {step}"
    mine, wanted = weights(named_layers(engine)), weights(one.layers)
    assert mine and all((mine[key] == wanted[key]).all() for key in mine), f"{schedule}: other weights"
    found = device.counters()
    assert found["races"] == found["freed_in_use"] == found["mismatches"] == 0, device.reports()
    print("trained", schedule)
"""
)
SCHEDULES = [("VPP:groups=even", 2), ("ZBVPP", 2), ("1F1B", 1), ("VPP:groups=even,overlap_p2p_comm=on", 2)]


def train(schedules, **options):
    return run(TRAIN.replace("SCHEDULES", repr(schedules)), ranks=2, limit=100, **options)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_losses_and_weights_are_those_of_one_process(seed):
    result = train(SCHEDULES, seed=seed, delay_us=300)
    assert result.passed and result.all.count("trained") == 2 * len(SCHEDULES), result.all


def test_events_that_come_before_their_transfers_are_found():
    """The fault of Paddle 2.6.2: what its tasks wait for comes too early. It shows that the tests above can fail."""
    result = train(SCHEDULES[:1], seed=1, delay_us=500, events="early")
    assert not result.passed and "without having waited for receive" in result.all, result.all


# Paddle 2.6.2's batches: they are a group by this guard, and their tasks' events come early.
AS_IN_2_6 = """
import sys
batches = sys.modules["paddle.distributed.communication.batch_isend_irecv"]
del batches._coalescing_manager
batches._with_batch_p2p_guard = lambda backend: device.group()
"""


def test_where_events_come_early_the_computing_stream_does_the_transfers():
    """Without overlap_p2p_comm, which is refused with a warning."""
    program = TRAIN.replace("descs =", AS_IN_2_6 + "descs =").replace("SCHEDULES", repr([SCHEDULES[0], SCHEDULES[1], SCHEDULES[3]]))
    result = run(program, ranks=2, limit=100, seed=1, delay_us=500, events="early")
    assert result.passed and result.all.count("trained") == 6, result.all
    assert result.all.count("overlap_p2p_comm has no effect") == 1, result.all


HOST_WAITS = (
    START
    + """
engine, optimizer = build(descs(), 2, "VPP:groups=even", 5)
def waits():
    found = device.counters()
    return {name: found[name] for name in ("device_synchronizes", "stream_synchronizes", "event_synchronizes")}
for step in range(3):
    data = list(batch(step, 10))
    before = waits()
    engine.train_batch(data, optimizer)
    spent = {name: count - before[name] for name, count in waits().items()}
print(rank, spent)
assert spent == {"device_synchronizes": 0, "stream_synchronizes": 1, "event_synchronizes": 0}, spent
"""
)


def test_in_a_steady_step_the_host_waits_for_the_device_only_for_the_loss():
    """Once: the last stage reads it, the other ranks bring it to their device."""
    result = run(HOST_WAITS, ranks=2, limit=60)
    assert result.passed, result.all


FAIL = (
    START
    + """
engine, optimizer = build(descs(), 2, "VPP:groups=even,timeout=20", 5)
for step in range(2):
    if step == 1 and rank == RANK:
        def fail(*what):
            raise RuntimeError("broken on purpose")
        engine.runner.stage.KIND = fail
    engine.train_batch(list(batch(step, 10)), optimizer)
"""
)


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_ends_the_other_with_its_words(rank, kind):
    result = run(FAIL.replace("RANK", str(rank)).replace("KIND", kind), ranks=2, limit=40)
    assert not result.hung, result.all
    assert result.codes == [1, 1] and all("broken on purpose" in text for text in result.texts), result.all


FIRST_STEP = (
    START
    + """
engine, optimizer = build(descs(), 2, "VPP:groups=even,overlap_p2p_comm=on", 5)
wrapped = device.bytes_sent()
engine.train_batch(list(batch(0, 10)), optimizer)
print(rank, wrapped, device.bytes_sent())
assert len(wrapped) >= 2 and len(device.bytes_sent()) == len(wrapped), "a communicator was made within the step"
assert sum(map(bool, wrapped)) >= 2, "not both have been connected"
"""
)


def test_both_communicators_are_there_when_the_model_is_wrapped():
    result = run(FIRST_STEP, ranks=2, limit=60, seed=1)
    assert result.passed, result.all
