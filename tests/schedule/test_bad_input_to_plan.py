"""Numbers and options that make no pipeline are refused with what was given."""

import pytest

from paddle_vpp_ext.planning.planner import make_plan
from paddle_vpp_ext.schedule import plan
from paddle_vpp_ext.schedule.costs import Costs
from paddle_vpp_ext.schedule.plan import plan_orders


@pytest.mark.parametrize(
    "numbers, name",
    [
        ((1, 2, 8), "num_stages=1"),
        ((0, 2, 8), "num_stages=0"),
        ((-4, 2, 8), "num_stages=-4"),
        ((4.0, 2, 8), "num_stages=4.0"),
        ((True, 2, 8), "num_stages=True"),
        (("4", 2, 8), "num_stages='4'"),
        ((4, 0, 8), "num_chunks=0"),
        ((4, 2.5, 8), "num_chunks=2.5"),
        ((4, 2, 0), "accumulate_steps=0"),
        ((4, 2, None), "accumulate_steps=None"),
    ],
)
def test_numbers_that_make_no_pipeline_are_refused(numbers, name):
    with pytest.raises(ValueError, match="whole number") as error:
        make_plan("VPP", *numbers)
    assert name in str(error.value)


@pytest.mark.parametrize("groups", [(7, 5), (12, -1), (11, 0), (), [6, 6]])
def test_groups_that_do_not_add_up_are_refused(groups):
    with pytest.raises(ValueError, match="accumulate_steps=11"):
        make_plan("VPP", 4, 2, 11, {"groups": groups})


def test_groups_may_be_a_list():
    assert make_plan("VPP", 4, 2, 11, {"groups": [6, 5]}).groups == (6, 5)


def test_an_unknown_grouping_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'odd'.*first, even"):
        make_plan("VPP", 4, 2, 11, {"groups": "odd"})


@pytest.mark.parametrize(
    "costs",
    [
        Costs(forward=-1),
        Costs(input_grad=float("nan")),
        Costs(weight_grad=float("inf")),
        Costs(hop=-0.1),
        Costs(hop=float("nan")),
        Costs(forward=[1] * 7),
    ],
)
def test_costs_that_are_no_times_are_refused(costs):
    with pytest.raises(ValueError):
        make_plan("VPP", 4, 2, 8, costs=costs)


def test_costs_per_part_are_used():
    plan = make_plan("VPP", 2, 1, 1)
    assert plan.simulate(Costs([1, 10], [100, 1000], [0, 0])).makespan == 1111


def test_orders_of_actions_that_the_model_lacks_are_refused():
    orders = make_plan("VPP", 2, 2, 2).orders
    with pytest.raises(ValueError, match="rank 0.*chunks 0..0"):
        plan_orders(orders, 1, 2)


def test_the_size_of_a_plan_is_limited_at_its_edge(monkeypatch):
    monkeypatch.setattr(plan, "MAX_ACTIONS", 2 * 4 * 2 * 11)
    assert make_plan("VPP", 4, 2, 11).accumulate_steps == 11
    with pytest.raises(
        ValueError, match="4 stages, 2 chunks and 12 micro-batches are 192 forwards and backwards, and a plan may have 176 at most"
    ):
        make_plan("VPP", 4, 2, 12)
    with pytest.raises(ValueError, match="a plan may have 176 at most"):
        plan_orders([[]] * 4, 2, 12)


@pytest.mark.parametrize("schedule", ["VPP", "ZBVPP"])
def test_groups_with_the_largest_not_first_are_told_to_have_it_first(schedule):
    try:
        make_plan(schedule, 4, 2, 11, {"groups": (4, 7)})
    except ValueError as error:
        assert str(error).startswith("groups=4+7: the largest group has to come first, as in groups=7+4; ")
    else:
        assert schedule == "ZBVPP", "its list schedule takes groups in any order"
    make_plan(schedule, 4, 2, 11, {"groups": (7, 4)})
