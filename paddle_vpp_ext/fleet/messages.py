"""What crosses a stage boundary: tensors of agreed shapes, and the headers that agree on them.

The forward of a model part gives a tensor, a tuple or list of tensors, or a dict of tensors (or
of lists of them). Its Signature goes ahead of the first micro-batch that crosses the boundary
and holds for the others; the gradients that come back have the shapes and dtypes of those of
the tensors that need one, so they need no header.
"""

import functools
import json
import math
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple, Optional, Union

import numpy as np
import paddle

from ..schedule.dependencies import Transfer


class TensorSpec(NamedTuple):
    """One tensor of a message: shape, dtype by name (``float32``), and whether it stops gradients."""

    shape: tuple[int, ...]
    dtype: str
    stop_gradient: bool

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" + ("" if self.stop_gradient else " with gradient")

    def empty(self) -> paddle.Tensor:
        """A tensor to receive into."""
        return paddle.empty(self.shape, dtype=self.dtype)


class Signature(NamedTuple):
    """The form of a message: ``tensor``, ``tuple``, ``list``, or for a dict its (key, length of a list or None)."""

    form: Any
    specs: tuple[TensorSpec, ...]

    def encode(self) -> np.ndarray:
        """As bytes (uint8), for a header."""
        return np.frombuffer(json.dumps([self.form, self.specs]).encode(), dtype=np.uint8)

    @classmethod
    def decode(cls, data: np.ndarray) -> "Signature":
        """The inverse of ``encode``."""
        form, specs = json.loads(data.tobytes().decode())
        form = form if isinstance(form, str) else tuple((key, length) for key, length in form)
        return cls(form, tuple(TensorSpec(tuple(shape), dtype, stop) for shape, dtype, stop in specs))

    def __str__(self) -> str:
        names = self.form if isinstance(self.form, str) else "dict of " + ", ".join(key for key, _ in self.form)
        return f"{names} ({', '.join(map(str, self.specs))})"

    @property
    def gradient_specs(self) -> list[TensorSpec]:
        """Those of the tensors that need a gradient."""
        return [spec for spec in self.specs if not spec.stop_gradient]


def dtype_name(tensor: paddle.Tensor) -> str:
    """``float32`` and the like, in all releases."""
    return _name_of(tensor.dtype)


@functools.lru_cache(None)
def _name_of(dtype):
    return str(dtype).rpartition(".")[2]


def spec_of(tensor: paddle.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), dtype_name(tensor), bool(tensor.stop_gradient))


def byte_count(tensors: Sequence[paddle.Tensor]) -> int:
    """What the elements of tensors take."""
    return sum(math.prod(tensor.shape) * tensor.element_size() for tensor in tensors)


def flatten(value: Any, what: str) -> tuple[Any, list[paddle.Tensor]]:
    """(form, tensors) of a value. TypeError that names ``what`` for one that cannot cross a boundary."""
    if isinstance(value, paddle.Tensor):
        return "tensor", [value]
    form: Any
    if isinstance(value, (tuple, list)):
        form, tensors = ("tuple" if isinstance(value, tuple) else "list"), list(value)
    elif isinstance(value, dict):
        form, tensors = [], []
        for key, item in value.items():
            is_list = isinstance(item, (tuple, list))
            form.append((str(key), len(item) if is_list else None))
            tensors += item if is_list else [item]
        form = tuple(form)
    else:
        raise TypeError(f"{what} is a {type(value).__name__}; a tensor, a tuple, list or dict of tensors can cross a stage")
    for k, tensor in enumerate(tensors):
        if not isinstance(tensor, paddle.Tensor):
            raise TypeError(f"{what} has a {type(tensor).__name__} at place {k}; only tensors can cross a stage")
    return form, tensors


def unflatten(form: Any, tensors: list[paddle.Tensor]) -> Any:
    """The inverse of ``flatten``."""
    if form == "tensor":
        return tensors[0]
    if isinstance(form, str):
        return (tuple if form == "tuple" else list)(tensors)
    value, rest = {}, iter(tensors)
    for key, length in form:
        value[key] = next(rest) if length is None else [next(rest) for _ in range(length)]
    return value


