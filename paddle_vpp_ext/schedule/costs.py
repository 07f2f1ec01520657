"""What an action and a transfer cost."""
from dataclasses import dataclass, replace
from typing import Sequence, Union

from .action import Action

PerPart = Union[float, Sequence[float]]


@dataclass(frozen=True)
class Costs:
    """Times of one chunk's actions and of one transfer, in any one unit.

    ``forward``, ``input_grad`` (I) and ``weight_grad`` (W) are a number for all model parts,
    or a sequence with one for each of the p*V parts. A backward takes I + W. ``hop`` is the
    time of a transfer from one rank to another.
    """

    forward: PerPart = 1.0
    input_grad: PerPart = 1.0
    weight_grad: PerPart = 1.0
    hop: float = 0.0

    def table(self, num_parts: int):
        """``{kind: [time of part 0, ...]}``; ValueError for a sequence of another length, or a negative or infinite time."""
        forward, input_grad, weight_grad = (
            self._per_part(name, num_parts) for name in ("forward", "input_grad", "weight_grad")
        )
        if not 0 <= self.hop < float("inf"):
            raise ValueError(f"hop={self.hop!r} is no time")
        whole = [i + w for i, w in zip(input_grad, weight_grad)]
        return {"F": forward, "B": whole, "I": input_grad, "W": weight_grad}

    def bounded(self) -> "Costs":
        """The same with no time below 1/1000 of the longest action's, and no hop above ten times that.

        For placing transfers, which tells before from after by the clock: actions that take no time, or
        vanish beside a hop, would all happen at once.
        """
        times = {name: getattr(self, name) for name in ("forward", "input_grad", "weight_grad")}
        longest = max(max(t) if hasattr(t, "__len__") else t for t in times.values()) or 1.0
        least = longest / 1000
        raised = {n: [max(x, least) for x in t] if hasattr(t, "__len__") else max(t, least) for n, t in times.items()}
        return replace(self, **raised, hop=min(self.hop, 10 * longest))

    def _per_part(self, name, num_parts):
        value = getattr(self, name)
        times = [float(t) for t in value] if hasattr(value, "__len__") else [float(value)] * num_parts
        if len(times) != num_parts:
            raise ValueError(f"{name} has {len(times)} times, but the model has {num_parts} parts")
        if not all(0 <= t < float("inf") for t in times):
            raise ValueError(f"{name} has a time that is negative, infinite or no number: {value!r}")
        return times


UNIT = Costs()


def part_of(action: Action, rank: int, num_stages: int) -> int:
    """The model part that ``action`` of ``rank`` computes: chunk * p + rank."""
    return action.chunk * num_stages + rank
