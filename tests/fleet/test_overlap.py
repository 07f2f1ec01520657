"""Forward-backward overlap: what the model's method gets, and that it changes no bit of a result."""

import itertools
import time

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer

import paddle_vpp_ext
from paddle_vpp_ext.fleet.stage.nodes import CommunicationNode, LayerNode
from paddle_vpp_ext.fleet.stage.overlap import interleave_nodes
from pool import get_pool
from training import (
    WIDTH,
    Block,
    OneProcess,
    assert_same_bits,
    batch,
    cut,
    gradients,
    mean_square,
    merged,
    named_layers,
    set_options,
)


class ByTheProtocol:
    """The method as the protocol has it, with every step in its place."""

    spelling = "backward_async_comm"

    def overlapped_forward_backward(
        self,
        forward_chunk,
        forward_inputs,
        forward_loss_fn_node,
        backward_chunk,
        backward_loss_fn_node,
        backward_input_grads,
        scaler,
        p2p_async_handle=None,
    ):
        self.calls = getattr(self, "calls", 0) + 1
        self.handles = getattr(self, "handles", 0) + (p2p_async_handle is not None)
        if backward_loss_fn_node is not None:
            backward_input_grads = backward_loss_fn_node.backward(scaler=scaler)
        if p2p_async_handle is not None:
            p2p_async_handle.forward_handle_wait()
        outputs = forward_chunk.forward(forward_inputs)
        if p2p_async_handle is not None:
            p2p_async_handle.forward_async_comm(outputs)
            p2p_async_handle.backward_handle_wait()
        grads = backward_chunk.backward(backward_input_grads)
        if p2p_async_handle is not None:
            getattr(p2p_async_handle, self.spelling)(grads)
        loss = forward_loss_fn_node.forward(outputs) if forward_loss_fn_node is not None else None
        return outputs, loss, grads


class BackwardFirst(ByTheProtocol):
    """The other side first, the waits at the start, one comm left out, the other spelling."""

    def overlapped_forward_backward(
        self,
        forward_chunk,
        forward_inputs,
        forward_loss_fn_node,
        backward_chunk,
        backward_loss_fn_node,
        backward_input_grads,
        scaler,
        p2p_async_handle=None,
    ):
        self.calls = getattr(self, "calls", 0) + 1
        self.handles = getattr(self, "handles", 0) + (p2p_async_handle is not None)
        if p2p_async_handle is not None:
            p2p_async_handle.backward_handle_wait()
            p2p_async_handle.forward_handle_wait()
        if backward_loss_fn_node is not None:
            backward_input_grads = backward_loss_fn_node.backward(scaler=scaler)
        grads = backward_chunk.backward(backward_input_grads)
        if p2p_async_handle is not None:
            p2p_async_handle.backwatd_async_comm(grads)
        outputs = forward_chunk.forward(forward_inputs)
        loss = forward_loss_fn_node.forward(outputs) if forward_loss_fn_node is not None else None
        return outputs, loss, grads


METHODS = {"protocol": ByTheProtocol, "backward first": BackwardFirst, "mixin": paddle_vpp_ext.OverlapMixin}


def model_of(method, descs, loss_fn=mean_square, **kwargs):
    kind = type("Model", (METHODS[method], PipelineLayer), {}) if method else PipelineLayer
    topology = fleet.get_hybrid_communicate_group().topology()
    return kind(layers=descs, loss_fn=loss_fn, topology=topology, **kwargs)


def wrap(method, descs, num_chunks, schedule, m, seg_method="layer:Block", loss_fn=mean_square, **flags):
    set_options(schedule, m, 2, **flags)
    model = model_of(method, descs, loss_fn, seg_method=seg_method, num_virtual_pipeline_stages=num_chunks)
    return fleet.distributed_model(model)


def blocks(count):
    return [LayerDesc(Block) for _ in range(count)]


