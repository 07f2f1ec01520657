"""The stage of forward-backward overlap: chunks as rows of nodes, pairs in the model's own hands."""

from typing import Any, NamedTuple, Optional

import paddle

from ...schedule.action import Action
from .. import versions
from ..messages import Payload, Signature, TensorSpec, unflatten
from .nodes import chunk_of, loss_node_of
from .overlap import AsyncHandle
from .pipeline_stage import PipelineStage


class SavedNodes(NamedTuple):
    """What a chunk's forward leaves for its backward.

    Its nodes, the loss's node on the last part (else None), the specs of what came in, and what
    callbacks of the backward get.
    """

    nodes: Any
    loss_node: Any
    input_specs: tuple[TensorSpec, ...]
    seen: tuple[Any, Any]


class OverlappedStage(PipelineStage):
    """Each forward and backward of a steady pair go to the model's ``overlapped_forward_backward`` in one call.

    Evaluation has no pairs and runs as without overlap.
    """

    def forward(self, chunk: int, micro_batch: int, message: Optional[tuple[Signature, list[paddle.Tensor]]]) -> Any:
        if not self._training:
            return super().forward(chunk, micro_batch, message)
        value, _ = self._begin_forward(chunk, micro_batch, message)
        nodes, loss_node = self._nodes(chunk, micro_batch)
        output = nodes.forward(value)
        loss = loss_node.forward(output) if loss_node else None
        self._keep(chunk, micro_batch, message, value, output, nodes, loss_node, loss)
        return None if loss_node else self._pack(chunk, micro_batch, output)

    def backward(self, chunk: int, micro_batch: int, grads: Optional[list[paddle.Tensor]]) -> Payload:
        saved = self._begin_backward(chunk, micro_batch, grads)
        given = saved.loss_node.backward(scaler=self._scaler) if saved.loss_node else grads
        input_grads = _needed(saved.input_specs, saved.nodes.backward(given))
        return self._end_backward(saved.seen, grads, input_grads)

    def overlapped(self, forward: Action, backward: Action, message: Any, grads: Any, comm: Any) -> tuple[Any, Any]:
        """One call of the model's method for a steady pair."""
        _, chunk, micro_batch = forward
        _, back_chunk, back_micro_batch = backward
        value, _ = self._begin_forward(chunk, micro_batch, message)
        nodes, loss_node = self._nodes(chunk, micro_batch)
        saved = self._begin_backward(back_chunk, back_micro_batch, grads)
        pack = lambda output: None if loss_node else self._pack(chunk, micro_batch, output)
        pack_grads = lambda input_grads: Payload(_needed(saved.input_specs, input_grads))
        handle = AsyncHandle(comm, pack, pack_grads) if comm else None
        output, loss, input_grads = self._layers.overlapped_forward_backward(
            nodes, value, loss_node, saved.nodes, saved.loss_node, grads, self._scaler, p2p_async_handle=handle
        )
        payload = handle.payload("F", output) if handle else pack(output)
        gradients = handle.payload("B", input_grads) if handle else pack_grads(input_grads)
        self._keep(chunk, micro_batch, message, value, output, nodes, loss_node, loss)
        self._engine.set_virtual_pipeline_rank(back_chunk)
        self._end_backward(saved.seen, grads, gradients.tensors)
        return payload, gradients

    def _nodes(self, chunk, micro_batch):
        """The chunk's nodes, and on the last part the node of the loss function that the backward starts from."""
        nodes = chunk_of(self._layers, chunk)
        if self._part(chunk) != self._last_part:
            return nodes, None
        self._labels = self._take_labels(micro_batch)
        function = versions.loss_functions(self._layers)[self._loss_fn_idx]
        return nodes, loss_node_of(function, self._labels, self._loss_scale())

    def _keep(self, chunk, micro_batch, message, value, output, nodes, loss_node, loss):
        """After a forward: its losses, and what its backward needs."""
        self._end_forward(chunk, value, output)
        if loss_node:
            for k, function in enumerate(versions.loss_functions(self._layers)):
                if k != self._loss_fn_idx:
                    with paddle.no_grad():
                        self._keep_loss(k, micro_batch, self._scaled(function(output, self._labels), k))
                else:
                    self._keep_loss(k, micro_batch, loss)
        specs = message[0].specs if message else ()
        seen = self._seen(message, value, loss if loss_node else output)
        self._saved[chunk, micro_batch] = SavedNodes(nodes, loss_node, specs, seen)

    def _take(self, signature, tensors):
        # No views: with overlapped transfers the tensors may not be filled yet. Nodes make their own.
        if not self._training:
            return super()._take(signature, tensors)
        for tensor, spec in zip(tensors, signature.specs):
            tensor.stop_gradient = spec.stop_gradient
        return tensors, unflatten(signature.form, tensors)


def _needed(specs: tuple[TensorSpec, ...], grads: Any) -> list[paddle.Tensor]:
    """Of a chunk's input gradients those that the previous part waits for, zeros where there is none.

    Nodes give one for each input, or for each input that needs one. ValueError for another number.
    """
    grads = [grads] if grads is None or isinstance(grads, paddle.Tensor) else list(grads)
    if not specs:
        return []
    wanted = [spec for spec in specs if not spec.stop_gradient]
    if len(grads) == len(specs):
        grads = [grad for grad, spec in zip(grads, specs) if not spec.stop_gradient]
    if len(grads) != len(wanted):
        raise ValueError(f"the chunk's backward gave {len(grads)} gradients, but its input has {len(wanted)} tensors that need one")
    return [paddle.zeros(spec.shape, spec.dtype) if grad is None else grad for grad, spec in zip(grads, wanted)]
