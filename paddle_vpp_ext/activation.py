"""``PADDLE_VPP_EXT=1``: ``enable()`` in a script that does not mention the package.

Python imports this module at its start when the variable is set: the line in paddle_vpp_ext.pth, which pip
installs into site-packages, says so. Every Python that the variable reaches does, pip's and the launcher's too,
so nothing is imported here but what Python has loaded already. ``enable()`` follows at the end of ``import paddle``.
"""

import os
import sys

TYPE_CHECKING = False  # typing's own would have to be imported
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Optional

VARIABLE = "PADDLE_VPP_EXT"
PTH = "paddle_vpp_ext.pth"


def is_wanted(environment: "Mapping[str, str]" = os.environ) -> bool:
    """Whether the variable asks for the extension. ValueError, which shows its value, if that is neither 1 nor 0."""
    value = environment.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={value!r}: write 1 to train with paddle_vpp_ext, 0 to train without")
    return value == "1"


class EnableAfterPaddle:
    """A finder that has ``enable()`` called at the end of the first ``import paddle``; all else is left to the others."""

    def find_spec(self, name: str, path: "Optional[Sequence[str]]" = None, target: "Optional[ModuleType]" = None) -> "Optional[ModuleSpec]":
        if name != "paddle":
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not self and hasattr(finder, "find_spec") else None
            if spec is not None:
                if spec.loader is not None:  # a namespace package has none
                    self._hook(spec.loader)
                return spec
        return None

    def _hook(self, loader):
        # In the loader itself, not in one around it: those who only look for Paddle, or for its files, find what they would.
        plain = loader.exec_module

        def exec_module(module):
            loader.exec_module = plain
            plain(module)
            uninstall()
            enable()

        loader.exec_module = exec_module


def enable() -> None:
    """``paddle_vpp_ext.enable()``, if the variable asks for it; what it raises says which variable asked."""
    try:
        if is_wanted():
            from . import enable

            enable()
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(f"{VARIABLE}=1, but {error}; unset {VARIABLE} to train without paddle_vpp_ext") from error


def install() -> None:
    """Adds the finder, unless the variable says 0. A wrong value waits, too: the error belongs to a training, not to every Python."""
    if os.environ.get(VARIABLE, "0") != "0" and "paddle" not in sys.modules:
        uninstall()
        sys.meta_path.insert(0, EnableAfterPaddle())


def uninstall() -> None:
    """Removes the finder."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, EnableAfterPaddle)]


install()
