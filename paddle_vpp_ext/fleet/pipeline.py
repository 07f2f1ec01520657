"""The engines: Paddle's pipeline classes with a step that runs a plan."""
import contextlib
import dataclasses
import itertools
from typing import Dict, NamedTuple, Optional, Tuple

import paddle
from paddle.distributed.fleet.meta_parallel import PipelineParallel, PipelineParallelWithInterleave
from paddle.distributed.fleet.meta_parallel.pipeline_parallel import PipelineParallelWithInterleaveFthenB

from ..config import BY_RULE, LEAST_MEMORY, Options, parse_schedule, read_options
from ..executor import resolve, run
from ..log import logger
from ..schedule.costs import UNIT, Costs
from ..schedule.plan import Plan, make_plan
from ..schedule.registry import SCHEDULES
from ..schedule.select import select
from . import cpu, gradient_sync, versions
from .agreement import check_agreement, check_shared, tied_weights
from .data import MicroBatches, shapes_of
from .failure import FailureBoard, PeerFailed
from .finite import FiniteTransport
from .hooks import BubbleHooks, StepHooks
from .messages import Boundaries, dtype_name
from .position import Position
from .profile import ProfiledSteps
from .recording import RecordingStage
from .overlapped_stage import OverlappedStage
from .shared_weights import SharedWeights
from .split_stage import SplitStage
from .stage import PipelineStage
from .trace_file import record_steps


_engines = itertools.count()


class _Step(NamedTuple):
    """How a step is run: training or evaluation, with or without a loss, the loss per micro-batch or its mean."""

    training: bool
    compute_loss: bool
    return_micro_batch_loss: bool


