"""Small models, trained in the workers through fleet, and the same ones in one process: the oracle.

A PipelineLayer seeds each layer by its place in the whole model, so both start from equal weights.
"""

import numpy as np
import paddle
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer

WIDTH = 8
SEED = 1234  # PipelineLayer's


class Block(nn.Layer):
    """``tanh(x W + b)``."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return paddle.tanh(self.linear(x))


def mean_square(output, label):
    return paddle.mean((output - label) ** 2)


class Model(PipelineLayer):
    def __init__(self, descs, loss_fn=mean_square, **kwargs):
        super().__init__(layers=descs, loss_fn=loss_fn, topology=fleet.get_hybrid_communicate_group().topology(), **kwargs)


_before = {}  # flags that an earlier call has set, as they were: the workers' strategy outlives a test


def set_options(schedule="1F1B", accumulate_steps=1, micro_batch_size=2, **pp_configs):
    """What ``strategy`` would have at fleet.init; the workers have called that already."""
    strategy = fleet.fleet._user_defined_strategy
    strategy.pipeline_configs = {
        "schedule_mode": schedule,
        "accumulate_steps": accumulate_steps,
        "micro_batch_size": micro_batch_size,
    }
    flags = strategy.hybrid_configs["pp_configs"]
    for name in list(_before):
        setattr(flags, name, _before.pop(name))
    for name, value in pp_configs.items():
        _before[name] = getattr(flags, name)
        setattr(flags, name, value)


def build(
    descs,
    num_chunks,
    schedule="1F1B",
    accumulate_steps=1,
    micro_batch_size=2,
    learning_rate=0.1,
    seg_method="layer:Block",
    loss_fn=mean_square,
    model=None,
    kind=Model,
    **pp_configs,
):
    """(engine, optimizer), as a user's script makes them; ``model`` has further arguments of the PipelineLayer, a ``kind`` of Model."""
    set_options(schedule, accumulate_steps, micro_batch_size, **pp_configs)
    model = kind(descs, loss_fn, seg_method=seg_method, num_virtual_pipeline_stages=num_chunks, **(model or {}))
    optimizer = paddle.optimizer.SGD(learning_rate, parameters=model.parameters() or [paddle.create_parameter([1], "float32")])
    return fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)


def batch(step, rows, width=WIDTH):
    """(inputs, labels) of a step."""
    random = np.random.RandomState(step)
    return tuple(paddle.to_tensor(random.rand(rows, width).astype("float32")) for _ in range(2))


def named_layers(engine):
    """{place in the whole model: layer} of this rank."""
    layers = engine._layers
    if layers.get_num_virtual_stages() == 1:
        return dict(enumerate(layers.run_function, layers._start_pos))
    found = {}
    for start, chunk in zip(layers._start_poss, layers.get_model_chunks()):
        found.update(enumerate(chunk.get_run_function(), start))
    return found


def gradients(layers):
    """{(place, parameter's number): gradient} as numpy arrays, None where there is none."""
    return {
        (place, k): None if parameter.grad is None else parameter.grad.numpy()
        for place, layer in layers.items()
        if isinstance(layer, nn.Layer)
        for k, parameter in enumerate(layer.parameters())
    }


def weights(layers):
    return {
        (place, k): parameter.numpy()
        for place, layer in layers.items()
        if isinstance(layer, nn.Layer)
        for k, parameter in enumerate(layer.parameters())
    }


class OneProcess:
    """The same model without a pipeline: micro-batch after micro-batch, gradients added up in that order."""

    def __init__(self, descs, loss_fn=mean_square, learning_rate=0.1):
        self.layers = {}
        for place, desc in enumerate(descs):
            paddle.seed(SEED + place)
            self.layers[place] = desc.build_layer() if isinstance(desc, LayerDesc) else desc
        self.parameters = [p for layer in self.layers.values() if isinstance(layer, nn.Layer) for p in layer.parameters()]
        self.optimizer = paddle.optimizer.SGD(learning_rate, parameters=self.parameters or [paddle.create_parameter([1], "float32")])
        self.loss_fn = loss_fn

    def forward(self, x):
        for place in sorted(self.layers):
            x = self.layers[place](x)
        return x

    def step(self, pairs, update=True):
        """Mean loss over (input, label) pairs, one per micro-batch."""
        total = 0.0
        for x, label in pairs:
            loss = self.loss_fn(self.forward(x), label)
            if len(pairs) > 1:
                loss = loss / len(pairs)
            if not loss.stop_gradient:
                loss.backward()
            total = total + loss.detach()
        if update:
            self.optimizer.step()
            self.optimizer.clear_grad()
        return total


def cut(data, accumulate_steps):
    """The micro-batches of (inputs, labels)."""
    inputs, labels = data
    size = inputs.shape[0] // accumulate_steps
    return [(inputs[i * size : (i + 1) * size], labels[i * size : (i + 1) * size]) for i in range(accumulate_steps)]


def merged(per_rank):
    """One dict from the dicts of all ranks."""
    result = {}
    for part in per_rank:
        result.update(part)
    return result


def assert_same_bits(found, expected):
    """Two dicts of arrays are equal to the last bit."""
    assert found.keys() == expected.keys()
    for key in expected:
        if expected[key] is None:
            assert found[key] is None, f"{key}: a gradient where there should be none"
        else:
            assert found[key] is not None, f"{key}: no gradient"
            np.testing.assert_array_equal(found[key], expected[key], err_msg=str(key))
