"""A mistake of the user's is a clear error, on all ranks, before anything can hang."""

import pathlib
import subprocess
import sys
import time

import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.meta_parallel import LayerDesc, SharedLayerDesc

from pool import environment, get_pool, reserved_endpoints
from training import WIDTH, Block, batch, build, set_options

P, V, M = 3, 2, 4


def blocks():
    return [LayerDesc(Block) for _ in range(P * V)]


def text_of_error(function, *args):
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def errors(function, *args):
    return get_pool(P).run(text_of_error, function, *args)


def wrap(schedule, m=M, micro_batch_size=2):
    return build(blocks(), V, schedule, m, micro_batch_size)


@pytest.mark.parametrize(
    "schedule, says",
    (
        ("vpp", "unknown schedule 'vpp', choose one of 1F1B, VPP, FthenB, "),
        ("VPP:group=even", "'group=even' is not one of the options of VPP, write groups=…, slope=…"),
        ("VPP:groups=odd", "groups: 'odd' is not a grouping: write first, even, or sizes as in 7+4"),
        ("VPP:groups=3+3", "groups 3+3 must be positive and add up to accumulate_steps=4"),
        ("FthenB:groups=even", "not one of the options of FthenB"),
        ("VPP:slope=1,slope=2", "slope is given twice"),
        ("paddle:x=1", "paddle takes no options"),
    ),
)
def test_a_wrong_schedule_mode_is_shown_with_what_is_allowed(schedule, says):
    for text in errors(wrap, schedule):
        assert text.startswith("ValueError") and says in text and (schedule in text or "add up" in text), text


def test_fewer_micro_batches_than_stages_says_what_would_work():
    for text in errors(wrap, "1F1B", 2):
        assert "The accumulate_steps(2) should be greater than or equal to pp_degree(3)" in text
        assert 'schedule_mode"] = "VPP"' in text


def wrap_differently(what):
    rank = paddle.distributed.get_rank()
    if what == "m":
        wrap("VPP", M + (rank == 1))
    elif what == "schedule":
        wrap("VPP:groups=even" if rank == 2 else "VPP")
    else:
        build([LayerDesc(Block) for _ in range(6)], 1 if rank == 0 else 2, "VPP", M)


@pytest.mark.parametrize(
    "what, says",
    (
        ("m", "accumulate_steps: rank 0: 4, rank 1: 5, rank 2: 4"),
        ("schedule", "schedule: rank 0: VPP, rank 1: VPP, rank 2: VPP:groups=even"),
        ("V", "num_virtual_pipeline_stages: rank 0: 1, rank 1: 2, rank 2: 2"),
    ),
)
def test_ranks_that_disagree_find_out_when_the_model_is_wrapped(what, says):
    for text in errors(wrap_differently, what):
        assert "disagree when the model is wrapped" in text and says in text, text


def step_with(data_of):
    engine, optimizer = wrap("VPP")
    engine.train_batch(DATA[data_of](engine), optimizer)


DATA = {
    "too few rows": lambda engine: list(batch(0, 7)),
    "short list": lambda engine: [[batch(0, 2)[0]] * 3, batch(0, 8)[1]],
    "three parts": lambda engine: [*batch(0, 8), 1],
    "no tensor": lambda engine: ["text", batch(0, 8)[1]],
    "none": lambda engine: None if engine.stage_id == 0 else list(batch(0, 8)),
}


@pytest.mark.parametrize(
    "data, says",
    (
        ("too few rows", " have 7 rows, but accumulate_steps=4 times micro_batch_size=2 makes 8"),
        ("short list", "inputs are a list of 3 micro-batches, but accumulate_steps is 4"),
        ("three parts", "data must be a pair (inputs, labels), but it has 3 parts"),
        ("no tensor", "inputs are a str"),
        ("none", "the first and the last stage need data, but it is None"),
    ),
)
def test_data_of_the_wrong_size_is_an_error_on_all_ranks(data, says):
    for text in errors(step_with, data):
        assert says in text, text


def short_iterator():
    engine, optimizer = wrap("VPP")
    inputs, labels = batch(0, 8)
    pairs = [(inputs[i : i + 2], labels[i : i + 2]) for i in range(0, 6, 2)]
    engine.train_batch(iter(pairs), optimizer)


