"""Zero-bubble orders keep to their cap, reach the published figures, and never deadlock."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle import check_programs, sizes
from paddle_vpp_ext.planning.planner import make_plan
from paddle_vpp_ext.schedule.action import format_order, parse_order
from paddle_vpp_ext.schedule.costs import Costs
from paddle_vpp_ext.schedule.grouping import even
from paddle_vpp_ext.schedule.interleave import interleaved
from paddle_vpp_ext.schedule.plan import plan_orders
from paddle_vpp_ext.schedule.simulate import simulate
from paddle_vpp_ext.schedule.verify import verify_orders
from paddle_vpp_ext.search.problem import Capacity, SearchProblem
from paddle_vpp_ext.search.zero_bubble import capacity_of, list_schedule, smallest_capacities, steady_pattern, zero_bubble


def of_a_stage(num_chunks, forward=1.0, input_grad=1.0, weight_grad=1.0):
    """Costs of one chunk where those of a whole stage are given."""
    return Costs(forward / num_chunks, input_grad / num_chunks, weight_grad / num_chunks)


@pytest.mark.parametrize(
    "num_chunks, stage, makespan",
    [
        (1, (1, 1, 1), 79.0),
        (2, (1, 1, 1), 75.5),
        (4, (1, 1, 1), 73.75),
        (4, (1, 1.2, 0.8), 74.45),
        (2, (1, 1.2, 0.8), 76.9),
    ],
)
def test_the_table_of_eight_stages_and_24_micro_batches_is_reproduced(num_chunks, stage, makespan):
    costs = of_a_stage(num_chunks, *stage)
    plan = make_plan("ZBVPP", 8, num_chunks, 24, {"cap": 8.0}, costs=costs)
    result = plan.simulate(costs)
    assert result.makespan <= makespan + 1e-9
    assert max(result.peak_activations) <= 8 * num_chunks


@pytest.mark.parametrize("num_chunks", (2, 3, 4, 8))
@pytest.mark.parametrize("p", (2, 3, 4, 5, 6, 8, 16))
def test_the_bound_is_reached_with_room_for_p_micro_batches(p, num_chunks):
    """112 cases: m a multiple of p."""
    for m in range(p, 4 * p + 1, p):
        result = simulate(zero_bubble(p, num_chunks, m, even(p, m)), num_chunks, m)
        assert result.makespan == 3 * m * num_chunks + p - 1
        assert max(result.peak_activations) <= p * num_chunks


@pytest.mark.parametrize("p, num_chunks", [(p, v) for p in (2, 3, 4, 5, 7, 8) for v in (1, 2, 3, 4)] + [(12, 2), (16, 3)])
def test_the_bound_is_reached_for_other_m_with_little_more_room(p, num_chunks):
    for m in (m for m in range(p + 1, 4 * p) if m % p):
        groups = even(p, m)
        result = simulate(zero_bubble(p, num_chunks, m, groups), num_chunks, m)
        assert result.makespan == 3 * m * num_chunks + p - 1
        assert max(result.peak_activations) <= (num_chunks - 1) * groups[0] + 2 * p


@given(st.data())
def test_any_cap_runs_or_is_refused_with_the_smallest_that_works(data):
    p, v, m = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 13))
    groups = data.draw(sizes(p, m)) if data.draw(st.booleans()) else tuple([1] * m)
    cap = data.draw(st.integers(1, (p + 2) * v)) / v
    times = st.integers(1, 6)
    costs = Costs(data.draw(times), data.draw(times), data.draw(times), data.draw(st.integers(0, 2)))
    least = max(smallest_capacities(SearchProblem(p, v, m), groups)) / v
    if cap < least:
        with pytest.raises(ValueError, match=f"the smallest that works is {least:g}"):
            make_plan("ZBVPP", p, v, m, {"groups": groups, "cap": cap}, costs=costs)
        cap = least
    blocking = data.draw(st.booleans())
    plan = make_plan("ZBVPP", p, v, m, {"groups": groups, "cap": cap}, blocking, costs=costs)
    assert max(plan.simulate(costs).peak_activations) <= cap * v + 1e-9
    check_split_programs(plan)


def check_split_programs(plan):
    """The oracle knows whole backwards: to what is sent, I is one, and W is nothing."""
    as_whole = lambda x: x._replace(kind="B") if getattr(x, "kind", "") == "I" else x
    check_programs([[as_whole(x) for x in program if getattr(x, "kind", "") != "W"] for program in plan.programs], plan.num_chunks)


@given(st.data())
def test_less_room_than_the_smallest_deadlocks(data):
    """So that what the error names is not merely enough."""
    p, v, m = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 11))
    groups = data.draw(sizes(p, m))
    least = smallest_capacities(SearchProblem(p, v, m), groups)
    assert list_schedule(SearchProblem(p, v, m, capacity=Capacity([1] * (p * v), least)), groups)
    if max(least) > 1:
        assert not list_schedule(SearchProblem(p, v, m, capacity=Capacity([1] * (p * v), [r - 1 for r in least])), groups)


def test_activations_are_held_until_w_and_i_frees_nothing():
    for order, peak in (("F0.0 F0.1 I0.0 I0.1 W0.0 W0.1", 2), ("F0.0 I0.0 F0.1 I0.1 W0.0 W0.1", 2), ("F0.0 I0.0 W0.0 F0.1 I0.1 W0.1", 1)):
        plan = plan_orders([parse_order(order)] * 2, 1, 2)
        assert plan.simulate().peak_activations == [peak, peak]


@pytest.mark.parametrize(
    "function, made",
    [
        (list_schedule, lambda problem: list_schedule(problem, (3,))[1]),
        (steady_pattern, lambda problem: steady_pattern(problem, (3,))),
    ],
)
def test_the_orders_in_the_docstrings_are_what_is_made(function, made):
    problem = SearchProblem(2, 1, 3, capacity=capacity_of(2, 2, 1))
    drawn = [line.split(maxsplit=2)[2] for line in function.__doc__.splitlines() if line.strip().startswith("rank ") and "F0.0" in line]
    assert drawn == [format_order(order) for order in problem.actions(made(problem))]


@pytest.mark.parametrize("p, v, m", [(2, 1, 1), (4, 2, 11), (8, 4, 39), (3, 3, 2)])
def test_the_pattern_with_whole_backwards_is_vpp(p, v, m):
    problem = SearchProblem(p, v, m, split=False)
    for slope in (1, 2):
        assert problem.actions(steady_pattern(problem, even(p, m), slope)) == interleaved(p, v, even(p, m), slope)


@settings(max_examples=25)
@given(st.data())
def test_networks_and_simulator_tell_the_same_time(data):
    p, v, m = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    times = st.lists(st.integers(1, 9), min_size=p * v, max_size=p * v)
    costs = Costs(data.draw(times), data.draw(times), data.draw(times), data.draw(st.integers(0, 3)))
    problem = SearchProblem(p, v, m, costs, split=data.draw(st.booleans())).build()
    makespan, numbers = list_schedule(problem, even(p, m))
    orders = problem.actions(numbers)
    verify_orders(orders, v, m)
    assert problem.evaluate(numbers)[0] == makespan == simulate(orders, v, m, costs).makespan >= problem.bound()


def test_evaluation_under_zbvpp_does_forwards_only():
    plan = make_plan("ZBVPP", 3, 2, 7, forward_only=True)
    assert {action.kind for order in plan.orders for action in order} == {"F"}


def test_unbalanced_vpp_with_hops_is_as_fast_as_promised():
    """p=8, V=4, m=39, 0.1 a hop: at most 490.4 at a peak of at most 11.25 micro-batches."""
    costs = Costs(1, 1, 1, 0.1)
    result = make_plan("VPP", 8, 4, 39, {"groups": "even"}, costs=costs).simulate(costs)
    assert result.makespan <= 490.4 + 1e-6 and max(result.peak_activations) / 4 <= 11.25