def steady(p, v, m, rank, head):
    return m * v - min((1 if v == 1 else 2) * (p - 1 - rank) + (v - 1) * head + 1, m * v)


def overlapped_steps(method, num_layers, num_chunks, groups, micro_batches, overlap_p2p):
    """Per m: (loss, gradients, calls of the method, handles it got, planned steady steps)."""
    schedule = f"VPP:overlap=on,groups={groups},overlap_p2p_comm={'on' if overlap_p2p else 'off'}"
    engine = wrap(method, blocks(num_layers), num_chunks, schedule, micro_batches[0])
    results = []
    for m in micro_batches:
        engine.accumulate_steps = m
        engine._layers.calls = engine._layers.handles = 0
        loss = engine.forward_backward_pipeline(list(batch(m, 2 * m)))
        planned = steady(engine.num_stages, num_chunks, m, engine.stage_id, engine.plan().groups[0])
        results.append((loss.numpy(), gradients(named_layers(engine)), engine._layers.calls, engine._layers.handles, planned))
        for parameter in engine.parameters():
            parameter.clear_gradient(False)
    return results


@pytest.mark.parametrize("num_chunks", (2, 3))
@pytest.mark.parametrize("p", (2, 3, 4))
def test_overlap_changes_no_bit(p, num_chunks):
    micro_batches = list(range(p, 3 * p + 2))
    expected = []
    for m in micro_batches:
        one = OneProcess(blocks(p * num_chunks))
        loss = one.step(cut(batch(m, 2 * m), m), update=False)
        expected.append((loss.numpy(), gradients(one.layers)))
    variants = itertools.chain(
        itertools.product(("protocol",), ("first", "even"), (False, True)),
        (("backward first", "first", True), ("mixin", "even", True), ("mixin", "first", False)),
    )
    for method, groups, overlap_p2p in variants:
        per_rank = get_pool(p).run(overlapped_steps, method, p * num_chunks, num_chunks, groups, micro_batches, overlap_p2p, timeout=120)
        for k in range(len(micro_batches)):
            for loss, _, calls, handles, planned in (results[k] for results in per_rank):
                np.testing.assert_array_equal(loss, expected[k][0])
                if method != "mixin":
                    assert calls == planned, "each steady pair is handed over once"
                    assert handles == (planned if overlap_p2p else 0)
            assert_same_bits(merged([results[k][1] for results in per_rank]), expected[k][1])


# ---- values of all sorts, several loss functions, callbacks


