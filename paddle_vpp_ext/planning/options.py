"""What a user writes about a schedule: ``NAME:key=value,key=value``."""

from collections.abc import Mapping
from typing import Callable, NamedTuple

from .registry import SCHEDULES
from .values import read_path, read_seconds, read_switch

# Paddle's default value of schedule_mode; dygraph ignores it, to us it is "no wish".
BY_RULE = "1F1B"
PADDLES_OWN = "paddle"

# Options of what runs a plan, not of what makes it: any NAME takes them. Two are Paddle's flags under
# their own names, for the releases that have no such flags; here they win.
ENGINE_KEYS: dict[str, Callable[[str], object]] = {
    "timeout": read_seconds,
    "overlap_p2p_comm": read_switch,
    "enable_dynamic_shape": read_switch,
    "trace": read_path,
    "check_finite": read_switch,
}


class Choice(NamedTuple):
    """A schedule's name with the ``options`` that make its plan, and those of the ``engine`` that runs it."""

    name: str
    options: Mapping[str, object] = {}
    engine: Mapping[str, object] = {}
    text: str = ""


def parse_schedule(text: str, source: str = "schedule_mode") -> Choice:
    """``NAME`` or ``NAME:key=value,key=value``.

    ``1F1B`` is the selector's rule, ``paddle`` Paddle's own classes. ValueError for an unknown
    name, key or value: it shows ``source`` and the text and lists what is allowed.
    """
    if not isinstance(text, str):
        raise ValueError(f"{source}={text!r} is not a text: write a schedule's name, with its options as in VPP:groups=even")
    name, colon, rest = text.strip().partition(":")
    names = [BY_RULE, *SCHEDULES, PADDLES_OWN]
    if name not in names:
        raise ValueError(f"{source}={text!r}: unknown schedule {name!r}, choose one of {', '.join(names)}")
    if colon and name == PADDLES_OWN:
        raise ValueError(f"{source}={text!r}: {PADDLES_OWN} takes no options, Paddle's own flags are in pp_configs")
    own = SCHEDULES["VPP" if name == BY_RULE else name].keys if name != PADDLES_OWN else {}
    options: dict[str, object] = {}
    engine: dict[str, object] = {}
    for item in rest.split(",") if colon else ():
        key, equals, value = item.strip().partition("=")
        target = options if key in own else engine
        read = own.get(key) or ENGINE_KEYS.get(key)
        if not read or not equals:
            raise ValueError(
                f"{source}={text!r}: {item.strip()!r} is not one of the options of {name}, "
                f"write {', '.join(k + '=…' for k in [*own, *ENGINE_KEYS])}"
            )
        if key in target:
            raise ValueError(f"{source}={text!r}: {key} is given twice")
        try:
            target[key] = read(value)
        except ValueError as error:
            raise ValueError(f"{source}={text!r}: {key}: {error}") from None
    return Choice(name, options, engine, text.strip())
