"""The proven optimum of small pipelines, by OR-tools CP-SAT. Shares nothing with the package.

Free is the order of each rank, with all backwards split (a whole backward is I with W right after it). As micro-batches
are alike, nothing is lost by letting each part do its forwards in the order of the micro-batches, and so its I and its
W: name the k-th to be done at each part k. When the k-th forward of part s starts, k forwards of part s-1 are done, so
also the k-th of them; the same for I and W; and what is held depends on how many are done, not on which.

Run as a script it writes rows of ``optima.tsv`` for seeds FIRST .. FIRST+COUNT-1: python exact.py FIRST COUNT SECONDS
"""

import random
import sys
from typing import NamedTuple


class Case(NamedTuple):
    """Integer times of each of the p*V parts, hop, and how many chunks' activations a rank may hold."""

    p: int
    num_chunks: int
    m: int
    forward: tuple[int, ...]
    input_grad: tuple[int, ...]
    weight_grad: tuple[int, ...]
    hop: int
    cap: int

    def row(self):
        lists = (" ".join(map(str, times)) for times in (self.forward, self.input_grad, self.weight_grad))
        return "\t".join([str(self.p), str(self.num_chunks), str(self.m), *lists, str(self.hop), str(self.cap)])

    @classmethod
    def read(cls, cells):
        times = [tuple(map(int, cell.split())) for cell in cells[3:6]]
        return cls(*map(int, cells[:3]), *times, int(cells[6]), int(cells[7]))


def random_case(seed):
    """Equal parts, parts that differ a little, and parts that differ wildly; caps from the least to plenty."""
    rnd = random.Random(seed)
    p, num_chunks, m = rnd.randint(2, 4), rnd.randint(1, 2), rnd.randint(2, 6)
    n = p * num_chunks
    base, spread = [rnd.randint(3, 6) for _ in range(3)], rnd.choice((0, 1, 2))
    times = [tuple(max(1, b + rnd.randint(-spread, spread)) for _ in range(n)) for b in base]
    if rnd.random() < 0.3:  # a head last
        times = [t[:-1] + (t[-1] * 2,) for t in times]
    cap = rnd.randint(num_chunks, min(m, p + 2) * num_chunks)
    return Case(p, num_chunks, m, *times, rnd.choice((0, 0, 1)), cap)


def solve(case, seconds=60.0, workers=1):
    """(best makespan found, proven lower bound); equal if it is the optimum. RuntimeError if nothing is found in time."""
    from ortools.sat.python import cp_model

    p, v, m = case.p, case.num_chunks, case.m
    n = p * v
    times = {"F": case.forward, "I": case.input_grad, "W": case.weight_grad}
    horizon = (sum(map(sum, times.values())) + 2 * n * case.hop) * m
    model = cp_model.CpModel()
    start = {(k, s, i): model.new_int_var(0, horizon, f"{k}{s}.{i}") for k in "FIW" for s in range(n) for i in range(m)}
    after = lambda b, a, lag=0: model.add(start[b] >= start[a] + times[a[0]][a[1]] + lag)
    makespan = model.new_int_var(0, horizon, "makespan")
    for i in range(m):
        for s in range(n):
            if s:
                after(("F", s, i), ("F", s - 1, i), case.hop)
                after(("I", s - 1, i), ("I", s, i), case.hop)
            after(("W", s, i), ("I", s, i))
            for kind in "FIW" if i else "":
                after((kind, s, i), (kind, s, i - 1))
            model.add(makespan >= start["W", s, i] + times["W"][s])
        after(("I", n - 1, i), ("F", n - 1, i))
    for rank in range(p):
        parts = range(rank, n, p)
        model.add_no_overlap(
            model.new_fixed_size_interval_var(start[k, s, i], times[k][s], "") for k in "FIW" for s in parts for i in range(m)
        )
        held = [
            model.new_interval_var(start["F", s, i], model.new_int_var(0, horizon, ""), start["W", s, i] + times["W"][s], "")
            for s in parts
            for i in range(m)
        ]
        model.add_cumulative(held, [1] * len(held), case.cap)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = workers
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.random_seed = 1
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise RuntimeError(f"{case}: {solver.status_name(status)} within {seconds} s")
    return round(solver.objective_value), round(solver.best_objective_bound)


if __name__ == "__main__":
    first, count, limit = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    for seed in range(first, first + count):
        case = random_case(seed)
        found, bound = solve(case, limit)
        print(case.row(), found, bound, sep="\t", flush=True)
