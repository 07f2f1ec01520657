"""With a communicator each for activations and gradients no plan can hang; merged as for one communicator many would."""

import itertools

import pytest

from paddle_vpp_ext.planning.planner import make_plan
from paddle_vpp_ext.schedule.dependencies import Dependencies, Exchange
from paddle_vpp_ext.schedule.grouped_exchange import step_together
from paddle_vpp_ext.schedule.verify import ScheduleError, verify_programs
from two_communicators import hangs, in_order_of_issue


def plan_and_dependencies(p, v, m, schedule="VPP", **options):
    plan = make_plan(schedule, p, v, m, options, blocking=False)
    return plan, Dependencies(plan.orders, v, m)


def configurations(most_p, most_v):
    return [(p, v, m) for p in range(2, most_p + 1) for v in range(1, most_v + 1) for m in range(1, 4 * p + 1)]


def test_merged_over_kinds_some_would_hang():
    plans = {c: plan_and_dependencies(*c) for c in configurations(4, 3)}
    assert sum(hangs(plan.programs, dependencies) for plan, dependencies in plans.values()) > 0


def test_a_plan_that_could_hang_is_refused():
    refused = 0
    for c in configurations(4, 3):
        plan, dependencies = plan_and_dependencies(*c)
        if hangs(plan.programs, dependencies):
            with pytest.raises(ScheduleError, match="deadlock|at the other end"):
                verify_programs(dependencies, [in_order_of_issue(program) for program in plan.programs])
            refused += 1
    assert refused


@pytest.mark.parametrize("p", range(2, 9))
def test_of_one_kind_none_hangs(p):
    for v, m in itertools.product(range(1, 5), range(1, 4 * p + 1)):
        plan, dependencies = plan_and_dependencies(p, v, m)
        assert not hangs(plan.one_kind_programs, dependencies), (p, v, m)


@pytest.mark.parametrize("schedule, options", (("VPP", {"overlap": True}), ("ZBVPP", {}), ("FthenB", {})))
def test_nor_do_other_schedules(schedule, options):
    for p, v, m in ((2, 2, 5), (3, 3, 7), (4, 2, 8), (4, 2, 11), (8, 2, 16)):
        plan, dependencies = plan_and_dependencies(p, v, m, schedule, **options)
        assert not hangs(plan.one_kind_programs, dependencies), (p, v, m)
        kinds = [{t.kind for t in x.sends + x.receives} for program in plan.one_kind_programs for x in program if type(x) is Exchange]
        assert all(len(k) == 1 for k in kinds)
        assert not step_together(plan.one_kind_programs, dict.fromkeys("FBIW", [1.0] * p * v)).open
