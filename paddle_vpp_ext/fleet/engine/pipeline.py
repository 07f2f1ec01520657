"""The engines: Paddle's pipeline classes with a StepRunner that runs a plan."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Optional

import paddle
from paddle.distributed.fleet.meta_parallel import PipelineParallel, PipelineParallelWithInterleave
from paddle.distributed.fleet.meta_parallel.pipeline_parallel import PipelineParallelWithInterleaveFthenB

from ...log import logger
from ...planning.options import BY_RULE, parse_schedule
from ...planning.registry import SCHEDULES
from ...planning.select import select
from ...schedule.costs import Costs
from ...schedule.plan import Plan
from .. import device, versions
from ..observe.hooks import BubbleHooks, StepHooks
from ..observe.recording import Recording
from ..stage import gradient_sync
from ..stage.overlapped_stage import OverlappedStage
from ..stage.pipeline_stage import PipelineStage
from ..stage.split_stage import SplitStage
from ..transport.protocol import Promises
from .options import LEAST_MEMORY, Options, read_options
from .plans import Plans, overlaps_pairs
from .step_runner import Kind, StepRunner


class _PlannedPipeline:
    """What our engines have in common: Paddle's interface. Comes before a class of Paddle's among the bases."""

    # What Paddle's class has, after this one among the bases.
    _layers: Any
    _compute_loss: Any
    _optimizer_step: Any
    _chunk_2_comm_buffers: Any
    optimizer: Any
    accumulate_steps: int
    num_stages: int
    stage_id: int

    # The engine's own schedule when the user wishes none, and when fleet's selector made it.
    default_schedule = "VPP"
    _hooks_class = StepHooks

    def __init__(self, layers: Any, hcg: Any, strategy: Any, options: Optional[Options] = None):
        flags = strategy.hybrid_configs["pp_configs"]
        self.options = options or read_options(strategy.pipeline_configs, flags)
        with versions.flags_off(flags, "best_unbalanced_scheduler", "profiling"):  # ours go together with everything
            super().__init__(layers=layers, hcg=hcg, strategy=strategy)  # type: ignore[call-arg]  # Paddle's
        if getattr(flags, "enable_offload_queue", False) and self.stage_id == 0:
            logger.warning("enable_offload_queue has no effect: activations that wait to be sent stay in the device's memory")
        versions.complete(self)
        self._num_chunks = layers.get_num_virtual_stages()
        self.gradient_sync = gradient_sync.GradientSync(self)
        self.runner = StepRunner(self, self.options.engine, self._make_plans, self._hooks_class(self))
        wishes: Mapping[str, Any] = self.options.schedule.choice.options
        self.runner.prepare(self._make_stage(), wishes.get("profile"), wishes.get("save"))

    def _make_plans(self, promises: Promises) -> Plans:
        schedule, name, text = self.options.schedule, self._schedule_name, self.schedule_text
        self._pairs = overlaps_pairs(schedule, name, text, self._layers)
        return Plans(name, text, schedule.choice.options, self._pairs, self.num_stages, self._num_chunks, self.stage_id, promises)

    def _make_stage(self) -> PipelineStage:
        splits = SCHEDULES[self._schedule_name].splits
        stage = OverlappedStage if self._pairs else SplitStage if splits else PipelineStage
        return stage(self, self.runner.boundaries)

    # ---- plans

    @property
    def measured_costs(self) -> Optional[Costs]:
        """What ``auto:profile=N`` has measured, in milliseconds and bytes; None before, and with any other schedule."""
        return self.runner.plans.costs

    @property
    def schedule_text(self) -> str:
        """The schedule with its options, as one would write it in schedule_mode."""
        choice = self.options.schedule.choice
        return self.default_schedule if choice.name == BY_RULE and not choice.options else choice.text

    @property
    def _schedule_name(self) -> str:
        name = self.options.schedule.choice.name
        return self.default_schedule if name == BY_RULE else name

    def plan(self, training: bool = True) -> Plan:
        """The verified plan for the present ``accumulate_steps``, made once for each."""
        return self.runner.plans.plan(self.accumulate_steps, training)

    def _get_virtual_pp_rank(self, micro_step, forward):
        """The chunk of this rank's ``micro_step``-th forward or backward; beyond the last one as in a next step."""
        kinds = "F" if forward else "BI"
        chunks = [a.chunk for a in self.plan().orders[self.stage_id] if a.kind in kinds]
        return chunks[micro_step % len(chunks)]

    def get_static_scheduler(self) -> str:
        """This rank's order in Paddle's text form, ``f0_vp0;f1_vp0;b0_vp0;`` (``f0;b0;`` with one chunk). Runs nothing."""
        chunk = (lambda a: f"_vp{a.chunk}") if self._num_chunks > 1 else (lambda a: "")
        return "".join(f"{a.kind.lower()}{a.micro_batch}{chunk(a)};" for a in self.plan().orders[self.stage_id])

    # ---- steps

    def train_batch(
        self,
        data: Any,
        optimizer: Any,
        lr_scheduler: Any = None,
        scaler: Any = None,
        loss_fn_idx: Any = 0,
        return_micro_batch_loss: Any = False,
    ) -> Any:
        """One training step with an update of the weights.

        Returns the mean loss of the batch (a tensor, on every rank), one for each loss function if
        there are several; with ``return_micro_batch_loss`` the m losses of the micro-batches.
        """
        data = self._prepare_training(data, optimizer, lr_scheduler)
        self.loss_fn_idx = self._checked_loss_fn(loss_fn_idx)
        try:
            loss = self.runner.run(data, scaler, Kind(True, True, return_micro_batch_loss))
        except BaseException:
            if self.runner.transport is None:  # it failed in the middle: the next step must not add to half of the gradients
                self.optimizer.clear_grad()
            raise
        with paddle.amp.auto_cast(enable=False):
            self._optimizer_step()
        return loss

    def eval_batch(self, data: Any, compute_loss: Any = False, loss_fn_idx: Any = 0, return_host_tensor: Any = False) -> Any:
        """Forward only. Returns the loss as ``train_batch`` does, or the outputs of the micro-batches (last stage only)."""
        self._layers.eval()
        self.loss_fn_idx = self._checked_loss_fn(loss_fn_idx) if compute_loss else loss_fn_idx
        before = self._compute_loss
        self._compute_loss = compute_loss
        try:
            result = self.runner.run(data, None, Kind(False, compute_loss, False))
        finally:
            self._compute_loss = before
        if return_host_tensor and not compute_loss:
            for output in result:
                versions.move_to_host(output)
        return result

    def _prepare_training(self, data, optimizer, lr_scheduler):
        # Paddle's refuses missing data on this rank alone, and leaves the others waiting: the runner tells all.
        given = () if data is None else data
        prepared = super()._prepare_training(given, optimizer, lr_scheduler)  # type: ignore[misc]  # Paddle's
        return None if data is None else prepared

    def _checked_loss_fn(self, index):
        functions = versions.loss_functions(self._layers)
        if index not in range(len(functions)) or functions[index] is None:
            raise ValueError(f"loss_fn_idx={index}, but the model has {len([f for f in functions if f])} loss functions")
        return index

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[tuple]]:
        """A list that has, after the block, when each action of the steps in it ran, on all ranks.

        Its entries are (rank, start, end, kind, chunk, micro_batch), times in seconds; see
        tools.draw. All ranks enter and leave it together.
        """
        blocks: list[tuple] = []
        recording = Recording(self.stage_id)
        self.runner.add(recording)
        try:
            yield blocks
        finally:
            self.runner.remove(recording)
        for of_rank in self.runner.transport.gather(recording.blocks):
            blocks += map(tuple, of_rank)

    # ---- what the stage and Paddle's constructor call

    def set_virtual_pipeline_rank(self, rank: int) -> None:
        self.__dict__["_virtual_pp_rank"] = rank  # a Layer's own __setattr__ takes ten times as long

    def register_allreduce_overlap_hook(self, model: Any, comm_group: Any, *args: Any, **kwargs: Any) -> None:
        """Makes the buffers that synchronise gradients with the other replicas."""
        if device.is_cpu():
            self._chunk_2_comm_buffers.update(gradient_sync.buffers_of(model, comm_group))
        else:
            super().register_allreduce_overlap_hook(model, comm_group, *args, **kwargs)  # type: ignore[misc]  # Paddle's

    def fused_gradient(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Paddle's buffers of all chunks, also of those after a chunk without weights."""
        trained = gradient_sync.TrainedChunks(model)
        super().fused_gradient(trained, *args, **kwargs)  # type: ignore[misc]  # Paddle's
        made = [self._chunk_2_comm_buffers.pop(k, []) for k in range(len(trained.places))]
        self._chunk_2_comm_buffers.update(zip(trained.places, made))
        return self._chunk_2_comm_buffers


class PipelineParallel1F1B(_PlannedPipeline, PipelineParallel):
    """1F1B: one chunk a rank. ``isinstance(…, PipelineParallel)`` holds."""

    def forward_backward_pipeline(
        self, data: Any, scaler: Any = None, static_scheduler: Any = False, return_micro_batch_loss: Any = False
    ) -> Any:
        """Forward and backward of a batch without an update; returns as ``train_batch`` does."""
        if static_scheduler:
            return self.get_static_scheduler()
        return self.runner.run(data, scaler, Kind(True, True, return_micro_batch_loss))


class _Interleaved(_PlannedPipeline):
    def _check_sanity(self):
        pass  # Paddle's asserts p > 2 and m >= 2p; the plan is verified for any p >= 2 and m >= 1

    def forward_backward_pipeline(
        self,
        data: Any,
        scaler: Any = None,
        forward_only: Any = False,
        compute_loss: Any = True,
        static_scheduler: Any = False,
        return_micro_batch_loss: Any = False,
    ) -> Any:
        """Forward and, unless ``forward_only``, backward of a batch without an update; returns as ``train_batch`` does.

        With ``compute_loss=False`` (forward only) the outputs of the micro-batches, on the last stage.
        """
        if static_scheduler:
            return self.get_static_scheduler()
        if not compute_loss and not forward_only:
            raise ValueError("compute_loss=False goes with forward_only=True")
        return self.runner.run(data, scaler, Kind(not forward_only, compute_loss, return_micro_batch_loss))


class VirtualPipelineParallel(_Interleaved, PipelineParallelWithInterleave):
    """Interleaved 1F1B (VPP) for any accumulate_steps. ``isinstance(…, PipelineParallelWithInterleave)`` holds."""

    _hooks_class = BubbleHooks


class VirtualPipelineParallelFthenB(_Interleaved, PipelineParallelWithInterleaveFthenB):
    """All forwards, then all backwards, in several chunks a rank."""

    default_schedule = "FthenB"


def engine_for(layers: Any, hcg: Any, strategy: Any) -> tuple[type, Options, str]:
    """The engine that options and selector's rule pick for a PipelineLayer; (engine class, options, why)."""
    options = read_options(strategy.pipeline_configs, strategy.hybrid_configs["pp_configs"])
    schedule, chunks = options.schedule, layers.get_num_virtual_stages()
    m, p = strategy.pipeline_configs["accumulate_steps"], hcg.get_pipe_parallel_world_size()
    name, why = schedule.choice.name, "as asked for"
    if name == BY_RULE and schedule.least_memory and chunks > 1:
        choice = parse_schedule(LEAST_MEMORY)._replace(engine=schedule.choice.engine)
        options = options._replace(schedule=dataclasses.replace(schedule, choice=choice))
        name, why = choice.name, "best_unbalanced_scheduler: the fewest activations"
    if name == BY_RULE:
        name = select(p, chunks, m)
        why = f"by rule for accumulate_steps={m}, pp_degree={p}, {chunks} chunks"
    if chunks == 1:
        return PipelineParallel1F1B, options, why
    return (VirtualPipelineParallelFthenB if name == "FthenB" else VirtualPipelineParallel), options, why
