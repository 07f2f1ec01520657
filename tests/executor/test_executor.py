"""The real executor, on the real programs, under NCCL's rules."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inprocess import Hang, World
from paddle_vpp_ext.executor import Pending, Step, resolve, run
from paddle_vpp_ext.planning.planner import make_plan
from paddle_vpp_ext.schedule.action import Action
from paddle_vpp_ext.schedule.dependencies import Exchange, Transfer


class ToyStage:
    """Part s maps x to weight_s * x + micro_batch, in integers: any mistake in what meets what shows in a gradient."""

    def __init__(self, rank, num_stages, num_chunks):
        self.rank, self.p, self.last = rank, num_stages, num_stages * num_chunks - 1
        self.weights = [2 * (c * num_stages + rank) + 3 for c in range(num_chunks)]
        self.grads = [0] * num_chunks
        self.inputs, self.output_grads, self.loss, self.done = {}, {}, {}, []
        self.held = self.most_held = self.pairs = 0
        self.random = random.Random(rank)

    def forward(self, chunk, i, x):
        x = i + 1 if chunk * self.p + self.rank == 0 else x
        self.inputs[chunk, i] = x
        y = self.weights[chunk] * x + i
        if chunk * self.p + self.rank == self.last:
            self.loss[i] = y
            return None
        self.held += 1
        self.most_held = max(self.most_held, self.held)
        return y

    def backward(self, chunk, i, grad):
        grad = self.backward_input(chunk, i, grad)
        self.backward_weight(chunk, i)
        return grad

    def backward_input(self, chunk, i, grad):
        grad = i + 2 if chunk * self.p + self.rank == self.last else grad
        self.output_grads[chunk, i] = grad
        return grad * self.weights[chunk]

    def backward_weight(self, chunk, i):
        self.grads[chunk] += self.output_grads.pop((chunk, i)) * self.inputs.pop((chunk, i))

    def overlapped(self, forward, backward, x, grad, comm):
        """The two in any order that the protocol allows, picked anew each time."""
        assert forward[1:] != backward[1:], "a pair's backward must not need its forward"
        self.pairs += 1
        if comm is None:
            return self.forward(*forward[1:], x), self.backward(*backward[1:], grad)
        made = {}
        calls = {"F": lambda: self.forward(*forward[1:], x), "B": lambda: self.backward(*backward[1:], grad)}
        for kind in self.random.sample("FB", 2):
            comm.wait(kind)
            made[kind] = calls[kind]()
            if self.random.random() < 0.8:  # what the stage leaves out, the executor does after it
                comm.start(kind, made[kind])
        return made["F"], made["B"]

    def sent(self, transfer, payload):
        if transfer.kind == "F":
            self.held -= 1

    def chunk_done(self, chunk):
        assert not [c for c, _ in self.inputs if c == chunk]
        self.done.append(chunk)


def one_process(p, v, m):
    """Losses and gradients of the same model without a pipeline."""
    weights = [2 * s + 3 for s in range(p * v)]
    losses, grads = {}, [0] * len(weights)
    for i in range(m):
        xs = [i + 1]
        for w in weights:
            xs.append(w * xs[-1] + i)
        losses[i], g = xs[-1], i + 2
        for s in reversed(range(p * v)):
            grads[s] += g * xs[s]
            g *= weights[s]
    return losses, grads


def train(plan, blocking, seed=0, overlap_pairs=False):
    p, v = plan.num_stages, plan.num_chunks
    stages = [ToyStage(r, p, v) for r in range(p)]

    def rank_main(rank, transport):
        startup = plan.startups[rank] if plan.startups else None
        run(resolve(plan.programs[rank], rank, p, v, startup), stages[rank], transport, overlap_pairs)

    World(p, blocking, seed).run(rank_main)
    return stages


def check(plan, stages):
    p, v = plan.num_stages, plan.num_chunks
    losses, grads = one_process(p, v, plan.accumulate_steps)
    assert stages[-1].loss == losses
    assert [stages[s % p].grads[s // p] for s in range(p * v)] == grads
    for stage in stages:
        assert stage.held == 0, "everything that was sent is freed"
        assert sorted(stage.done) == list(range(v)), "each chunk is reported final once"


GRID = [
    (schedule, options, p, v, m)
    for p in (2, 3, 4, 5)
    for v in (1, 2, 3)
    for m in range(1, 3 * p + 2)
    for schedule, options in (
        ("VPP", {"groups": "first"}),
        ("VPP", {"groups": "even"}),
        ("VPP", {"groups": "even", "slope": 1}),
        ("VPP", {"groups": "first", "overlap": m >= p}),
        ("FthenB", {}),
    )
]


@pytest.mark.parametrize("p", (2, 3, 4, 5))
@pytest.mark.parametrize("blocking", (True, False))
def test_gradients_are_those_of_one_process(p, blocking):
    for schedule, options, stages, v, m in GRID:
        if stages == p:
            plan = make_plan(schedule, p, v, m, options, blocking)
            check(plan, train(plan, blocking))


@pytest.mark.parametrize("blocking, overlap_pairs", ((True, False), (False, False), (False, True)))
def test_pairs_of_the_steady_phase_run_together(blocking, overlap_pairs):
    """As many pairs as steady steps, for every grouping and m >= p, also for p = 2."""
    for p in (2, 3, 4):
        for v in (1, 2, 3):
            for m in range(p, 3 * p + 2):
                for groups in ("first", "even"):
                    plan = make_plan("VPP", p, v, m, {"groups": groups, "overlap": True}, blocking)
                    stages = train(plan, blocking, seed=m, overlap_pairs=overlap_pairs)
                    check(plan, stages)
                    head = plan.groups[0]
                    slope = 1 if v == 1 else 2
                    for r, stage in enumerate(stages):
                        assert stage.pairs == m * v - min(slope * (p - 1 - r) + (v - 1) * head + 1, m * v)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_no_interleaving_of_the_ranks_changes_a_result(data):
    p = data.draw(st.integers(2, 6))
    v = data.draw(st.integers(1, 4))
    m = data.draw(st.integers(1, 3 * p + 1))
    blocking = data.draw(st.booleans())
    options = {"groups": data.draw(st.sampled_from(("first", "even"))), "slope": data.draw(st.sampled_from((1, 2)))}
    plan = make_plan("VPP", p, v, m, options, blocking)
    check(plan, train(plan, blocking, seed=data.draw(st.integers(0, 2**32))))


@pytest.mark.parametrize("m", range(1, 10))
def test_headers_can_go_before_payloads_when_each_transfer_is_an_exchange_of_its_own(m):
    """A step whose messages carry headers does each exchange of the serial programs in two messages."""
    p, v = 3, 2
    plan = make_plan("VPP", p, v, m, blocking=True)

    def twice(program):
        for instruction in program:
            if isinstance(instruction, Exchange):
                assert len(instruction.sends) + len(instruction.receives) == 1
                yield Exchange(*(tuple(Transfer(t.kind, t.part, -1 - t.micro_batch) for t in side) for side in instruction))
            yield instruction

    class WithHeaders:
        def __init__(self, endpoint):
            self.endpoint, self.blocking = endpoint, True

        def exchange(self, sends, receives):
            header = [Transfer(t.kind, t.part, -1 - t.micro_batch) for t, _ in sends]
            header_in = [Transfer(t.kind, t.part, -1 - t.micro_batch) for t in receives]
            pending = self.endpoint.exchange([(t, None) for t in header], header_in)
            for ticket in pending.sends + pending.receives:
                ticket.wait()
            return self.endpoint.exchange(sends, receives)

    stages = [ToyStage(r, p, v) for r in range(p)]
    World(p, True).run(lambda r, endpoint: run(resolve(plan.serial_programs[r], r, p, v), stages[r], WithHeaders(endpoint)))
    check(plan, stages)


def test_a_schedule_that_would_hang_on_nccl_fails_here():
    """The transport is only a proof if it catches what it is for: two ranks that both send first."""
    a, b = Transfer("F", 0, 0), Transfer("B", 1, 0)

    def both_send_first(rank, transport):
        mine, other = ((a, 1), b) if rank == 0 else ((b, 1), a)
        transport.exchange([mine], []).sends[0].wait()
        transport.exchange([], [other]).receives[0].wait()

    with pytest.raises(Hang):
        World(2, True).run(both_send_first)


def test_an_activation_never_meets_a_gradient():
    a, b = Transfer("F", 0, 0), Transfer("B", 2, 0)

    def crossed(rank, transport):
        if rank == 0:
            transport.exchange([(a, 1)], []).sends[0].wait()
        else:
            transport.exchange([], [b]).receives[0].wait()

    with pytest.raises(Hang, match="meets"):
        World(2, True).run(crossed)


def test_what_is_left_over_at_the_end_of_a_step_is_named():
    class Nothing:
        blocking = False
        forward = backward = sent = lambda self, *what: None

        def exchange(self, sends, receives):
            return Pending([], [None] * len(receives))

    received = Transfer("F", 0, 3)
    with pytest.raises(AssertionError, match="left over: .*part=0, micro_batch=3"):
        run([Exchange((), (received,))], Nothing(), Nothing())
    made = Step(Action("F", 0, 1), None, Transfer("F", 0, 1), False)
    with pytest.raises(AssertionError, match="left over: .*part=0, micro_batch=1"):
        run([made], Nothing(), Nothing())
