"""Forward-backward overlap: schedule nodes and chunks, the async p2p handle, the default overlapper.

A chunk is a row of nodes. A node's forward cuts its piece of the graph off from the others, so
that its backward can be called by itself, between the forwards of another micro-batch.
"""
import threading
from typing import Any, Callable, List, NamedTuple, Sequence

import paddle

from . import versions
from .autograd import backward_from

_PaddlesNode = versions.schedule_node_class()


class LayerNode(_PaddlesNode):
    """A node that any callable of one value becomes. Values are tensors, or tuples, lists or dicts of them.

    ``backward`` takes a gradient for each output, or for each output that needs one, None where
    there is none; it gives one for each input tensor, None for those that need none.
    """

    is_communication = False

    def __init__(self, function: Callable[[Any], Any], name: str = ""):
        super().__init__(function, name)
        self._function = function
        self._leaves, self._outputs = [], []

    def forward(self, inputs: Any = (), **kwargs) -> Any:
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

    def backward(self, output_grad: Any = None, scaler=None) -> tuple:
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

    def __init__(self, function: Callable[[Any, Any], paddle.Tensor], labels: Any, scale: float = None):
        super().__init__(function, getattr(function, "__name__", type(function).__name__))
        self.labels, self.scale_loss_factor = labels, scale

    def forward(self, inputs: Any = (), **kwargs) -> paddle.Tensor:
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

    def backward(self, output_grad: Any = None, scaler=None) -> tuple:
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
        self._running = _start(lambda: function(value))

    def wait(self) -> Any:
        return self._running()

    def forward(self, inputs: Any = (), **kwargs) -> Any:
        self.issue(inputs)
        return self.wait()

    def backward(self, output_grad: Any = None, scaler=None) -> tuple:
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


def chunk_of(layers, chunk: int) -> Any:
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


def loss_node_of(function: Callable, labels: Any, scale: float = None) -> Any:
    """The node that the loss function builds, set up as Paddle does, else one made for it."""
    if not hasattr(function, "build_schedule_node"):
        return LossNode(function, labels, scale)
    node = function.build_schedule_node()
    node.labels = labels
    if scale is not None:
        node.scale_loss_factor = scale
    return node


class AsyncHandle:
    """What ``overlapped_forward_backward`` gets as ``p2p_async_handle``: the pair's transfers, beside its computation.

    Call each wait before what it waits for is used, each comm as soon as its value is there.
    """

    def __init__(self, comm, pack: Callable[[Any], Any], pack_grads: Callable[[Any], Any]):
        self._comm, self._pack = comm, {"F": pack, "B": pack_grads}
        self._waited = set()
        self._payloads = {}

    def forward_handle_wait(self) -> None:
        """The forward's inputs are there."""
        self._wait("F")

    def forward_async_comm(self, output_tensor: Any) -> None:
        """Sends the forward's output; receives the next forward's inputs."""
        self._start("F", output_tensor)

    def backward_handle_wait(self) -> None:
        """The backward's gradients are there."""
        self._wait("B")

    def backward_async_comm(self, input_tensor_grad: Any) -> None:
        """Sends the backward's gradients; receives the next backward's."""
        self._start("B", input_tensor_grad)

    backwatd_async_comm = backward_async_comm  # a spelling that is in circulation

    def payload(self, kind: str, value: Any) -> Any:
        """The message of the forward's output or the backward's gradients, made once.

        RuntimeError if its wait was never called: the value may come from what had not arrived.
        """
        if kind not in self._waited:
            name = {"F": "forward", "B": "backward"}[kind]
            raise RuntimeError(
                f"overlapped_forward_backward did not call p2p_async_handle.{name}_handle_wait() before it used the {name}'s inputs"
            )
        if kind not in self._payloads:
            self._payloads[kind] = self._pack[kind](value)
        return self._payloads[kind]

    def _wait(self, kind):
        self._comm.wait(kind)
        self._waited.add(kind)

    def _start(self, kind, value):
        self._comm.start(kind, self.payload(kind, value))


class Move(NamedTuple):
    """One move of the default overlapper: ``run``, ``issue`` or ``wait`` node ``index`` of side ``F`` or ``B``."""

    side: str
    what: str
    index: int


