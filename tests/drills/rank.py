"""One rank of a failure drill: trains a small model through fleet while one fault is done to it.

    python rank.py '{"fault": "kill", "at": 1, "phase": "steady", …}'

Lines on stdout tell the harness (drill.py) what happened when: ``FAULT``, ``ERROR`` and ``DONE`` with the time.
"""

import json
import os
import signal
import sys
import time

import paddle

import paddle_vpp_ext

paddle_vpp_ext.enable()
from paddle.distributed import fleet  # noqa: E402
from paddle.distributed.fleet.meta_parallel import LayerDesc  # noqa: E402

from training import Block, Model, OneProcess, assert_same_bits, batch, build, cut, gradients, mean_square, named_layers  # noqa: E402

V, SIZE = 2, 2


class Pairs(paddle_vpp_ext.OverlapMixin, Model):
    """With overlap=on its steady forwards and backwards go in pairs."""


class Breaking(paddle.autograd.PyLayer):
    """Nothing. While ``fails`` an error in the third backward."""

    fails, count = False, 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Breaking.count += Breaking.fails
        if Breaking.count == 3:
            Breaking.fails, Breaking.count = False, 0
            say("FAULT")
            raise ArithmeticError("the backward fails")
        return gradient.clone()


class BreakingBlock(Block):
    def forward(self, x):
        return Breaking.apply(super().forward(x))


def say(word, text=""):
    print(word, f"{time.time():.3f}", text.replace("\n", " | "), flush=True)


def say_error(error):
    say("ERROR", f"{type(error).__name__}: {error}")


class FaultyStage:
    """A stage that does the fault instead of, or before, one of its actions. Everything else is passed through."""

    def __init__(self, stage, fault, at):
        self._stage, self._fault, self._left = stage, fault, at

    def __getattr__(self, name):
        return getattr(self._stage, name)

    def forward(self, *args):
        return self._act(1, self._stage.forward, *args)

    def backward(self, *args):
        return self._act(1, self._stage.backward, *args)

    def backward_input(self, *args):
        return self._act(1, self._stage.backward_input, *args)

    def backward_weight(self, *args):
        return self._act(1, self._stage.backward_weight, *args)

    def overlapped(self, *args):
        return self._act(2, self._stage.overlapped, *args)

    def _act(self, actions, compute, *args):
        left, self._left = self._left, self._left - actions
        if 0 <= left < actions:
            say("FAULT")
            return FAULTS[self._fault](compute, *args)
        return compute(*args)


def kill(compute, *args):
    os.kill(os.getpid(), signal.SIGKILL)


def leave(compute, *args):
    sys.stdout.flush()
    os._exit(0)


def fail(compute, *args):
    raise ArithmeticError("the layer fails")


def sleep(compute, *args):
    time.sleep(TASK["seconds"])
    return compute(*args)


def wrong_size(compute, *args):
    """A message of another size than agreed on, as if the check on the sender were not there."""
    payload = compute(*args)
    payload.tensors[0] = paddle.concat([payload.tensors[0]] * 2)
    return payload


def cut_the_network(compute, *args):
    os.system(TASK["command"])
    return compute(*args)


FAULTS = {f.__name__: f for f in (kill, leave, fail, sleep, wrong_size, cut_the_network)}


class FailingLoss:
    """The mean square; when ``fails`` an error the second time."""

    fails, count = False, 0

    def __call__(self, output, label):
        self.count += self.fails
        if self.count == 2:
            self.fails, self.count = False, 0
            say("FAULT")
            raise ArithmeticError("the loss fails")
        return mean_square(output, label)


def failing_pairs(data, m):
    for number, pair in enumerate(cut(data, m)):
        if number == 2:
            say("FAULT")
            raise ArithmeticError("the data iterator fails")
        yield pair


def action_of(engine, phase):
    """The number of the action at which the fault is done: the first, one of the steady phase, the last."""
    order = engine.plan().orders[engine.stage_id]
    backwards = [k for k, action in enumerate(order) if action.kind in "BI"]
    forwards = [k for k, action in enumerate(order) if action.kind == "F"]
    return {"startup": 0, "steady": (backwards[0] + forwards[-1]) // 2, "cooldown": len(order) - 1}[phase]


def main():
    p, m, rank = TASK["p"], TASK.get("m", 4), int(os.environ["PADDLE_TRAINER_ID"])
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": p, "dp_degree": TASK.get("replicas", 1), "mp_degree": 1}
    fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
    loss = FailingLoss()
    descs = [LayerDesc(BreakingBlock)] * (p * V)
    engine, optimizer = build(descs, V, TASK["schedule"], m, SIZE, seg_method="layer:BreakingBlock", loss_fn=loss, kind=Pairs)
    one = OneProcess(descs)
    data = [list(batch(step, SIZE * m)) for step in range(4)]

    def step(number):
        given = failing_pairs(data[number], m) if number == 1 and faulty and TASK["fault"] == "fail_data" else data[number]
        loss = engine.train_batch(given, optimizer)
        assert float(loss) == float(one.step(cut(data[number], m))), "another loss than in one process"

    faulty = rank == TASK["at"]
    for _ in range(TASK.get("steps_before", 1)):
        step(0)
    plain = engine.runner.stage
    loss.fails = faulty and TASK["fault"] == "fail_loss"
    Breaking.fails = faulty and TASK["fault"] == "fail_backward"
    if TASK["fault"] in FAULTS and faulty:
        engine.runner.stage = FaultyStage(plain, TASK["fault"], action_of(engine, TASK["phase"]))
    say("READY")
    try:
        step(1)
    except Exception as error:
        if not TASK.get("recover"):
            raise
        say_error(error)
        engine.runner.stage = plain
        engine.forward_backward_pipeline(data[2])
        one.step(cut(data[2], m), update=False)
        mine = named_layers(engine)
        found = gradients(mine)
        assert_same_bits(found, {key: value for key, value in gradients(one.layers).items() if key in found})
        say("RECOVERED")
        optimizer.clear_grad()
        one.optimizer.clear_grad()
    else:
        say("NO ERROR")
    step(3)
    paddle.distributed.barrier()
    say("DONE")


def run():
    global TASK
    TASK = json.loads(sys.argv[1])
    try:
        main()
    except Exception as error:
        say_error(error)
        raise


if __name__ == "__main__":
    run()
