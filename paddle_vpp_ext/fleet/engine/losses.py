"""The losses of a step, made on the last stage, on every rank."""

from typing import Any, Callable, Optional

import paddle

from .. import versions
from ..messages import dtype_name


def share_losses(
    engine: Any, losses: Optional[list[list[paddle.Tensor]]], per_micro_batch: bool, gather: Callable[[Any], list[Any]]
) -> Any:
    """What a step returns: the mean loss, or the m losses of the micro-batches; a list of these for several loss functions.

    ``losses``: on the last stage the losses of all micro-batches for each loss function; None elsewhere, and without a loss. On
    the last stage it also becomes the engine's ``total_loss``. The others get the dtype and shape that it has there; None without a loss.
    """
    count, mine, packed = len(versions.loss_functions(engine._layers)), [], None
    with paddle.amp.auto_cast(enable=False), paddle.no_grad():
        if losses is not None:
            stacked = [paddle.stack(of_one) for of_one in losses]
            engine.total_loss = stacked if versions.total_loss_is_list() else _sum(losses[engine.loss_fn_idx])
            if per_micro_batch:
                mine = [s.reshape([len(of_one)]) for s, of_one in zip(stacked, losses)]
            else:
                mine = [_sum(of_one) / len(of_one) if engine._delay_scale_loss else _sum(of_one) for of_one in losses]
            packed = [(dtype_name(loss), loss.shape, loss.astype("float64").flatten().tolist()) for loss in mine]
        packed = gather(packed)[-1]
        if packed and not mine:
            mine = [paddle.to_tensor(values, dtype=dtype).reshape(shape) for dtype, shape, values in packed]
    return mine[0] if mine and count == 1 else mine or None


def _sum(losses):
    # Added up one after the other, as Paddle does, for the same last bit.
    total = paddle.zeros_like(losses[0])
    for loss in losses:
        total = total + loss
    return total
