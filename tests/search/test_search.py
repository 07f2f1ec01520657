"""The search keeps to the memory limit, says what it gains, and gives every rank the same answer in time."""

import os
import random
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_vpp_ext.planning.options import parse_schedule
from paddle_vpp_ext.planning.planner import make_plan
from paddle_vpp_ext.schedule.costs import UNIT, Costs
from paddle_vpp_ext.schedule.plan import plan_orders
from paddle_vpp_ext.schedule.simulate import peak_activations, simulate
from paddle_vpp_ext.schedule.verify import verify_orders
from paddle_vpp_ext.search.memory import Memory, peak_bytes
from paddle_vpp_ext.search.search import _search, search


def uneven(p, v, seed):
    """Parts that differ by up to 20 %, and a head of 1.6, all reproducible."""
    rnd = random.Random(seed)
    times = [[1 + rnd.uniform(-0.2, 0.2) for _ in range(p * v)] for _ in range(3)]
    for row in times:
        row[-1] *= 1.6
    return Costs(*times, hop=0.05)


@settings(max_examples=12)
@given(st.data())
def test_what_is_found_runs_in_the_time_and_memory_that_it_says(data):
    p, v, m = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 11))
    costs = uneven(p, v, data.draw(st.integers(0, 99)))
    cap = data.draw(st.integers(v, (p + 2) * v))
    split = data.draw(st.booleans())
    found = search(p, v, m, costs, Memory(cap / v, False), split=split, effort=0.05)
    verify_orders(found.orders, v, m)
    assert max(map(peak_activations, found.orders)) <= cap
    assert simulate(found.orders, v, m, costs).makespan == pytest.approx(found.makespan)
    assert found.bound <= found.makespan * (1 + 1e-9)
    assert found.reference == pytest.approx(make_plan("VPP", p, v, m).simulate(costs).makespan)
    assert split or {a.kind for order in found.orders for a in order} == {"F", "B"}


@pytest.mark.parametrize("p, v, m", [(4, 2, 8), (4, 2, 11), (3, 1, 7), (8, 4, 24)])
def test_without_a_limit_it_is_never_worse_than_vpp_nor_holds_more(p, v, m):
    for costs in (UNIT, Costs(1, 1.2, 0.8, 0.1), Costs(1, 2, 0)):
        found = search(p, v, m, costs, effort=0.3)
        vpp = make_plan("VPP", p, v, m)
        assert found.makespan <= found.reference + 1e-9 and found.margin >= -1e-12
        assert max(map(peak_activations, found.orders)) <= max(map(peak_activations, vpp.orders))


@pytest.mark.parametrize("p, v", [(4, 2), (4, 4), (8, 2), (8, 4)])
def test_uneven_parts_gain_at_least_3_percent(p, v):
    for seed in range(2):
        found = search(p, v, 3 * p, uneven(p, v, seed), Memory(p + 2, False), effort=0.3)
        assert found.margin >= 0.03, str(found)
        assert found.makespan <= 1.03 * found.bound, str(found)


def test_a_limit_in_bytes_counts_messages_too():
    costs = Costs((1, 1, 1, 1.6), 1.1, 0.9, 0.1, activation=(3e9, 1e9, 1e9, 2e9), residue=2e8, message=1e8)
    for limit in (9e9, 14e9):
        plan = make_plan("auto", 2, 2, 8, {"memory": Memory(limit, True)}, costs=costs)
        assert max(peak_bytes(plan.programs, costs, 2)) <= limit
    with pytest.raises(ValueError, match="too small.*takes"):
        search(2, 2, 8, costs, Memory(4e9, True))


def test_what_is_chosen_for_blocking_exchanges_is_fast_where_they_block():
    costs = Costs(1, 1.2, 0.8, 0.1)
    found = search(4, 2, 11, costs, blocking=True)
    plan = plan_orders(found.orders, 2, 11, blocking=True, costs=costs)
    assert plan.simulate(costs).makespan == pytest.approx(found.makespan)
    assert (
        found.makespan < found.reference == pytest.approx(make_plan("VPP", 4, 2, 11, blocking=True, costs=costs).simulate(costs).makespan)
    )


def test_every_process_finds_the_same():
    """Also where hashes of texts differ from process to process."""
    program = (
        "from paddle_vpp_ext.search.search import search; from paddle_vpp_ext.schedule.costs import Costs\n"
        "f = search(3, 2, 5, Costs((1, 1.1, 0.9, 1.2, 1, 1.6), 1.1, 0.9, 0.05), effort=0.2)\n"
        "print(f, [str(a) for order in f.orders for a in order])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_eight_stages_are_searched_in_five_seconds():
    _search.cache_clear()
    start = time.process_time()
    found = search(8, 4, 64, uneven(8, 4, 1), Memory(8, False))
    assert time.process_time() - start < 5
    assert found.makespan <= 1.01 * found.bound


def test_auto_is_written_like_any_schedule(tmp_path):
    path = tmp_path / "costs.json"
    Costs((1, 1, 1, 1, 1, 1, 1, 1.6), 1.1, 0.9).save(path)
    choice = parse_schedule(f"auto:memory=4.5,costs={path}")
    plan = make_plan(choice.name, 4, 2, 9, choice.options)
    assert max(plan.simulate().peak_activations) <= 9 and "bound" in plan.note
    for text, what in (("auto:memory=much", "memory"), ("auto:costs=none.json", "none.json"), ("ZBVPP:cap=-1", "cap")):
        with pytest.raises(ValueError, match=what):
            parse_schedule(text)


def test_without_a_limit_less_memory_is_taken_where_it_costs_nothing():
    # p micro-batches are enough for the bound here, VPP:groups=first holds more.
    found = search(4, 2, 8)
    assert found.makespan == found.bound and found.peak <= 4
    assert max(peak_activations(order) for order in make_plan("VPP", 4, 2, 8).orders) / 2 > 4
