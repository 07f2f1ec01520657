"""The orders that the search tries: recipes of a few numbers each, varied one number at a time."""

from typing import NamedTuple, Optional, Union

from ..schedule.grouping import first
from .problem import INFINITE, NumberedOrders, SearchProblem
from .zero_bubble import ahead_of, list_schedule, smallest_capacities, try_pattern

FREE = INFINITE  # slope of an order whose startup is bounded by room alone
PATTERN = -1.0  # patience of an order in a fixed rhythm
Grouping = Union[str, int]  # ``first``, or the least size of a group


class Recipe(NamedTuple):
    """How to make an order.

    ``groups``: ``first``, or the least size of groups that are as equal as can be. ``slope``, ``extra``: the startup,
    as in ``steady_pattern``. ``patience``: of the list schedule, or PATTERN. ``split``: I and W, or whole backwards.
    """

    groups: Grouping
    slope: float
    extra: int
    patience: float
    split: bool

    def __str__(self) -> str:
        kind = "VPP" if not self.split else "zero bubble"
        how = "fixed" if self.patience == PATTERN else f"list schedule with patience {self.patience:g}"
        startup = "free" if self.slope == FREE else f"{self.slope:g}" + (f"+{self.extra}" if self.extra else "")
        groups = self.groups if self.groups == "first" else f"of at least {self.groups}"
        return f"{kind}, {how}, groups {groups}, slope {startup}"


def sizes_of(groups: Grouping, num_stages: int, accumulate_steps: int) -> tuple[int, ...]:
    """The sizes of a recipe's groups: ``first``, or as many groups as have at least that size, larger first."""
    if isinstance(groups, str):
        return first(num_stages, accumulate_steps)
    count = max(1, accumulate_steps // groups)
    size, larger = divmod(accumulate_steps, count)
    return (size + 1,) * larger + (size,) * (count - larger)


def groupings(num_stages: int, accumulate_steps: int) -> list[Grouping]:
    """Groupings that make sense, the most usual first: p and more keep the pipeline full, fewer hold less."""
    p, m = num_stages, accumulate_steps
    wanted: list[Grouping] = [p, "first", p + 1, 2 * p, p - 1, p // 2, p + p // 2, 1, 2, m, p // 4, 4 * p, 3, *range(4, min(m, 24))]
    seen: dict[tuple[int, ...], Grouping] = {}
    for groups in wanted:
        if isinstance(groups, str) or 1 <= groups <= max(p, m):
            seen.setdefault(sizes_of(groups, p, m), groups)
    return list(seen.values())


class CandidatePool:
    """Makes recipes for one pipeline, each once, and remembers the best."""

    def __init__(self, problems: dict[bool, SearchProblem], budget: int):
        self.problems, self.left = problems, budget
        self.made: dict[Recipe, float] = {}
        self.best: list[tuple[float, int, Recipe, NumberedOrders]] = []
        some = next(iter(problems.values()))
        self.num_stages, self.accumulate_steps = some.num_stages, some.accumulate_steps
        self._fits: dict[Grouping, bool] = {}

    def fits(self, groups: Grouping) -> bool:
        """Whether every rank has the room that these groups need at the least."""
        if groups not in self._fits:
            problem = next(iter(self.problems.values()))
            least = smallest_capacities(problem, self.sizes(groups))
            self._fits[groups] = all(a <= b for a, b in zip(least, problem.capacity.limit))
        return self._fits[groups]

    def sizes(self, groups: Grouping) -> tuple[int, ...]:
        """``sizes_of`` for this pipeline."""
        return sizes_of(groups, self.num_stages, self.accumulate_steps)

    def make(self, recipe: Recipe, keep: int = 12) -> float:
        """The recipe's makespan; infinite if it cannot run in the room, or if the budget is used up."""
        if recipe in self.made:
            return self.made[recipe]
        problem = self.problems.get(recipe.split)
        if problem is None or self.left < 0 or not self.fits(recipe.groups):
            return INFINITE
        self.left -= problem.num_actions
        found = self._make(problem, recipe)
        makespan = self.made[recipe] = found[0] if found else INFINITE
        if found:
            self.best.append((makespan, len(self.made), recipe, found[1]))
            self.best.sort(key=lambda entry: entry[:2])
            del self.best[keep:]
        return makespan

    def _make(self, problem: SearchProblem, recipe: Recipe) -> Optional[tuple[float, NumberedOrders]]:
        groups = self.sizes(recipe.groups)
        if recipe.patience == PATTERN:
            return None if recipe.slope == FREE else try_pattern(problem, groups, recipe.slope, recipe.extra)
        ahead = None if recipe.slope == FREE else ahead_of(problem, groups, recipe.slope, recipe.extra)
        return list_schedule(problem, groups, ahead, recipe.patience)

    def descend(self, bound: float) -> None:
        """Tries the usual recipes for each grouping, then varies the best ones until nothing gains or the budget is used up."""
        names = [g for g in groupings(self.num_stages, self.accumulate_steps) if self.fits(g)]
        for groups in names:
            for split in (False, True):
                for slope, patience in ((2, PATTERN), (1, PATTERN), (FREE, 0.5), (1.5, 0.5)):
                    if self.make(Recipe(groups, slope, 0, patience, split)) <= bound:
                        return
            if self.made and groups != names[0] and self.left < 0.4 * self._all():
                break
        for start in [entry[2] for entry in self.best[:4]]:
            while True:
                nearby = sorted((self.make(near), i, near) for i, near in enumerate(_nearby(start, names)))
                if not nearby or nearby[0][0] >= self.made[start] or nearby[0][0] <= bound:
                    break
                start = nearby[0][2]
            if self.left < 0 or self.best[0][0] <= bound:
                return

    def _all(self):
        return self.left + sum(self.problems[recipe.split].num_actions for recipe in self.made)


def _nearby(recipe, groupings_):
    for slope in (1, 1.5, 2, 3, FREE):
        for extra in (0, 1, 2):
            yield recipe._replace(slope=slope, extra=extra)
    for patience in (PATTERN, 0.1, 0.3, 0.5, 0.7, 0.9):
        yield recipe._replace(patience=patience)
    for groups in groupings_:
        yield recipe._replace(groups=groups)