class Boundaries:
    """The signatures at this rank's stage boundaries, by the model part that makes the activation.

    Kept apart per step key: training and evaluation differ in what needs gradients, batches in
    their shapes. ``dynamic``: every micro-batch may differ, so every activation has a header.
    """

    def __init__(self, dynamic: bool = False):
        self.dynamic = dynamic
        self._known: dict[Any, dict[int, Signature]] = {}
        self._per_micro_batch: dict[tuple[int, int], Signature] = {}
        self._current: dict[int, Signature] = {}

    def begin(self, key: Any) -> None:
        """Starts a step; what earlier steps of the same key agreed on holds."""
        self._current = self._known.setdefault(key, {})
        self._per_micro_batch.clear()

    def knows(self, key: Any) -> bool:
        """Whether a step of this key has been done, so that no header is needed."""
        return bool(self._known.get(key)) and not self.dynamic

    def forget(self) -> None:
        """Agree anew in the next step."""
        self._known.clear()
        self._current = {}

    def announce(self, transfer: Transfer, signature: Signature) -> bool:
        """Takes the sender's signature; returns whether a header has to go first.

        ValueError, before anything is sent, if the receiver has been told another one.
        """
        if self.dynamic:
            self._per_micro_batch[transfer.part, transfer.micro_batch] = signature
            return True
        known = self._current.setdefault(transfer.part, signature)
        if known is signature:
            return True
        if known != signature:
            raise ValueError(
                f"part {transfer.part} of the model made {signature} for micro-batch {transfer.micro_batch}, but {known} "
                f'before: for micro-batches of different shapes set pp_configs["enable_dynamic_shape"], '
                f"or write enable_dynamic_shape=on in schedule_mode or PADDLE_VPP_SCHEDULE"
            )
        return False

    def expected(self, part: int, micro_batch: int) -> Optional[Signature]:
        """The signature of what ``part`` makes; None if its header has yet to come."""
        if self.dynamic:
            return self._per_micro_batch.get((part, micro_batch))
        return self._current.get(part)

    def learn(self, transfer: Transfer, signature: Signature) -> None:
        """Takes a received header."""
        if self.dynamic:
            self._per_micro_batch[transfer.part, transfer.micro_batch] = signature
        else:
            self._current[transfer.part] = signature

    def check_gradients(self, transfer: Transfer, tensors: list[paddle.Tensor]) -> None:
        """ValueError, before anything is sent, if a gradient to be sent is not of the form of the activation that it belongs to."""
        signature = self.expected(transfer.part - 1, transfer.micro_batch)
        wanted = signature.gradient_specs if signature else ()
        if len(wanted) == len(tensors) and all(map(_is_like, tensors, wanted)):
            return
        raise ValueError(
            f"the backward of part {transfer.part} of the model made gradients ({', '.join(map(_form_of, tensors))}) for micro-batch "
            f"{transfer.micro_batch}, but part {transfer.part - 1} gave it {signature}"
        )

    def empty_message(self, transfer: Transfer) -> Optional["Message"]:
        """Tensors to receive ``transfer`` into; None where its header has yet to say which."""
        is_gradient = transfer.kind == "B"
        signature = self.expected(transfer.part - is_gradient, transfer.micro_batch)
        if signature is None:
            return None
        tensors = [spec.empty() for spec in (signature.gradient_specs if is_gradient else signature.specs)]
        return tensors if is_gradient else (signature, tensors)


def _is_like(tensor, spec):
    # Older releases mix up shapes [] and [1], so the number of elements has to do.
    return math.prod(tensor.shape) == math.prod(spec.shape) and dtype_name(tensor) == spec.dtype


def _form_of(tensor):
    return f"{dtype_name(tensor)}{list(tensor.shape)}"


# What arrives: (signature, tensors) of an activation, the tensors of a gradient.
Message = Union[tuple[Signature, list[paddle.Tensor]], list[paddle.Tensor]]


def tensors_of(message: Message) -> list[paddle.Tensor]:
    """The tensors of what arrives."""
    return message if isinstance(message, list) else message[1]


class Payload(NamedTuple):
    """What a stage hands over to be sent: the tensors, and the header that has to go first, if any."""

    tensors: list[paddle.Tensor]
    header: Optional[Signature] = None


def send_message(send: Callable[[paddle.Tensor], Any], tensors: list[paddle.Tensor], header: Optional[Signature]) -> None:
    """``send(tensor)`` for each tensor of a message, its header first where there is one."""
    if header is not None:
        data = header.encode()
        send(paddle.to_tensor(np.array([data.size], dtype=np.int64)))
        send(paddle.to_tensor(np.array(data)))
    for tensor in tensors:
        send(tensor)


def receive_message(
    receive: Callable[[paddle.Tensor], Any], boundaries: Boundaries, transfer: Transfer, message: Optional[Message] = None
) -> Message:
    """The message of ``transfer``, with ``receive(tensor)`` filling a tensor; into ``message`` if that is there already."""
    if message is None:
        message = boundaries.empty_message(transfer)
    if message is None:
        size = paddle.zeros([1], dtype="int64")
        receive(size)
        data = paddle.zeros([int(size.item())], dtype="uint8")
        receive(data)
        boundaries.learn(transfer, Signature.decode(data.numpy()))
        message = boundaries.empty_message(transfer)
        assert message is not None, "the header has just said which"
    for tensor in tensors_of(message):
        receive(tensor)
    return message
