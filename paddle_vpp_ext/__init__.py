"""Unbalanced virtual pipeline, forward-backward overlap and more for PaddlePaddle fleet.

``enable()`` before ``fleet.init`` makes ``fleet.distributed_model`` return our engines.
"""

TYPE_CHECKING = False  # as in activation, with which this is imported when Python starts
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Callable

__version__ = "0.1.0"


def enable() -> None:
    """Makes ``fleet.distributed_model`` return our engines, and CPU-only Paddle able to run them. Call it before ``fleet.init``."""
    from .fleet.engine.selector import enable

    enable()


def disable() -> None:
    """Restores what ``enable`` replaced."""
    from .fleet.engine.selector import disable

    disable()


def register_schedule(name: str, function: "Callable[[int, int, int], Sequence[Any]]") -> None:
    """Makes ``function(p, V, m)``, which returns all ranks' orders, the schedule ``name``; see ``planning.registry.register_schedule``."""
    from .planning.registry import register_schedule

    register_schedule(name, function)


def __getattr__(name):
    # On demand: these need Paddle, the schedules and the command line do not.
    if name == "OverlapMixin":
        from .fleet.stage.overlap import OverlapMixin

        return OverlapMixin
    if name == "CommunicationNode":
        from .fleet.stage.nodes import CommunicationNode

        return CommunicationNode
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
