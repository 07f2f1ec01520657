"""What Paddle's own pipeline engines send, over our channels: without it they fail on CPU at the first transfer."""

import functools
import math
from typing import Any, Callable

import paddle

from ..patches import Patches


def route_paddle_p2p(channels: Any) -> Callable[[], None]:
    """Send what Paddle's own pipeline engines send through `channels`, and return a function that undoes it.

    Without this they fail on CPU at the first transfer. Only one route at a time.
    """
    from paddle.distributed.fleet.meta_parallel.pp_utils import p2p_communication as module

    return _Route(channels, module).install()


class _Route:
    def __init__(self, channels: Any, module: Any) -> None:
        self._channels = channels
        self._module = module
        self._kind = "F"  # of what Paddle is about to transfer
        self._posted: list[Any] = []
        p = len(channels.ranks)
        self._next, self._previous = (channels.stage + 1) % p, (channels.stage - 1) % p

    def install(self):
        module, meta = self._module, self._module.SendRecvMeta
        distributed = _Overlay(paddle.distributed, send=self._send_meta, recv=self._receive_meta)
        patches = [
            (module, "paddle", _Overlay(paddle, distributed=distributed)),
            (meta, "send_meta", self._noting_direction(meta.send_meta)),
            (meta, "recv_meta", self._noting_direction(meta.recv_meta)),
        ]
        if hasattr(module, "_p2p_ops"):
            patches += [(module, "_p2p_ops", self._start), (module, "_batched_p2p_ops", self._start_and_wait)]
        else:  # 2.6: one function that allocates and transfers
            patches += [
                (module, "_p2p_helper", self._one_kind_at_a_time(module._p2p_helper)),
                (module, "batch_send_recv_on_calc_stream", self._start_operations),
                (module, "_is_valid_send_recv_partial", lambda tensor, mp_degree: False),
            ]
        made = Patches()
        for owner, name, new in patches:
            made.replace(owner, name, new)
        return made.undo

    # Activations go to the next stage and come from the previous one, gradients the other way.

    def _send(self, kind, tensor):
        # Paddle frees an output once it is sent, sometimes before: hold its memory by another tensor.
        tensor = tensor.detach()
        peer = self._next if kind == "F" else self._previous
        return self._channels.send(peer, kind, lambda transfer: transfer(tensor), math.prod(tensor.shape) * tensor.element_size())

    def _receive(self, kind, tensor):
        peer = self._previous if kind == "F" else self._next
        return self._channels.receive(peer, kind, lambda transfer: transfer(tensor), math.prod(tensor.shape) * tensor.element_size())

    def _start(self, send_previous, receive_previous, send_next, receive_next, hcg):
        """Start all of it and return the tickets."""
        parts = (
            (self._send, "B", send_previous),
            (self._receive, "F", receive_previous),
            (self._send, "F", send_next),
            (self._receive, "B", receive_next),
        )
        return [start(kind, tensor) for start, kind, tensors in parts for tensor in _each(tensors)]

    def _start_and_wait(self, *args):
        for ticket in self._start(*args):
            ticket.wait()

    # Shapes and dtypes go by plain send and recv, and gradients' ones with reverse=True.

    def _noting_direction(self, method):
        @functools.wraps(method)
        def wrapper(meta, *args, **kwargs):
            before, self._kind = self._kind, "B" if kwargs.get("reverse") else "F"
            try:
                return method(meta, *args, **kwargs)
            finally:
                self._kind = before

        return wrapper

    def _send_meta(self, tensor, dst=0, group=None, sync_op=True):
        return self._send(self._kind, tensor)

    def _receive_meta(self, tensor, src=0, group=None, sync_op=True):
        return self._receive(self._kind, tensor).wait()

    # Paddle 2.6

    def _one_kind_at_a_time(self, helper):
        """Call it for activations, then for gradients, since with two stages the peer does not tell them apart."""

        @functools.wraps(helper)
        def wrapper(tensor_send_next, tensor_send_prev, recv_prev, recv_next, *args, **kwargs):
            self._kind = "F"
            activation, _ = helper(tensor_send_next, None, recv_prev, False, *args, **kwargs)
            self._kind = "B"
            _, gradient = helper(None, tensor_send_prev, False, recv_next, *args, **kwargs)
            while self._posted:
                self._posted.pop().wait()
            return activation, gradient

        return wrapper

    def _start_operations(self, operations):
        for operation in operations:
            start = self._send if operation.op is self._module._send_on_calc_stream else self._receive
            self._posted.append(start(self._kind, operation.tensor))


class _Overlay:
    """A module seen through a few replacements."""

    def __init__(self, module: Any, **replacements: Any) -> None:
        self._module = module
        self.__dict__.update(replacements)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _each(tensors):
    if tensors is None:
        return ()
    return tensors if isinstance(tensors, (tuple, list)) else (tensors,)