def test_an_iterator_that_ends_early_is_an_error_on_all_ranks():
    for text in errors(short_iterator):
        assert "the data iterator ended after 3 micro-batches, accumulate_steps is 4" in text, text


class Text(nn.Layer):
    def forward(self, x):
        return "text"


class Mixed(nn.Layer):
    def forward(self, x):
        return x, 3


def train_through(layer):
    engine, optimizer = build(
        [LayerDesc(Block), LayerDesc(layer)] + [LayerDesc(Block)] * 4, V, "VPP", M, seg_method=f"layer:Block|{layer.__name__}"
    )
    engine.train_batch(list(batch(0, 8)), optimizer)


@pytest.mark.parametrize(
    "layer, says",
    ((Text, "the output of part 1 of the model (Text) is a str"), (Mixed, "part 1 of the model (Mixed) has a int at place 1")),
)
def test_an_output_that_cannot_cross_names_its_layer(layer, says):
    for text in errors(train_through, layer):
        assert says in text, text


class Grows(nn.Layer):
    """One row more each time."""

    count = 0

    def forward(self, x):
        self.count += 1
        return paddle.concat([x] + [x[:1]] * self.count)


def test_an_output_of_another_shape_is_an_error_on_the_sender():
    for text in errors(train_through, Grows):
        assert "part 1 of the model made tensor (float32[4, 8]" in text and "float32[3, 8]" in text, text
        assert "enable_dynamic_shape" in text


SCRIPT = """
import paddle, paddle_vpp_ext, sys
sys.path.insert(0, {tests!r})
paddle_vpp_ext.enable()
from paddle.distributed import fleet
strategy = fleet.DistributedStrategy()
strategy.hybrid_configs = {{"pp_degree": 3, "dp_degree": 1, "mp_degree": 1}}
fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
from training import *
class Fails(Block):
    def forward(self, x):
        raise ArithmeticError("this layer fails")
engine, optimizer = build([LayerDesc(Block)] * 3 + [LayerDesc(Fails)] + [LayerDesc(Block)] * 2, 2, "VPP", 4, seg_method="layer:Block|Fails")
print("ready", flush=True)
engine.train_batch(list(batch(0, 8)), optimizer)
"""


