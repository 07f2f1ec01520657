"""Benchmarks that print a table: planning, and steps of sleeping or empty layers on CPU.

``ci/bench.sh`` runs them. Times on shared machines are noisy: compare the ratios of one run.
"""

import argparse
import contextlib
import resource
import statistics
import sys
import tempfile
import time
from typing import NamedTuple

from paddle_vpp_ext.planning.planner import make_plan
from paddle_vpp_ext.schedule.costs import Costs
from paddle_vpp_ext.search.search import search
from paddle_vpp_ext.tools import recorded

NOTHING = Costs(0.0, 0.0, 0.0)


def plan_table():
    """Seconds and memory of plan and proof, the figures that the project holds itself to beside them."""
    print(f"{'plan and verify':28} {'seconds':>8} {'limit':>6} {'peak GiB':>9}")
    for (p, v, m), limit in (((16, 4, 256), 1), ((64, 8, 1024), 30)):
        for blocking in (True, False):
            start = time.perf_counter()
            make_plan("VPP", p, v, m, {"groups": "even"}, blocking)
            seconds = time.perf_counter() - start
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            name = f"p={p} V={v} m={m}" + (" blocking" if blocking else "")
            print(f"{name:28} {seconds:8.2f} {limit:6} {memory:9.2f}", flush=True)
    print(f"\n{'search, uneven parts':28} {'seconds':>8} {'limit':>6}")
    for (p, v, m), limit in (((8, 4, 64), 5), ((64, 8, 512), 120)):
        times = [1 + 0.2 * ((7 * s) % 11 - 5) / 5 for s in range(p * v - 1)] + [1.6]
        start = time.perf_counter()
        found = search(p, v, m, Costs(times, times, times, 0.05))
        print(f"{f'p={p} V={v} m={m}':28} {time.perf_counter() - start:8.2f} {limit:6}   {found}", flush=True)


class Bench:
    """Steps of one model under several engines in turn, so that all see the same machine.

    ``costs``: what its parts sleep, in milliseconds; a part that takes no time does next to nothing.
    """

    def __init__(self, costs, num_chunks):
        import paddle
        from paddle import nn
        from paddle.distributed import fleet
        from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer

        self.paddle, self.fleet, self.num_chunks = paddle, fleet, num_chunks

        class Nap(paddle.autograd.PyLayer):
            @staticmethod
            def forward(ctx, x, forward_ms, backward_ms):
                ctx.milliseconds = backward_ms
                time.sleep(forward_ms / 1e3)
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                time.sleep(ctx.milliseconds / 1e3)
                return grad.clone()

        class Block(nn.Layer):
            def __init__(self, forward_ms, input_ms, weight_ms):
                super().__init__()
                self.weight = self.create_parameter([8, 8])
                self.naps = forward_ms, input_ms
                if weight_ms:
                    self.weight.register_hook(lambda grad: time.sleep(weight_ms / 1e3))

            def forward(self, x):
                x = x @ self.weight
                return Nap.apply(x, *self.naps) if any(self.naps) else x

        table = costs.table(self.num_stages * num_chunks)
        self.describe = lambda: PipelineLayer(
            layers=[LayerDesc(Block, *times) for times in zip(table["F"], table["I"], table["W"])],
            loss_fn=lambda y, label: (y - label).mean(),
            topology=fleet.get_hybrid_communicate_group().topology(),
            seg_method="layer:Block",
            num_virtual_pipeline_stages=num_chunks,
        )

    @property
    def num_stages(self):
        return self.fleet.get_hybrid_communicate_group().get_pipe_parallel_world_size()

    def engine(self, schedule, accumulate_steps, **pp_configs):
        """(engine, optimizer) under the options."""
        strategy = self.fleet.fleet._user_defined_strategy
        strategy.pipeline_configs = {"accumulate_steps": accumulate_steps, "micro_batch_size": 1, "schedule_mode": schedule}
        for name, value in pp_configs.items():
            setattr(strategy.hybrid_configs["pp_configs"], name, value)
        model = self.describe()
        optimizer = self.paddle.optimizer.SGD(0.0, parameters=model.parameters())
        return self.fleet.distributed_model(model), self.fleet.distributed_optimizer(optimizer)

    def agreed(self, value):
        """The first rank's ``value``, on all."""
        everybody = []
        self.paddle.distributed.all_gather_object(everybody, value)
        return everybody[0]

    def step_times(self, engines, steps, warm=1):
        """{name: median seconds of a step}, ``warm`` steps each before."""
        times = {name: [] for name in engines}
        for step in range(steps + warm):
            for name, (engine, optimizer) in engines.items():
                data = [self.paddle.ones([engine.accumulate_steps, 8]) for _ in range(2)]
                start = time.perf_counter()
                engine.train_batch(data, optimizer)
                if step >= warm:
                    times[name].append(time.perf_counter() - start)
        return {name: statistics.median(of_one) for name, of_one in times.items()}


