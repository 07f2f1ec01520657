"""Checkpoints move between Paddle's engines and ours, and between numbers of chunks with Paddle's own adaptor."""

import pathlib

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc
from paddle.distributed.fleet.utils.pp_parallel_adaptor import ParallelConfig, PipeLineModelAdaptor

from pool import get_pool
from training import WIDTH, batch, build

P, BLOCKS, M = 4, 16, 8
STEPS = 4


class Double(nn.Layer):
    """Two weights: Paddle's adaptor takes neighbours of equal names, from two ranks, for one layer."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return paddle.tanh(self.out(self.into(x)))


def as_a_new_process(function, *args):
    """Weights and the optimizer's states have numbers in their names, which start anew."""
    with paddle.utils.unique_name.guard():
        return function(*args)


def trainer(schedule, num_chunks):
    """(engine, optimizer, scheduler)."""
    engine, _ = build([LayerDesc(Double) for _ in range(BLOCKS)], num_chunks, schedule, M, seg_method="layer:Double")
    scheduler = paddle.optimizer.lr.ExponentialDecay(0.05, 0.7)
    return engine, fleet.distributed_optimizer(paddle.optimizer.AdamW(scheduler, parameters=engine.parameters())), scheduler


def train(engine, optimizer, scheduler, steps):
    return [engine.train_batch(list(batch(step, 2 * M)), optimizer, scheduler).item() for step in steps]


def folder_of(folder, engine):
    """Of this rank, named as Paddle's adaptor wants it."""
    path = pathlib.Path(folder) / f"mp_00_sharding_00_pp_{engine.stage_id:0>2d}"
    path.mkdir(exist_ok=True, parents=True)
    return path


def train_and_save(schedule, num_chunks, folder):
    """Losses of all steps; the checkpoint is of the middle."""
    parts = trainer(schedule, num_chunks)
    engine, optimizer, _ = parts
    losses = train(*parts, range(STEPS // 2))
    path = folder_of(folder, engine)
    paddle.save(engine.state_dict(), str(path / "model.pdparams"))
    paddle.save(optimizer.state_dict(), str(path / "model_state.pdopt"))
    paddle.save({}, str(path / "meta_state.pdopt"))
    return losses + train(*parts, range(STEPS // 2, STEPS)), sorted(engine.state_dict()), sorted(optimizer.state_dict())


def load_and_train(schedule, num_chunks, folder):
    """Losses of the steps after the checkpoint."""
    parts = trainer(schedule, num_chunks)
    engine, optimizer, _ = parts
    path = folder_of(folder, engine)
    missing, unexpected = engine.set_state_dict(paddle.load(str(path / "model.pdparams")))
    optimizer.set_state_dict(paddle.load(str(path / "model_state.pdopt")))
    return train(*parts, range(STEPS // 2, STEPS)), list(missing), list(unexpected)


def run(function, *args):
    return get_pool(P).run(as_a_new_process, function, *args)


def check(results, expected):
    for losses, missing, unexpected in results:
        assert (missing, unexpected) == ([], [])
        np.testing.assert_array_equal(losses, expected)


CASES = {"VPP": ("VPP:groups=first", 2), "1F1B": ("1F1B", 1)}


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_moves_between_paddles_engine_and_ours(case, tmp_path):
    ours, num_chunks = CASES[case]
    of_ours = run(train_and_save, ours, num_chunks, str(tmp_path / "ours"))
    of_paddle = run(train_and_save, "paddle", num_chunks, str(tmp_path / "paddle"))
    for (losses, names, states), (other_losses, other_names, other_states) in zip(of_ours, of_paddle):
        assert names == other_names and states == other_states
        np.testing.assert_array_equal(losses, other_losses)
    expected = of_ours[0][0][STEPS // 2 :]
    check(run(load_and_train, ours, num_chunks, str(tmp_path / "paddle")), expected)
    check(run(load_and_train, "paddle", num_chunks, str(tmp_path / "ours")), expected)


@pytest.mark.parametrize("before, after", ((2, 4), (4, 1), (1, 2)))
def test_a_checkpoint_moves_between_numbers_of_chunks(before, after, tmp_path, monkeypatch):
    saved = run(train_and_save, "VPP", before, str(tmp_path / "before"))
    for stage in range(P):
        (tmp_path / "after" / f"mp_00_sharding_00_pp_{stage:0>2d}").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)  # the adaptor writes next to where it is
    configs = [ParallelConfig(mp=1, pp=P, vpp=v) for v in (before, after)]
    adaptor = PipeLineModelAdaptor(*configs, transformer_layer_num=BLOCKS, segment_method="uniform")
    adaptor.apply(str(tmp_path / "before"), str(tmp_path / "after"))
    check(run(load_and_train, "VPP", after, str(tmp_path / "after")), saved[0][0][STEPS // 2 :])
