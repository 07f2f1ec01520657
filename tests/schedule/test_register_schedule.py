"""A schedule that a user registers is planned and proved like ours, or refused with what is wrong."""

import pytest

import paddle_vpp_ext
from paddle_vpp_ext.examples.own_schedule import waves
from paddle_vpp_ext.planning.options import parse_schedule
from paddle_vpp_ext.planning.planner import make_plan
from paddle_vpp_ext.planning.registry import SCHEDULES, register_schedule
from paddle_vpp_ext.schedule.action import Action
from paddle_vpp_ext.schedule.verify import ScheduleError


@pytest.fixture(autouse=True)
def forget():
    before = dict(SCHEDULES)
    yield
    SCHEDULES.clear()
    SCHEDULES.update(before)


def plan_of(function, p=2, num_chunks=1, m=1):
    register_schedule("Mine", function)
    return make_plan("Mine", p, num_chunks, m)


@pytest.mark.parametrize("p, num_chunks, m", [(2, 1, 1), (2, 2, 5), (4, 2, 11), (4, 3, 24), (8, 2, 17)])
@pytest.mark.parametrize("blocking", [False, True])
def test_the_readmes_schedule_is_verified_and_bounds_memory(p, num_chunks, m, blocking):
    plan = make_plan("Waves", p, num_chunks, m, blocking=blocking)
    assert plan.simulate().peak_activations == [min(m, 2 * p) * num_chunks] * p
    assert len(plan.programs) == p and plan.schedule == "Waves"


@pytest.mark.parametrize("order", ["F0.0 B0.0", ["F0.0", "B0.0"], [Action("F", 0, 0), ("B", 0, 0)], (a for a in ("F0.0", "B0.0"))])
def test_orders_are_text_or_actions(order):
    assert plan_of(lambda p, v, m: [order, "F0.0 B0.0"]).orders[0] == [Action("F", 0, 0), Action("B", 0, 0)]


def test_a_split_backward_and_an_evaluation_are_planned():
    register_schedule("Split", lambda p, v, m: ["F0.0 I0.0 W0.0"] * p)
    assert make_plan("Split", 2, 1, 1).simulate().makespan == 5  # the first rank's W runs last
    assert [len(order) for order in make_plan("Split", 2, 1, 1, forward_only=True).orders] == [1, 1]


def test_the_name_is_one_of_schedule_mode_then():
    with pytest.raises(ValueError, match="unknown schedule 'Mine'"):
        parse_schedule("Mine")
    register_schedule("Mine", waves)
    assert parse_schedule("Mine:timeout=5").name == "Mine"
    register_schedule("Mine", waves)  # a cell of a notebook runs twice


@pytest.mark.parametrize("name", ["", "my schedule", "a:b", "a,b", "1F", "ä", None, 7, "VPP", "FthenB", "1F1B", "paddle", "auto", "ZBVPP"])
def test_a_name_that_cannot_be_one_is_refused(name):
    with pytest.raises(ValueError, match="name"):
        paddle_vpp_ext.register_schedule(name, waves)


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="'waves' is not a function"):
        register_schedule("Mine", "waves")


@pytest.mark.parametrize(
    "function, complaint",
    [
        (lambda p, v, m: ["F0.0 B0.0"], "gave orders for 1 ranks, not for 2"),
        (lambda p, v, m: None, "called with p=2, V=1, m=1, failed with TypeError"),
        (lambda p, v, m: 1 / 0, "failed with ZeroDivisionError"),
        (lambda p, v, m: ["F0.0 B0.0", 7], "failed with TypeError"),
        (lambda p, v, m: ["F0.0 B0.0", "F0.0 X0.0"], "rank 1 as its action 1: 'X0.0' is not an action"),
        (lambda p, v, m: ["F0.0 B0.0", [("F", 0)]], "rank 1 as its action 0"),
        (lambda p, v, m: ["F0.0 B0.0", [("F", "a", 0)]], "rank 1 as its action 0: 'Fa.0'"),
        (lambda p, v, m: ["F0.0 B0.0", "F0.0 B0.1"], r"rank 1, instruction 1 \(B0.1\)"),
        (lambda p, v, m: ["F0.0 B0.0", "F0.0"], "rank 1 has neither B0.0"),
        (lambda p, v, m: ["F0.0 B0.0", "B0.0 F0.0"], r"rank 1, instruction 0 \(B0.0\): it comes before F0.0"),
    ],
)
def test_what_is_wrong_is_told_with_rank_and_place(function, complaint):
    with pytest.raises(ScheduleError, match=complaint):
        plan_of(function)


def test_a_deadlock_is_told_with_rank_and_place():
    orders = ["F0.0 F0.1 B0.0 B0.1", "F0.1 B0.1 F0.0 B0.0"]
    assert plan_of(lambda p, v, m: orders, m=2)  # odd, and no deadlock without blocking
    orders = ["F0.0 B0.0 F0.1 B0.1", "F0.1 B0.1 F0.0 B0.0"]
    with pytest.raises(ScheduleError, match=r"deadlock: rank 0 cannot start B0.0(?s:.*)\[F0.1\]"):
        plan_of(lambda p, v, m: orders, m=2)
