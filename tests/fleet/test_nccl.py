"""The GPU path without a GPU: real executor, stage and DeviceTransport on a stand-in for paddle.distributed.

The stand-in has a thread per rank and enforces NCCL's rules for grouped calls (inprocess.py); tensors are
real. It fails where NCCL would hang, and where two ends differ in shape or dtype.
"""

import threading
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle import nn

from inprocess import End, Group, Hang, World
from paddle_vpp_ext.executor import resolve, run
from paddle_vpp_ext.fleet.messages import Boundaries
from paddle_vpp_ext.fleet.stage.data import MicroBatches
from paddle_vpp_ext.fleet.stage.overlap import OverlapMixin
from paddle_vpp_ext.fleet.stage.overlapped_stage import OverlappedStage
from paddle_vpp_ext.fleet.stage.pipeline_stage import PipelineStage
from paddle_vpp_ext.fleet.transport import device_transport as nccl
from paddle_vpp_ext.fleet.transport.device_transport import DeviceTransport
from paddle_vpp_ext.planning.planner import make_plan

WIDTH = 4


class StandIn:
    """What DeviceTransport uses of paddle.distributed. Global rank r is 10 + r, as for a second replica."""

    def __init__(self, world):
        self.world = world
        self.here = threading.local()
        self.calls = {r: [] for r in range(world.num_stages)}

    isend, irecv = "isend", "irecv"

    class P2POp:
        def __init__(self, op, tensor, peer, group):
            assert op in ("isend", "irecv") and isinstance(tensor, paddle.Tensor) and tensor.is_contiguous()
            self.op, self.tensor, self.peer, self.group = op, tensor, peer, group

    def batch_isend_irecv(self, operations):
        rank, (communicator,) = self.here.rank, {op.group for op in operations}  # all of one group
        self.calls[rank].append([(op.op, op.peer) for op in operations])
        ends = []
        for op in operations:
            label = tuple(op.tensor.shape), str(op.tensor.dtype)
            if op.op == "isend":
                ends.append(End(op.peer - 10, True, label, op.tensor))
            else:
                ends.append(End(op.peer - 10, False, label, None, op.tensor.set_value))
        group = Group(self.world, rank, communicator, ends)
        self.world.yield_until(rank, lambda: True)
        return [Task(group)]


class Task:
    def __init__(self, group):
        self.wait = group.wait
        self.is_completed = lambda: group.finished


class Layers(OverlapMixin):
    """As much of a PipelineLayer as a stage needs: a tuple with an integer in it crosses each boundary."""

    _loss_fn = staticmethod(lambda output, label: paddle.mean((output - label) ** 2))

    def __init__(self, rank, p, v):
        self.p, self.v, self.rank = p, v, rank
        self.parts = [Part(c * p + rank, p * v) for c in range(v)]
        self.run_function = self.parts

    def get_num_virtual_stages(self):
        return self.v

    def get_model_chunks(self):
        return [Run([part]) for part in self.parts]

    def forward(self, value, chunk_id=None):
        return self.parts[chunk_id or 0](value)


class Run(list):
    def get_run_function(self):
        return self


class Part(nn.Layer):
    def __init__(self, number, count):
        super().__init__()
        paddle.seed(number)
        self.number, self.count = number, count
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value):
        x, ids = value if self.number else (value, paddle.arange(WIDTH))
        x = paddle.tanh(self.linear(x) + ids.astype("float32"))
        # Not contiguous, as a slice of something larger would be.
        return x if self.number == self.count - 1 else (x.t().contiguous().t(), ids)


class Engine:
    """As much of an engine as a stage needs."""

    def __init__(self, rank, p, v, m):
        self._layers, self.num_stages, self.stage_id, self.accumulate_steps = Layers(rank, p, v), p, rank, m
        self._delay_scale_loss, self.micro_batch_id = False, 0

    class callbacks:
        hooks = {}

    def nothing(self, *_):
        pass

    set_virtual_pipeline_rank = nothing

    class gradient_sync:
        start = staticmethod(lambda chunk: None)

    def _release_output(self, tensor):
        tensor._clear_dataptr()


def data(m):
    random = np.random.RandomState(m)
    return [paddle.to_tensor(random.rand(2 * m, WIDTH).astype("float32")) for _ in range(2)]


