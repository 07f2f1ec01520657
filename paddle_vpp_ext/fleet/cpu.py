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
import socket
import stat
import struct
import sys
import time

import paddle

from . import versions

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None

_POLL = 0.005  # seconds between two looks at the store while an address is not there yet
_PORT_ATTEMPTS = 20
_SIOCGIFADDR = 0x8915  # Linux: an interface's address

_CHECKPOINT_CODE = ("paddle.distributed.flex_checkpoint.", "paddle.distributed.checkpoint.")

_undo = []  # callables that restore what install() replaced, in the order of the patches; empty: not installed
_stores = []  # every store made here: a group may look into its store for as long as it lives
_times_named = {}  # group name -> how many groups of that name this process has made


def is_cpu_only():
    """Whether this Paddle can compute on nothing but the CPU."""
    if paddle.is_compiled_with_cuda() or paddle.is_compiled_with_xpu():
        return False
    return not paddle.device.get_all_custom_device_type()


def install():
    """Make fleet work on this process's CPU-only Paddle. Call it before `fleet.init`; a second call does nothing."""
    if _undo or not is_cpu_only():
        return
    try:
        _install_backend()
        _install_device_id()
        _install_synchronize()
        _install_checkpoint_copies()
        _install_recompute()
        _install_group_stores()
    except BaseException:
        uninstall()
        raise


def uninstall():
    """Restore what `install` replaced. Groups made in between keep working."""
    while _undo:
        _undo.pop()()


def own_host():
    """The host at which the other processes reach this one: that of its endpoint, loopback when there is none."""
    return os.getenv("PADDLE_CURRENT_ENDPOINT", "127.0.0.1:0").rsplit(":", 1)[0]


def gather(name, ranks, text, timeout):
    """Give `text` and return those of `ranks` (global, this process among them), in that order.

    They meet in the job's store, in the same order of calls. Unlike gloo's collectives, which fail when a process is
    30 seconds late, this waits `timeout` seconds. Raises TimeoutError naming the rank that has not come.
    """
    rank, store = paddle.distributed.get_rank(), versions.default_store()
    key = _fresh_key(f"{name}/{'-'.join(map(str, ranks))}")
    _publish(store, f"{key}/{rank}", text)
    waiting = f"rank {rank}: waited {timeout:g} s for rank {{}} to come to {name}"
    deadline = time.monotonic() + timeout
    return [_published(store, f"{key}/{other}", deadline, waiting.format(other)) for other in ranks]


# ---- patches --------------------------------------------------------------------------------------------------------


def _replace(owner, name, new):
    old = getattr(owner, name)
    setattr(owner, name, new)
    _undo.append(lambda: setattr(owner, name, old))


def _install_backend():
    name = "PADDLE_DISTRI_BACKEND"
    old = os.environ.get(name)
    if old in (None, "auto"):
        os.environ[name] = "gloo"
        _undo.append(lambda: os.environ.pop(name, None) if old is None else os.environ.update({name: old}))


def _install_device_id():
    env = paddle.distributed.ParallelEnv
    if not hasattr(env, "_device_id"):
        env._device_id = 0  # a default of the class: what an instance sets still wins
        _undo.append(lambda: delattr(env, "_device_id"))


def _install_synchronize():
    for module in (paddle.device, getattr(paddle.device, "cuda", None)):
        if hasattr(module, "synchronize"):
            _replace(module, "synchronize", _harmless_on_cpu(module.synchronize))


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

    _replace(paddle.Tensor, "cuda", wrapper)


def _install_recompute():
    for name in ("recompute", "recompute_hybrid"):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(f"paddle.distributed.fleet.recompute.{name}")
            _replace(module, "paddle", _PaddleOfAGpu())


class _PaddleOfAGpu:
    """paddle with a GPU's name for the device: the one question that recompute has about it."""

    def __getattr__(self, name):
        return getattr(paddle, name)

    @staticmethod
    def get_device():
        return "gpu:0"


def _install_group_stores():
    from paddle.distributed import collective, parallel

    name = "_new_process_group_impl"
    make = getattr(collective, name, None)
    if make is None:
        return

    @functools.wraps(make)
    def with_own_store(backend, store, rank, world_size, group_name, *args, **kwargs):
        if backend != "gloo" or world_size < 2:
            return make(backend, store, rank, world_size, group_name, *args, **kwargs)
        own = _own_store(store, rank, group_name)
        with _at_own_interface():
            return make(backend, own, rank, world_size, group_name, *args, **kwargs)

    for module in (collective, parallel):  # parallel has a copy of the name, for the default group
        if getattr(module, name, None) is make:
            _replace(module, name, with_own_store)


# ---- a store for each group -----------------------------------------------------------------------------------------


