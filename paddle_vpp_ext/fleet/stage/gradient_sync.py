"""dp_comm_overlap and sharding_comm_overlap: a chunk's gradients go to the other replicas as soon as they are final.

On a GPU Paddle's fused buffers do it. On CPU, where Paddle has none, ChunkGradients stands in for them.
"""

from typing import Any, Optional

import paddle

from .. import device, versions


class ChunkGradients:
    """The gradients of a chunk's weights, averaged over the replicas: what Paddle's FusedCommBuffer is to the engines.

    With sharding the owner of a weight needs the mean only; here all get it.
    """

    def __init__(self, parameters: list[paddle.Tensor], group: Any):
        self._parameters, self._group = parameters, group
        self._sent: Optional[list[tuple[list[paddle.Tensor], paddle.Tensor, Any]]] = None

    def start(self) -> None:
        """Sends the gradients, in one message for each dtype."""
        by_dtype: dict[str, list[paddle.Tensor]] = {}
        for parameter in self._parameters:
            gradient = versions.whole_gradient(parameter)
            by_dtype.setdefault(str(gradient.dtype), []).append(gradient)
        self._sent = []
        with paddle.no_grad():
            for gradients in by_dtype.values():
                flat = paddle.concat([gradient.flatten() for gradient in gradients])
                self._sent.append((gradients, flat, paddle.distributed.all_reduce(flat, group=self._group, sync_op=False)))

    def finish(self) -> None:
        """Waits for the sums and puts the means in the gradients' place."""
        assert self._sent is not None, "it was started"
        for gradients, flat, task in self._sent:
            task.wait()
            means = paddle.split(flat / self._group.nranks, [gradient.size for gradient in gradients])
            for gradient, mean in zip(gradients, means):
                paddle.assign(mean.reshape(gradient.shape), gradient)
        self._sent = None

    def _clear_grad_storage(self):
        pass  # Paddle's optimizer step calls it with release_gradients; there is no storage here


def buffers_of(layers: Any, group: Any) -> dict[int, list[ChunkGradients]]:
    """A buffer for each chunk that has weights to train."""
    return {c: [ChunkGradients(_trained(chunk), group)] for c, chunk in enumerate(chunks_of(layers)) if _trained(chunk)}


def chunks_of(layers: Any) -> list:
    """The chunks of a PipelineLayer, also of one with a single chunk."""
    return list(layers.get_model_chunks()) if layers.get_num_virtual_stages() > 1 else [layers]


def _trained(chunk):
    return [parameter for parameter in chunk.parameters() if not parameter.stop_gradient]


class TrainedChunks:
    """Stands for a PipelineLayer of only those chunks that have weights to train.

    Paddle's loop over the chunks ends at the first without any. ``places``: where its chunks are in the model.
    """

    def __init__(self, layers: Any) -> None:
        chunks = chunks_of(layers)
        self.places = [c for c, chunk in enumerate(chunks) if _trained(chunk)]
        self._chunks = [chunks[c] for c in self.places]

    def get_num_virtual_stages(self) -> int:
        return max(2, len(self._chunks))  # so that the chunks are asked for

    def get_model_chunks(self) -> list:
        return self._chunks


class GradientSync:
    """The buffers of one engine, started chunk by chunk; without overlap of communication there are none."""

    def __init__(self, engine: Any):
        self._engine = engine
        # With one chunk Paddle's buffers start by themselves, after the last gradient.
        self._starts = engine._comm_overlap and (engine._num_chunks > 1 or device.is_cpu())

    def begin(self) -> None:
        """Before a step: Paddle's buffers count the backwards, and one that failed has left counts behind."""
        for buffer in self._buffers():
            if not isinstance(buffer, ChunkGradients):
                buffer._acc_steps = self._engine.accumulate_steps
                buffer._reset_params_checked_in()

    def start(self, chunk: int) -> None:
        """All backwards of a chunk are done."""
        for buffer in self._engine._chunk_2_comm_buffers.get(chunk, ()) if self._starts else ():
            # Not comm_grads, which insists that each weight had a gradient in each micro-batch.
            buffer.start() if isinstance(buffer, ChunkGradients) else buffer._comm_grads()

    def finish(self) -> None:
        """Before the optimizer's step."""
        for buffer in self._buffers():
            buffer.finish() if isinstance(buffer, ChunkGradients) else versions.scale_buffer_grads(buffer)

    def _buffers(self):
        buffers = self._engine._chunk_2_comm_buffers.values() if self._engine._comm_overlap else ()
        return [buffer for of_chunk in buffers for buffer in of_chunk]
