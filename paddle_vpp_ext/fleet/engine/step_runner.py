"""Runs the steps of one engine: agrees on each with the other ranks, runs its program, shares gradients and losses."""

from typing import Any, Callable, NamedTuple, Optional, TypeVar, cast

import paddle

from ...executor import Stage, run
from ...instruments import Instrument, Instruments
from ...log import logger
from ...schedule.costs import Costs
from ..messages import Boundaries
from ..observe.failure import PeerFailed
from ..observe.finite import FiniteCheck
from ..observe.hooks import StepHooks
from ..observe.profile import ProfiledSteps
from ..observe.trace_file import open_recorder
from ..observe.watchdog import Watchdog
from ..stage.data import MicroBatches, shapes_of
from ..stage.pipeline_stage import PipelineStage
from ..stage.shared_weights import SharedWeights
from .agreement import check_agreement, check_shared, facts_of, tied_weights
from .connection import Connection
from .losses import share_losses
from .options import EngineOptions
from .plans import Plans

T = TypeVar("T")


class Kind(NamedTuple):
    """How a step is run: training or evaluation, with or without a loss, the loss per micro-batch or its mean."""

    training: bool
    compute_loss: bool
    return_micro_batch_loss: bool


class StepRunner:
    """``engine``: one of the classes in pipeline.py, which has Paddle's groups, flags and hooks.

    ``plans``, ``stage``, ``connection``, ``boundaries``: what a step is made of. ``split_backwards``: whole backwards are run
    in two parts, for measuring them.
    """

    def __init__(self, engine: Any, options: EngineOptions, make_plans: Callable[..., Plans], hooks: StepHooks):
        self._engine, self._options, self._hooks = engine, options, hooks
        self.stage_id: int = engine.stage_id
        self.split_backwards = False
        self.boundaries = Boundaries(options.dynamic_shape)
        self._watchdog = Watchdog(engine.pp_group.ranks, engine.global_rank, options.timeout)
        self.connection = Connection(engine, options.overlap_p2p, options.timeout, self.boundaries, self._watchdog)
        self.ranks = self.connection.ranks
        self.shared_weights = SharedWeights(engine._layers, self.ranks, self.stage_id)
        self._instruments: list[Instrument] = [self._watchdog, hooks]
        if options.check_finite:
            self._instruments.append(FiniteCheck())
        self._look = Instruments(self._instruments)
        self.connection.open()
        when = "when the model is wrapped"
        check_agreement(self.transport.gather(facts_of(engine)), self.ranks, when)
        check_shared(self.transport.gather(tied_weights(engine._layers)), self.ranks, when)
        self.plans = make_plans(self.connection.promises)

    def prepare(self, stage: PipelineStage, profile: Optional[int], save: Optional[str]) -> None:
        """Takes the stage, and agrees with the other ranks on the plan and on what is recorded and measured."""
        self.stage = stage
        self._agree_on_plan()
        if profile:
            self.add(ProfiledSteps(self, profile, save))
        if self._options.trace:
            self.add(open_recorder(self, self._options.trace))

    @property
    def transport(self) -> Any:
        """The present connection's; None after a step that failed."""
        return self.connection.transport

    @property
    def accumulate_steps(self) -> int:
        """How many micro-batches the next step has: clients change it."""
        return self._engine.accumulate_steps

    def add(self, instrument: Instrument) -> None:
        """Has ``instrument`` look on as the outermost, from the next step on."""
        self._instruments.insert(0, instrument)
        self._look = Instruments(self._instruments)

    def remove(self, instrument: Instrument) -> None:
        """The inverse of ``add``."""
        self._instruments.remove(instrument)
        self._look = Instruments(self._instruments)

    def plan_for(self, costs: Costs) -> None:
        """Plans anew, now for measured costs; goes on as before, with a warning, where no plan fits into the memory."""
        if self.plans.replan(costs, self._agree_on_plan) and self.stage_id == 0:
            logger.info(f"{self.plans.text} goes on with {self.plans.plan(self.accumulate_steps).note} (milliseconds)")

    def _agree_on_plan(self):
        """A schedule that cannot run, or that the ranks have registered differently, is an error on all of them now."""
        try:
            fact = self.plans.plan(self.accumulate_steps).digest
        except ValueError as error:
            fact = str(error)
        check_agreement(self.transport.gather({"plan": fact}), self.ranks, "when the model is wrapped")
        self.plans.program(self.accumulate_steps, training=True, with_headers=False)  # its error, or that of the plan

    def run(self, data: Any, scaler: Any, kind: Kind) -> Any:
        """One step without an update of the weights. Returns the loss on all ranks, without a loss the outputs (last stage only).

        What fails on one rank fails on all; the next step connects anew.
        """
        self.connection.open()
        look, engine = self._look, self._engine
        look.begin_step(kind.training)
        self._watchdog.begin()
        try:
            with_headers, batches = self._agree_on_step(data, kind)
        except BaseException:
            self._watchdog.end()
            raise
        engine.scaler = scaler
        engine.total_loss = None
        engine.micro_batch_id = 0
        engine.user_hooks_enabled = kind.training
        try:
            self._run_program(batches, scaler, kind, with_headers, look)
            losses = self.stage.losses() if kind.compute_loss and self.stage_id == len(self.ranks) - 1 else None
            share = lambda: share_losses(engine, losses, kind.return_micro_batch_loss, self._gather)
            result = self._hooks.timed("broadcast_final_loss", share)
            if kind.training:
                engine.gradient_sync.finish()
                self._hooks.timed("allreduce_shared_weight_gradients", self.shared_weights.sum_gradients)
            look.end_program(kind.training)
        except BaseException as error:
            self._give_up(error)
            raise
        self._watchdog.end()
        look.end_step()
        if engine._clear_every_step_cache:
            self.boundaries.forget()
        return result if kind.compute_loss else self.stage.outputs()

    def _run_program(self, batches, scaler, kind, with_headers, look):
        engine, transport = self._engine, self.transport
        self.stage.begin(batches, kind.training, kind.compute_loss, engine.loss_fn_idx, scaler)
        if kind.training:
            engine.gradient_sync.begin()
        transport.begin(with_headers)
        program = self.plans.program(self.accumulate_steps, kind.training, with_headers, self.split_backwards)
        look.begin_program(kind.training, program)
        with paddle.set_grad_enabled(kind.training):
            stage = cast(Stage, self.stage)  # it has of a Stage what its schedule's programs call
            run(program, stage, transport, self._options.overlap_p2p and not transport.blocking, look)
        engine.set_virtual_pipeline_rank(0)

    def together(self, function: Callable[[], T]) -> T:
        """The result of what all ranks do together outside of a step; where it fails, it fails on all."""
        try:
            return function()
        except BaseException as error:
            self._give_up(error)
            raise

    def _give_up(self, error):
        """Ends a failed step here and, by what is posted and closed, on the other ranks."""
        board = self.connection.board
        assert board is not None, "the connection was open"
        if not isinstance(error, PeerFailed):
            board.post(error)
        if isinstance(error, TimeoutError):
            error.args = (str(error) + board.who_is_behind(error),)
        self._watchdog.log(error)
        self._watchdog.waits = None
        self._watchdog.end()
        self.connection.close()
        board.stay()
        self.boundaries.forget()

    def _gather(self, value):
        self._look.waiting(None)
        values = self.transport.gather(value)
        self._look.waited(None)
        return values

    def _agree_on_step(self, data, kind):
        """Whether messages need headers, and the micro-batches; a ValueError on all ranks if they cannot go together."""
        engine, m = self._engine, self.accumulate_steps
        first, last = self.stage_id == 0, self.stage_id == len(self.ranks) - 1
        batches, digest, problem, shapes = None, None, None, None
        try:
            digest = self.plans.plan(m, kind.training).digest
            batches = MicroBatches(data, m, engine.micro_batch_size, first, last and kind.compute_loss)
            shapes = shapes_of(batches.inputs(0)) if first else None
        except Exception as error:
            problem = error
        mine = {
            "accumulate_steps": m,
            "plan": digest,
            "training, compute_loss, return_micro_batch_loss": list(kind),
            "problem": problem and f"{type(problem).__name__}: {problem}",
            "shapes": shapes,
        }
        facts = self.together(lambda: self._gather(mine))
        if problem:
            raise problem
        for rank, other in zip(self.ranks, facts):
            if other["problem"]:
                raise ValueError(f"rank {rank} cannot do this step: {other['problem']}")
        key = kind.training, repr(facts[0]["shapes"])
        for other in facts:
            del other["shapes"]
        check_agreement(facts, self.ranks, "on the step")
        with_headers = not self.boundaries.knows(key)
        self.boundaries.begin(key)
        return with_headers, batches
