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
