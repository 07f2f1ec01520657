"""What makes Paddle fleet start and run on CPU-only Paddle.

`install` mends, and `uninstall` restores:

* groups of gloo: each gets a TCPStore of its own. In Paddle all groups meet through one store, partly under
  the same keys, so that a new group can read the addresses of an older one and hang;
* `ParallelEnv().device_id`, which `PipelineLayer` reads and CPU wheels never set;
* `paddle.device.synchronize` and `paddle.device.cuda.synchronize`, which raise on CPU although there is nothing
  to wait for (Paddle's timers and profiling call them);
* `Tensor.cuda()` in Paddle's own checkpoint code, which calls it whatever the device: it gets a copy, on the CPU;
* recompute (`recompute_interval`, too), which refuses the CPU although it keeps its random state as it does a GPU's;
* `PADDLE_DISTRI_BACKEND`, which only Paddle's launcher sets to gloo.

On a Paddle built for CUDA, XPU or a custom device both do nothing. The private names of Paddle that this takes are
used in this file only, and each is left alone where a release does not have it.
"""

import contextlib
import functools
import importlib
import os
import sys
from typing import Any

import paddle

from . import group_stores
from .device import is_cpu
from .patches import Patches

_CHECKPOINT_CODE = ("paddle.distributed.flex_checkpoint.", "paddle.distributed.checkpoint.")

_patches = Patches()


def install() -> None:
    """Make fleet work on this process's CPU-only Paddle. Call it before `fleet.init`; a second call does nothing."""
    if _patches or not is_cpu():
        return
    try:
        _install_backend()
        _install_device_id()
        _install_synchronize()
        _install_checkpoint_copies()
        _install_recompute()
        group_stores.install(_patches)
    except BaseException:
        uninstall()
        raise


def uninstall() -> None:
    """Restore what `install` replaced. Groups made in between keep working."""
    _patches.undo()


def _install_backend():
    name = "PADDLE_DISTRI_BACKEND"
    old = os.environ.get(name)
    if old in (None, "auto"):
        os.environ[name] = "gloo"
        _patches.on_undo(lambda: os.environ.pop(name, None) if old is None else os.environ.update({name: old}))


def _install_device_id():
    env = paddle.distributed.ParallelEnv
    if not hasattr(env, "_device_id"):
        env._device_id = 0  # a default of the class: what an instance sets still wins
        _patches.on_undo(lambda: delattr(env, "_device_id"))


def _install_synchronize():
    for module in (paddle.device, getattr(paddle.device, "cuda", None)):
        if module is not None and hasattr(module, "synchronize"):
            _patches.replace(module, "synchronize", _harmless_on_cpu(module.synchronize))


def _harmless_on_cpu(synchronize):
    @functools.wraps(synchronize)
    def wrapper(device=None):
        if device is None or isinstance(device, paddle.CPUPlace) or device == "cpu":
            return None
        return synchronize(device)

    return wrapper


def _install_checkpoint_copies():
    cuda = getattr(paddle.Tensor, "cuda", None)
    if cuda is None:
        return

    @functools.wraps(cuda)
    def wrapper(self, *args, **kwargs):
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not caller.startswith(_CHECKPOINT_CODE):
            return cuda(self, *args, **kwargs)  # to a user's script it says as before that there is no GPU
        copy = self._copy_to(paddle.CPUPlace(), True)
        copy.stop_gradient, copy.persistable = self.stop_gradient, self.persistable
        return copy

    _patches.replace(paddle.Tensor, "cuda", wrapper)


def _install_recompute():
    for name in ("recompute", "recompute_hybrid"):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(f"paddle.distributed.fleet.recompute.{name}")
            _patches.replace(module, "paddle", _PaddleOfAGpu())


class _PaddleOfAGpu:
    """paddle with a GPU's name for the device: the one question that recompute has about it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(paddle, name)

    @staticmethod
    def get_device() -> str:
        return "gpu:0"
