"""How good is the search? Against optima that CP-SAT has proven, on small random pipelines.

``optima.tsv`` holds the optima of 100 cases; each run proves a sample of them anew (with ortools) and searches all,
with a bit more than half of the usual effort to save time.
"""

from pathlib import Path

import pytest

from exact import Case, random_case, solve
from paddle_vpp_ext.schedule.costs import Costs
from paddle_vpp_ext.schedule.simulate import peak_activations, simulate
from paddle_vpp_ext.schedule.verify import verify_orders
from paddle_vpp_ext.search.memory import Memory
from paddle_vpp_ext.search.search import search


def optima():
    """(case, optimum) of every row."""
    with open(Path(__file__).with_name("optima.tsv"), encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file if not line.startswith("#")]
    assert all(row[8] == row[9] for row in rows), "found and bound are the same, else it is no proof"
    return [(Case.read(row), int(row[8])) for row in rows]


def test_the_search_is_near_the_proven_optimum():
    gaps = []
    for case, optimum in optima():
        costs = Costs(case.forward, case.input_grad, case.weight_grad, case.hop)
        found = search(case.p, case.num_chunks, case.m, costs, Memory(case.cap / case.num_chunks, False), effort=0.6)
        verify_orders(found.orders, case.num_chunks, case.m)
        assert simulate(found.orders, case.num_chunks, case.m, costs).makespan == pytest.approx(found.makespan)
        assert max(map(peak_activations, found.orders)) <= case.cap
        assert found.bound <= optimum + 1e-6
        gaps.append(found.makespan / optimum - 1)
    assert len(gaps) >= 100 and min(gaps) > -1e-9
    assert max(gaps) <= 0.05 and sum(gaps) / len(gaps) <= 0.02, sorted(gaps)[-5:]


def test_the_optima_are_those_of_the_cases_that_the_seeds_make():
    assert [case for case, _ in optima()] == [random_case(seed) for seed in range(len(optima()))]


@pytest.mark.parametrize("seed", range(5, 100, 10))
def test_a_sample_of_the_optima_is_proven_anew(seed):
    pytest.importorskip("ortools")
    case, optimum = optima()[seed]
    assert solve(case, seconds=60) == (optimum, optimum)
