"""The only file that asks which Paddle this is; by feature where it can."""

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any, Callable, Optional

from ..releases import OLDEST, numbers


def paddle_version() -> tuple[int, ...]:
    """The imported Paddle's release as three numbers; a build from source (0.0.0) counts as the newest."""
    import paddle

    version = numbers(paddle.__version__)[:3]
    return (999, 0, 0) if version in ((), (0, 0, 0)) else version


def check_supported() -> None:
    """RuntimeError, in one sentence, on a Paddle older than 2.6.2."""
    version = paddle_version()
    if version < numbers(OLDEST):
        raise RuntimeError(f"paddle_vpp_ext needs Paddle {OLDEST} or newer, but this is {'.'.join(map(str, version))}")


def pipeline_module() -> Any:
    """Paddle's module with the engines that ours derive from."""
    from paddle.distributed.fleet.meta_parallel import pipeline_parallel

    return pipeline_parallel


def complete(engine: Any) -> None:
    """Gives an engine the attributes of newer base classes that its own base class lacks."""
    defaults = {
        "loss_fn_idx": 0,  # 3.0 on
        "_clear_every_step_cache": False,  # 3.0 on
    }
    for name, value in defaults.items():
        if not hasattr(engine, name):
            setattr(engine, name, value)


@contextlib.contextmanager
def flags_off(flags: Any, *names: str) -> Iterator[None]:
    """Has Paddle's ``pp_configs`` read as without these flags, those that the release has."""
    on = [name for name in names if getattr(flags, name, False)]
    for name in on:
        setattr(flags, name, False)
    try:
        yield
    finally:
        for name in on:
            setattr(flags, name, True)


def loss_functions(layers: Any) -> list[Any]:
    """A PipelineLayer's loss functions, a list also where the release has a single one (2.6)."""
    functions = layers._loss_fn
    return list(functions) if isinstance(functions, (list, tuple)) else [functions]


def check_paddles_own(layers: Any) -> None:
    """ValueError for a model that this release's own engines cannot train: one with a list of loss functions, before 3.0."""
    if isinstance(layers._loss_fn, (list, tuple)) and not total_loss_is_list():
        raise ValueError(
            "this Paddle's own pipeline engines take one loss function, not a list; those of paddle_vpp_ext take a list, "
            "with any schedule_mode but paddle"
        )


def total_loss_is_list() -> bool:
    """Whether an engine's ``total_loss`` is a list per loss function (3.0 on) or one tensor (2.6)."""
    return hasattr(pipeline_module(), "PipelineParallelMicroStepLocations")


def micro_step_locations() -> Any:
    """Paddle's enumeration of the places of micro-step callbacks (3.0 on), or None."""
    return getattr(pipeline_module(), "PipelineParallelMicroStepLocations", None)


def unwrap_data(data: Any) -> Any:
    """What a PipelineDatasetPreprocessor (3.0 on) makes; other data as it is."""
    preprocessor = getattr(pipeline_module(), "PipelineDatasetPreprocessor", None)
    return data() if preprocessor and isinstance(data, preprocessor) else data


def align_mode_scale() -> Any:
    """By what Paddle's alignment mode divides the loss (3.0 on); None when it is off."""
    import paddle.distributed as dist

    if getattr(dist, "in_auto_parallel_align_mode", lambda: False)():
        return pipeline_module()._get_align_mode_scale()
    return None


def without_amp() -> contextlib.AbstractContextManager[Any]:
    """A context without automatic casts. Paddle's own takes longer than a small layer, so only where amp is on."""
    import paddle

    if paddle.base.framework._dygraph_tracer()._amp_level == paddle.base.core.AmpLevel.O0:
        return contextlib.nullcontext()
    return paddle.amp.auto_cast(enable=False)


def scale_loss(scaler: Any, loss: Any) -> Any:
    """The loss times a GradScaler's scale; without one the loss itself.

    Paddle's scaler disables itself where it reads an amp dtype other than float16. Paddle's engines scale under
    ``auto_cast(enable=False)``, which sets that; elsewhere the last stage alone would switch off, and the others wait.
    """
    import paddle

    if not scaler:
        return loss
    with paddle.amp.auto_cast(enable=False):
        return scaler.scale(loss)