class _PlannedPipeline(StepHooks):
    """What our engines have in common. Comes before a class of Paddle's among the bases."""

    # The engine's own schedule when the user wishes none, and when fleet's selector made it.
    default_schedule = "VPP"

    def __init__(self, layers, hcg, strategy, options: Options = None):
        if options is None:
            options = read_options(strategy.pipeline_configs, strategy.hybrid_configs["pp_configs"])
        self.options = options
        flags = strategy.hybrid_configs["pp_configs"]
        with versions.flags_off(flags, "best_unbalanced_scheduler", "profiling"):  # ours go together with everything
            super().__init__(layers=layers, hcg=hcg, strategy=strategy)
        if getattr(flags, "enable_offload_queue", False) and self.stage_id == 0:
            logger.warning("enable_offload_queue has no effect: activations that wait to be sent stay in the device's memory")
        versions.complete(self)
        self._num_chunks = layers.get_num_virtual_stages()
        self._ranks = list(self.pp_group.ranks)
        self._shared_weights = SharedWeights(layers, self._ranks, self.stage_id)
        self._costs: Optional[Costs] = None  # once they are measured
        self._plans: Dict[Tuple[int, bool], Plan] = {}
        self._steps: Dict[Tuple[int, bool, bool], list] = {}
        self._boundaries = Boundaries(options.dynamic_shape)
        self._number = next(_engines)  # the same on all ranks, which make their engines in one order
        self._attempts = 0
        self._position = Position(self._ranks, self.global_rank, options.timeout)
        self._connect()
        self._agree_on_setup()
        self._overlap_pairs = self._pairs_overlap()
        self._stage = self._stage_class()(self, self._boundaries)
        self._agree_on_plan()
        schedule = options.schedule.options
        if schedule.get("profile"):
            self._run_step = ProfiledSteps(self, schedule["profile"], schedule.get("save"))
        if options.trace:
            record_steps(self, options.trace)

    def _connect(self):
        """Makes the transport; all ranks together, at first and after a step that failed."""
        if self._attempts:
            self._board.check_reachable()
            self._meet_replicas()
        self._attempts += 1
        self._board = FailureBoard(f"{'-'.join(map(str, self._ranks))}/{self._number}/{self._attempts}", self.global_rank, self._position)
        if cpu.is_cpu_only():
            from .channels import Channels
            from .transport import ChannelTransport

            channels = Channels(self._ranks, self.options.timeout)
            self._transport = ChannelTransport(channels, self._boundaries, self._board, self.options.timeout, self._position)
        else:
            from .nccl import NcclTransport

            groups = {"F": self.pp_group, "B": self._second_group() if self.options.overlap_p2p else self.pp_group}
            self._transport = NcclTransport(self._ranks, self.stage_id, groups, self._boundaries)
        if self.options.check_finite:
            self._transport = FiniteTransport(self._transport)

    def _meet_replicas(self):
        """A replica in which the step did not fail is still summing its gradients: they must not meet those of the next step."""
        count = paddle.distributed.get_world_size()
        if count > self.num_stages:
            try:
                self._board.meet(f"{self._number}/{self._attempts}", count, self.options.timeout)
            except TimeoutError as error:
                raise TimeoutError(f"a step failed here, and can only be followed by another if it failed in all replicas: {error}") from None

    def _second_group(self):
        """A second communicator of this pipeline; every process of the job takes part in making those of all pipelines."""
        for ranks in self._hcg.topology().get_comm_list("pipe"):
            group = paddle.distributed.new_group(ranks)
            if self.global_rank in ranks:
                mine = group
        return mine

    def _agree_on_setup(self):
        from .. import __version__

        facts = {
            "stages": self.num_stages,
            "num_virtual_pipeline_stages": self._num_chunks,
            "accumulate_steps": self.accumulate_steps,
            "micro_batch_size": self.micro_batch_size,
            "schedule": self.schedule_text,
            "overlap_p2p_comm": self.options.overlap_p2p,
            "forward_backward_overlap_scheduler": self.options.overlap_pairs,
            "enable_dynamic_shape": self.options.dynamic_shape,
            "delay_scale_loss": self._delay_scale_loss,
            "timeout": self.options.timeout,
            "check_finite": self.options.check_finite,
            "trace": bool(self.options.trace),
            "layers of the model": len(self._layers._layers_desc),
            "default dtype": paddle.get_default_dtype(),
            "paddle_vpp_ext": __version__,
            "paddle": paddle.__version__,
        }
        when = "when the model is wrapped"
        check_agreement(self._transport.gather(facts), self._ranks, when)
        check_shared(self._transport.gather(tied_weights(self._layers)), self._ranks, when)

    def plan_for(self, costs: Costs) -> None:
        """Plans anew, now for measured costs; goes on as before, with a warning, where no plan fits into the memory."""
        before = self._plans, self._steps
        self._costs, self._plans, self._steps = costs, {}, {}
        try:
            self._agree_on_plan()
        except ValueError as error:
            self._costs, (self._plans, self._steps) = None, before
            logger.warning(f"{self.schedule_text} keeps the order that it was measured with: {error}")
            return
        if self.stage_id == 0:
            logger.info(f"{self.schedule_text} goes on with {self.plan().note} (milliseconds)")

    def _agree_on_plan(self):
        """A schedule that cannot run, or that the ranks have registered differently, is an error on all of them now."""
        try:
            fact = self.plan().digest
        except ValueError as error:
            fact = str(error)
        check_agreement(self._transport.gather({"plan": fact}), self._ranks, "when the model is wrapped")
        self.plan()

    # ---- plans

    @property
    def measured_costs(self) -> Optional[Costs]:
        """What ``auto:profile=N`` has measured, in milliseconds and bytes; None before, and with any other schedule."""
        return self._costs

    @property
    def schedule_text(self) -> str:
        """The schedule with its options, as one would write it in schedule_mode."""
        choice = self.options.schedule
        return self.default_schedule if choice.name == BY_RULE and not choice.options else choice.text

    @property
    def _schedule(self) -> str:
        name = self.options.schedule.name
        return self.default_schedule if name == BY_RULE else name

    def _stage_class(self):
        if self._overlap_pairs:
            return OverlappedStage
        return SplitStage if SCHEDULES[self._schedule].splits else PipelineStage

    def _pairs_overlap(self) -> bool:
        """Whether steady forwards and backwards go to the model's ``overlapped_forward_backward``.

        ``overlap=on`` demands it: ValueError where it cannot be. With Paddle's flag a warning says why it is not.
        """
        asked = self.options.schedule.options.get("overlap")
        if not (self.options.overlap_pairs if asked is None else asked):
            return False
        why_not = None
        if "overlap" not in SCHEDULES[self._schedule].keys:
            why_not = f"{self._schedule} has no forwards and backwards in turn"
        elif not hasattr(type(self._layers), "overlapped_forward_backward"):
            why_not = (
                f"{type(self._layers).__name__} has no overlapped_forward_backward; derive it from paddle_vpp_ext.OverlapMixin"
            )
        elif self._layers._recompute_interval > 0:
            why_not = "its layers are recomputed; set recompute_interval to 0"
        if why_not and asked and "overlap" in SCHEDULES[self._schedule].keys:
            raise ValueError(f"{self.schedule_text}: this model cannot overlap forward and backward: {why_not}")
        if why_not:
            logger.warning(f"forward-backward overlap has no effect: {why_not}")
        return not why_not

    def plan(self, training: bool = True) -> Plan:
        """The verified plan for the present ``accumulate_steps``, made once for each."""
        key = self.accumulate_steps, training
        if key not in self._plans:
            # With the rule's options, a schedule of the rule's choice takes those that it has.
            keys = SCHEDULES[self._schedule].keys
            options = {key: value for key, value in self.options.schedule.options.items() if key in keys}
            options.pop("overlap", None)
            if self._costs is not None:
                options = {key: value for key, value in options.items() if key not in ("profile", "save")}
            if self._overlap_pairs and training:
                options["overlap"] = True
            blocking = not cpu.is_cpu_only() and not self.options.overlap_p2p
            self._plans[key] = make_plan(
                self._schedule, self.num_stages, self._num_chunks, self.accumulate_steps, options, blocking, not training, self._costs or UNIT
            )
        return self._plans[key]

    def _resolved(self, training, with_headers):
        key = self.accumulate_steps, training, with_headers
        if key not in self._steps:
            plan, rank = self.plan(training), self.stage_id
            programs = plan.serial_programs if with_headers and not cpu.is_cpu_only() else plan.programs
            startup = plan.startups[rank] if plan.startups else None
            self._steps[key] = resolve(programs[rank], rank, self.num_stages, self._num_chunks, startup)
        return self._steps[key]

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
        self, data, optimizer, lr_scheduler=None, scaler=None, loss_fn_idx=0, return_micro_batch_loss=False
    ):
        """One training step with an update of the weights.

        Returns the mean loss of the batch (a tensor, on every rank), one for each loss function if
        there are several; with ``return_micro_batch_loss`` the m losses of the micro-batches.
        """
        data = self._prepare_training(data, optimizer, lr_scheduler)
        self.loss_fn_idx = self._checked_loss_fn(loss_fn_idx)
        try:
            loss = self._run_step(data, scaler, _Step(True, True, return_micro_batch_loss))
        except BaseException:
            if self._transport is None:  # it failed in the middle: the next step must not add to half of the gradients
                self.optimizer.clear_grad()
            raise
        with paddle.amp.auto_cast(enable=False):
            self._optimizer_step()
        return loss

    def eval_batch(self, data, compute_loss=False, loss_fn_idx=0, return_host_tensor=False):
        """Forward only. Returns the loss as ``train_batch`` does, or the outputs of the micro-batches (last stage only)."""
        self._layers.eval()
        self.loss_fn_idx = self._checked_loss_fn(loss_fn_idx) if compute_loss else loss_fn_idx
        before = self._compute_loss
        self._compute_loss = compute_loss
        try:
            result = self._run_step(data, None, _Step(False, compute_loss, False))
        finally:
            self._compute_loss = before
        if return_host_tensor and not compute_loss:
            for output in result:
                versions.move_to_host(output)
        return result

    def _prepare_training(self, data, optimizer, lr_scheduler):
        # Paddle's refuses missing data on this rank alone, and leaves the others waiting: _agree_on_step tells all.
        prepared = super()._prepare_training(() if data is None else data, optimizer, lr_scheduler)
        return None if data is None else prepared

    def _checked_loss_fn(self, index):
        functions = versions.loss_functions(self._layers)
        if index not in range(len(functions)) or functions[index] is None:
            raise ValueError(f"loss_fn_idx={index}, but the model has {len([f for f in functions if f])} loss functions")
        return index

    def _run_step(self, data, scaler, step: _Step):
        if self._transport is None:
            self._connect()
        self._position.begin()
        try:
            with_headers, batches = self._agree_on_step(data, step)
        except BaseException:
            self._position.end()
            raise
        self.scaler = scaler
        self.total_loss = None
        self.micro_batch_id = 0
        self.user_hooks_enabled = step.training
        try:
            self._stage.begin(batches, step.training, step.compute_loss, self.loss_fn_idx, scaler)
            if step.training and self._comm_overlap:
                gradient_sync.begin(self._all_buffers(), self.accumulate_steps)
            self._transport.begin(with_headers)
            self.begin_hooks()
            with paddle.set_grad_enabled(step.training):
                overlap_transfers = self.options.overlap_p2p and not self._transport.blocking
                program = self._resolved(step.training, with_headers)
                run(program, self._stage, self._transport, overlap_transfers, self._position.run(program))
            self.set_virtual_pipeline_rank(0)
            result = self._timed("broadcast_final_loss", lambda: self._share_losses(step))
            if step.training:
                self._finish_gradients()
            self.end_hooks(step.training)
        except BaseException as error:
            self._give_up(error)
            raise
        self._position.end()
        if self._clear_every_step_cache:
            self._boundaries.forget()
        return result if step.compute_loss else self._stage.outputs()

    def _give_up(self, error):
        """Ends a failed step here and, by what is posted and closed, on the other ranks."""
        if not isinstance(error, PeerFailed):
            self._board.post(error)
        if isinstance(error, TimeoutError):
            error.args = (str(error) + self._board.who_is_behind(error),)
        self._position.log(error)
        self._position.waits = None
        self._position.end()
        self._transport.close()
        self._board.stay()
        self._transport = None
        self._boundaries.forget()

    def together(self, function):
        """The result of what all ranks do together outside of a step's own ``try``; where it fails, it fails on all."""
        try:
            return function()
        except BaseException as error:
            self._give_up(error)
            raise

    def _agree_on_step(self, data, step: _Step):
        """Whether messages need headers, and the micro-batches; a ValueError on all ranks if they cannot go together."""
        first, last = self.stage_id == 0, self.stage_id == self.num_stages - 1
        batches, digest, problem, shapes = None, None, None, None
        try:
            digest = self.plan(step.training).digest
            batches = MicroBatches(data, self.accumulate_steps, self.micro_batch_size, first, last and step.compute_loss)
            shapes = shapes_of(batches.inputs(0)) if first else None
        except Exception as error:
            problem = error
        mine = {
            "accumulate_steps": self.accumulate_steps,
            "plan": digest,
            "training, compute_loss, return_micro_batch_loss": list(step),
            "problem": problem and f"{type(problem).__name__}: {problem}",
            "shapes": shapes,
        }
        facts = self.together(lambda: self._transport.gather(mine))
        if problem:
            raise problem
        for rank, other in zip(self._ranks, facts):
            if other["problem"]:
                raise ValueError(f"rank {rank} cannot do this step: {other['problem']}")
        key = step.training, repr(facts[0]["shapes"])
        for other in facts:
            del other["shapes"]
        check_agreement(facts, self._ranks, "on the step")
        with_headers = not self._boundaries.knows(key)
        self._boundaries.begin(key)
        return with_headers, batches

    def _finish_gradients(self):
        if self._comm_overlap:
            gradient_sync.finish(self._all_buffers())
        self._timed("allreduce_shared_weight_gradients", self._shared_weights.sum_gradients)

    def _share_losses(self, step: _Step):
        """The losses on every rank, with the dtype and shape that they have on the last stage; None without a loss."""
        count, m = len(versions.loss_functions(self._layers)), self.accumulate_steps
        mine, packed = [], None
        with paddle.amp.auto_cast(enable=False), paddle.no_grad():
            if step.compute_loss and self.stage_id == self.num_stages - 1:
                losses = self._stage.losses()
                stacked = [paddle.stack(of_one) for of_one in losses]
                self.total_loss = stacked if versions.total_loss_is_list() else self._sum(losses[self.loss_fn_idx])
                mine = [s.reshape([m]) for s in stacked] if step.return_micro_batch_loss else list(map(self._mean, losses))
                packed = [(dtype_name(loss), loss.shape, loss.astype("float64").flatten().tolist()) for loss in mine]
            packed = self._transport.gather(packed)[-1]
            if packed and not mine:
                mine = [paddle.to_tensor(values, dtype=dtype).reshape(shape) for dtype, shape, values in packed]
        return mine[0] if mine and count == 1 else mine or None

    def _mean(self, losses):
        return self._sum(losses) / self.accumulate_steps if self._delay_scale_loss else self._sum(losses)

    def _sum(self, losses):
        # Added up one after the other, as Paddle does, for the same last bit.
        total = paddle.zeros_like(losses[0])
        for loss in losses:
            total = total + loss
        return total

    @contextlib.contextmanager
    def recording(self):
        """A list that has, after the block, when each action of the steps in it ran, on all ranks.

        Its entries are (rank, start, end, kind, chunk, micro_batch), times in seconds; see
        tools.timeline, picture and trace. All ranks enter and leave it together.
        """
        blocks, plain = [], self._stage
        self._stage = RecordingStage(plain, self.stage_id)
        try:
            yield blocks
        finally:
            recorded, self._stage = self._stage.blocks, plain
        for of_rank in self._transport.gather(recorded):
            blocks += map(tuple, of_rank)

    # ---- what the stage calls

    def set_virtual_pipeline_rank(self, rank):
        self.__dict__["_virtual_pp_rank"] = rank  # a Layer's own __setattr__ takes ten times as long

    def chunk_gradients_final(self, chunk: int) -> None:
        """Starts the synchronisation of a chunk's gradients with the other replicas, where it is overlapped."""
        # With one chunk Paddle's buffers start by themselves, after the last gradient.
        if self._comm_overlap and (self._num_chunks > 1 or cpu.is_cpu_only()):
            gradient_sync.start(self._chunk_2_comm_buffers.get(chunk, ()))

    def _all_buffers(self):
        return [buffer for buffers in self._chunk_2_comm_buffers.values() for buffer in buffers]

    def register_allreduce_overlap_hook(self, model, comm_group, *args, **kwargs):
        """Makes the buffers that synchronise gradients with the other replicas."""
        if cpu.is_cpu_only():
            self._chunk_2_comm_buffers.update(gradient_sync.buffers_of(model, comm_group))
        else:
            super().register_allreduce_overlap_hook(model, comm_group, *args, **kwargs)

    def fused_gradient(self, model, *args, **kwargs):
        """Paddle's buffers of all chunks, also of those after a chunk without weights."""
        trained = gradient_sync.TrainedChunks(model)
        super().fused_gradient(trained, *args, **kwargs)
        made = [self._chunk_2_comm_buffers.pop(k, []) for k in range(len(trained.places))]
        self._chunk_2_comm_buffers.update(zip(trained.places, made))
        return self._chunk_2_comm_buffers


