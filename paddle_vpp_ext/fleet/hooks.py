"""Paddle's hooks and timers around the actions of a step, fired where Paddle fires them."""


class StepHooks:
    """Of all engines: user hooks before forwards and backwards, and timers. ``count``: how many of the kind came before."""

    def before_forward(self, count: int) -> None:
        if self.user_hooks_enabled and getattr(self, "forward_hooks", None):
            self.forward_hooks.run_hook()
        self._timer("forward_step", "start")

    def after_forward(self, count: int) -> None:
        self._timer("forward_step", "stop")

    def before_backward(self, count: int) -> None:
        if self.user_hooks_enabled and getattr(self, "backward_hooks", None):
            self.backward_hooks.run_hook()
        self._timer("backward_step", "start")

    def after_backward(self, count: int) -> None:
        self._timer("backward_step", "stop")

    def begin_hooks(self) -> None:
        """Before a step's first action."""
        if not hasattr(self, "forward_hooks"):
            return
        self._reset_user_hooks_status()
        for hooks in (self.forward_hooks, self.backward_hooks):
            hooks.set_hooks_capacity(self._num_chunks * self.accumulate_steps)

    def end_hooks(self, training: bool) -> None:
        """After a step's last action."""
        if self._enable_timer:
            self.timer_printer()
        if hasattr(self, "processed_steps"):
            self.processed_steps += 1
        if training and hasattr(self, "_check_user_hooks_status_at_step_end"):
            self._check_user_hooks_status_at_step_end()

    def _timer(self, name, action):
        if self._enable_timer:
            getattr(self.timers(name), action)()

    def _timed(self, name, function):
        self._timer(name, "start")
        result = function()
        self._timer(name, "stop")
        return result


class BubbleHooks:
    """Of interleaved 1F1B: the hooks in bubbles. Comes before a StepHooks among the bases.

    One for each bubble of an action, 2p - 2 a step: rank r has r at the start, p-1-r before the steady phase and as
    many after it, one an action, and r at the end.
    """

    def begin_hooks(self):
        super().begin_hooks()
        if self._has_bubble_hooks():
            self._startup = self._startup_forwards()
            self._run_bubble_hooks(until=self.stage_id)

    def after_forward(self, count):
        super().after_forward(count)
        if self._has_bubble_hooks() and count < self._startup:
            self._run_bubble_hooks(until=self.num_stages - (self._startup - count))

    def before_backward(self, count):
        cooldown = self._num_chunks * self.accumulate_steps - getattr(self, "_startup", 0)
        if self._has_bubble_hooks() and count >= cooldown:
            before = self.num_stages - 1
            self._run_bubble_hooks(until=before)
            if self.bubble_hooks.current_id < before + self.num_stages - 1 - self.stage_id:
                self._run_bubble_hooks(until=before + count - cooldown + 1)
        super().before_backward(count)

    def end_hooks(self, training):
        if training and self._has_bubble_hooks():
            self._run_bubble_hooks(until=2 * self.num_stages - 2)
        super().end_hooks(training)

    def _startup_forwards(self):
        """Forwards before the first that has a backward after it."""
        plan, order = self.plan(), self.plan().orders[self.stage_id]
        if plan.startups:
            return plan.startups[self.stage_id]
        return next(k for k, action in enumerate(order) if action.kind != "F") - 1

    def _has_bubble_hooks(self):
        return self.user_hooks_enabled and getattr(self, "bubble_hooks", None) is not None

    def _run_bubble_hooks(self, until):
        while self.bubble_hooks.current_id < until:
            self.bubble_hooks.run_hook()
