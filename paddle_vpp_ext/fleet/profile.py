"""``auto:profile=N``: measures the first training steps, then plans for what was measured."""
import statistics
import time
from typing import Any, List, NamedTuple, Optional

import paddle

from ..executor import Pending
from ..log import logger
from ..schedule.costs import Costs
from ..schedule.flow import Transfer
from .messages import Payload, byte_count, tensors_of
from .recording import device_wait

# Times in Costs are milliseconds here.
_MS = 1e3
# Round trips by which a hop is measured, after one that is not counted.
_ROUND_TRIPS = 5


class Mark(NamedTuple):
    """A moment of a device, and the bytes that were allocated then."""

    moment: Any
    allocated: int


class CpuMeter:
    """Marks moments on the CPU."""

    def mark(self) -> Mark:
        return Mark(time.perf_counter(), paddle.base.core.host_memory_stat_current_value("Allocated", 0))

    def milliseconds(self, start: Mark, end: Mark) -> float:
        return (end.moment - start.moment) * _MS


class GpuMeter:
    """Marks moments in the device's stream, by events; the host does not wait for them in the step."""

    def mark(self) -> Mark:
        event = paddle.device.Event("gpu", enable_timing=True)
        event.record()
        return Mark(event, paddle.device.cuda.memory_allocated())

    def milliseconds(self, start: Mark, end: Mark) -> float:
        end.moment.synchronize()
        return start.moment.elapsed_time(end.moment)


def meter():
    """That of this process's device."""
    return GpuMeter() if paddle.is_compiled_with_cuda() else CpuMeter()


SENT = "sent"  # a Sample's kind: the release of an activation that has been sent


class Sample(NamedTuple):
    """One action as it ran: its two marks, and how many bytes came in and went out by message."""

    kind: str
    chunk: int
    start: Mark
    end: Mark
    received: int
    sent: int


class MeasuringStage:
    """A stage with split backward whose actions are measured; a whole backward is I, then W. All else is passed through."""

    def __init__(self, stage, num_stages, device_meter):
        self._stage, self._num_stages, self._meter = stage, num_stages, device_meter
        self.samples: List[Sample] = []

    def __getattr__(self, name):
        return getattr(self._stage, name)

    def forward(self, chunk, micro_batch, message):
        return self._measured("F", chunk, message, lambda: self._stage.forward(chunk, micro_batch, message))

    def backward(self, chunk, micro_batch, grads):
        input_grads = self._measured("I", chunk, grads, lambda: self._stage.backward_input(chunk, micro_batch, grads))
        self._measured("W", chunk, None, lambda: self._stage.backward_weight(chunk, micro_batch))
        return input_grads

    def sent(self, transfer, payload):
        if transfer.kind == "F":
            self._measured(SENT, transfer.part // self._num_stages, None, lambda: self._stage.sent(transfer, payload))

    def _measured(self, kind, chunk, received, compute):
        start = self._meter.mark()
        payload = compute()
        end = self._meter.mark()
        self.samples.append(Sample(kind, chunk, start, end, byte_count(tensors_of(received) if received else ()), byte_count(payload.tensors if payload else ())))
        return payload


def summary(samples: List[Sample], num_chunks: int, device_meter) -> dict:
    """One rank's medians: fields of Costs, each a list with one value for each chunk.

    An activation is what a forward leaves allocated, and its input, without what is freed once its output is sent. The
    residue is what I allocates beyond the gradient that it hands on, and the gradient that came in.
    """
    def median(kind, value):
        of = lambda chunk: [value(sample) for sample in samples if sample.kind == kind and sample.chunk == chunk]
        return [statistics.median(of(chunk) or [0]) for chunk in range(num_chunks)]  # the last part sends nothing

    duration = lambda sample: device_meter.milliseconds(sample.start, sample.end)
    allocated = lambda sample: sample.end.allocated - sample.start.allocated
    activation = median("F", lambda sample: allocated(sample) + sample.received)
    residue = median("I", lambda sample: allocated(sample) + sample.received - sample.sent)
    return {
        **{name: median(kind, duration) for name, kind in (("forward", "F"), ("input_grad", "I"), ("weight_grad", "W"))},
        "activation": [max(0, kept + freed) for kept, freed in zip(activation, median(SENT, allocated))],
        "residue": [max(0, kept) for kept in residue],
        "message": median("F", lambda sample: sample.sent),
    }


def joined(summaries: List[dict]) -> Costs:
    """The costs of all parts from the summaries of ranks 0..p-1; a hop is the slowest of those that were measured."""
    names = [name for name in summaries[0] if name != "hop"]
    chunks = range(len(summaries[0][names[0]]))
    fields = {name: [of_rank[name][chunk] for chunk in chunks for of_rank in summaries] for name in names}
    return Costs(**fields, hop=max(of_rank["hop"] or 0.0 for of_rank in summaries))


def measure_hop(transport, boundaries, stage: int, num_stages: int) -> Optional[float]:
    """Milliseconds of one transfer between this rank and its partner: half of an activation's and a gradient's round trip.

    Ranks 0 and 1 are partners, 2 and 3, and so on, with the messages of the first chunk; None for a rank without one.
    """
    part = stage - stage % 2
    if part + 1 == num_stages:
        return None
    there, back = Transfer("F", part, 0), Transfer("B", part + 1, 0)
    payload = lambda transfer: Payload(tensors_of(boundaries.empty_message(transfer)))
    finish = device_wait()

    def do(transfer, sends):
        pending = transport.exchange([(transfer, payload(transfer))], []) if sends else transport.exchange([], [transfer])
        _wait(pending)

    times = []
    for _ in range(_ROUND_TRIPS + 1):
        finish()
        start = time.perf_counter()
        do(there, sends=stage == part)
        do(back, sends=stage != part)
        finish()
        times.append((time.perf_counter() - start) / 2 * _MS)
    return statistics.median(times[1:])


def _wait(pending: Pending):
    for ticket in (*pending.sends, *pending.receives):
        ticket.wait()


class ProfiledSteps:
    """In place of an engine's ``_run_step``: measures its first ``count`` training steps, then has it plan anew.

    ``save``: a file into which the first rank writes the costs, for ``paddle-vpp plan --costs``; or None.
    """

    def __init__(self, engine, count: int, save: Optional[str]):
        self._engine, self._run_step, self._count, self._save = engine, engine._run_step, count, save
        self._steps: List[List[Sample]] = []
        self._meter = meter()

    def __call__(self, data, scaler, step):
        if len(self._steps) == self._count or not step.training:
            return self._run_step(data, scaler, step)
        engine = self._engine
        plain = engine._stage
        engine._stage = measuring = MeasuringStage(plain, engine.num_stages, self._meter)
        try:
            result = self._run_step(data, scaler, step)
        finally:
            engine._stage = plain
        self._steps.append(measuring.samples)
        if len(self._steps) == self._count:
            engine.plan_for(engine.together(self._costs))
        return result

    def _costs(self):
        engine = self._engine
        # In the first step a chunk's first forward is not split, and much is done for the first time.
        samples = [sample for step in self._steps[1:] or self._steps for sample in step]
        mine = summary(samples, engine._num_chunks, self._meter)
        engine._transport.gather(None)  # partners start together
        mine["hop"] = measure_hop(engine._transport, engine._boundaries, engine.stage_id, engine.num_stages)
        costs = joined(engine._transport.gather(mine))
        if self._save and engine.stage_id == 0:
            try:
                costs.save(self._save)
            except OSError as error:  # no reason to end a training
                logger.warning(f"the measured costs are not saved: {error}")
        return costs