def view_of(tensor: Any) -> Any:
    """A view of all of a tensor, a node of its own in the graph.

    ``Tensor.view`` has no backward on 2.6, and on 3.0 none that allows a change in place; an identity transpose
    works in all releases. Without amp, which would cast it; without elements, where 2.6 crashes, the tensor itself.
    """
    if 0 in tensor.shape:
        return tensor
    with without_amp():
        return tensor.transpose(list(range(tensor.ndim)))


def move_to_host(output: Any) -> None:
    """Moves an output's tensors to the host's memory, in place.

    Paddle's own, 3.2 on, leaves out dicts and fails on CPU, where there is nothing to move.
    """
    import paddle

    if isinstance(output, dict):
        output = list(output.values())
    for item in output if isinstance(output, (tuple, list)) else [output]:
        if isinstance(item, (tuple, list, dict)):
            move_to_host(item)
        elif isinstance(item, paddle.Tensor) and not item.place.is_cpu_place():
            item.pin_memory()._share_buffer_to(item)


def whole_gradient(parameter: Any) -> Any:
    """A weight's gradient, made if there is none, and without holes: collectives would work on a copy of one with holes."""
    import paddle

    name = "main_grad" if hasattr(parameter, "main_grad") else "grad"
    gradient = getattr(parameter, name)
    if gradient is None:
        whole = paddle.zeros(parameter.shape, "float32" if name == "main_grad" else parameter.dtype)
    else:
        whole = gradient if gradient.is_contiguous() else gradient.contiguous()
    if whole is not gradient:
        setattr(parameter, name, whole)
    return getattr(parameter, name)


def ordered_shared_groups() -> Optional[Callable[[Any], Any]]:
    """What replaces ``PipelineLayer._construct_shared_comm`` up to 3.0; None where it is right (3.1 on).

    There the groups of several SharedLayerDesc names are made in the order of a set of texts, which differs from process
    to process: they hang, or sum the gradients of different weights. Here each name is alone while its groups are made.
    """
    from paddle.distributed.fleet.meta_parallel import PipelineLayer, SharedLayerDesc

    if paddle_version() >= (3, 1):
        return None
    construct = PipelineLayer._construct_shared_comm

    @functools.wraps(construct)
    def name_after_name(layers):
        descs = layers._layers_desc
        names = dict.fromkeys(desc.layer_name for desc in descs if isinstance(desc, SharedLayerDesc))
        if len(names) < 2:
            return construct(layers)
        made: dict[Any, Any] = {}
        try:
            for name in names:
                others = lambda desc, name=name: isinstance(desc, SharedLayerDesc) and desc.layer_name != name
                layers._layers_desc = [None if others(desc) else desc for desc in descs]
                made.update(construct(layers) or {})
        finally:
            layers._layers_desc = descs
        return made

    return name_after_name


def default_store() -> Any:
    """The key-value store through which the processes of this job met."""
    from paddle.base import core

    return core.create_or_get_global_tcp_store()


def p2p_tasks_order_the_device() -> bool:
    """Whether the wait of a batch's tasks has the device wait (3.0 on). In 2.6 its event is recorded too early."""
    return hasattr(_batch_module(), "_coalescing_manager")


def p2p_group(backend: str) -> contextlib.AbstractContextManager[None]:
    """2.6: what is sent and received within is one operation of the device."""
    return _batch_module()._with_batch_p2p_guard(backend)


def _batch_module():
    return importlib.import_module("paddle.distributed.communication.batch_isend_irecv")


def scale_buffer_grads(buffer: Any) -> None:
    """Ends a fused gradient buffer's step (named ``scale_and_split_grads`` in 2.6)."""
    (getattr(buffer, "scale_grads", None) or buffer.scale_and_split_grads)()


def schedule_node_class() -> Any:
    """Paddle's ScheduleNode (3.1 on), so that ours can stand where it is asked for; before, a class with its constructor."""
    try:
        from paddle.distributed.fleet.meta_parallel.pp_utils.forward_backward_overlap_utils import ScheduleNode

        return ScheduleNode
    except ImportError:
        return _Node


class _Node:
    def __init__(self, fwd_func: Any, name: str = "") -> None:
        self.name = name
        self.fwd_func = fwd_func