def engines_of(bench, accumulate_steps):
    """The engines that are compared. Paddle's own refuses m < 2p."""
    return {
        "VPP:groups=first": bench.engine("VPP:groups=first", accumulate_steps),
        "VPP:groups=even": bench.engine("VPP:groups=even", accumulate_steps),
        "Paddle's own": bench.engine("paddle", accumulate_steps),
    }


def sleeping_table(steps=5, forward_ms=10, backward_ms=20, num_chunks=2):
    """Step time over the ideal, with chunks that sleep 10 ms forward and 20 ms backward."""
    bench = Bench(Costs(forward_ms, backward_ms, 0.0), num_chunks)
    for m in (8, 11):
        ideal = (m * num_chunks + bench.num_stages - 1) * (forward_ms + backward_ms) / 1e3
        for name, seconds in bench.step_times(engines_of(bench, m), steps).items():
            yield f"m={m:<3} {name:20} {seconds * 1e3:9.1f} ms   {seconds / ideal:6.3f} of the ideal {ideal * 1e3:.0f} ms"


# Parts of p=4, V=2 that differ by 20 % at most, and a head that takes 1.6 times the mean.
UNEVEN = (0.8, 1.1, 0.9, 1.2, 1.0, 0.85, 1.15, 1.6)


class Own(NamedTuple):
    """The engine's own time in recorded steps, in milliseconds: per action, and per step before its first and after its last."""

    action: float
    step: float


def schedule_table(steps=6, ms=10, num_chunks=2, m=8):
    """Each schedule's step beside its simulation, when F, I and W of each chunk sleep.

    Simulated are the naps, and the naps with what the engine was measured to take: its own time per action and step,
    and a hop. Paddle's own engine cannot be recorded and gets the own time of ours with the same schedule.
    """
    yield f"{'':12} {'':18} {'step ms':>8} {'naps simulated':>15} {'own ms/action':>14} {'with own time':>14} {'step over that':>15}"
    for title, factors in (("even parts", (1.0,) * len(UNEVEN)), ("uneven parts", UNEVEN)):
        bench = Bench(_naps(factors, ms), num_chunks)
        with tempfile.TemporaryDirectory() as own_folder:
            folder = bench.agreed(own_folder)
            names = ["VPP:groups=first", "VPP:groups=even", "ZBVPP:groups=even", "auto:profile=2"]
            engines = {"Paddle's own": bench.engine("paddle", m)}
            engines.update({name: bench.engine(f"{name},trace={folder}/{k}", m) for k, name in enumerate(names)})
            times = bench.step_times(engines, steps, warm=3)
            bench.paddle.distributed.barrier()  # all ranks have written
            own = {name: _own(f"{folder}/{k}", bench, factors, ms, times[name]) for k, name in enumerate(names)}
            bench.paddle.distributed.barrier()
        own["Paddle's own"] = own[names[0]]
        hop = engines[names[-1]][0].measured_costs.hop
        for name, seconds in times.items():
            plan = engines[name if name in names else names[0]][0].plan()
            naps = plan.simulate(_naps(factors, ms)).makespan
            expected = plan.simulate(_naps(factors, ms, own[name].action, hop)).makespan + own[name].step
            yield (
                f"{title:12} {name:18} {seconds * 1e3:8.1f} {naps:15.1f} {own[name].action:14.2f} {expected:14.1f} "
                f"{seconds * 1e3 / expected:15.3f}"
            )


