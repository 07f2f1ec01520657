"""Every plan of the grid is complete, runs without hanging, and takes the time that the oracle says."""

from collections import Counter
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from oracle import check_programs, is_exchange, makespan_blocking, makespan_without_blocking, pipelines, vpp_options
from paddle_vpp_ext.planning.planner import make_plan
from paddle_vpp_ext.schedule.costs import Costs

# Whole numbers and halves: sums are exact in floats, so that times can be compared with ==.
times = st.integers(0, 6).map(lambda n: n / 2)


def plan_of(data, max_v=4, **more):
    p, num_chunks, m = data.draw(pipelines(max_v=max_v), "p, V, m")
    if data.draw(st.integers(0, 4)) == 0:
        return make_plan("FthenB", p, num_chunks, m, **more)
    return make_plan("VPP", p, num_chunks, m, data.draw(vpp_options(p, m), "options"), **more)


@settings(max_examples=80)
@given(st.data(), st.booleans(), st.booleans())
def test_plans_do_every_action_once_and_cannot_hang(data, blocking, forward_only):
    plan = plan_of(data, blocking=blocking, forward_only=forward_only)
    everything = Counter(
        (kind, c, i) for kind in ("F" if forward_only else "FB") for c in range(plan.num_chunks) for i in range(plan.accumulate_steps)
    )
    for order, program in zip(plan.orders, plan.programs):
        assert Counter(map(tuple, order)) == everything
        assert [x for x in program if not is_exchange(x)] == order
    check_programs(plan.programs, plan.num_chunks)


@given(st.data(), st.booleans())
def test_serial_programs_do_the_same_one_transfer_at_a_time(data, blocking):
    plan = plan_of(data, max_v=3, blocking=blocking)
    assert all(len(x.sends) + len(x.receives) == 1 for program in plan.serial_programs for x in program if is_exchange(x))
    check_programs(plan.serial_programs, plan.num_chunks)


@given(st.data(), times, times, times)
def test_times_without_blocking_are_the_oracles(data, forward, half_backward, hop):
    costs = Costs(forward, half_backward, half_backward, hop)
    plan = plan_of(data, costs=costs)
    expected = makespan_without_blocking(plan.orders, plan.num_chunks, forward, 2 * half_backward, hop)
    assert plan.simulate(costs).makespan == expected


@given(st.data(), times, times, times)
def test_times_with_blocking_are_the_oracles(data, forward, half_backward, hop):
    costs = Costs(forward, half_backward, half_backward, hop)
    plan = plan_of(data, blocking=True, costs=costs)
    assert plan.simulate(costs).makespan == makespan_blocking(plan.programs, forward, 2 * half_backward, hop)


@given(st.data(), st.booleans())
def test_idle_shares_and_spans_tell_the_same(data, blocking):
    plan = plan_of(data, blocking=blocking)
    result = plan.simulate()
    busy = 3 * plan.num_chunks * plan.accumulate_steps
    for order, spans, idle in zip(plan.orders, result.spans, result.idle_share):
        assert len(order) == len(spans)
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:]))
        assert abs(idle - (1 - Fraction(busy) / Fraction(result.makespan))) < 1e-12
    assert max(spans[-1][1] for spans in result.spans) == result.makespan


@given(st.data())
def test_a_plan_is_the_same_on_every_rank_that_makes_it(data):
    p, num_chunks, m = data.draw(pipelines())
    one, other = (make_plan("VPP", p, num_chunks, m, {"groups": "even"}) for _ in range(2))
    assert one.digest == other.digest and one.programs == other.programs
    assert one.digest != make_plan("VPP", p, num_chunks, m + 1, {"groups": "even"}).digest


@given(st.data(), st.booleans())
def test_costs_of_any_size_can_be_planned(data, blocking):
    """Actions without time, or too short to be told apart by the clock, once got their receives too late."""
    p, num_chunks, m = data.draw(pipelines(), "p, V, m")
    size = st.sampled_from((0, 0.0, 1e-12, 1.0, 1e9))
    per_part = st.one_of(size, st.lists(size, min_size=p * num_chunks, max_size=p * num_chunks))
    costs = Costs(data.draw(per_part), data.draw(per_part), data.draw(per_part), data.draw(size))
    plan = make_plan("VPP", p, num_chunks, m, blocking=blocking, costs=costs)
    check_programs(plan.programs, num_chunks)
