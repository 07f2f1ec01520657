"""What crosses a stage: every form and dtype, with and without gradients; values against one process."""

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.meta_parallel import LayerDesc

from pool import get_pool
from training import WIDTH, OneProcess, assert_same_bits, batch, build, cut, gradients, merged, named_layers

P, V, M = 3, 2, 5


class Link(nn.Layer):
    """Unpacks what comes, computes, packs what goes. ``first`` gets the data, ``last`` gives the output."""

    def __init__(self, first=False, last=False):
        super().__init__()
        self.linear, self.first, self.last = nn.Linear(WIDTH, WIDTH), first, last

    def forward(self, x):
        y = self.start(x) if self.first else self.unpack(x)
        y = paddle.tanh(self.linear(y))
        return y if self.last else self.pack(y)

    def start(self, x):
        return x


class Lists(Link):
    """A list of tensors, the second one handed on as it came."""

    def unpack(self, x):
        assert isinstance(x, list)
        return x[0] * 0.5 + x[1]

    def pack(self, y):
        return [y, y * 2.0]


class Single(Link):
    """Tuples, lists and dicts of one tensor, which are not that tensor."""

    kind = tuple

    def unpack(self, x):
        assert isinstance(x, self.kind) and len(x) == 1
        return x[0]

    def pack(self, y):
        return self.kind([y])


class SingleList(Single):
    kind = list


class Dicts(Link):
    """A dict with a tensor, a list, and integers."""

    def unpack(self, x):
        assert list(x) == ["mask", "y", "more"] and isinstance(x["more"], list) and x["mask"].dtype == paddle.bool
        assert x["mask"].stop_gradient and x["more"][1].stop_gradient
        return paddle.where(x["mask"], x["y"], x["more"][0]) + x["more"][1].astype("float32")

    def pack(self, y):
        return {"mask": y > 0, "y": y, "more": [y * 0.5, paddle.arange(WIDTH)]}


class Dtypes(Link):
    """A tensor of each dtype in one tuple; integers cast from floats claim to need a gradient."""

    NAMES = ("int64", "float64", "bool", "bfloat16", "int32", "float32", "float16", "uint8")

    def unpack(self, x):
        assert [str(t.dtype).rpartition(".")[2] for t in x] == list(self.NAMES)
        return x[1].astype("float32") + x[5]

    def pack(self, y):
        half = y.astype("bfloat16").astype("float32")
        return tuple((half if name == "bfloat16" else y).astype(name) for name in self.NAMES)


class Doubles(Link):
    """float64 between stages, float32 within."""

    def unpack(self, x):
        assert x.dtype == paddle.float64
        return x.astype("float32")

    def pack(self, y):
        return y.astype("float64")


class Halves(Link):
    """bfloat16 between stages, float32 within."""

    def unpack(self, x):
        assert x.dtype == paddle.bfloat16
        return x.astype("float32")

    def pack(self, y):
        return y.astype("bfloat16")


class Detached(Link):
    """No gradient at the first place, one at the second, a part of the graph cut off at the third."""

    def unpack(self, x):
        assert x[0].stop_gradient and x[2].stop_gradient
        return x[0] + x[1] + x[2]

    def pack(self, y):
        return y.detach() * 0.1, y, paddle.ones([1])


class Shapes(Link):
    """A scalar, a tensor without elements, one of four dimensions."""

    def unpack(self, x):
        scalar, empty, four = x
        assert scalar.shape == [] and empty.size == 0 and four.ndim == 4
        return paddle.concat([four.flatten(0, 2) * scalar, empty])

    def pack(self, y):
        return y.mean(), y[:0], y.unsqueeze(0).unsqueeze(0)


class SameTwice(Link):
    """One tensor at two places."""

    def unpack(self, x):
        return x[0] * 0.5 + x[1]

    def pack(self, y):
        return y, y


class Parameter(Link):
    """A weight itself crosses, and its gradient comes back."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.bias = self.create_parameter([WIDTH])

    def unpack(self, x):
        return x[0] + x[1]

    def pack(self, y):
        return y, self.bias


KINDS = (Lists, Single, SingleList, Dicts, Dtypes, Doubles, Halves, Detached, Shapes, SameTwice, Parameter)


def descs(kind):
    count = P * V
    return [LayerDesc(kind, first=k == 0, last=k == count - 1) for k in range(count)]


def steps(kind, schedule, num_chunks):
    engine, _ = build(descs(kind), num_chunks, schedule, M, seg_method=f"layer:{kind.__name__}")
    before = engine.eval_batch(list(batch(0, 2 * M)), compute_loss=True).numpy()
    engine._layers.train()
    first = engine.forward_backward_pipeline(list(batch(0, 2 * M))).numpy()
    for parameter in engine.parameters():
        parameter.clear_gradient(False)
    loss = engine.forward_backward_pipeline(list(batch(0, 2 * M))).numpy()
    return [before, first, loss], gradients(named_layers(engine))


@pytest.mark.parametrize("schedule, num_chunks", (("VPP", V), ("FthenB", V), ("ZBVPP", V), ("VPP:enable_dynamic_shape=on", 1)))
@pytest.mark.parametrize("kind", KINDS)
def test_activations_of_every_form_cross(kind, schedule, num_chunks):
    one = OneProcess(descs(kind))
    expected = one.step(cut(batch(0, 2 * M), M), update=False).numpy()
    results = get_pool(P).run(steps, kind, schedule, num_chunks)
    for losses, _ in results:
        np.testing.assert_array_equal(losses, [expected] * 3)
    assert_same_bits(merged([found for _, found in results]), gradients(one.layers))
