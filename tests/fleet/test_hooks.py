"""Hooks and callbacks: fired as often and in the same order as by Paddle's own engines."""

import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.meta_parallel import LayerDesc

from paddle_vpp_ext.fleet import versions
from pool import get_pool
from training import WIDTH, Block, batch, build

P, V = 4, 2
KINDS = ("forward", "backward", "bubble")

pytestmark = pytest.mark.skipif(versions.micro_step_locations() is None, reason="this Paddle has neither hooks nor callbacks")


class Pair(nn.Layer):
    """Gives a tuple of a tensor with and one without gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = x[0] if isinstance(x, tuple) else x
        return paddle.tanh(self.linear(y)), paddle.arange(WIDTH)


def loss_of_pair(output, label):
    return paddle.mean((output[0] - label) ** 2)


def shape_of(value):
    """What a callback got, as text that compares."""
    if isinstance(value, (tuple, list)):
        return [shape_of(item) for item in value]
    if isinstance(value, paddle.Tensor):
        return f"{list(value.shape)} {str(value.dtype).rpartition('.')[2]}"
    return value if value is None else type(value).__name__


def got(name, what):
    """An event. What is left of an output in the backward is not compared: it is sent, and its memory free."""
    kept = {key: value if key == "step_id" else shape_of(value) for key, value in what.items()}
    if name.startswith("backward"):
        kept["output_tensor"] = len(what["output_tensor"]) if isinstance(what["output_tensor"], (tuple, list)) else "one"
    return name, kept


def watch(engine, events):
    """Has every callback and hook of the engine write into ``events``; returns what takes the callbacks back."""
    locations = versions.micro_step_locations()
    for location in locations:
        engine.register_hook(location, lambda name=location.value, **what: events.append(got(name, what)))
    for kind in KINDS:
        capacity = getattr(engine, f"{kind}_pipeline_parallel_hook_capacity")
        register = getattr(engine, f"register_{kind}_pipeline_parallel_hook")
        for place in range(capacity):
            register(place, lambda number, kind=kind: events.append((kind, number)))

    def unwatch():
        for location in locations:
            engine.callbacks.hooks[location].clear()

    return unwatch


def record(schedule, num_chunks, m, kind, evaluate):
    descs = [LayerDesc(kind) for _ in range(P * num_chunks)]
    loss = {"loss_fn": loss_of_pair} if kind is Pair else {}
    engine, optimizer = build(descs, num_chunks, schedule, m, seg_method=f"layer:{kind.__name__}", **loss)
    events = []
    engine.train_batch(list(batch(0, 2 * m)), optimizer)  # the first step of Paddle's tells shapes
    unwatch = watch(engine, events)
    try:
        for step in range(2):
            events.append("step")
            engine.train_batch(list(batch(step, 2 * m)), optimizer)
        if evaluate:
            events.append("evaluate")
            engine.eval_batch(list(batch(3, 2 * m)), compute_loss=True)
    finally:
        unwatch()
    return type(engine).__name__, events


CASES = {
    "VPP": ("VPP:groups=first,slope=2", 2, 8),
    "VPP with a larger first group": ("VPP:groups=first,slope=2", 2, 10),
    "FthenB": ("FthenB", 2, 4),
    "1F1B": ("1F1B", 1, 6),
}


@pytest.mark.parametrize("kind", (Block, Pair))
@pytest.mark.parametrize("case", CASES)
def test_hooks_and_callbacks_are_fired_as_by_paddle(case, kind):
    schedule, num_chunks, m = CASES[case]
    ours = get_pool(P).run(record, schedule, num_chunks, m, kind, True)
    paddles = get_pool(P).run(record, "paddle", num_chunks, m, kind, True)
    for rank, ((name, events), (other_name, others)) in enumerate(zip(ours, paddles)):
        assert name != other_name
        assert events == others, f"rank {rank}"
