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

    is_cpu = True

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


class Gpu:
    """A device with streams, which computes what it was given some time later. Not run on any machine of this project."""

    is_cpu = False

    def __init__(self) -> None:
        self._side_stream = None

    def synchronize(self) -> None:
        """Waits until the device has done all that it was given."""
        paddle.device.synchronize()

    def mark(self) -> Mark:
        """This moment of the computing stream, by an event; the host does not wait for it."""
        event = paddle.device.Event("gpu", enable_timing=True)
        event.record()
        return Mark(event, paddle.device.cuda.memory_allocated())

    def milliseconds(self, start: Mark, end: Mark) -> float:
        """From one mark to a later one; the host waits for the latter."""
        end.moment.synchronize()
        return start.moment.elapsed_time(end.moment)

    def start_aside(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Runs ``function`` on a stream of its own, after all that was given before; what is returned has the device wait for it."""
        cuda = paddle.device.cuda
        self._side_stream = side = self._side_stream or cuda.Stream()
        side.wait_stream(cuda.current_stream())
        with cuda.stream_guard(side):
            value = function()

        def wait():
            cuda.current_stream().wait_stream(side)
            return value

        return wait


_cpu, _gpu = Cpu(), Gpu()


def is_cpu_only() -> bool:
    """Whether this Paddle can compute on nothing but the CPU."""
    if paddle.is_compiled_with_cuda() or paddle.is_compiled_with_xpu():
        return False
    return not paddle.device.get_all_custom_device_type()


def current() -> Union[Cpu, Gpu]:
    """This process's device."""
    return _gpu if paddle.is_compiled_with_cuda() else _cpu
