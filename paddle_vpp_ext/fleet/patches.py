"""What is replaced in other modules, and how it comes back."""

from typing import Any, Callable


class Patches:
    """Replacements that ``undo`` takes back, the last one first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def __bool__(self) -> bool:
        """Whether anything is replaced."""
        return bool(self._undo)

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Sets an attribute that ``owner`` has."""
        old = getattr(owner, name)
        setattr(owner, name, new)
        self.on_undo(lambda: setattr(owner, name, old))

    def on_undo(self, function: Callable[[], Any]) -> None:
        """Has ``undo`` call ``function``, too."""
        self._undo.append(function)

    def undo(self) -> None:
        """Restores what was replaced; a second call does nothing."""
        while self._undo:
            self._undo.pop()()