class PipelineParallel1F1B(_PlannedPipeline, PipelineParallel):
    """1F1B: one chunk a rank. ``isinstance(…, PipelineParallel)`` holds."""

    def forward_backward_pipeline(self, data, scaler=None, static_scheduler=False, return_micro_batch_loss=False):
        """Forward and backward of a batch without an update; returns as ``train_batch`` does."""
        if static_scheduler:
            return self.get_static_scheduler()
        return self._run_step(data, scaler, _Step(True, True, return_micro_batch_loss))


class _Interleaved(_PlannedPipeline):
    def _check_sanity(self):
        pass  # Paddle's asserts p > 2 and m >= 2p; the plan is verified for any p >= 2 and m >= 1

    def forward_backward_pipeline(
        self,
        data,
        scaler=None,
        forward_only=False,
        compute_loss=True,
        static_scheduler=False,
        return_micro_batch_loss=False,
    ):
        """Forward and, unless ``forward_only``, backward of a batch without an update; returns as ``train_batch`` does.

        With ``compute_loss=False`` (forward only) the outputs of the micro-batches, on the last stage.
        """
        if static_scheduler:
            return self.get_static_scheduler()
        if not compute_loss and not forward_only:
            raise ValueError("compute_loss=False goes with forward_only=True")
        return self._run_step(data, scaler, _Step(not forward_only, compute_loss, return_micro_batch_loss))


