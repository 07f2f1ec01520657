"""What a step really did: when each action ran, on every rank."""
import time
from typing import List, Tuple

import paddle


class RecordingStage:
    """A stage whose forwards and backwards are timed. Everything else is passed through.

    ``blocks``: (rank, start, end, kind, chunk, micro_batch), in seconds of the wall clock. On a
    GPU each action is waited for, so a recorded step is a little slower than others.
    """

    def __init__(self, stage, rank: int):
        self._stage, self._rank = stage, rank
        self.blocks: List[Tuple] = []
        self._synchronize = paddle.device.synchronize if paddle.is_compiled_with_cuda() else lambda: None

    def __getattr__(self, name):
        return getattr(self._stage, name)

    def forward(self, chunk, micro_batch, inputs):
        return self._timed("F", chunk, micro_batch, self._stage.forward, inputs)

    def backward(self, chunk, micro_batch, output_grads):
        return self._timed("B", chunk, micro_batch, self._stage.backward, output_grads)

    def backward_input(self, chunk, micro_batch, output_grads):
        return self._timed("I", chunk, micro_batch, self._stage.backward_input, output_grads)

    def backward_weight(self, chunk, micro_batch):
        return self._timed("W", chunk, micro_batch, self._stage.backward_weight)

    def _timed(self, kind, chunk, micro_batch, compute, *values):
        start = time.time()
        result = compute(chunk, micro_batch, *values)
        self._synchronize()
        self.blocks.append((self._rank, start, time.time(), kind, chunk, micro_batch))
        return result
