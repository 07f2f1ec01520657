"""Options: everything a user sets, read from three places and checked into one value.

In order of precedence: the environment variables PADDLE_VPP_SCHEDULE and PADDLE_VPP_TRACE,
``strategy.pipeline_configs["schedule_mode"]``, and the flags of
``strategy.hybrid_configs["pp_configs"]``.
"""
import os
from dataclasses import dataclass
from typing import Mapping, NamedTuple

from .schedule.registry import SCHEDULES, read_path, read_switch

ENVIRONMENT = "PADDLE_VPP_SCHEDULE"
TRACE_ENVIRONMENT = "PADDLE_VPP_TRACE"

# Paddle's default value of schedule_mode; dygraph ignores it, to us it is "no wish".
BY_RULE = "1F1B"
PADDLES_OWN = "paddle"

# What best_unbalanced_scheduler stands for: of the schedules for any accumulate_steps the one that holds the fewest activations.
LEAST_MEMORY = "VPP:groups=even,slope=1"
# Where steps are recorded with Paddle's flag profiling, which has no folder.
PROFILING_FOLDER = "pipeline_trace"


def read_seconds(text: str) -> float:
    """A positive number of seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{text!r} is no positive number of seconds")
    return seconds


# Options of the engine rather than of a schedule: any NAME takes them. Two are Paddle's flags under
# their own names, for the releases that have no such flags; here they win.
COMMON_KEYS = {
    "timeout": read_seconds, "overlap_p2p_comm": read_switch, "enable_dynamic_shape": read_switch, "trace": read_path,
    "check_finite": read_switch,
}


class Choice(NamedTuple):
    """A schedule's name with the options of its orders, and the engine's options."""

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
        raise ValueError(f"{source}={text!r} is no text")
    name, colon, rest = text.strip().partition(":")
    names = [BY_RULE, *SCHEDULES, PADDLES_OWN]
    if name not in names:
        raise ValueError(f"{source}={text!r}: unknown schedule {name!r}, choose one of {', '.join(names)}")
    if colon and name == PADDLES_OWN:
        raise ValueError(f"{source}={text!r}: {PADDLES_OWN} takes no options, Paddle's own flags are in pp_configs")
    own = SCHEDULES["VPP" if name == BY_RULE else name].keys if name != PADDLES_OWN else {}
    options, engine = {}, {}
    for item in rest.split(",") if colon else ():
        key, equals, value = item.strip().partition("=")
        target = options if key in own else engine
        read = own.get(key) or COMMON_KEYS.get(key)
        if not read or not equals:
            raise ValueError(
                f"{source}={text!r}: {item.strip()!r} is not one of the options of {name}, "
                f"write {', '.join(k + '=…' for k in [*own, *COMMON_KEYS])}"
            )
        if key in target:
            raise ValueError(f"{source}={text!r}: {key} is given twice")
        try:
            target[key] = read(value)
        except ValueError as error:
            raise ValueError(f"{source}={text!r}: {key}: {error}") from None
    return Choice(name, options, engine, text.strip())


@dataclass(frozen=True)
class Options:
    """One engine's options.

    ``schedule``: the user's choice. ``overlap_p2p``: transfers run beside computation. ``overlap_pairs``:
    Paddle's flag for forward-backward overlap.
    ``timeout``: seconds that a wait for another rank may take. ``trace``: the folder into which each
    step is recorded, or empty. ``check_finite``: what crosses a stage boundary is looked at for infinities and NaN.
    ``least_memory``: Paddle's flag best_unbalanced_scheduler.
    """

    schedule: Choice = Choice(BY_RULE)
    overlap_p2p: bool = False
    overlap_pairs: bool = False
    dynamic_shape: bool = False
    timeout: float = 600.0
    trace: str = ""
    check_finite: bool = False
    least_memory: bool = False


def read_options(pipeline_configs: Mapping, pp_configs, environment: Mapping = os.environ) -> Options:
    """The options from a strategy's ``pipeline_configs`` and ``pp_configs`` and the environment.

    ``pp_configs`` is Paddle's own object: a flag that the release lacks reads as off.
    """
    if environment.get(ENVIRONMENT):
        choice = parse_schedule(environment[ENVIRONMENT], ENVIRONMENT)
    else:
        choice = parse_schedule(pipeline_configs.get("schedule_mode", BY_RULE), 'pipeline_configs["schedule_mode"]')
    flag = lambda name: bool(getattr(pp_configs, name, False))
    return Options(
        schedule=choice,
        overlap_p2p=choice.engine.get("overlap_p2p_comm", flag("overlap_p2p_comm")),
        overlap_pairs=flag("forward_backward_overlap_scheduler"),
        dynamic_shape=choice.engine.get("enable_dynamic_shape", flag("enable_dynamic_shape")),
        timeout=choice.engine.get("timeout", Options.timeout),
        trace=environment.get(TRACE_ENVIRONMENT) or choice.engine.get("trace") or (PROFILING_FOLDER if flag("profiling") else ""),
        check_finite=choice.engine.get("check_finite", False),
        least_memory=flag("best_unbalanced_scheduler"),
    )