def _naps(factors, ms, more=0.0, hop=0.0):
    times = [ms * factor + more for factor in factors]
    return Costs(times, times, times, hop)


def _own(folder, bench, factors, ms, seconds):
    """The engine's own time in the steps that took ``seconds``, the mean of all ranks."""
    steps = [step for step in recorded.load(folder)[0].steps.values() if step[0].training][3:]
    own = actions = 0.0
    for rank, account in enumerate(recorded.accounts(steps)):
        blocks = [block for step in steps for block in step[rank].blocks]
        parts = lambda block: 2 if block.kind == "B" else 1
        naps = sum(ms * factors[block.chunk * bench.num_stages + rank] * parts(block) for block in blocks)
        own += (account.compute + account.other) * 1e3 - naps
        actions += sum(map(parts, blocks))
    spans = [max(b.end for b in rows) - min(b.start for b in rows) for rows in map(recorded.timeline_of, steps)]
    return Own(own / actions, (seconds - statistics.median(spans)) * 1e3)


def hop_table(steps=5, forward_ms=10, backward_ms=20, num_chunks=2, hop_ms=5, m=8):
    """The same with transfers that take 5 ms, with and without overlap_p2p_comm."""
    bench = Bench(Costs(forward_ms, backward_ms, 0.0), num_chunks)
    engines = {
        "VPP": bench.engine("VPP", m),
        "VPP, overlap_p2p_comm": bench.engine("VPP", m, overlap_p2p_comm=True),
        "Paddle's own, overlap_p2p_comm": bench.engine("paddle", m, overlap_p2p_comm=True),
        "Paddle's own": bench.engine("paddle", m, overlap_p2p_comm=False),
    }
    ideal = (m * num_chunks + bench.num_stages - 1) * (forward_ms + backward_ms) / 1e3
    with slow_transfers(hop_ms / 1e3):
        for name, seconds in bench.step_times(engines, steps).items():
            yield f"{name:32} {seconds * 1e3:9.1f} ms   {seconds / ideal:6.3f} of the ideal without transfers"


@contextlib.contextmanager
def slow_transfers(seconds):
    """Activations and gradients that are sent in here take that long, in the channels' threads."""
    from paddle_vpp_ext.fleet.transport.channels import Channels

    send = Channels.send

    def slowly(self, peer, kind, job, size=None):
        def slow_job(transfer):
            def slow_transfer(tensor):
                if "float" in str(tensor.dtype):
                    time.sleep(seconds)
                transfer(tensor)

            return job(slow_transfer)

        return send(self, peer, kind, slow_job)

    Channels.send = slowly
    try:
        yield
    finally:
        Channels.send = send


def pair_table(seconds=0.01, repeats=10):
    """A steady pair whose chunks compute, communicate and compute, 10 ms each, by the default overlapper."""
    import paddle

    from paddle_vpp_ext.fleet.stage.nodes import Chunk, CommunicationNode, LayerNode
    from paddle_vpp_ext.fleet.stage.overlap import OverlapMixin

    class Nap(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx, x):
            time.sleep(seconds)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            time.sleep(seconds)
            return grad.clone()

    def chunk():
        return Chunk([LayerNode(Nap.apply), CommunicationNode(Nap.apply), LayerNode(Nap.apply)])

    x, grad = paddle.ones([8]), paddle.ones([8])
    x.stop_gradient = False
    apart, together = [], []
    for _ in range(repeats):
        for times in (apart, together):
            forward, backward = chunk(), chunk()
            backward.forward(x)
            start = time.perf_counter()
            if times is apart:
                forward.forward(x)
                backward.backward(grad)
            else:
                OverlapMixin().overlapped_forward_backward(forward, x, None, backward, None, grad, None)
            times.append(time.perf_counter() - start)
    apart, together = statistics.median(apart), statistics.median(together)
    yield f"one after the other {apart * 1e3:6.1f} ms   together {together * 1e3:6.1f} ms   {together / apart:.3f} (limit 0.75)"


