"""``auto:profile=N``: measures the first training steps, then plans for what was measured."""

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional, cast

from ...executor import Pending
from ...instruments import Instrument
from ...log import logger
from ...schedule.action import Action
from ...schedule.costs import Costs
from ...schedule.dependencies import Transfer
from .. import device
from ..device import Mark
from ..messages import Boundaries, Message, Payload, byte_count, tensors_of

# Times in Costs are milliseconds here.
_MS = 1e3
# Round trips by which a hop is measured, after one that is not counted.
_ROUND_TRIPS = 5


SENT = "sent"  # a Sample's kind: the release of an activation that has been sent


class Sample(NamedTuple):
    """One action as it ran: its two marks, and how many bytes came in and went out by message."""

    kind: str
    chunk: int
    start: Mark
    end: Mark
    received: int
    sent: int


def summary(samples: Sequence[Sample], num_chunks: int, on: Any) -> dict:
    """One rank's medians on its device ``on``: fields of Costs, each a list with one value for each chunk.

    An activation is what a forward leaves allocated, and its input, without what is freed once its output is sent. The
    residue is what I allocates beyond the gradient that it hands on, and the gradient that came in.
    """

    def median(kind, value):
        of = lambda chunk: [value(sample) for sample in samples if sample.kind == kind and sample.chunk == chunk]
        return [statistics.median(of(chunk) or [0]) for chunk in range(num_chunks)]  # the last part sends nothing

    duration = lambda sample: on.milliseconds(sample.start, sample.end)
    allocated = lambda sample: sample.end.allocated - sample.start.allocated
    activation = median("F", lambda sample: allocated(sample) + sample.received)
    residue = median("I", lambda sample: allocated(sample) + sample.received - sample.sent)
    return {
        **{name: median(kind, duration) for name, kind in (("forward", "F"), ("input_grad", "I"), ("weight_grad", "W"))},
        "activation": [max(0, kept + freed) for kept, freed in zip(activation, median(SENT, allocated))],
        "residue": [max(0, kept) for kept in residue],
        "message": median("F", lambda sample: sample.sent),
    }


def joined(summaries: list[dict]) -> Costs:
    """The costs of all parts from the summaries of ranks 0..p-1; a hop is the slowest of those that were measured."""
    names = [name for name in summaries[0] if name != "hop"]
    chunks = range(len(summaries[0][names[0]]))
    fields = {name: [of_rank[name][chunk] for chunk in chunks for of_rank in summaries] for name in names}
    return Costs(**fields, hop=max(of_rank["hop"] or 0.0 for of_rank in summaries))


def measure_hop(transport: Any, boundaries: Boundaries, stage: int, num_stages: int) -> Optional[float]:
    """Milliseconds of one transfer between this rank and its partner: half of an activation's and a gradient's round trip.

    Ranks 0 and 1 are partners, 2 and 3, and so on, with the messages of the first chunk; None for a rank without one.
    """
    part = stage - stage % 2
    if part + 1 == num_stages:
        return None
    there, back = Transfer("F", part, 0), Transfer("B", part + 1, 0)
    payload = lambda transfer: Payload(tensors_of(cast(Message, boundaries.empty_message(transfer))))  # steps have agreed on it
    finish = device.current().synchronize

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


def _wait(pending: Pending) -> None:
    for ticket in (*pending.sends, *pending.receives):
        ticket.wait()


class ProfiledSteps(Instrument):
    """Measures ``count`` training steps of a runner after its first one, then has it plan anew; its programs are split meanwhile.

    In the first step much is done for the first time: a chunk's first forward is not split, and messages have headers, which
    other threads allocate while an action runs.
    ``save``: a file into which the first rank writes the costs, for ``paddle-vpp plan --costs``; or None.
    """

    def __init__(self, runner: Any, count: int, save: Optional[str]):
        self._runner, self._count, self._save = runner, count, save
        self._steps: list[list[Sample]] = []
        self._device = device.current()
        self._num_stages = len(runner.ranks)

    def begin_step(self, training: bool) -> None:
        self._measures = training
        self._runner.split_backwards = training
        self._samples: list[Sample] = []

    def before(self, actions: Sequence[Action]) -> None:
        self._start = self._device.mark()

    def after(self, actions: Sequence[Action], received: Sequence[Any], made: Sequence[Any]) -> None:
        end = self._device.mark()
        (action,), (message,), (payload,) = actions, received, made
        bytes_in = byte_count(tensors_of(message) if message else ())
        bytes_out = byte_count(payload.tensors if payload else ())
        self._samples.append(Sample(action.kind, action.chunk, self._start, end, bytes_in, bytes_out))

    def freeing(self, transfer: Transfer) -> None:
        self._start = self._device.mark()

    def freed(self, transfer: Transfer) -> None:
        if transfer.kind == "F":
            self._samples.append(Sample(SENT, transfer.part // self._num_stages, self._start, self._device.mark(), 0, 0))

    def end_step(self) -> None:
        if not self._measures:
            return
        self._steps.append(self._samples)
        if len(self._steps) == self._count + 1:
            runner = self._runner
            runner.split_backwards = False
            runner.remove(self)
            runner.plan_for(runner.together(self._costs))

    def _costs(self):
        runner = self._runner
        samples = [sample for step in self._steps[1:] for sample in step]
        mine = summary(samples, runner.plans.num_chunks, self._device)
        runner.transport.gather(None)  # partners start together
        mine["hop"] = measure_hop(runner.transport, runner.boundaries, runner.stage_id, self._num_stages)
        costs = joined(runner.transport.gather(mine))
        if self._save and runner.stage_id == 0:
            try:
                costs.save(self._save)
            except OSError as error:  # no reason to end a training
                logger.warning(f"the measured costs are not saved: {error}")
        return costs
