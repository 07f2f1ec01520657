"""What an action and a transfer cost, in time and memory."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Union

PerPart = Union[float, Sequence[float]]


@dataclass(frozen=True)
class Costs:
    """Times of one chunk's actions and of one transfer, in any one unit, and the bytes that a micro-batch takes.

    ``forward``, ``input_grad`` (I) and ``weight_grad`` (W) are a number for all model parts,
    or a sequence with one for each of the p*V parts. A backward takes I + W. ``hop`` is the
    time of a transfer from one rank to another.

    Bytes, likewise for all parts or for each: ``activation`` is held from a forward to its B or W, ``residue`` is
    what I leaves for W on top of it, ``message`` is the output that a part sends on (its gradient has the same size).
    """

    forward: PerPart = 1.0
    input_grad: PerPart = 1.0
    weight_grad: PerPart = 1.0
    hop: float = 0.0
    activation: PerPart = 0.0
    residue: PerPart = 0.0
    message: PerPart = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):  # tuples, so that costs can be a key
            value = getattr(self, field.name)
            if field.name != "hop" and hasattr(value, "__len__") and not isinstance(value, str):
                object.__setattr__(self, field.name, tuple(value))

    @classmethod
    def load(cls, path: Union[str, os.PathLike]) -> "Costs":
        """The costs of a JSON file as ``save`` writes it: an object with some of the fields of this class, the rest as in ``Costs()``.

        ValueError, with the path and the field, for what is no such file; OSError for one that cannot be read.
        """
        with open(path, encoding="utf-8") as file:
            try:
                content = json.load(file)
            except ValueError as error:
                raise ValueError(f"{path} is not a JSON file: {error}") from None
        names = [field.name for field in fields(cls)]
        if not isinstance(content, dict):
            raise ValueError(f"{path}: costs are an object with some of {', '.join(names)}")
        for name, value in content.items():
            if name not in names:
                raise ValueError(f"{path}: unknown field {name!r}, costs have {', '.join(names)}")
            values = value if isinstance(value, list) and name != "hop" else [value]
            if not values or not all(_is_amount(x) for x in values):
                many = "" if name == "hop" else ", or a list of them with one for each model part"
                raise ValueError(f"{path}: {name} is {value!r}, not a number of at least 0{many}")
        return cls(**content)

    def save(self, path: Union[str, os.PathLike]) -> None:
        """Writes a JSON file that ``load`` reads as equal costs."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file, indent=2)
            file.write("\n")

    def bytes_table(self, num_parts: int) -> dict[str, list[float]]:
        """``{field: [bytes of part 0, ...]}`` for activation, residue and message; ValueError as of ``table``."""
        return {name: self._per_part(name, num_parts) for name in ("activation", "residue", "message")}

    def table(self, num_parts: int) -> dict[str, list[float]]:
        """``{kind: [time of part 0, ...]}``; ValueError for a sequence of another length, or a negative or infinite time."""
        forward, input_grad, weight_grad = (self._per_part(name, num_parts) for name in ("forward", "input_grad", "weight_grad"))
        if not 0 <= self.hop < float("inf"):
            raise ValueError(f"hop={self.hop!r} is not a time: give a finite number of at least 0")
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
            raise ValueError(f"{name} has {len(times)} values, but the model has {num_parts} parts")
        if not all(0 <= t < float("inf") for t in times):
            raise ValueError(f"{name} has a value that is negative, infinite or not a number: {value!r}")
        return times


def _is_amount(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")


UNIT = Costs()
