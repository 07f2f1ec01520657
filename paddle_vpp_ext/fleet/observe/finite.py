"""``check_finite=on``: no infinity and no NaN crosses a stage boundary unseen."""

from collections.abc import Sequence
from typing import Any

import paddle

from ...instruments import Instrument
from ...schedule.dependencies import Transfer
from ..messages import Payload


class FiniteCheck(Instrument):
    """Looks at what is sent.

    FloatingPointError that names the part, the micro-batch and the direction, before anything of the
    exchange is sent. On a GPU the host waits for each of these looks.
    """

    def posting(self, sends: Sequence[tuple[Transfer, Payload]], receives: Sequence[Transfer]) -> None:
        for transfer, payload in sends:
            for place, tensor in enumerate(payload.tensors):
                _check(transfer, place, tensor)


def _check(transfer: Transfer, place: int, tensor: Any) -> None:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return
    with paddle.no_grad():
        finite = paddle.isfinite(tensor.detach())
        if finite.all():
            return
        count = finite.size - int(finite.astype("int64").sum())
    kind, part, micro_batch = transfer
    direction = (
        f"the activation that part {part} of the model made in its forward, for part {part + 1}"
        if kind == "F"
        else f"the gradient that part {part} of the model made in its backward, for part {part - 1}"
    )
    raise FloatingPointError(
        f"{direction}, has {count} of {finite.size} values that are infinite or no number: "
        f"micro-batch {micro_batch}, tensor {place} of the message"
    )
