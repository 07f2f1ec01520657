"""The patched fleet.distributed_model: enable() and disable()."""

import functools
import sys

import paddle

from ... import log
from ...log import logger
from ...planning.options import PADDLES_OWN
from .. import cpu_bridges, device, versions
from ..patches import Patches
from .options import read_options

# The classes of paddle.distributed.fleet.model that its distributed_model looks up when it is called.
_CLASSES = (
    "PipelineParallel",
    "PipelineParallelWithInterleave",
    "PipelineParallelWithInterleaveFthenB",
    "VPPFhenBInBalancedMemory",
)

_patches = Patches()


def enable() -> None:
    """Makes ``fleet.distributed_model`` return our engines, and CPU-only Paddle able to run them. Call it before ``fleet.init``.

    A second call does nothing. RuntimeError on a Paddle older than 2.6.2.
    """
    if _patches:
        return
    versions.check_supported()
    log.show()
    _patches.on_undo(log.hide)
    cpu_bridges.install()
    _patches.on_undo(cpu_bridges.uninstall)
    import paddle.distributed.fleet as fleet
    import paddle.distributed.fleet.model  # noqa: F401, for sys.modules
    from paddle.distributed.fleet.meta_parallel import PipelineLayer

    module = sys.modules["paddle.distributed.fleet.model"]
    for name in _CLASSES:
        if hasattr(module, name):
            _patches.replace(module, name, functools.partial(_wrap, getattr(module, name)))
    wrapped = _accepting_any_accumulate_steps(module.distributed_model)
    for owner in (module, fleet):
        _patches.replace(owner, "distributed_model", wrapped)
    shared_groups = versions.ordered_shared_groups()
    if shared_groups:
        _patches.replace(PipelineLayer, "_construct_shared_comm", shared_groups)


def disable() -> None:
    """Restores what ``enable`` replaced. Engines that were made in between keep working."""
    _patches.undo()


def is_enabled() -> bool:
    """Whether ``enable`` is in force."""
    return bool(_patches)


def _wrap(paddles_class, layers, hcg, strategy):
    """What distributed_model gets where it asks for one of Paddle's pipeline classes."""
    from .pipeline import engine_for

    layers.__dict__.pop("get_num_virtual_stages", None)  # see _accepting_any_accumulate_steps
    engine, options, why = engine_for(layers, hcg, strategy)
    if options.schedule.choice.name == PADDLES_OWN:
        return _paddles_own(paddles_class, layers, hcg, strategy)
    model = engine(layers, hcg, strategy, options)
    plan = model.plan()
    if model.stage_id == 0:
        groups = "+".join(map(str, plan.groups))
        logger.info(
            f"pipeline schedule {model.schedule_text} ({why}): {plan.num_stages} stages, {plan.num_chunks} chunks, "
            f"{plan.accumulate_steps} micro-batches in groups {groups}, idle share {max(plan.simulate().idle_share):.1%} at most"
        )
    return model


def _paddles_own(paddles_class, layers, hcg, strategy):
    versions.check_paddles_own(layers)
    model = paddles_class(layers, hcg, strategy=strategy)
    if device.is_cpu():
        from ..transport.channels import Channels
        from ..transport.paddle_p2p import route_paddle_p2p

        channels = Channels(hcg.get_pipe_parallel_group().ranks)
        _patches.on_undo(channels.close)
        _patches.on_undo(route_paddle_p2p(channels))
    return model


def _wants_paddles_own():
    from paddle.distributed import fleet

    strategy = fleet.fleet._user_defined_strategy
    options = read_options(strategy.pipeline_configs, strategy.hybrid_configs["pp_configs"])
    return options.schedule.choice.name == PADDLES_OWN


def _accepting_any_accumulate_steps(distributed_model):
    """Paddle's function refuses m < p before it looks up a class; whether it can be is for our options to say.

    So for the length of the call the model reads as one with a single chunk, for which Paddle has no rule on m.
    """

    @functools.wraps(distributed_model)
    def wrapper(model):
        from paddle.distributed.fleet.meta_parallel import PipelineLayer

        if not isinstance(model, PipelineLayer):
            # Of one process 3.3 asserts that it is a PipelineLayer; before, it gave the model back.
            return model if paddle.distributed.get_world_size() == 1 else distributed_model(model)
        if _wants_paddles_own():
            return distributed_model(model)
        model.__dict__["get_num_virtual_stages"] = lambda: 1
        try:
            return distributed_model(model)
        finally:
            model.__dict__.pop("get_num_virtual_stages", None)

    return wrapper
