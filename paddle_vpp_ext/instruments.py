"""The one seam at which others look on while a step runs. What they get is opaque here as it is to the executor."""

from collections.abc import Sequence
from typing import Any, Callable, Optional

from .schedule.action import Action
from .schedule.dependencies import Transfer


class Instrument:
    """What looks on while steps run: measures, checks, tells. Every method does nothing here; one that is not overridden costs nothing.

    A step is from ``begin_step`` to ``end_step``, its program from ``begin_program`` to ``end_program``: who runs
    steps calls these four, and ``waiting`` and ``waited`` with None where all ranks meet. After a step that failed there is
    no end. Of several instruments the first is the outermost: begins and befores are called from
    first to last, ends and afters from last to first.
    """

    def begin_step(self, training: bool) -> None:
        """Before anything of a step is done."""

    def begin_program(self, training: bool, program: Sequence[Any]) -> None:
        """Before the first instruction."""

    def instruction(self, instruction: Any) -> None:
        """Before each instruction."""

    def before(self, actions: Sequence[Action]) -> None:
        """Before an action, or two that run together; what it needs is there, unless two overlap with their transfers."""

    def after(self, actions: Sequence[Action], received: Sequence[Any], made: Sequence[Any]) -> None:
        """After it; for each action what came in and what goes out, None where there is nothing."""

    def posting(self, sends: Sequence[tuple[Transfer, Any]], receives: Sequence[Transfer]) -> None:
        """Before an exchange is handed to the transport."""

    def posted(self, sends: Sequence[tuple[Transfer, Any]], receives: Sequence[Transfer]) -> None:
        """After it."""

    def waiting(self, transfer: Optional[Transfer]) -> None:
        """Before a transfer is waited for; None: all ranks."""

    def waited(self, transfer: Optional[Transfer]) -> None:
        """After it."""

    def freeing(self, transfer: Transfer) -> None:
        """Before what was sent is freed."""

    def freed(self, transfer: Transfer) -> None:
        """After it."""

    def end_program(self, training: bool) -> None:
        """After the last instruction, and after the gradients and the loss are shared."""

    def end_step(self) -> None:
        """After a step that did not fail."""


_INWARD = ("begin_step", "begin_program", "instruction", "before", "posting", "waiting", "freeing")
_OUTWARD = ("after", "posted", "waited", "freed", "end_program", "end_step")


class Instruments:
    """Several instruments as one: each event is one call, of nothing where nobody looks."""

    begin_step: Callable[[bool], None]
    begin_program: Callable[[bool, Sequence[Any]], None]
    instruction: Callable[[Any], None]
    before: Callable[[Sequence[Action]], None]
    after: Callable[[Sequence[Action], Sequence[Any], Sequence[Any]], None]
    posting: Callable[[Sequence[tuple[Transfer, Any]], Sequence[Transfer]], None]
    posted: Callable[[Sequence[tuple[Transfer, Any]], Sequence[Transfer]], None]
    waiting: Callable[[Optional[Transfer]], None]
    waited: Callable[[Optional[Transfer]], None]
    freeing: Callable[[Transfer], None]
    freed: Callable[[Transfer], None]
    end_program: Callable[[bool], None]
    end_step: Callable[[], None]

    def __init__(self, instruments: Sequence[Instrument] = ()):
        for names, ordered in ((_INWARD, list(instruments)), (_OUTWARD, list(instruments)[::-1])):
            for name in names:
                calls = [getattr(i, name) for i in ordered]
                calls = [call for call in calls if getattr(call, "__func__", None) is not getattr(Instrument, name)]
                setattr(self, name, _as_one(calls))


def _as_one(calls):
    if len(calls) == 1:
        return calls[0]

    def call_all(*what):
        for call in calls:
            call(*what)

    return call_all if calls else _nothing


def _nothing(*what):
    pass
