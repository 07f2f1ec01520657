"""The stage of schedules whose backward is split in two: I, then W."""

from typing import Any, Optional

import paddle

from ..messages import Boundaries, Payload, Signature
from .pipeline_stage import PipelineStage
from .split_backward import SplitBackward


class SplitStage(PipelineStage):
    """Puts off the gradients of weights from I to W, without a change to the model."""

    def __init__(self, engine: Any, boundaries: Boundaries) -> None:
        super().__init__(engine, boundaries)
        self._split = SplitBackward()

    def begin(self, *args: Any) -> None:
        super().begin(*args)
        self._split.clear()

    def forward(self, chunk: int, micro_batch: int, message: Optional[tuple[Signature, list[paddle.Tensor]]]) -> Any:
        if not self._training:
            return super().forward(chunk, micro_batch, message)
        with self._split.forward(chunk):
            payload = super().forward(chunk, micro_batch, message)
        self._split.built(chunk, self._saved[chunk, micro_batch].roots)
        return payload

    def backward_input(self, chunk: int, micro_batch: int, grads: Optional[list[paddle.Tensor]]) -> Payload:
        with self._split.input_pass((chunk, micro_batch)):
            return super().backward(chunk, micro_batch, grads)

    def backward_weight(self, chunk: int, micro_batch: int) -> None:
        self._split.weight_pass((chunk, micro_batch))