def _own_store(default_store, rank, group_name):
    """Make or join the TCPStore of one group. Its first rank serves it and publishes the address in `default_store`."""
    _no_delay(_default_store_ports())
    key = _fresh_key(group_name)
    if rank == 0:
        host = own_host()
        store, port = _serve_store(host)
        _publish(default_store, key, f"{host}:{port}")
    else:
        limit = _start_timeout()
        address = _published(
            default_store,
            key,
            time.monotonic() + limit,
            f"rank {os.getenv('PADDLE_TRAINER_ID', '?')}: waited {limit} s as rank {rank} of group {group_name} "
            "for the group's first rank to publish the address of its store; "
            "has that process ended, or does it make its groups in another order?",
        )
        host, port = address.rsplit(":", 1)
        store = _make_store(host, int(port), False)
        _no_delay({int(port)})
    _stores.append(store)
    return store


def _fresh_key(name):
    # A name comes again after destroy_process_group, when what was published under it is still in the store.
    times = _times_named[name] = _times_named.get(name, 0) + 1
    return f"paddle_vpp_ext/{name}/{times}"


def _publish(store, key, text):
    store.set(key + "/text", text)
    store.add(key + "/there", 1)


def _published(store, key, deadline, complaint):
    # Asking again and again, unlike the store's own wait, can be interrupted and can say what was waited for.
    while store.add(key + "/there", 0) == 0:
        if time.monotonic() > deadline:
            raise TimeoutError(complaint)
        time.sleep(_POLL)
    return bytes(store.get(key + "/text")).decode()


def _serve_store(host):
    """A store that this process serves, and its port.

    A taken port makes some releases abort the process instead of raising, so the port is reserved first: a bound
    socket that does not listen keeps everybody else from getting the port, yet lets the store listen on it, since
    both allow the address to be reused.
    """
    for attempt in range(_PORT_ATTEMPTS):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as reserved:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(("", 0))  # the store listens on all interfaces and cannot be told otherwise
            port = reserved.getsockname()[1]
            try:
                store = _make_store(host, port, True)
            except RuntimeError:
                if attempt == _PORT_ATTEMPTS - 1:
                    raise
                continue
        _no_delay({port})  # those who join inherit it from the listening socket
        return store, port


def _make_store(host, port, is_master):
    # Told of one member only, the master does not wait for the others: they learn the address after it listens.
    return paddle.base.core.TCPStore(host, port, is_master, 1, _start_timeout())


def _start_timeout():
    """Seconds to wait for the other processes while groups are made: the variable that Paddle's own store reads."""
    return int(os.getenv("FLAGS_stop_check_timeout", "900"))


@contextlib.contextmanager
def _at_own_interface():
    """While a group is made, keep gloo on the interface that this process's endpoint is at.

    gloo takes the address of the machine's name otherwise, which the other hosts may not reach.
    """
    name = "GLOO_SOCKET_IFNAME"
    interface = None if name in os.environ else _interface_of(own_host())
    if interface is None:
        yield
        return
    os.environ[name] = interface
    try:
        yield
    finally:
        os.environ.pop(name, None)


def _interface_of(host):
    """The name of this machine's interface with that address, or None where that cannot be found out."""
    names = [name for _, name in socket.if_nameindex()]
    if host == "localhost" or host.startswith("127."):
        return next((name for name in ("lo", "lo0") if name in names), None)
    try:
        address = socket.inet_aton(socket.gethostbyname(host))
    except OSError:
        return None
    return next((name for name in names if _address_of(name) == address), None)


def _address_of(interface):
    """An interface's IPv4 address in four bytes. Known on Linux, elsewhere None."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            return fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))[20:24]
    except (OSError, AttributeError):
        return None


# ---- sockets that Paddle opened -------------------------------------------------------------------------------------


def _default_store_ports():
    """The ports at which Paddle's default store may be."""
    addresses = [os.getenv("PADDLE_MASTER", ""), os.getenv("PADDLE_TRAINER_ENDPOINTS", "").split(",")[0]]
    ports = [address.rsplit(":", 1)[-1] for address in addresses] + [os.getenv("MASTER_PORT", "")]
    return {int(port) for port in ports if port.isdigit()}


def _no_delay(ports):
    """Set TCP_NODELAY on this process's sockets at these ports.

    Paddle's store writes a request in several pieces, so without it every answer takes one or two delayed
    acknowledgements of 40 ms. Where it cannot be set, starting is merely slower.
    """
    for sock in _tcp_sockets():
        with contextlib.suppress(OSError):
            here = sock.getsockname()[1]
            try:
                there = sock.getpeername()[1]
            except OSError:
                there = None  # listening
            if here in ports or there in ports:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _tcp_sockets():
    """Yield an object for each of this process's TCP sockets, good for one turn of the loop."""
    try:
        descriptors = [int(name) for name in os.listdir("/dev/fd")]
    except OSError:
        return
    for descriptor in descriptors:
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            sock = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            continue  # closed meanwhile
        with sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                yield sock
