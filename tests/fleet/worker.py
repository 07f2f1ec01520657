"""One process of a pool (pool.py): starts fleet, then runs the functions that it is sent."""

import ctypes
import faulthandler
import functools
import importlib
import json
import logging
import multiprocessing.connection
import os
import queue
import signal
import sys
import threading
import time
import traceback
import warnings


def main():
    descriptor, parent, configs = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    _die_with(parent)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    connection = multiprocessing.connection.Connection(descriptor)
    requests = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, requests), daemon=True).start()
    try:
        _start_fleet(configs)
    except BaseException:
        connection.send((False, traceback.format_exc()))
        raise
    connection.send((True, None))
    while True:
        request = requests.get()
        if request is None:  # the pool is closed
            return
        connection.send(_answer(*request))


def _die_with(parent):
    """Have the kernel end this process when the pytest process ends, however that happens."""
    if sys.platform.startswith("linux"):
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        os._exit(1)


def _read(connection, requests):
    """Read requests in a thread, so that the end of the pool is noticed while a function runs."""
    while True:
        try:
            requests.put(connection.recv())
        except (EOFError, OSError):
            requests.put(None)
            time.sleep(2.0)  # for an orderly exit, unless a function hangs
            os._exit(1)


def _start_fleet(configs):
    warnings.filterwarnings("ignore")
    import paddle
    from paddle.distributed import fleet

    logging.disable(logging.INFO)  # fleet reports every group
    _enable_extension()
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = configs
    if os.environ["PADDLE_TRAINER_ID"] != "0":
        _wait_listening(int(os.environ["PADDLE_MASTER"].rsplit(":", 1)[1]))
    fleet.init(is_collective=True, strategy=strategy)
    if paddle.distributed.get_world_size() > 1:
        paddle.distributed.barrier()


def _enable_extension():
    import paddle_vpp_ext

    if hasattr(paddle_vpp_ext, "enable"):
        paddle_vpp_ext.enable()
    from paddle_vpp_ext.fleet import cpu_bridges

    cpu_bridges.install()  # does nothing if enable() has done it


def _wait_listening(port):
    """Wait for rank 0's store. Paddle would try at once, fail, and sleep three seconds before it tries again."""
    wanted = f":{port:04X}"
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        try:
            with open("/proc/net/tcp") as table:
                rows = [line.split() for line in table]
        except OSError:
            return
        if any(row[1].endswith(wanted) and row[3] == "0A" for row in rows):
            return
        time.sleep(0.02)


def _answer(path, module, name, args):
    try:
        sys.path += [entry for entry in path if entry not in sys.path]
        function = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        value = function(*args)
        multiprocessing.connection._ForkingPickler.dumps(value)  # fails here rather than half-way through sending
        return True, value
    except BaseException:
        return False, traceback.format_exc()


if __name__ == "__main__":
    main()
