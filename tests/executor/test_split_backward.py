"""Split backwards and orders without sequence, on the real executor under NCCL's rules."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_vpp_ext.planning.planner import make_plan
from paddle_vpp_ext.schedule.costs import Costs
from paddle_vpp_ext.schedule.plan import plan_orders
from paddle_vpp_ext.search.free_order import free_schedule, random_handicaps
from paddle_vpp_ext.search.memory import Memory
from paddle_vpp_ext.search.problem import Capacity, SearchProblem
from test_executor import check, train


@pytest.mark.parametrize("p", (2, 3, 4, 5))
@pytest.mark.parametrize("blocking", (True, False))
def test_gradients_under_zbvpp_are_those_of_one_process(p, blocking):
    for v in (1, 2, 3):
        for m in range(1, 3 * p + 2):
            plan = make_plan("ZBVPP", p, v, m, {}, blocking)
            stages = train(plan, blocking)
            check(plan, stages)
            # The micro-batches' gradients of a weight add up in their order, as in one process.
            for order in plan.orders:
                for chunk in range(v):
                    assert [a.micro_batch for a in order if a.kind == "W" and a.chunk == chunk] == list(range(m))


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_orders_without_sequence_run_on_both_transports(data):
    """Their receivers use things in another order than they are made in: what is early is buffered."""
    p, v, m = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    times = st.lists(st.integers(1, 9), min_size=p * v, max_size=p * v)
    costs = Costs(data.draw(times), data.draw(times), data.draw(times), data.draw(st.integers(0, 2)))
    limit = data.draw(st.integers(v, m * v))
    problem = SearchProblem(p, v, m, costs, Capacity([1] * (p * v), [limit] * p), data.draw(st.booleans()))
    makespan, numbers = free_schedule(problem, random_handicaps(problem, data.draw(st.integers(0, 10**6))))
    blocking = data.draw(st.booleans())
    plan = plan_orders(problem.actions(numbers), v, m, blocking=blocking, costs=costs)
    if not blocking:
        assert plan.simulate(costs).makespan == makespan
    assert max(plan.simulate(costs).peak_activations) <= limit
    check(plan, train(plan, blocking, seed=data.draw(st.integers(0, 2**32))))


@pytest.mark.parametrize("blocking", (True, False))
@pytest.mark.parametrize("p, v, m", [(2, 2, 5), (3, 1, 4), (4, 2, 6)])
def test_gradients_under_auto_are_those_of_one_process(p, v, m, blocking):
    forward = [1 + part % 3 / 5 for part in range(p * v - 1)] + [1.6]
    plan = make_plan("auto", p, v, m, {"memory": Memory(p, False)}, blocking, costs=Costs(forward, 1.1, 0.9, 0.1))
    assert "shorter than" in plan.note or "longer than" in plan.note
    check(plan, train(plan, blocking))
