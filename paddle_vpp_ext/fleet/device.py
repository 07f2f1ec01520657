"""What kind of device this process computes on: the only file that asks.

``current()`` answers with an object that knows how to wait for the device, to mark moments and bytes
on it, and to run something beside its computation.
"""

import threading
import time
from typing import Any, Callable, NamedTuple, Union

import paddle


class Mark(NamedTuple):
    """A moment of a device, and the bytes that were allocated then."""

    moment: Any
    allocated: int


class Cpu:
    """The host itself: computation is done when the call returns."""

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def mark(self) -> Mark:
        """This moment."""
        return Mark(time.perf_counter(), paddle.base.core.host_memory_stat_current_value("Allocated", 0))

    def milliseconds(self, start: Mark, end: Mark) -> float:
        """From one mark to a later one."""
        return (end.moment - start.moment) * 1e3

    def start_aside(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Runs ``function`` in a thread; returns what waits for its result, or raises what it raised."""
        outcome = {}
        has_grad = paddle.is_grad_enabled()  # it is a state of the thread

        def work():
            try:
                with paddle.set_grad_enabled(has_grad):
                    outcome["value"] = function()
            except BaseException as error:
                outcome["error"] = error

        thread = threading.Thread(target=work, daemon=True)
        thread.start()

        def wait():
            thread.join()
            if "error" in outcome:
                raise outcome["error"]
            return outcome["value"]

        return wait


class Accelerator:
    """A device with streams, which computes what it was given some time later: a GPU, an XPU, or one behind a plug-in.

    ``kind`` as in ``paddle.device.get_device()``. On GPUs it was not run on any machine of this project.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._side_stream: Any = None

    def synchronize(self) -> None:
        """Waits until the device has done all that it was given."""
        paddle.device.synchronize()

    def mark(self) -> Mark:
        """This moment of the computing stream: by an event on a GPU, without a wait of the host; else the host waits for it."""
        if self.kind != "gpu":
            self.synchronize()
            return Mark(time.perf_counter(), 0)
        event = paddle.device.cuda.Event(enable_timing=True)  # paddle.device.Event cannot be made the same way in all releases
        event.record()
        return Mark(event, paddle.device.cuda.memory_allocated())

    def milliseconds(self, start: Mark, end: Mark) -> float:
        """From one mark to a later one; the host waits for the latter."""
        if self.kind != "gpu":
            return (end.moment - start.moment) * 1e3
        end.moment.synchronize()
        return start.moment.elapsed_time(end.moment)

    def start_aside(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Runs ``function`` on a stream of its own, after all that was given before; what is returned has the device wait for it.

        On other devices than a GPU it just runs: right, and not beside anything.
        """
        if self.kind != "gpu":
            done = function()
            return lambda: done
        cuda = paddle.device.cuda
        self._side_stream = side = self._side_stream or cuda.Stream()
        side.wait_stream(cuda.current_stream())
        with cuda.stream_guard(side):
            value = function()

        def wait():
            cuda.current_stream().wait_stream(side)
            return value

        return wait


_cpu = Cpu()
_accelerators: dict[str, Accelerator] = {}


def kind() -> str:
    """What this process computes on, by Paddle's word: cpu, gpu, xpu, or a plug-in's name. A GPU build told to run on CPU is a CPU."""
    return str(paddle.device.get_device()).partition(":")[0]


def is_cpu() -> bool:
    """Whether this process computes on the CPU."""
    return kind() == "cpu"


def current() -> Union[Cpu, Accelerator]:
    """This process's device."""
    name = kind()
    return _cpu if name == "cpu" else _accelerators.setdefault(name, Accelerator(name))
