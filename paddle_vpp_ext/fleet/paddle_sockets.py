"""The sockets that Paddle has opened in this process."""

import contextlib
import os
import socket
import stat
from collections.abc import Collection


def default_store_ports() -> set[int]:
    """The ports at which Paddle's default store may be."""
    addresses = [os.getenv("PADDLE_MASTER", ""), os.getenv("PADDLE_TRAINER_ENDPOINTS", "").split(",")[0]]
    ports = [address.rsplit(":", 1)[-1] for address in addresses] + [os.getenv("MASTER_PORT", "")]
    return {int(port) for port in ports if port.isdigit()}


def no_delay(ports: Collection[int]) -> None:
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
