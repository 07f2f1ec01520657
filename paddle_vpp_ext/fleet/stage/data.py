"""A step's data, cut into micro-batches."""

from typing import Any

import paddle

from .. import versions


class MicroBatches:
    """Inputs (for the first stage) and labels (for the last) of a step, by micro-batch.

    ``data`` is (inputs, labels), or an iterator or iterable of m such pairs, which is pulled as
    far as needed. Inputs and labels each are None, a tensor whose first dimension is
    m * micro_batch_size, a list of m micro-batches, or a tuple or dict of these.
    What can be checked is checked at once: ValueError that says what is wrong with which of them.
    """

    def __init__(self, data: Any, accumulate_steps: int, micro_batch_size: int, use_inputs: bool, use_labels: bool):
        self._m, self._size = accumulate_steps, micro_batch_size
        self._source: Any = None
        self._pulled: dict[int, Any] = {}
        self._sides: list[Any] = [None, None]
        self._next = 0
        data = versions.unwrap_data(data)
        if not (use_inputs or use_labels):
            return
        if data is None:
            raise ValueError("the first and the last stage need data, but it is None")
        if not isinstance(data, (tuple, list)):
            self._source = iter(data)
            return
        if len(data) != 2:
            raise ValueError(f"data must be a pair (inputs, labels), but it has {len(data)} parts")
        for side, (name, used) in enumerate((("inputs", use_inputs), ("labels", use_labels))):
            if used:
                self._check(data[side], name)
                self._sides[side] = data[side]

    def inputs(self, micro_batch: int) -> Any:
        """The first stage's input for a micro-batch."""
        return self._get(0, micro_batch)

    def labels(self, micro_batch: int) -> Any:
        """The last stage's labels for a micro-batch."""
        return self._get(1, micro_batch)

    def drop(self, micro_batch: int) -> None:
        """Nobody asks for this micro-batch again."""
        self._pulled.pop(micro_batch, None)

    def _get(self, side, i):
        if self._source is None:
            return self._cut(self._sides[side], i)
        while i not in self._pulled:
            try:
                pair = next(self._source)
            except StopIteration:
                raise ValueError(f"the data iterator ended after {self._next} micro-batches, accumulate_steps is {self._m}") from None
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise ValueError("the data iterator must give pairs (inputs, labels)")
            self._pulled[self._next] = pair
            self._next += 1
        value = self._pulled[i][side]
        _check_tensors(value)
        return value

    def _check(self, value, name):
        if isinstance(value, paddle.Tensor):
            if not value.shape or value.shape[0] != self._m * self._size:
                raise ValueError(
                    f"{name} have {value.shape[0] if value.shape else 'no'} rows, but accumulate_steps={self._m} times "
                    f"micro_batch_size={self._size} makes {self._m * self._size}"
                )
        elif isinstance(value, list):
            if len(value) != self._m:
                raise ValueError(f"{name} are a list of {len(value)} micro-batches, but accumulate_steps is {self._m}")
            for item in value:
                _check_tensors(item)
        elif isinstance(value, tuple):
            for k, item in enumerate(value):
                self._check(item, f"{name}[{k}]")
        elif isinstance(value, dict):
            for key, item in value.items():
                self._check(item, f"{name}[{key!r}]")
        elif value is not None:
            raise ValueError(f"{name} are a {type(value).__name__}, but must be tensors, lists of micro-batches, tuples or dicts of them")

    def _cut(self, value, i):
        if isinstance(value, paddle.Tensor):
            return value[i * self._size : (i + 1) * self._size].detach()
        if isinstance(value, list):
            return _detach(value[i])
        if isinstance(value, tuple):
            return tuple(self._cut(item, i) for item in value)
        if isinstance(value, dict):
            return {key: self._cut(item, i) for key, item in value.items()}
        return None


def _detach(value):
    if isinstance(value, (tuple, list)):
        return type(value)(_detach(item) for item in value)
    if isinstance(value, dict):
        return {key: _detach(item) for key, item in value.items()}
    return None if value is None else value.detach()


def _check_tensors(value):
    items = value if isinstance(value, (tuple, list)) else value.values() if isinstance(value, dict) else ()
    for item in items:
        _check_tensors(item)
    if not (value is None or isinstance(value, (paddle.Tensor, tuple, list, dict))):
        raise ValueError(f"a micro-batch has a {type(value).__name__} where a tensor belongs")


def shapes_of(value: Any) -> Any:
    """Shapes and dtypes of a micro-batch, as plain data that compares and prints."""
    if isinstance(value, (tuple, list)):
        return [shapes_of(item) for item in value]
    if isinstance(value, dict):
        return {str(key): shapes_of(item) for key, item in value.items()}
    return None if value is None else [list(value.shape), str(value.dtype)]
