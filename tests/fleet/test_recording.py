"""Steps that are recorded into files: complete, in whole lines, aligned, and without a change of what is trained."""

import glob
import json
import os
import threading

import pytest

from paddle_vpp_ext.fleet.engine.options import read_options
from paddle_vpp_ext.fleet.observe import trace_file
from paddle_vpp_ext.planning.options import parse_schedule
from paddle_vpp_ext.tools import recorded
from pool import WorkerError, get_pool
from test_gradients import descs
from test_overlap import blocks, wrap
from training import batch, build


def train(schedule, variable, micro_batches):
    if variable:
        os.environ["PADDLE_VPP_TRACE"] = variable
    try:
        engine, optimizer = build(descs(4), 2, schedule, accumulate_steps=micro_batches[0])
    finally:
        os.environ.pop("PADDLE_VPP_TRACE", None)
    losses = []
    for step, m in enumerate(micro_batches):
        engine.accumulate_steps = m
        losses.append(engine.train_batch(list(batch(step, 2 * m)), optimizer).item())
    losses.append(engine.eval_batch(list(batch(9, 2 * m)), compute_loss=True).item())
    return losses, [str(a) for a in engine.plan().orders[engine.stage_id]]


@pytest.mark.parametrize("by_option", [True, False])
def test_every_step_of_every_rank_is_there_and_nothing_else_changes(tmp_path, by_option):
    folder = str(tmp_path / "new" / "folder")
    schedule, variable = (f"VPP:trace={folder}", None) if by_option else ("VPP", folder)
    plain = get_pool(2).run(train, "VPP", None, [5, 5, 3])
    traced = get_pool(2).run(train, schedule, variable, [5, 5, 3])
    assert [losses for losses, _ in traced] == [losses for losses, _ in plain]
    run, _ = recorded.load(folder)
    assert run.head["schedule"] == "VPP" and run.head["num_chunks"] == 2
    assert {n: (step[0].training, step[0].accumulate_steps) for n, step in run.steps.items()} == {
        0: (True, 5),
        1: (True, 5),
        2: (True, 3),
        3: (False, 3),
    }
    for rank, of_rank in enumerate(run.steps[2]):
        assert [str(block.action) for block in of_rank.blocks] == traced[rank][1]
        assert all(of_rank.start <= b.start <= b.end <= of_rank.end for b in of_rank.blocks)
    for account in recorded.accounts(list(run.steps.values())):
        assert account.compute > 0 and account.transfer >= 0 and account.other >= -1e-6
        assert account.total == pytest.approx(account.compute + sum(account.waiting.values()) + account.transfer + account.other)


def test_an_action_starts_after_what_it_needs_ended_on_the_other_rank(tmp_path):
    get_pool(2).run(train, f"VPP:trace={tmp_path}", None, [6])
    run, _ = recorded.load(tmp_path)
    ends = {(b.kind, b.chunk * 2 + b.rank, b.micro_batch): b for rank in run.steps[0] for b in rank.blocks}
    for (kind, part, i), block in ends.items():
        before = ends.get((kind, part - 1 if kind == "F" else part + 1, i))
        assert before is None or before.end <= block.start


def overlapped_step(folder):
    engine = wrap("protocol", blocks(4), 2, f"VPP:overlap=on,overlap_p2p_comm=on,trace={folder}", 6)
    engine.forward_backward_pipeline(list(batch(0, 12)))
    return [str(a) for a in engine.plan().orders[engine.stage_id]]


def test_a_forward_and_a_backward_that_run_together_are_recorded_both(tmp_path):
    orders = get_pool(2).run(overlapped_step, str(tmp_path))
    run, _ = recorded.load(tmp_path)
    assert [[str(block.action) for block in rank.blocks] for rank in run.steps[0]] == orders
    for account in recorded.accounts([run.steps[0]]):
        assert account.compute > 0 and account.other >= -1e-6, "a wait inside an action is no computation"


def test_files_hold_whole_lines_while_the_training_goes_on(tmp_path):
    get_pool(2).run(train, f"FthenB:trace={tmp_path}", None, [2])
    (path,) = glob.glob(f"{tmp_path}/*-rank1.jsonl")
    with open(path, encoding="utf-8") as file:
        text = file.read()
    assert text.endswith("\n") and all(json.loads(line) for line in text.splitlines())
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"step": 7, "trai')  # where a run was killed
    assert list(recorded.load(tmp_path)[0].steps) == [0, 1]


def test_a_folder_that_cannot_be_written_is_an_error_on_all_ranks():
    with pytest.raises(WorkerError) as caught:
        get_pool(2).run(train, "VPP:trace=/dev/null/x", None, [2])
    assert str(caught.value).count("ValueError: trace=/dev/null/x: rank 0 cannot write there") == 2


def record_until_the_disk_is_full(folder):
    engine, optimizer = build(descs(4), 2, f"VPP:trace={folder}", accumulate_steps=2)
    recorder = engine.runner._instruments[0]
    recorder._file.close()
    recorder._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115, the recorder closes it
    return [engine.train_batch(list(batch(step, 4)), optimizer).item() for step in range(2)], recorder._file


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_ends_the_recording_and_not_the_training(tmp_path):
    for losses, file in get_pool(2).run(record_until_the_disk_is_full, str(tmp_path)):
        assert len(losses) == 2 and file is None


class Gathering:
    """``gather`` among threads, each with a clock of its own, which is ahead of the real one by ``skew``."""

    def __init__(self, count):
        self.barrier, self.values = threading.Barrier(count), [None] * count

    def of(self, rank):
        def gather(value):
            self.values[rank] = value
            self.barrier.wait(10)
            everybody = list(self.values)
            self.barrier.wait(10)
            return everybody

        return gather


@pytest.mark.parametrize("skews", [[0, 0, 0], [5.0, 0, 3600.0], [0, -2.5, 0.25]])
def test_clocks_that_differ_are_measured_and_those_that_agree_are_left_alone(monkeypatch, skews):
    local = threading.local()
    real = trace_file.now
    monkeypatch.setattr(trace_file, "now", lambda: real() + local.skew)
    gathering, results = Gathering(len(skews)), {}

    def run(rank):
        local.skew = skews[rank]
        results[rank] = trace_file.clock_offset(gathering.of(rank))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(skews))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for rank, (offset, error) in results.items():
        assert abs(offset - (skews[rank] - skews[0])) <= error < 0.2
        if skews[rank] == skews[0]:
            assert offset == 0.0


def test_the_option_and_the_variable_are_read():
    assert parse_schedule("1F1B:trace=a/b").engine == {"trace": "a/b"}
    with pytest.raises(ValueError, match="trace: there is no path"):
        parse_schedule("VPP:trace=")
    configs = {"schedule_mode": "VPP:trace=a"}
    assert read_options(configs, None, {}).engine.trace == "a" and read_options({}, None, {}).engine.trace == ""
    assert read_options(configs, None, {"PADDLE_VPP_TRACE": "b"}).engine.trace == "b"
