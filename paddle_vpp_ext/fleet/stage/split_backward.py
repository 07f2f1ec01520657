"""The backward in two parts, without a change to the model: I (gradients of inputs) at once, W (of weights) later.

While a chunk's forward runs, products with a weight run as the same op on the detached weight, so that Paddle's kernel
computes the input's gradient only. A hook on the output puts off the weight's and bias's gradients; W computes them
and hands them in with one backward rooted at the parameters, which accumulates and fires each parameter's hooks once.

Split are ``nn.Linear``, ``F.linear``, ``paddle.matmul`` and ``@`` with a trainable 2-D parameter on the right, so also the
tensor-parallel linears. All else stays ordinary backward, as part of I.
"""

import contextlib
import threading
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Callable, Optional

import paddle
from paddle import _C_ops
from paddle.autograd import PyLayer
from paddle.base.framework import EagerParamBase

from ..versions import without_amp

_Deferred = tuple[Any, Callable[[], paddle.Tensor]]


class SplitBackward:
    """The put off gradients of one model. Not for use by two threads at once; several in several threads are fine.

        with split.forward(chunk):
            output = layers(input)
        split.built(chunk, [output])
        with split.input_pass((chunk, i)):                # I
            paddle.autograd.backward([output], [gradient])
        split.weight_pass((chunk, i))                     # W

    The first forward of each chunk is not split: it shows which weights are also used by other ops. Such a weight
    (a tied embedding) stays whole, else its hooks would fire in I and in W. Uses inside a recomputed block cannot be
    seen: if a weight is multiplied outside and used by another op inside one, its hooks fire twice.

    W of one chunk in the order of the micro-batches gives the gradients of the whole backward to the last bit.
    """

    def __init__(self) -> None:
        self._deferred: dict[Hashable, list[_Deferred]] = {}
        self._collected: Optional[list[_Deferred]] = None  # what the running input pass has put off
        self._whole: dict[int, Any] = {}  # parameters that stay whole, by id
        self._seen_chunks: set[int] = set()
        self._observed: Optional[dict[int, tuple[Any, int]]] = None  # {id: (parameter, products with it)} of a chunk's first forward

    @contextlib.contextmanager
    def forward(self, chunk: int) -> Iterator[None]:
        """Around a chunk's forward: its products are made so that their backward can be split."""
        first = chunk not in self._seen_chunks
        self._observed = {} if first else None
        with _products_made_by(self._observe if first else self._multiply):
            yield

    def built(self, chunk: int, roots: Sequence[paddle.Tensor]) -> None:
        """After the chunk's forward: ``roots`` are its outputs that need a gradient."""
        observed, self._observed = self._observed, None
        self._seen_chunks.add(chunk)
        if observed:
            edges = _edges_to([parameter for parameter, _ in observed.values()], roots)
            self._whole.update({key: p for key, (p, count) in observed.items() if edges[key] > count})

    @contextlib.contextmanager
    def input_pass(self, key: Hashable) -> Iterator[None]:
        """Around the backward of one chunk and micro-batch: the gradients of weights are put off until ``weight_pass(key)``."""
        before, self._collected = self._collected, []
        try:
            # Recompute runs forwards in here.
            with _products_made_by(self._multiply):
                yield
            self._deferred[key] = self._collected
        finally:
            self._collected = before

    def weight_pass(self, key: Hashable) -> None:
        """Computes what the input pass with this key has put off, and hands it in. Nothing of it stays in memory."""
        _hand_in(self._deferred.pop(key))

    def clear(self) -> None:
        """Drops what is put off, after a step that failed."""
        self._deferred.clear()

    def _observe(self, x, weight, bias, transposed):
        assert self._observed is not None, "a first forward runs"
        for parameter in (weight, bias):
            if parameter is not None and not parameter.stop_gradient and parameter.is_leaf:
                _, count = self._observed.get(id(parameter), (parameter, 0))
                self._observed[id(parameter)] = parameter, count + 1
        return NotImplemented

    def _multiply(self, x, weight, bias, transposed):
        puts_off_bias = bias is not None and not bias.stop_gradient and bias.is_leaf
        if id(weight) in self._whole or bias is not None and (id(bias) in self._whole or not (puts_off_bias or bias.stop_gradient)):
            return NotImplemented
        product = _Product(self._emit, x.detach(), weight, bias if puts_off_bias else None, transposed)
        fixed = weight.detach(), None if bias is None else bias.detach()
        if x.stop_gradient:
            return _WithoutInput.apply(_anchor(), product, lambda x: _apply(x, *fixed, transposed))
        output = _apply(x, *fixed, transposed)
        output.register_hook(product.put_off)
        return output

    def _emit(self, deferred):
        if self._collected is None:  # a whole backward through a graph that was made to be split
            _hand_in(deferred)
        else:
            self._collected += deferred


class _Product:
    """One product x @ weight (+ bias), for the gradients of weight and bias."""

    def __init__(self, emit: Callable[[list[_Deferred]], None], x: Any, weight: Any, bias: Any, transposed: bool) -> None:
        self.emit, self.x, self.weight, self.bias, self.transposed = emit, x, weight, bias, transposed
        self.version = x.inplace_version

    def put_off(self, gradient):
        """The hook of the output."""
        gradient = gradient.detach()
        deferred = [(self.weight, lambda: self.weight_gradient(gradient))]
        if self.bias is not None:
            deferred.append((self.bias, lambda: _as(_rows(gradient).sum(0), self.bias)))
        self.emit(deferred)

    def weight_gradient(self, gradient):
        if self.x.inplace_version != self.version:
            raise RuntimeError(
                f"the input of a product with {self.weight.name} was modified in place before W: its gradient would be wrong"
            )
        x, gradient = _rows(self.x), _rows(gradient)
        if x.dtype != gradient.dtype:
            x = x.astype(gradient.dtype)
        pair = (gradient, x) if self.transposed else (x, gradient)
        return _as(_original("matmul")(*pair, True, False), self.weight)