class VirtualPipelineParallel(BubbleHooks, _Interleaved, PipelineParallelWithInterleave):
    """Interleaved 1F1B (VPP) for any accumulate_steps. ``isinstance(…, PipelineParallelWithInterleave)`` holds."""


class VirtualPipelineParallelFthenB(_Interleaved, PipelineParallelWithInterleaveFthenB):
    """All forwards, then all backwards, in several chunks a rank."""

    default_schedule = "FthenB"


def engine_for(layers, hcg, strategy):
    """The engine that options and selector's rule pick for a PipelineLayer; (engine class, options, why)."""
    options = read_options(strategy.pipeline_configs, strategy.hybrid_configs["pp_configs"])
    chunks = layers.get_num_virtual_stages()
    m, p = strategy.pipeline_configs["accumulate_steps"], hcg.get_pipe_parallel_world_size()
    name, why = options.schedule.name, "as asked for"
    if name == BY_RULE and options.least_memory and chunks > 1:
        options = dataclasses.replace(options, schedule=parse_schedule(LEAST_MEMORY)._replace(engine=options.schedule.engine))
        name, why = options.schedule.name, "best_unbalanced_scheduler: the fewest activations"
    if name == BY_RULE:
        name = select(p, chunks, m)
        why = f"by rule for accumulate_steps={m}, pp_degree={p}, {chunks} chunks"
    if chunks == 1:
        return PipelineParallel1F1B, options, why
    return (VirtualPipelineParallelFthenB if name == "FthenB" else VirtualPipelineParallel), options, why