def overhead_table(steps=30, m=12, num_chunks=2):
    """An engine's own time per action, with layers that do next to nothing."""
    bench = Bench(NOTHING, num_chunks)
    for name, seconds in bench.step_times(engines_of(bench, m), steps).items():
        yield f"{name:20} {seconds / (2 * m * num_chunks) * 1e6:9.0f} us per action of a rank"


def split_table(width=512, rows=(4, 128), repeats=40):
    """What I and W take together, over the whole backward, one process with one thread of Paddle's."""
    import paddle
    from paddle import nn

    from paddle_vpp_ext.fleet.stage.split_backward import SplitBackward

    class Attention(nn.Layer):
        def __init__(self):
            super().__init__()
            self.attention, self.norm = nn.MultiHeadAttention(width, 8), nn.LayerNorm(width)

        def forward(self, x):
            return x + self.attention(self.norm(x))

    mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    x, gradient = paddle.randn([*rows, width]), paddle.randn([*rows, width])
    x.stop_gradient = False
    for name, block in (("MLP", mlp), ("attention", Attention())):
        split, whole, parts = SplitBackward(), [], {"I": [], "W": []}
        for k in range(repeats + 1):
            output = block(x)
            start = time.perf_counter()
            paddle.autograd.backward([output], [gradient])
            whole.append(time.perf_counter() - start)
            with split.forward(0):
                output = block(x)
            split.built(0, [output])
            start = time.perf_counter()
            with split.input_pass(k):
                paddle.autograd.backward([output], [gradient])
            middle = time.perf_counter()
            split.weight_pass(k)
            parts["I"].append(middle - start)
            parts["W"].append(time.perf_counter() - middle)
        # The first time nothing is split.
        ratios = sorted((i + w) / b for i, w, b in zip(parts["I"][1:], parts["W"][1:], whole[1:]))
        share = statistics.median(parts["W"][1:]) / statistics.median(whole[1:])
        quartiles = ratios[len(ratios) // 4], ratios[-len(ratios) // 4]
        yield (
            f"{name:10} B {statistics.median(whole[1:]) * 1e3:6.1f} ms   (I + W) / B {statistics.median(ratios):.3f} "
            f"(half of all between {quartiles[0]:.3f} and {quartiles[1]:.3f}, limit 1.05)   W / B {share:.2f}"
        )


def steps_main():
    """What each of four launched processes runs."""
    from paddle.distributed import fleet

    import paddle_vpp_ext

    paddle_vpp_ext.enable()
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 4}
    fleet.init(is_collective=True, strategy=strategy, log_level="WARNING")
    for title, rows in (
        ("schedules against their simulations, p=4, V=2, m=8, F=I=W=10 ms a chunk, asleep", schedule_table()),
        ("step time, p=4, V=2, F=10 ms, B=20 ms a chunk, asleep", sleeping_table()),
        ("transfers of 5 ms, p=4, V=2, m=8, the same layers", hop_table()),
        ("a pair of forward and backward by the default overlapper", pair_table()),
        ("the engine's own time, p=4, V=2, m=12, empty layers", overhead_table()),
    ):
        lines = list(rows)
        if fleet.worker_index() == 0:
            print("\n".join(["", title, *lines]), flush=True)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("plan", "split", "steps"), help="steps: to be launched with four processes")
    what = parser.parse_args(argv).what
    if what == "plan":
        plan_table()
    elif what == "split":
        print("\n".join(["", "a backward split in two, against the whole one", *split_table()]), flush=True)
    else:
        steps_main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