class Mixed(nn.Layer):
    """A tensor, or a list, or a dict with a list in it, with integers and tensors without a gradient among them."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value):
        if isinstance(value, dict):
            ids, (x, extra) = value["ids"], value["list"]
        elif isinstance(value, (tuple, list)):
            x, ids, extra = value
        else:
            x, ids, extra = value, paddle.arange(WIDTH), paddle.full([1], 2.0)
        assert ids.stop_gradient and extra.stop_gradient
        x = paddle.tanh(self.linear(x) + ids.astype("float32") * 0.01 * extra)
        if self.kind == "tensor":
            return x
        if self.kind == "dict":
            return {"ids": ids, "list": [x, extra]}
        return (tuple if self.kind == "tuple" else list)((x, ids, extra))


def mixed_descs():
    return [LayerDesc(Mixed, kind) for kind in ("tuple", "list", "dict", "dict", "tuple", "tensor")]


def absolute(output, label):
    return paddle.mean(paddle.abs(output - label))


def divided_in_place(output, label):
    loss = paddle.mean((output - label) ** 2)
    return loss.scale_(0.5)


def step_with_everything(method, loss_fn_idx):
    """(losses per micro-batch and loss function, gradients, how often each callback was called)."""
    seen = []
    engine = wrap(method, mixed_descs(), 2, "VPP:overlap=on" if method else "VPP", 7, "layer:Mixed", [divided_in_place, absolute])
    locations = (
        getattr(engine, "callbacks", None)
        and __import__("paddle.distributed.fleet.meta_parallel.pipeline_parallel", fromlist=["x"]).PipelineParallelMicroStepLocations
    )
    if locations:
        for location in locations:
            engine.register_hook(location, lambda name=location.name, **what: seen.append((name, sorted(what))))
    try:
        optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(0.0, parameters=engine.parameters()))
        engine._prepare_training(list(batch(0, 14)) if engine.stage_id in (0, 2) else None, optimizer, None)
        engine.loss_fn_idx = loss_fn_idx
        losses = engine.forward_backward_pipeline(list(batch(0, 14)), return_micro_batch_loss=True)
        return [loss.numpy() for loss in losses], gradients(named_layers(engine)), sorted(map(str, seen))
    finally:
        if locations:
            for hooks in engine.callbacks.hooks.values():
                hooks.clear()


@pytest.mark.parametrize("loss_fn_idx", (0, 1))
@pytest.mark.parametrize("method", ("protocol", "mixin"))
def test_steady_steps_do_all_that_the_others_do(method, loss_fn_idx):
    plain = get_pool(3).run(step_with_everything, None, loss_fn_idx)
    overlapped = get_pool(3).run(step_with_everything, method, loss_fn_idx)
    for (losses, grads, seen), (plain_losses, plain_grads, plain_seen) in zip(overlapped, plain):
        np.testing.assert_array_equal(losses, plain_losses)
        assert_same_bits(grads, plain_grads)
        assert seen == plain_seen


# ---- when it cannot be


def texts(method, schedule, m, flag, num_layers=6, num_chunks=2):
    import logging

    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.disable(logging.NOTSET)
    logging.getLogger("paddle_vpp_ext").addHandler(handler)
    try:
        flags = {"forward_backward_overlap_scheduler": True} if flag else {}
        if flag and not hasattr(fleet.fleet._user_defined_strategy.hybrid_configs["pp_configs"], *flags):
            return None  # 3.0 and older
        engine = wrap(method, blocks(num_layers), num_chunks, schedule, m, **flags)
        engine.forward_backward_pipeline(list(batch(m, 2 * m)))
        engine.eval_batch(list(batch(m, 2 * m)), compute_loss=True)
        engine.forward_backward_pipeline(list(batch(m, 2 * m)))
        return [text for text in heard if "forward-backward overlap" in text]
    except ValueError as error:
        return [str(error)]
    finally:
        logging.getLogger("paddle_vpp_ext").removeHandler(handler)
        logging.disable(logging.INFO)


@pytest.mark.parametrize(
    "method, schedule, m, flag, says",
    (
        ("protocol", "1F1B", 8, True, None),
        ("protocol", "1F1B", 4, True, "has no effect: FthenB has no forwards and backwards in turn"),
        (
            None,
            "1F1B",
            8,
            True,
            "has no effect: PipelineLayer has no overlapped_forward_backward; derive it from paddle_vpp_ext.OverlapMixin",
        ),
        (None, "VPP:overlap=on", 8, False, "cannot overlap forward and backward: PipelineLayer has no overlapped_forward_backward"),
        ("protocol", "VPP:overlap=on", 2, False, "overlap=on needs accumulate_steps of at least pp_degree=3"),
        ("protocol", "VPP:overlap=off", 8, True, None),
    ),
)
def test_overlap_that_has_no_effect_is_said_once(method, schedule, m, flag, says):
    for heard in get_pool(3).run(texts, method, schedule, m, flag):
        if says is None or heard is None:
            assert not heard
        else:
            assert len(heard) == 1 and says in heard[0], heard


class ForgetsToWait(ByTheProtocol):
    def overlapped_forward_backward(self, forward_chunk, forward_inputs, *rest, **kwargs):
        kwargs["p2p_async_handle"] = None
        return super().overlapped_forward_backward(forward_chunk, forward_inputs, *rest, **kwargs)


METHODS["forgets to wait"] = ForgetsToWait


def error_of_forgetting():
    try:
        engine = wrap("forgets to wait", blocks(6), 2, "VPP:overlap=on,overlap_p2p_comm=on", 6)
        engine.forward_backward_pipeline(list(batch(6, 12)))
    except RuntimeError as error:
        return str(error)


def test_a_method_that_does_not_wait_is_an_error_not_a_wrong_gradient():
    for text in get_pool(3).run(error_of_forgetting):
        assert "did not call p2p_async_handle.forward_handle_wait()" in text


# ---- memory


def live_bytes_over_steps(schedule, steps):
    """Bytes of all live tensors after the second step and every seventh; to look takes longer than a step."""
    import gc

    engine = wrap("protocol", blocks(8), 2, schedule + ",overlap_p2p_comm=on", 9)
    sizes = []
    for step in range(steps):
        engine.forward_backward_pipeline(list(batch(step, 18)))
        if step != 1 and (step == 0 or step % 7):
            continue
        gc.collect()
        live = [t for t in gc.get_objects() if isinstance(t, paddle.Tensor) and t._is_initialized()]
        sizes.append(sum(int(t.size) * t.element_size() for t in live))
    return sizes


@pytest.mark.parametrize("schedule", ("VPP:groups=even", "VPP:overlap=on"))
def test_overlapped_transfers_free_all_that_they_send(schedule):
    for sizes in get_pool(4).run(live_bytes_over_steps, schedule, 50, timeout=120):
        assert len(sizes) == 8 and len(set(sizes)) == 1, "live bytes are flat over 50 steps"


# ---- the default overlapper


def test_the_order_of_nodes_computes_on_one_side_while_the_other_communicates():
    moves = [(m.side, m.what, m.index) for m in interleave_nodes([False, True, False], [False, True, False])]
    assert moves == [
        ("B", "run", 0),
        ("B", "issue", 1),
        ("F", "run", 0),
        ("F", "issue", 1),
        ("B", "wait", 1),
        ("B", "run", 2),
        ("F", "wait", 1),
        ("F", "run", 2),
    ]


@pytest.mark.parametrize("forward", [list(kinds) for n in range(5) for kinds in itertools.product((False, True), repeat=n)])
def test_the_order_of_nodes_is_complete_and_in_order(forward):
    for n in range(5):
        for backward in itertools.product((False, True), repeat=n):
            moves = interleave_nodes(forward, backward)
            for side, nodes in (("F", forward), ("B", backward)):
                wanted = [(what, k) for k, talks in enumerate(nodes) for what in (("issue", "wait") if talks else ("run",))]
                assert [(m.what, m.index) for m in moves if m.side == side] == wanted


class Nap(paddle.autograd.PyLayer):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad.clone()


@pytest.mark.parametrize("seconds", (0.03,))
def test_a_pair_hides_its_communication(seconds):
    """Compute, communicate, compute on both sides: at most 0.75 of one after the other."""
    from paddle_vpp_ext.fleet.stage.nodes import Chunk

    def chunk():
        nap = lambda x: Nap.apply(x, seconds)
        return Chunk([LayerNode(nap), CommunicationNode(nap), LayerNode(nap)])

    x = paddle.ones([2, 2])
    x.stop_gradient = False
    grad = paddle.ones([2, 2])

    def apart():
        first, second = chunk(), chunk()
        first.forward(x)
        start = time.perf_counter()
        second.forward(x)
        first.backward(grad)
        return time.perf_counter() - start

    def together():
        first, second = chunk(), chunk()
        first.forward(x)
        start = time.perf_counter()
        out, _, back = paddle_vpp_ext.OverlapMixin().overlapped_forward_backward(second, x, None, first, None, grad, None)
        took = time.perf_counter() - start
        np.testing.assert_array_equal(out.numpy(), x.numpy())
        np.testing.assert_array_equal(back[0].numpy(), grad.numpy())
        return took

    assert min(together() for _ in range(5)) <= 0.75 * min(apart() for _ in range(3))
