"""What the engine asks of a transport, and what each kind promises."""

from typing import Any, Callable, NamedTuple, Optional, Protocol

from ...executor import Transport


class Promises(NamedTuple):
    """How a kind of transport carries a step, known before it is made: plans are placed for it.

    ``blocking``: an exchange is waited for before anything else is done. ``serial_headers``: in a step with headers an
    exchange holds one transfer, which then is several messages. ``one_kind``: activations and gradients have a
    communicator each, so an exchange holds one kind.
    """

    blocking: bool
    serial_headers: bool
    one_kind: bool


class PipelineTransport(Transport, Protocol):
    """A transport between the stages of one pipeline. All ranks make it together."""

    def begin(self, with_headers: bool) -> None:
        """Starts a step. With headers every activation is preceded by its signature."""

    def gather(self, value: Any) -> list[Any]:
        """Everybody's ``value`` (plain data that JSON can hold), in the order of the stages. The host waits."""

    def close(self) -> None:
        """Ends it; what is under way here and at the other ends fails."""


class Waits(Protocol):
    """Who is told what this rank waits for: ``waits`` is (what, as a function to text; the peer's global rank; since when), or None."""

    waits: Optional[tuple[Callable[[], str], int, float]]


class Board(Protocol):
    """Where failures of other ranks are read."""

    def look(self) -> bool:
        """Raises if another rank has failed. False if the board does not answer."""
