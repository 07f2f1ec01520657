"""The options of one engine, read from three places and checked.

In order of precedence: the environment variables PADDLE_VPP_SCHEDULE and PADDLE_VPP_TRACE,
``strategy.pipeline_configs["schedule_mode"]``, and the flags of
``strategy.hybrid_configs["pp_configs"]``.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple

from ...planning.options import BY_RULE, Choice, parse_schedule

ENVIRONMENT = "PADDLE_VPP_SCHEDULE"
TRACE_ENVIRONMENT = "PADDLE_VPP_TRACE"

# What best_unbalanced_scheduler stands for: of the schedules for any accumulate_steps the one that holds the fewest activations.
LEAST_MEMORY = "VPP:groups=even,slope=1"
# Where steps are recorded with Paddle's flag profiling, which has no folder.
PROFILING_FOLDER = "pipeline_trace"


@dataclass(frozen=True)
class ScheduleOptions:
    """What makes the plan.

    ``choice``: the schedule as the user wrote it. ``overlap_pairs``: Paddle's flag for forward-backward
    overlap. ``least_memory``: Paddle's flag best_unbalanced_scheduler.
    """

    choice: Choice = Choice(BY_RULE)  # noqa: RUF009, a tuple that nobody changes
    overlap_pairs: bool = False
    least_memory: bool = False


@dataclass(frozen=True)
class EngineOptions:
    """What runs the plan.

    ``overlap_p2p``: transfers run beside computation. ``dynamic_shape``: micro-batches of one step may differ in shape.
    ``timeout``: seconds that a wait for another rank may take. ``trace``: the folder into which each step is
    recorded, or empty. ``check_finite``: what crosses a stage boundary is looked at for infinities and NaN.
    """

    overlap_p2p: bool = False
    dynamic_shape: bool = False
    timeout: float = 600.0
    trace: str = ""
    check_finite: bool = False


class Options(NamedTuple):
    """All options of one engine."""

    schedule: ScheduleOptions = ScheduleOptions()
    engine: EngineOptions = EngineOptions()


def read_options(pipeline_configs: Mapping[str, Any], pp_configs: Any, environment: Mapping[str, str] = os.environ) -> Options:
    """The options from a strategy's ``pipeline_configs`` and ``pp_configs`` and the environment.

    ``pp_configs`` is Paddle's own object: a flag that the release lacks reads as off. ValueError as of ``parse_schedule``.
    """
    if environment.get(ENVIRONMENT):
        choice = parse_schedule(environment[ENVIRONMENT], ENVIRONMENT)
    else:
        choice = parse_schedule(pipeline_configs.get("schedule_mode", BY_RULE), 'pipeline_configs["schedule_mode"]')
    flag = lambda name: bool(getattr(pp_configs, name, False))
    wish: Callable[..., Any] = choice.engine.get  # its values are checked
    return Options(
        ScheduleOptions(choice, flag("forward_backward_overlap_scheduler"), flag("best_unbalanced_scheduler")),
        EngineOptions(
            overlap_p2p=wish("overlap_p2p_comm", flag("overlap_p2p_comm")),
            dynamic_shape=wish("enable_dynamic_shape", flag("enable_dynamic_shape")),
            timeout=wish("timeout", EngineOptions.timeout),
            trace=environment.get(TRACE_ENVIRONMENT) or wish("trace") or (PROFILING_FOLDER if flag("profiling") else ""),
            check_finite=wish("check_finite", False),
        ),
    )
