"""Forward-backward overlap: the async p2p handle, and the default overlapper that walks the nodes of two micro-batches."""

from collections.abc import Sequence
from typing import Any, Callable, NamedTuple


class AsyncHandle:
    """What ``overlapped_forward_backward`` gets as ``p2p_async_handle``: the pair's transfers, beside its computation.

    Call each wait before what it waits for is used, each comm as soon as its value is there.
    """

    def __init__(self, comm: Any, pack: Callable[[Any], Any], pack_grads: Callable[[Any], Any]):
        self._comm, self._pack = comm, {"F": pack, "B": pack_grads}
        self._waited: set[str] = set()
        self._payloads: dict[str, Any] = {}

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
    index: int  # type: ignore[assignment]  # it hides tuple.index


def interleave_nodes(forward: Sequence[bool], backward: Sequence[bool]) -> list[Move]:
    """In which order to walk the nodes of a forward and of a backward; True stands for a communication node.

    A side keeps the device until it communicates or ends; then the other has it. What is under way
    is waited for when its side is next, or when neither has anything else to do. With one
    communication in the middle of each (c: compute, x: communicate):

        backward  c x- - - w   c
        forward        c x - - - - w c
    """
    nodes, at = {"B": list(backward), "F": list(forward)}, {"B": 0, "F": 0}
    under_way: list[str] = []
    moves: list[Move] = []
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
        forward_chunk: Any,
        forward_inputs: Any,
        forward_loss_fn_node: Any,
        backward_chunk: Any,
        backward_loss_fn_node: Any,
        backward_input_grads: Any,
        scaler: Any,
        p2p_async_handle: Any = None,
    ) -> tuple[Any, Any, Any]:
        handle = p2p_async_handle
        if backward_loss_fn_node is not None:
            backward_input_grads = backward_loss_fn_node.backward(scaler=scaler)
        nodes = {"F": _flat_nodes(forward_chunk), "B": _flat_nodes(backward_chunk)[::-1]}
        value = {"F": forward_inputs, "B": backward_input_grads}
        begun: set[str] = set()
        comm: dict[str, Any] = {"F": None, "B": None}
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
    nodes: list[Any] = []
    for node in chunk.nodes:
        nodes += _flat_nodes(node) if hasattr(node, "nodes") else [node]
    return nodes
