"""Paddle's hooks and timers around the actions of a step, fired where Paddle fires them."""

from collections.abc import Sequence
from typing import Any, Callable, TypeVar

from ...instruments import Instrument
from ...schedule.action import Action

T = TypeVar("T")


class StepHooks(Instrument):
    """Of all engines of Paddle's: user hooks before forwards and backwards, and timers.

    A forward's come before those of a backward that runs together with it.
    """

    def __init__(self, engine: Any):
        self._engine = engine

    def begin_program(self, training: bool, program: Sequence[Any]) -> None:
        self._forwards = self._backwards = 0
        engine = self._engine
        if not hasattr(engine, "forward_hooks"):
            return
        engine._reset_user_hooks_status()
        for hooks in (engine.forward_hooks, engine.backward_hooks):
            hooks.set_hooks_capacity(engine._num_chunks * engine.accumulate_steps)

    def before(self, actions: Sequence[Action]) -> None:
        for kind, chunk, _ in actions:
            self._engine.set_virtual_pipeline_rank(chunk)
            if kind == "F":
                self.before_forward(self._forwards)
            elif kind != "W":
                self.before_backward(self._backwards)

    def after(self, actions: Sequence[Action], received: Sequence[Any], made: Sequence[Any]) -> None:
        for kind, _, _ in actions:
            if kind == "F":
                self.after_forward(self._forwards)
                self._forwards += 1
            elif kind != "W":
                self._timer("backward_step", "stop")
                self._backwards += 1

    def before_forward(self, count: int) -> None:
        """``count`` forwards of this step came before."""
        self._run_user_hooks("forward_hooks")
        self._timer("forward_step", "start")

    def after_forward(self, count: int) -> None:
        """``count`` forwards of this step came before."""
        self._timer("forward_step", "stop")

    def before_backward(self, count: int) -> None:
        """``count`` backwards of this step came before."""
        self._run_user_hooks("backward_hooks")
        self._timer("backward_step", "start")

    def end_program(self, training: bool) -> None:
        engine = self._engine
        if engine._enable_timer:
            engine.timer_printer()
        if hasattr(engine, "processed_steps"):
            engine.processed_steps += 1
        if training and hasattr(engine, "_check_user_hooks_status_at_step_end"):
            engine._check_user_hooks_status_at_step_end()

    def timed(self, name: str, function: Callable[[], T]) -> T:
        """The function's result, under Paddle's timer of that name."""
        self._timer(name, "start")
        result = function()
        self._timer(name, "stop")
        return result

    def _run_user_hooks(self, name):
        if self._engine.user_hooks_enabled and getattr(self._engine, name, None):
            getattr(self._engine, name).run_hook()

    def _timer(self, name, action):
        if self._engine._enable_timer:
            getattr(self._engine.timers(name), action)()


class BubbleHooks(StepHooks):
    """Of interleaved 1F1B: also the hooks in bubbles.

    One for each bubble of an action, 2p - 2 a step: rank r has r at the start, p-1-r before the steady phase and as
    many after it, one an action, and r at the end.
    """

    def begin_program(self, training: bool, program: Sequence[Any]) -> None:
        super().begin_program(training, program)
        if self._has_bubble_hooks():
            self._startup = self._startup_forwards()
            self._run_bubble_hooks(until=self._engine.stage_id)

    def after_forward(self, count: int) -> None:
        super().after_forward(count)
        if self._has_bubble_hooks() and count < self._startup:
            self._run_bubble_hooks(until=self._engine.num_stages - (self._startup - count))

    def before_backward(self, count: int) -> None:
        if self._has_bubble_hooks():
            engine = self._engine
            cooldown, before = engine._num_chunks * engine.accumulate_steps - self._startup, engine.num_stages - 1
            if count >= cooldown:
                self._run_bubble_hooks(until=before)
                if engine.bubble_hooks.current_id < before + engine.num_stages - 1 - engine.stage_id:
                    self._run_bubble_hooks(until=before + count - cooldown + 1)
        super().before_backward(count)

    def end_program(self, training: bool) -> None:
        if training and self._has_bubble_hooks():
            self._run_bubble_hooks(until=2 * self._engine.num_stages - 2)
        super().end_program(training)

    def _startup_forwards(self):
        """Forwards before the first that has a backward after it."""
        plan, rank = self._engine.plan(), self._engine.stage_id
        if plan.startups:
            return plan.startups[rank]
        return next(k for k, action in enumerate(plan.orders[rank]) if action.kind != "F") - 1

    def _has_bubble_hooks(self):
        return self._engine.user_hooks_enabled and getattr(self._engine, "bubble_hooks", None) is not None

    def _run_bubble_hooks(self, until):
        while self._engine.bubble_hooks.current_id < until:
            self._engine.bubble_hooks.run_hook()
