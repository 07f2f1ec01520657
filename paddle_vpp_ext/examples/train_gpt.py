"""Trains a small GPT on bytes over four pipeline stages with two chunks each.

    python -m paddle.distributed.launch --nproc_per_node 4 train_gpt.py --steps 150

The text is the source code of Python's standard library, which every machine has. On GPUs the
command is the same. ``--check`` also trains the model in one process and demands equal losses.
"""

import argparse
import math
import pathlib
import sys
import sysconfig
import time
from collections.abc import Iterable, Sequence
from typing import Any, Callable, Optional

import numpy as np
import paddle
import paddle.nn as nn
import paddle.nn.functional as F
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc

import paddle_vpp_ext

VOCABULARY = 256
PIPELINE_LAYER_SEED = 1234  # a PipelineLayer seeds layer k of the whole model with this plus k


class Embedding(nn.Layer):
    """Bytes (int64 [batch, length]) to vectors [batch, length, width], with learned positions."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.weight = self.create_parameter([VOCABULARY, width], default_initializer=nn.initializer.Normal(0.0, 0.1))
        self.position = self.create_parameter([length, width], default_initializer=nn.initializer.Normal(0.0, 0.1))

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        return F.embedding(tokens, self.weight) + self.position


def tied_head(embedding: Embedding, x: paddle.Tensor) -> paddle.Tensor:
    """Logits by the embedding's own weight."""
    return paddle.matmul(x, embedding.weight, transpose_y=True)


class Block(nn.Layer):
    """Causal self-attention and an MLP, each behind a layer norm and a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))

    def attention(self, x: paddle.Tensor) -> paddle.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape([batch, length, 3, self.heads, width // self.heads]).transpose([2, 0, 3, 1, 4])
        q, k, v = qkv[0], qkv[1], qkv[2]
        scores = paddle.matmul(q, k, transpose_y=True) / math.sqrt(width // self.heads)
        future = paddle.triu(paddle.full([length, length], -1e4), diagonal=1)
        mixed = paddle.matmul(F.softmax(scores + future), v)
        return self.out(mixed.transpose([0, 2, 1, 3]).reshape([batch, length, width]))


def next_byte_loss(logits: paddle.Tensor, labels: paddle.Tensor) -> paddle.Tensor:
    """Mean cross entropy in nats."""
    return F.cross_entropy(logits.reshape([-1, VOCABULARY]), labels.reshape([-1]))


def layer_descs(args: argparse.Namespace) -> list[LayerDesc]:
    """The whole model, layer by layer."""
    blocks = [LayerDesc(Block, args.width, args.heads) for _ in range(args.layers)]
    if args.untied:
        ends = LayerDesc(Embedding, args.width, args.length), LayerDesc(nn.Linear, args.width, VOCABULARY)
    else:
        shared = dict(shared_weight_attr="weight", width=args.width, length=args.length)
        ends = (
            SharedLayerDesc("embedding", Embedding, **shared),
            SharedLayerDesc("embedding", Embedding, forward_func=tied_head, **shared),
        )
    return [ends[0], *blocks, LayerDesc(nn.LayerNorm, args.width), ends[1]]


class Text:
    """Batches of random pieces of the standard library's source, the same in every process."""

    def __init__(self, size: int = 4_000_000) -> None:
        files = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        self.data = np.frombuffer(b"".join(f.read_bytes() for f in files)[:size], dtype=np.uint8).astype(np.int64)

    def batch(self, step: int, rows: int, length: int) -> tuple[paddle.Tensor, paddle.Tensor]:
        """(bytes, the bytes that follow them): int64 [rows, length] each."""
        starts = np.random.RandomState(step).randint(0, len(self.data) - length - 1, rows)
        pieces = self.data[starts[:, None] + np.arange(length + 1)]
        return paddle.to_tensor(pieces[:, :-1]), paddle.to_tensor(pieces[:, 1:])


def optimizer_for(args: argparse.Namespace, parameters: Iterable[paddle.Tensor]) -> paddle.optimizer.Optimizer:
    return paddle.optimizer.AdamW(args.learning_rate, parameters=parameters, weight_decay=0.01)


def set_up(args: argparse.Namespace) -> tuple[Any, Any]:
    """Fleet with the pipeline's options; returns the engine and the optimizer."""
    paddle_vpp_ext.enable()
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": args.pp}
    strategy.pipeline_configs = {
        "accumulate_steps": args.acc,
        "micro_batch_size": args.micro_batch_size,
        "schedule_mode": args.schedule,
    }
    fleet.init(is_collective=True, strategy=strategy, log_level="WARNING")
    model = PipelineLayer(
        layers=layer_descs(args),
        loss_fn=next_byte_loss,
        topology=fleet.get_hybrid_communicate_group().topology(),
        seg_method="layer:Block",
        num_virtual_pipeline_stages=args.vpp,
    )
    optimizer = fleet.distributed_optimizer(optimizer_for(args, model.parameters()))
    return fleet.distributed_model(model), optimizer


def train(args: argparse.Namespace, text: Text, engine: Any, optimizer: Any) -> list[float]:
    """The losses of all steps, shown by the first rank as they come."""
    losses: list[float] = []
    rows = args.acc * args.micro_batch_size
    show_step, end = reporter(args, engine)
    for step in range(args.steps):
        start = time.time()
        losses.append(engine.train_batch(text.batch(step, rows, args.length), optimizer).item())
        show_step(step, losses[-1], rows * args.length / (time.time() - start))
    end()
    return losses