def test_an_exception_on_one_rank_ends_all_ranks_within_seconds(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(pathlib.Path(__file__).parent)))
    with reserved_endpoints(P) as endpoints:
        processes = [
            subprocess.Popen(
                [sys.executable, str(script)], env=environment(rank, endpoints), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            for rank in range(P)
        ]
    try:
        for process in processes:
            while "ready" not in (line := process.stdout.readline()):
                assert line, "a process ended before it was ready"
        start = time.monotonic()
        outputs = [process.communicate(timeout=30)[0] for process in processes]
        seconds = time.monotonic() - start
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert seconds < 15
    for rank, (process, output) in enumerate(zip(processes, outputs)):
        assert process.returncode == 1, f"rank {rank}: {process.returncode}\n{output}"
        assert "this layer fails" in output and ("ArithmeticError" in output), output
        assert rank == 0 or "rank 0 of the pipeline failed" in output, output


class Changes(nn.Layer):
    """A tensor of another dtype, form or need of a gradient after some micro-batches."""

    def forward(self, x):
        Changes.count += 1
        return CHANGED[self.what](x) if Changes.count > self.after else x * 2


CHANGED = {
    "dtype": lambda x: x.astype("float64"),
    "form": lambda x: (x * 2,),
    "no gradient": lambda x: x.detach(),
}


def train_through_changes(what, after):
    Changes.what, Changes.after, Changes.count = what, after, 0
    engine, optimizer = build(
        [LayerDesc(Block), LayerDesc(Changes)] + [LayerDesc(Block)] * 4, V, "VPP", M, seg_method="layer:Block|Changes"
    )
    for step in range(2):
        engine.train_batch(list(batch(step, 8)), optimizer)


@pytest.mark.parametrize(
    "what, says",
    (
        ("dtype", "part 1 of the model made tensor (float64[2, 8] with gradient) for micro-batch {}, but tensor (float32[2, 8]"),
        ("form", "part 1 of the model made tuple (float32[2, 8] with gradient) for micro-batch {}, but tensor (float32[2, 8]"),
        ("no gradient", "part 1 of the model made tensor (float32[2, 8]) for micro-batch {}, but tensor (float32[2, 8] with gradient)"),
    ),
)
@pytest.mark.parametrize("after", (1, M))
def test_an_output_of_another_type_is_an_error_on_the_sender(what, says, after):
    """Within a step, and from one step to the next."""
    for text in errors(train_through_changes, what, after):
        assert says.format(after % M) in text, text


OTHER_GRADIENTS = {"dtype": lambda grad: grad.astype("int32"), "size": lambda grad: grad[:1]}


def train_with_other_gradient(what):
    engine, optimizer = wrap("VPP")
    backward = engine.runner.stage.backward

    def changed(chunk, micro_batch, grads):
        payload = backward(chunk, micro_batch, grads)
        return payload._replace(tensors=[OTHER_GRADIENTS[what](tensor) for tensor in payload.tensors])

    if engine.stage_id == 1:
        engine.runner.stage.backward = changed
    engine.train_batch(list(batch(0, 8)), optimizer)


@pytest.mark.parametrize("what, says", (("dtype", "(int32[2, 8])"), ("size", "(float32[1, 8])")))
def test_a_gradient_of_another_type_or_size_is_an_error_on_the_sender(what, says):
    for text in errors(train_with_other_gradient, what):
        assert (
            f"the backward of part 4 of the model made gradients {says} for micro-batch 0, but part 3 gave it tensor (float32[2, 8]" in text
        ), text


class Breaks(nn.Layer):
    """No number in the output, or in the gradient of the input."""

    def forward(self, x):
        if self.where == "forward":
            return x / 0.0
        return x + paddle.sqrt(x * 0.0)


def train_through_breaks(where, schedule):
    Breaks.where = where
    engine, optimizer = build(
        [LayerDesc(Block)] * 2 + [LayerDesc(Breaks)] + [LayerDesc(Block)] * 3, V, schedule, M, seg_method="layer:Block|Breaks"
    )
    loss = engine.train_batch(list(batch(0, 8)), optimizer)
    raise ValueError(f"the loss is {float(loss)}")


@pytest.mark.parametrize(
    "where, says",
    (
        ("forward", "the activation that part 2 of the model made in its forward, for part 3, has 16 of 16 values that are infinite"),
        ("backward", "the gradient that part 2 of the model made in its backward, for part 1, has 16 of 16 values that are infinite"),
    ),
)
def test_check_finite_names_part_micro_batch_and_direction(where, says):
    for text in errors(train_through_breaks, where, "VPP:check_finite=on"):
        assert says in text and "FloatingPointError" in text and "micro-batch 0, tensor 0" in text, text
    for text in errors(train_through_breaks, where, "VPP"):
        assert "the loss is" in text, text


class Tied(Block):
    """Its weight is larger on the last rank."""

    def __init__(self):
        super().__init__()
        width = WIDTH + (paddle.distributed.get_rank() == P - 1)
        self.weight = self.create_parameter([WIDTH, width])


def wrap_tied():
    from paddle.distributed import fleet

    from training import Model

    set_options("VPP", M)
    descs = [SharedLayerDesc("tied", Tied)] + [LayerDesc(Block)] * 4 + [SharedLayerDesc("tied", Tied)]
    with_weights_left_alone = type("Model", (Model,), {"_synchronize_shared_weights": lambda self: None})
    fleet.distributed_model(with_weights_left_alone(descs, seg_method="layer:Block|Tied", num_virtual_pipeline_stages=V))


def test_tied_weights_of_different_shapes_are_found_when_the_model_is_wrapped():
    for text in errors(wrap_tied):
        assert "disagree when the model is wrapped" in text, text
        assert "shared weight tied.weight: rank 0: float32[8, 8], rank 2: float32[8, 9]" in text, text


def wrap_with_other_options():
    wrap("VPP:timeout=600" if paddle.distributed.get_rank() else "VPP:timeout=6e2,check_finite=on", micro_batch_size=2)


def test_options_that_differ_are_found_one_by_one():
    for text in errors(wrap_with_other_options):
        assert "check_finite: rank 0: True, rank 1: False, rank 2: False" in text and "\n  timeout" not in text, text