def train(p, v, m, monkeypatch, overlap_p2p=False, overlap_pairs=False, dynamic=False, steps=2, seed=0):
    """Losses and gradients of all parts after some steps; the first has headers."""
    plan = make_plan("VPP", p, v, m, {"overlap": True} if overlap_pairs else {}, blocking=not overlap_p2p)
    world = World(p, not overlap_p2p, seed)
    stand_in = StandIn(world)
    monkeypatch.setattr(nccl, "dist", stand_in)
    monkeypatch.setattr(nccl.versions, "p2p_tasks_order_the_device", lambda: True)
    engines = [Engine(r, p, v, m) for r in range(p)]

    def rank_main(rank, _):
        stand_in.here.rank = rank
        boundaries = Boundaries(dynamic)
        groups = {"F": "first", "B": "second" if overlap_p2p else "first"}
        meeting = SimpleNamespace(channels=SimpleNamespace(ranks=[10 + r for r in range(p)]), gather=None, close=None)
        transport = DeviceTransport(meeting, groups, boundaries)
        stage = (OverlappedStage if overlap_pairs else PipelineStage)(engines[rank], boundaries)
        losses = []
        for step in range(steps):
            with_headers = not boundaries.knows("key")
            assert with_headers == (step == 0 or dynamic)
            boundaries.begin("key")
            stage.begin(MicroBatches(data(m), m, 2, rank == 0, rank == p - 1), True, True, 0, None)
            transport.begin(with_headers)
            by_kind = overlap_p2p and not with_headers
            programs = plan.one_kind_programs if by_kind else plan.serial_programs if with_headers else plan.programs
            startup = plan.startups[rank] if plan.startups else None
            run(resolve(programs[rank], rank, p, v, startup), stage, transport, overlap_p2p and not transport.blocking)
            losses += [loss.numpy() for loss in (stage.losses() or [[]])[0]]
        return losses

    losses = world.run(rank_main)[-1]
    grads = {}
    for engine in engines:
        for part in engine._layers.parts:
            grads[part.number] = [parameter.grad.numpy() for parameter in part.parameters()]
    return losses, grads, stand_in.calls


def one_process(p, v, m, steps=2):
    parts = [Part(s, p * v) for s in range(p * v)]
    inputs, labels = data(m)
    losses = []
    for _ in range(steps):
        for i in range(m):
            value = inputs[2 * i : 2 * i + 2]
            for part in parts:
                value = part(value)
            loss = Layers._loss_fn(value, labels[2 * i : 2 * i + 2])
            loss = loss / m if m > 1 else loss
            loss.backward()
            losses.append(loss.numpy())
    return losses, {part.number: [parameter.grad.numpy() for parameter in part.parameters()] for part in parts}


@pytest.mark.parametrize(
    "options", ({}, {"overlap_p2p": True}, {"overlap_pairs": True}, {"overlap_p2p": True, "overlap_pairs": True}, {"dynamic": True})
)
@pytest.mark.parametrize("p, v", ((2, 1), (2, 3), (3, 2), (4, 2)))
def test_gradients_are_those_of_one_process_under_nccl_s_rules(p, v, options, monkeypatch):
    for m in (p, 2 * p - 1, 2 * p + 1):
        losses, grads, _ = train(p, v, m, monkeypatch, seed=m, **options)
        expected_losses, expected = one_process(p, v, m)
        np.testing.assert_array_equal(losses, expected_losses)
        for number in expected:
            for found, wanted in zip(grads[number], expected[number]):
                np.testing.assert_array_equal(found, wanted, err_msg=f"part {number}")


def test_the_sequence_of_calls(monkeypatch):
    """p=2, V=1, m=2, the second step (no headers): a tuple of two tensors goes forward, one gradient comes back."""
    _, _, calls = train(2, 1, 2, monkeypatch)
    send, receive = [("isend", 11)] * 2, [("irecv", 10)] * 2
    assert calls[0][-3:] == [send, send + [("irecv", 11)], [("irecv", 11)]]
    assert calls[1][-3:] == [receive, [("isend", 10)] + receive, [("isend", 10)]]


def test_with_overlap_activations_and_gradients_have_a_communicator_each(monkeypatch):
    _, _, calls = train(3, 2, 6, monkeypatch, overlap_p2p=True)
    assert all(calls.values())


def test_a_message_of_another_shape_fails_instead_of_being_taken():
    world = World(2, True)
    stand_in = StandIn(world)

    def crossed(rank, _):
        stand_in.here.rank = rank
        name, shape = ("isend", [2]) if rank == 0 else ("irecv", [3])
        operation = StandIn.P2POp(name, paddle.zeros(shape), 11 - rank, "first")
        stand_in.batch_isend_irecv([operation])[0].wait()

    with pytest.raises(Hang, match="meets"):
        world.run(crossed)