def reporter(args: argparse.Namespace, engine: Any) -> tuple[Callable[..., object], Callable[[], object]]:
    """(a function that shows a step's number, loss and tokens/s on the first rank, one that ends it).

    Lines, or a tqdm bar with ``--progress``.
    """
    if engine.stage_id != 0:
        return lambda *step: None, lambda: None
    if args.progress:
        try:
            from tqdm import tqdm
        except ImportError:
            print("no progress bar: pip install tqdm", file=sys.stderr)
        else:
            bar = tqdm(total=args.steps, unit="step")
            return lambda step, loss, rate: (bar.set_postfix_str(f"loss {loss:.4f}, {rate:.0f} tokens/s"), bar.update()), bar.close
    return lambda step, loss, rate: print(f"step {step:4d}  loss {loss:.4f}  {rate:8.0f} tokens/s", flush=True), lambda: None


def train_in_one_process(args: argparse.Namespace, text: Text) -> list[float]:
    """The losses of the same model without a pipeline: micro-batch after micro-batch."""
    layers: list[Callable] = []
    shared = None
    for place, desc in enumerate(layer_descs(args)):
        paddle.seed(PIPELINE_LAYER_SEED + place)
        if isinstance(desc, SharedLayerDesc):
            shared = shared or desc.build_layer()
            layers.append(shared if desc.forward_func is None else lambda x, f=desc.forward_func, shared=shared: f(shared, x))
        else:
            layers.append(desc.build_layer())
    optimizer = optimizer_for(args, nn.LayerList([x for x in layers if isinstance(x, nn.Layer)]).parameters())
    losses = []
    for step in range(args.steps):
        tokens, labels = text.batch(step, args.acc * args.micro_batch_size, args.length)
        total = paddle.zeros([])
        for i in range(0, len(tokens), args.micro_batch_size):
            x = tokens[i : i + args.micro_batch_size]
            for layer in layers:
                x = layer(x)
            loss = next_byte_loss(x, labels[i : i + args.micro_batch_size])
            loss = loss / args.acc if args.acc > 1 else loss
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(total.item())
    return losses


def check(args: argparse.Namespace, losses: Sequence[float], expected: Sequence[float]) -> bool:
    """True if the losses are equal: to the last bit untied, within 1e-5 with the tied head, whose gradient is added up in another order."""
    tolerance = 0.0 if args.untied else 1e-5
    for step, (ours, theirs) in enumerate(zip(losses, expected)):
        if abs(ours - theirs) > tolerance * abs(theirs):
            print(f"check FAILED: step {step} has loss {ours!r} in the pipeline, {theirs!r} in one process", flush=True)
            return False
    print(f"check passed: {len(losses)} losses equal one process's " + ("to the last bit" if args.untied else "within 1e-5"))
    return True


def show(args: argparse.Namespace, engine: Any, text: Text, optimizer: Any) -> None:
    """Records one more step; prints its idle share beside the plan's, and draws both."""
    with engine.recording() as blocks:
        engine.train_batch(text.batch(args.steps, args.acc * args.micro_batch_size, args.length), optimizer)
    if engine.stage_id != 0:
        return
    from paddle_vpp_ext.schedule.costs import Costs
    from paddle_vpp_ext.tools.draw import perfetto, picture, timeline

    run = timeline.from_zero(timeline.to_timeline(blocks))
    mean = lambda kinds: float(np.mean([b.end - b.start for b in run if b.kind in kinds]))
    plan = timeline.from_plan(engine.plan(), Costs(forward=mean("F"), input_grad=mean("B") / 2, weight_grad=mean("B") / 2))
    planned, measured = timeline.summary(plan), timeline.summary(run)
    print(f"idle share: planned {planned.mean_idle:.1%}, measured {measured.mean_idle:.1%} (four processes want four cores)")
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    perfetto.save(out / "trace.json", run, unit_us=1e6)
    print(f"timeline: {out / 'trace.json'} (for chrome://tracing or ui.perfetto.dev)")
    try:
        picture.save(
            out / "timeline.png",
            {"plan": plan, "run": run},
            title=f"{engine.schedule_text}, p={args.pp}, V={args.vpp}, m={args.acc}",
            unit="s",
        )
        print(f"picture: {out / 'timeline.png'}")
    except ImportError as error:
        print(f"no picture: {error}")


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pp", type=int, default=4, help="pipeline stages (4)")
    parser.add_argument("--vpp", type=int, default=2, help="chunks per stage (2)")
    parser.add_argument("--acc", type=int, default=10, help="micro-batches per step, accumulate_steps (10)")
    parser.add_argument("--schedule", default="1F1B", help='schedule_mode, as in "VPP:groups=even" (the selector\'s rule)')
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=64, help="bytes in a row")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--untied", action="store_true", help="an output head of its own instead of the embedding's weight")
    parser.add_argument("--check", action="store_true", help="train in one process too and demand equal losses")
    parser.add_argument("--progress", action="store_true", help="a bar instead of a line a step (needs tqdm)")
    parser.add_argument("--out", default="output", help="folder for the timeline")
    args = parser.parse_args(argv)
    text = Text()
    engine, optimizer = set_up(args)
    losses = train(args, text, engine, optimizer)
    good = True
    if args.check and engine.stage_id == 0:
        good = check(args, losses, train_in_one_process(args, text))
    show(args, engine, text, optimizer)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
