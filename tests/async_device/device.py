"""The asynchronous device as a program or its test sees it: environment, counters, reports, abort, groups.

A test starts its programs with ``environment()``; the program imports this module after that, and calls
``group_batches()`` once Paddle's distributed part is wanted.
"""

import contextlib
import ctypes
import functools
import os
import sys

COUNTERS = (
    "device_synchronizes",
    "stream_synchronizes",
    "event_synchronizes",
    "blocking_copies",
    "races",
    "freed_in_use",
    "mismatches",
    "allocated_bytes",
    "peak_bytes",
    "operations",
)


def environment(**options):
    """Variables for a process that shall run on the device, set before it starts; ``seed=3`` is ``ASYNC_DEVICE_SEED=3`` and so on."""
    from build import device_folder

    return {
        "CUSTOM_DEVICE_ROOT": str(device_folder()),
        "FLAGS_free_idle_chunk": "1",  # each free reaches the device, behind Paddle's stream-safe allocator
        "FLAGS_allocator_strategy": "auto_growth",
        "FLAGS_use_stride_kernel": "0",  # views need the kernel `contiguous`, which has no fallback to the CPU
        **{f"ASYNC_DEVICE_{name.upper()}": str(value) for name, value in options.items()},
    }


def rank_environment(rank, ranks, port):
    """What ``paddle.distributed.launch --devices 0,1,...`` sets for a rank, for processes started otherwise. Ports from ``port`` on."""
    endpoints = [f"127.0.0.1:{port + 1 + n}" for n in range(ranks)]
    return {
        "PADDLE_DISTRI_BACKEND": "xccl",
        "PADDLE_XCCL_BACKEND": "async_device",
        "FLAGS_selected_async_devices": str(rank),
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(ranks),
        "PADDLE_MASTER": f"127.0.0.1:{port}",
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
    }


@functools.lru_cache(None)
def library():
    import paddle  # noqa: F401  (loads the device)

    found = ctypes.CDLL(os.path.join(os.environ["CUSTOM_DEVICE_ROOT"], "libasync_device.so"))
    found.async_device_counter.restype = ctypes.c_long
    found.async_device_bytes_sent.restype = ctypes.c_long
    found.async_device_error.restype = ctypes.c_char_p
    found.async_device_reports.restype = ctypes.c_char_p
    found.async_device_calculation_stream.restype = ctypes.c_void_p
    found.async_device_new_stream.restype = ctypes.c_void_p
    found.async_device_copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    found.async_device_stream_wait.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return found


def counter(name):
    if name not in COUNTERS:
        raise KeyError(f"no counter {name!r}; there are {', '.join(COUNTERS)}")
    return library().async_device_counter(name.encode())


def counters():
    return {name: counter(name) for name in COUNTERS}


def bytes_sent():
    """By this process, for each communicator in the order of their making."""
    return [library().async_device_bytes_sent(n) for n in range(library().async_device_communicators())]


def reset_peak():
    library().async_device_reset_peak()


def reports():
    """The text of every fault reported so far."""
    return library().async_device_reports().decode()


def abort(communicator=-1):
    """Ends what blocks on a communicator, or on all, in this process."""
    library().async_device_abort(communicator)


def error(device=0):
    """Why a stream of the device went on without having done its work, or an empty text."""
    return library().async_device_error(device).decode()


def clear_errors():
    library().async_device_clear_errors()


@contextlib.contextmanager
def group(group=None, tasks=None):
    """What is issued within is one operation, as between ncclGroupStart and ncclGroupEnd."""
    library().async_device_group_start()
    try:
        yield
    finally:
        library().async_device_group_end()


def group_batches():
    """Makes ``batch_isend_irecv`` one group, as on NCCL: Paddle's process group for custom devices (3.3.1) opens none."""
    import paddle.distributed  # noqa: F401

    sys.modules["paddle.distributed.communication.batch_isend_irecv"]._coalescing_manager = group
