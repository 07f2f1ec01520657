"""A TCPStore of its own for each group of gloo.

In Paddle all groups meet through one store, partly under the same keys, so that a new group can read the addresses of
an older one and hang.
"""

import contextlib
import functools
import os
import socket
import struct
import time
from typing import Any

import paddle

from . import store
from .paddle_sockets import default_store_ports, no_delay
from .patches import Patches

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]  # not a Unix

_PORT_ATTEMPTS = 20
_SIOCGIFADDR = 0x8915  # Linux: an interface's address

_stores: list[Any] = []  # every store made here: a group may look into its store for as long as it lives


def own_host() -> str:
    """The host at which the other processes reach this one: that of its endpoint, loopback when there is none."""
    return os.getenv("PADDLE_CURRENT_ENDPOINT", "127.0.0.1:0").rsplit(":", 1)[0]


def install(patches: Patches) -> None:
    """Has each group of gloo that is made from now on meet in a store of its own."""
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
            patches.replace(module, name, with_own_store)


def _own_store(default_store, rank, group_name):
    """Make or join the TCPStore of one group. Its first rank serves it and publishes the address in `default_store`."""
    no_delay(default_store_ports())
    key = store.fresh_key(group_name)
    if rank == 0:
        host = own_host()
        own, port = _serve_store(host)
        store.publish(default_store, key, f"{host}:{port}")
    else:
        limit = _start_timeout()
        address = store.wait_for(
            default_store,
            key,
            time.monotonic() + limit,
            f"rank {os.getenv('PADDLE_TRAINER_ID', '?')}: waited {limit} s as rank {rank} of group {group_name} "
            "for the group's first rank to publish the address of its store; "
            "has that process ended, or does it make its groups in another order?",
        )
        host, port = address.rsplit(":", 1)
        own = _make_store(host, int(port), False)
        no_delay({int(port)})
    _stores.append(own)
    return own


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
        no_delay({port})  # those who join inherit it from the listening socket
        return store, port
    return None


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