class _WithoutInput(PyLayer):
    """A product whose input needs no gradient. The anchor makes its output differentiable; the weight is no argument of the graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Any, product: _Product, apply: Callable[[Any], Any]) -> Any:
        ctx.product = product
        return apply(product.x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> None:
        product, ctx.product = ctx.product, None
        product.put_off(gradient)
        return  # the anchor needs none


def _rows(tensor):
    return tensor if tensor.ndim == 2 else tensor.reshape([-1, tensor.shape[-1]])


def _as(gradient, parameter):
    return gradient if gradient.dtype == parameter.dtype else gradient.astype(parameter.dtype)


def _hand_in(deferred: list[_Deferred]) -> None:
    sums: dict[int, tuple[Any, Any]] = {}
    with paddle.no_grad(), without_amp():
        for parameter, compute in deferred:
            gradient = compute()
            sums[id(parameter)] = parameter, sums[id(parameter)][1] + gradient if id(parameter) in sums else gradient
    if sums:
        with without_amp():
            paddle.autograd.backward([p for p, _ in sums.values()], [g for _, g in sums.values()])


def _edges_to(parameters: Sequence[Any], roots: Sequence[Any]) -> dict[int, int]:
    """How often each parameter is used in the graph of ``roots``, by the id of the parameter."""
    nodes = {id(p): p.grad_fn for p in parameters}  # kept: a node's identity lasts as long as somebody holds it
    counts, by_node = dict.fromkeys(nodes, 0), {id(node): key for key, node in nodes.items()}
    visited: dict[int, Any] = {}
    todo = [root.grad_fn for root in roots if root.grad_fn is not None]
    while todo:
        node = todo.pop()
        if id(node) in visited:
            continue
        visited[id(node)] = node
        for following in node.next_functions:
            if following is None:
                continue
            if id(following) in by_node:
                counts[by_node[id(following)]] += 1
            todo.append(following)
    return counts


# ---- the patch: there while any thread is inside, and without effect in all other threads

_lock = threading.Lock()
_users = 0
_originals: dict[str, Callable] = {}
_local = threading.local()


@contextlib.contextmanager
def _products_made_by(maker):
    before = getattr(_local, "maker", None)
    _install()
    _local.maker = maker
    try:
        yield
    finally:
        _local.maker = before
        _uninstall()


def _install():
    global _users
    with _lock:
        _users += 1
        if _users > 1:
            return
        for name, replacement in (("linear", _linear), ("linear_v2", _linear_v2), ("matmul", _matmul)):
            if hasattr(_C_ops, name):
                _originals[name] = getattr(_C_ops, name)
                setattr(_C_ops, name, replacement)
        _originals["@"] = paddle.Tensor.__matmul__
        paddle.Tensor.__matmul__ = _at


def _uninstall():
    global _users
    with _lock:
        _users -= 1
        if _users:
            return
        # They stay known: another thread may be about to call one.
        for name, original in _originals.items():
            if name == "@":
                paddle.Tensor.__matmul__ = original
            else:
                setattr(_C_ops, name, original)


def _original(name):
    return _originals[name] if name in _originals else getattr(_C_ops, name)


def _apply(x, weight, bias, transposed):
    if bias is None:
        return _original("matmul")(x, weight, False, transposed)
    return _original("linear")(x, weight, bias)


def _made(x, weight, bias=None, transposed=False):
    """The product as this thread's maker makes it; NotImplemented where it is not to be split."""
    maker = getattr(_local, "maker", None)
    if (
        maker is None
        or not isinstance(weight, EagerParamBase)
        or weight.stop_gradient
        or weight.ndim != 2
        or not isinstance(x, paddle.Tensor)
        or x.ndim < 2
        or not paddle.is_grad_enabled()
    ):
        return NotImplemented
    return maker(x, weight, bias, transposed)


def _linear(x, weight, bias=None):
    made = _made(x, weight, bias)
    return _originals["linear"](x, weight, bias) if made is NotImplemented else made


def _linear_v2(x, weight, bias, transposed):
    made = NotImplemented if transposed else _made(x, weight, bias)
    return _originals["linear_v2"](x, weight, bias, transposed) if made is NotImplemented else made


def _matmul(*args, **kwargs):
    made = NotImplemented
    if not set(kwargs) - {"x", "y", "input", "other", "transpose_x", "transpose_y", "name", "out"} and len(args) <= 4:
        given = list(args) + [None] * (4 - len(args))
        for place, names in enumerate((("x", "input"), ("y", "other"), ("transpose_x",), ("transpose_y",))):
            for name in names:
                if kwargs.get(name) is not None:
                    given[place] = kwargs[name]
        x, weight, transposes_x, transposed = given
        if not transposes_x and kwargs.get("out") is None:
            made = _made(x, weight, None, bool(transposed))
    return _originals["matmul"](*args, **kwargs) if made is NotImplemented else made


def _at(self, other):
    made = _made(self, other)
    return _originals["@"](self, other) if made is NotImplemented else made


def _anchor():
    anchor = paddle.zeros([1])
    anchor.stop_gradient = False
    return anchor
