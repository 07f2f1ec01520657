"""Data in every form that Paddle's engines take: values against one process."""

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.meta_parallel import LayerDesc

from paddle_vpp_ext.fleet import versions
from pool import get_pool
from training import WIDTH, Block, OneProcess, assert_same_bits, batch, build, gradients, merged, named_layers

P, V, M = 3, 2, 5


class Entry(nn.Layer):
    """Takes the data in any form; what is missing counts as zero."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if isinstance(x, dict):
            x = (x["x"], x.get("more"))
        if not isinstance(x, (tuple, list)):
            return self.linear(x)
        y = self.linear(x[0])
        return y if x[1] is None else y + x[1]


def loss_of(output, label):
    """Takes the labels in any form."""
    if isinstance(label, dict):
        label = (label["y"], label.get("more"))
    if not isinstance(label, (tuple, list)):
        return paddle.mean((output - label) ** 2)
    loss = paddle.mean((output - label[0]) ** 2)
    return loss if label[1] is None else loss * label[1].mean()


def descs():
    return [LayerDesc(Entry)] + [LayerDesc(Block) for _ in range(P * V - 1)]


def sides():
    """(x, more of x, y, more of y) of a step, each for all micro-batches."""
    return *batch(0, 2 * M), *batch(1, 2 * M)


def split(tensor):
    return [tensor[2 * i : 2 * i + 2] for i in range(M)]


FORMS = {
    "tensor": lambda x, y, a, b: (x, y),
    "tuple": lambda x, y, a, b: ((x, a), (y, b)),
    "tuple with none": lambda x, y, a, b: ((x, None), (y, b)),
    "tuple of lists": lambda x, y, a, b: ((split(x), split(a)), (split(y), b)),
    "tuple of lists with none": lambda x, y, a, b: ((split(x), [None] * M), (split(y), [None] * M)),
    "dict": lambda x, y, a, b: ({"x": x, "more": a}, {"y": y, "more": b}),
    "dict with none": lambda x, y, a, b: ({"x": x, "more": None}, {"y": y}),
    "dict of lists": lambda x, y, a, b: ({"x": split(x), "more": a}, {"y": split(y), "more": split(b)}),
    "list of tensors": lambda x, y, a, b: (split(x), split(y)),
    "list of lists": lambda x, y, a, b: (list(map(list, zip(split(x), split(a)))), list(map(list, zip(split(y), split(b))))),
    "list of tuples": lambda x, y, a, b: (list(zip(split(x), split(a))), list(zip(split(y), split(b)))),
    "list of dicts": lambda x, y, a, b: ([{"x": i, "more": j} for i, j in zip(split(x), split(a))], split(y)),
}
PULLED = {
    "iterator of pairs": lambda x, y, a, b: iter(zip(split(x), split(y))),
    "generator of lists": lambda x, y, a, b: ([i, j] for i, j in zip(split(x), split(y))),
    "iterator of tuples": lambda x, y, a, b: iter([((i, None), (j, k)) for i, j, k in zip(split(x), split(y), split(b))]),
    "iterator of dicts": lambda x, y, a, b: iter([({"x": i, "more": k}, {"y": j}) for i, j, k in zip(split(x), split(y), split(a))]),
}


def given(form, stage, where):
    """The data as a rank gets it."""
    if where == "only first and last" and stage not in (0, P - 1):
        return None
    if where == "own side" and form in FORMS:
        inputs, labels = FORMS[form](*sides())
        return (inputs if stage == 0 else None), (labels if stage == P - 1 else None)
    if where == "own side":
        pairs = PULLED[form](*sides())
        return ((x if stage == 0 else None, y if stage == P - 1 else None) for x, y in pairs)
    return {**FORMS, **PULLED}[form](*sides())


def steps(form, schedule):
    """Per way to hand the data out: the loss of a step; then its gradients and that of an evaluation."""
    engine, _ = build(descs(), V, schedule, M, seg_method="layer:Block|Entry", loss_fn=loss_of)
    losses = []
    for where in ("everywhere", "only first and last", "own side", "preprocessor"):
        for parameter in engine.parameters():
            parameter.clear_gradient(False)
        data = given(form, engine.stage_id, where)
        if where == "preprocessor":
            wrapper = getattr(versions.pipeline_module(), "PipelineDatasetPreprocessor", None)
            data = wrapper(lambda where=where: given(form, engine.stage_id, where)) if wrapper else data
        losses.append(engine.forward_backward_pipeline(data).numpy())
    losses.append(engine.eval_batch(given(form, engine.stage_id, "everywhere"), compute_loss=True).numpy())
    return losses, gradients(named_layers(engine))


@pytest.mark.parametrize("form", [*FORMS, *PULLED])
def test_data_in_every_form(form):
    one = OneProcess(descs(), loss_of)
    if form in FORMS:
        inputs, labels = FORMS[form](*sides())
        pairs = [(piece(inputs, i), piece(labels, i)) for i in range(M)]
    else:
        pairs = list(PULLED[form](*sides()))
    expected = one.step(pairs, update=False).numpy()
    results = get_pool(P).run(steps, form, "VPP")
    for losses, _ in results:
        np.testing.assert_array_equal(losses, [expected] * len(losses))
    assert_same_bits(merged([found for _, found in results]), gradients(one.layers))


def piece(value, i):
    """Micro-batch ``i`` of inputs or labels."""
    if isinstance(value, list):
        return value[i]
    if isinstance(value, tuple):
        return tuple(piece(item, i) for item in value)
    if isinstance(value, dict):
        return {key: piece(item, i) for key, item in value.items()}
    return None if value is None else value[2 * i : 2 * i + 2]


# ---- micro-batches of different lengths in one step


class Sequence(nn.Layer):
    """Mixes the places of a sequence of any length; every other layer passes on a tuple."""

    def __init__(self, as_tuple):
        super().__init__()
        self.linear, self.as_tuple = nn.Linear(WIDTH, WIDTH), as_tuple

    def forward(self, x):
        if isinstance(x, tuple):
            x = x[0] * x[1].astype("float32")
        y = paddle.tanh(self.linear(x)) + x.mean(axis=1, keepdim=True)
        return (y, paddle.arange(1, y.shape[1] + 1).unsqueeze(-1)) if self.as_tuple else y


def sequences():
    return [LayerDesc(Sequence, k % 2 == 1) for k in range(P * V - 1)] + [LayerDesc(Sequence, False)]


def ragged(step, m):
    """Micro-batches of [2, length, WIDTH], each of another length, and labels to match."""
    random = np.random.RandomState(step)
    lengths = [1 + (3 * i + step) % 7 for i in range(m)]
    return [[paddle.to_tensor(random.rand(2, n, WIDTH).astype("float32")) for n in lengths] for _ in range(2)]


def ragged_steps(schedule, num_chunks, m):
    engine, optimizer = build(sequences(), num_chunks, schedule, m, seg_method="layer:Sequence", loss_fn=loss_of)
    losses = []
    for step in range(3):
        losses.append(engine.eval_batch(ragged(step, m), compute_loss=True).numpy())
        losses.append(engine.train_batch(ragged(step, m), optimizer).numpy())
    outputs = engine.eval_batch(ragged(9, m))
    engine.forward_backward_pipeline(ragged(3, m))
    return losses, gradients(named_layers(engine)), [output.shape for output in outputs]


@pytest.mark.parametrize(
    "schedule, num_chunks, m",
    (("VPP", V, 5), ("VPP:groups=first", V, 7), ("VPP:overlap_p2p_comm=on", V, 4), ("FthenB", V, 3), ("ZBVPP", V, 5), ("1F1B", 1, 5)),
)
def test_11_micro_batches_of_different_lengths_in_one_step(schedule, num_chunks, m):
    text = schedule + ("," if ":" in schedule else ":") + "enable_dynamic_shape=on"
    one = OneProcess(sequences(), loss_of)
    expected = []
    for step in range(3):
        pairs = list(zip(*ragged(step, m)))
        loss = one.step(pairs).numpy()
        expected += [loss, loss]
    one.step(list(zip(*ragged(3, m))), update=False)
    results = get_pool(P).run(ragged_steps, text, num_chunks, m)
    for losses, _, _ in results:
        np.testing.assert_array_equal(losses, expected)
    assert_same_bits(merged([found for _, found, _ in results]), gradients(one.layers))
    assert [list(shape) for shape in results[-1][2]] == [x.shape for x in ragged(9, m)[0]]