def interleave_nodes(forward: Sequence[bool], backward: Sequence[bool]) -> List[Move]:
    """In which order to walk the nodes of a forward and of a backward; True stands for a communication node.

    A side keeps the device until it communicates or ends; then the other has it. What is under way
    is waited for when its side is next, or when neither has anything else to do. With one
    communication in the middle of each (c: compute, x: communicate):

        backward  c x- - - w   c
        forward        c x - - - - w c
    """
    nodes, at, under_way = {"B": list(backward), "F": list(forward)}, {"B": 0, "F": 0}, []
    moves: List[Move] = []
    side = "B"
    while any(at[s] < len(nodes[s]) for s in "BF"):
        other = "F" if side == "B" else "B"
        if at[side] == len(nodes[side]) or (side in under_way and (at[other] < len(nodes[other]) and other not in under_way)):
            side = other
        elif side in under_way:
            side = under_way.pop(0)
            moves.append(Move(side, "wait", at[side]))
            at[side] += 1
        elif nodes[side][at[side]]:
            moves.append(Move(side, "issue", at[side]))
            under_way.append(side)
        else:
            moves.append(Move(side, "run", at[side]))
            at[side] += 1
    return moves


class OverlapMixin:
    """Gives a PipelineLayer an ``overlapped_forward_backward``: ``class Model(OverlapMixin, PipelineLayer)``.

    It walks the forward nodes of one micro-batch and the backward nodes of the other so that one
    side computes while the other communicates.
    """

    def overlapped_forward_backward(
        self,
        forward_chunk,
        forward_inputs,
        forward_loss_fn_node,
        backward_chunk,
        backward_loss_fn_node,
        backward_input_grads,
        scaler,
        p2p_async_handle=None,
    ):
        handle = p2p_async_handle
        if backward_loss_fn_node is not None:
            backward_input_grads = backward_loss_fn_node.backward(scaler=scaler)
        nodes = {"F": _flat_nodes(forward_chunk), "B": _flat_nodes(backward_chunk)[::-1]}
        value = {"F": forward_inputs, "B": backward_input_grads}
        begun, comm = set(), {"F": None, "B": None}
        if handle is not None:
            begin = {"F": handle.forward_handle_wait, "B": handle.backward_handle_wait}
            comm = {"F": handle.forward_async_comm, "B": handle.backward_async_comm}
        for side, what, index in interleave_nodes(*[[_communicates(n) for n in nodes[side]] for side in "FB"]):
            if handle is not None and side not in begun:
                begun.add(side)
                begin[side]()
            node = nodes[side][index]
            if what == "issue":
                node.issue(value[side], backward=side == "B")
                continue
            if what == "wait":
                value[side] = node.wait()
            else:
                value[side] = node.forward(value[side]) if side == "F" else node.backward(value[side])
            if index == len(nodes[side]) - 1 and comm[side] is not None:
                comm[side](value[side])
        loss = forward_loss_fn_node.forward(value["F"]) if forward_loss_fn_node is not None else None
        return value["F"], loss, value["B"]


def _communicates(node):
    return getattr(node, "is_communication", False)


def _flat_nodes(chunk):
    nodes = []
    for node in chunk.nodes:
        nodes += _flat_nodes(node) if hasattr(node, "nodes") else [node]
    return nodes


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
    found = []
    _map_tensors(value, found.append)
    return found


def _leaf(tensor):
    leaf = tensor.detach()
    leaf.stop_gradient = tensor.stop_gradient
    return leaf


def _view(leaf):
    return leaf if leaf.stop_gradient else versions.view_of(leaf)


def _start(function):
    """Runs ``function`` beside the caller's computation; returns what waits for its result."""
    if paddle.is_compiled_with_cuda():
        return _start_on_stream(function)
    outcome = {}
    has_grad = paddle.is_grad_enabled()  # it is a state of the thread

    def work():
        try:
            with paddle.set_grad_enabled(has_grad):
                outcome["value"] = function()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    def wait():
        thread.join()
        if "error" in outcome:
            raise outcome["error"]
        return outcome["value"]

    return wait


_stream = None


def _start_on_stream(function):
    # Not run on any machine of this project: none has a GPU.
    global _stream
    cuda = paddle.device.cuda
    _stream = _stream or cuda.Stream()
    _stream.wait_stream(cuda.current_stream())
    with cuda.stream_guard(_stream):
        value = function()

    def wait():
        cuda.current_stream().wait_stream(_stream)
        return value

    return wait
