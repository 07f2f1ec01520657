"""Unbalanced virtual pipeline, forward-backward overlap and more for PaddlePaddle fleet.

``enable()`` before ``fleet.init`` makes ``fleet.distributed_model`` return our engines.
"""
__version__ = "0.1.0"


def enable() -> None:
    """Makes ``fleet.distributed_model`` return our engines, and CPU-only Paddle able to run them. Call it before ``fleet.init``."""
    from .fleet.selector import enable

    enable()


def disable() -> None:
    """Restores what ``enable`` replaced."""
    from .fleet.selector import disable

    disable()


def register_schedule(name, function) -> None:
    """Makes ``function(p, V, m)``, which returns all ranks' orders, the schedule ``name``; see ``schedule.registry.register_schedule``."""
    from .schedule.registry import register_schedule

    register_schedule(name, function)


def __getattr__(name):
    # On demand: these need Paddle, the schedules and the command line do not.
    if name in ("OverlapMixin", "CommunicationNode"):
        from .fleet import overlap

        return getattr(overlap, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
