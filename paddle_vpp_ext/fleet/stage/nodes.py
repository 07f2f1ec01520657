"""Schedule nodes and chunks: pieces of a model whose forward and backward are called one by one.

A chunk is a row of nodes. A node's forward cuts its piece of the graph off from the others, so
that its backward can be called by itself, between the forwards of another micro-batch.
"""

from collections.abc import Sequence
from typing import Any, Callable, Optional

import paddle

from .. import device, versions
from .autograd import backward_from

_PaddlesNode: Any = versions.schedule_node_class()


class LayerNode(_PaddlesNode):
    """A node that any callable of one value becomes. Values are tensors, or tuples, lists or dicts of them.

    ``backward`` takes a gradient for each output, or for each output that needs one, None where
    there is none; it gives one for each input tensor, None for those that need none.
    """

    is_communication = False

    def __init__(self, function: Callable[..., Any], name: str = ""):
        super().__init__(function, name)
        self._function = function
        self._leaves: list[paddle.Tensor] = []
        self._outputs: list[paddle.Tensor] = []

    def forward(self, inputs: Any = (), **kwargs: Any) -> Any:
        leaves = _map_tensors(inputs, _leaf)
        self._leaves = _tensors_of(leaves)
        # Views, so that a layer may change its input in place, which it may not do with a leaf.
        outputs = self._function(_map_tensors(leaves, _view), **kwargs)
        self._outputs = _tensors_of(outputs)
        copies = _map_tensors(outputs, _leaf)
        for tensor in self._outputs:
            # The copies hold the data; the output stays as the root of its graph.
            if not tensor.stop_gradient and not tensor.is_leaf and tensor.inplace_version == 0:
                tensor._clear_dataptr()
        return copies

    def backward(self, output_grad: Any = None, scaler: Any = None) -> tuple:
        grads = list(output_grad) if isinstance(output_grad, (tuple, list)) else [output_grad]
        outputs = self._outputs
        if len(grads) != len(outputs):
            outputs = [tensor for tensor in outputs if not tensor.stop_gradient]
        if len(grads) != len(outputs):
            raise ValueError(f"node {self.name}: {len(grads)} gradients for {len(outputs)} outputs that need one")
        pairs = [(out, grad) for out, grad in zip(outputs, grads) if grad is not None and not out.stop_gradient]
        if pairs:
            with versions.without_amp():
                backward_from([out for out, _ in pairs], [grad for _, grad in pairs])
        return self._input_grads()

    def _input_grads(self):
        grads = tuple(None if leaf.stop_gradient else leaf.grad for leaf in self._leaves)
        self._leaves, self._outputs = [], []
        return grads


class LossNode(LayerNode):
    """The node of a loss function: ``forward`` of the model's output, ``backward`` with the gradient scaler, if any."""

    def __init__(self, function: Callable[[Any, Any], paddle.Tensor], labels: Any, scale: Optional[float] = None):
        super().__init__(function, getattr(function, "__name__", type(function).__name__))
        self.labels, self.scale_loss_factor = labels, scale

    def forward(self, inputs: Any = (), **kwargs: Any) -> paddle.Tensor:
        leaves = _map_tensors(inputs, _leaf)
        self._leaves = _tensors_of(leaves)
        loss = self._function(_map_tensors(leaves, _view), self.labels, **kwargs)
        if not isinstance(loss, paddle.Tensor):
            raise TypeError(f"loss function {self.name} gave a {type(loss).__name__}, not a tensor")
        if self.scale_loss_factor is not None:
            with versions.without_amp():
                loss = loss / self.scale_loss_factor
        self._outputs = [loss]
        return loss

    def backward(self, output_grad: Any = None, scaler: Any = None) -> tuple:
        loss = self._outputs[0]
        if not loss.stop_gradient:
            scale = versions.align_mode_scale()
            loss = loss / scale if scale else loss
            with versions.without_amp():
                paddle.autograd.backward(versions.scale_loss(scaler, loss))
        return self._input_grads()


class CommunicationNode(LayerNode):
    """A node that only communicates (an all-to-all of experts, say), so that others can compute meanwhile.

    ``issue`` starts its forward, or with ``backward=True`` its backward, ``wait`` gives the result.
    On CPU it runs in a thread, on GPU on a stream of its own. Called as other nodes it does both.
    """

    is_communication = True

    def issue(self, value: Any, backward: bool = False) -> None:
        function = super().backward if backward else super().forward
        self._running = device.current().start_aside(lambda: function(value))

    def wait(self) -> Any:
        return self._running()

    def forward(self, inputs: Any = (), **kwargs: Any) -> Any:
        self.issue(inputs)
        return self.wait()

    def backward(self, output_grad: Any = None, scaler: Any = None) -> tuple:
        self.issue(output_grad, backward=True)
        return self.wait()


class Chunk:
    """A model chunk as a row of nodes; calls them in order. Made anew for each micro-batch."""

    def __init__(self, nodes: Sequence[Any]):
        self.nodes = list(nodes)

    def forward(self, inputs: Any) -> Any:
        for node in self.nodes:
            inputs = node.forward(inputs)
        return inputs

    def backward(self, output_grad: Any) -> Any:
        for node in reversed(self.nodes):
            output_grad = node.backward(output_grad)
        return output_grad


def chunk_of(layers: Any, chunk: int) -> Any:
    """The chunk of a PipelineLayer: of the nodes that its layers build, else of one made for each layer.

    A layer with the attribute ``is_communication`` becomes a CommunicationNode.
    """
    if layers.get_num_virtual_stages() > 1:
        functions = layers.get_model_chunks()[chunk].get_run_function()
    else:
        functions = layers.run_function
    return Chunk([_node_of(function) for function in functions])


def _node_of(layer):
    if hasattr(layer, "build_schedule_node"):
        return layer.build_schedule_node()
    kind = CommunicationNode if getattr(layer, "is_communication", False) else LayerNode
    return kind(layer, type(layer).__name__)


def loss_node_of(function: Callable, labels: Any, scale: Optional[float] = None) -> Any:
    """The node that the loss function builds, set up as Paddle does, else one made for it."""
    if not hasattr(function, "build_schedule_node"):
        return LossNode(function, labels, scale)
    node = function.build_schedule_node()
    node.labels = labels
    if scale is not None:
        node.scale_loss_factor = scale
    return node


def _map_tensors(value, function):
    """``value`` with each tensor replaced; tuples, lists and dicts in any depth, and what else there is as it is."""
    if isinstance(value, paddle.Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_map_tensors(item, function) for item in value)
    if isinstance(value, dict):
        return {key: _map_tensors(item, function) for key, item in value.items()}
    return value


def _tensors_of(value):
    found: list[paddle.Tensor] = []
    _map_tensors(value, found.append)
    return found


def _leaf(tensor):
    leaf = tensor.detach()
    leaf.stop_gradient = tensor.stop_gradient
    return leaf


def _view(leaf):
    return leaf if leaf.stop_gradient else versions.view_of(leaf)
