"""Tensors over a TCP connection: each with its length ahead, straight from and into its memory."""

import ctypes
import math
import select
import socket
import struct
from typing import Any

import numpy as np

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]  # not a Unix

_LENGTH = struct.Struct("!Q")  # goes before the bytes of each tensor
_SIOCOUTQ = 0x5411  # Linux: bytes that are sent and not acknowledged yet


def listen(host: str, backlog: int) -> socket.socket:
    """A listening socket on a free port of ``host``, and on no other address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=max(1, backlog))


def tune(sock: socket.socket) -> None:
    """Makes a connection send at once, and find out when the other machine is gone."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A process that dies closes its connections; a machine that dies does not: then these find out in half a minute.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def send_tensor(sock: socket.socket, tensor: Any) -> None:
    """Blocks until the tensor is on its way: it may be changed or freed then."""
    if not isinstance(tensor, np.ndarray) and not tensor.is_contiguous():
        tensor = tensor.contiguous()
    data = _memory_of(tensor)
    head = _LENGTH.pack(len(data))
    sent = sock.sendmsg([head, data])  # in one packet, if it is small
    if sent < len(head):
        sock.sendall(head[sent:])
        sent = len(head)
    if sent < len(head) + len(data):
        sock.sendall(data[sent - len(head) :])


def receive_tensor(sock: socket.socket, tensor: Any, limit: Any) -> None:
    """Fills a contiguous tensor; ``limit`` as in receive_into. ValueError if the sent one has another number of bytes."""
    if not isinstance(tensor, np.ndarray) and not tensor.is_contiguous():
        raise ValueError("a tensor to be filled must be contiguous")
    data = _memory_of(tensor)
    head = bytearray(_LENGTH.size)
    count = _receive_some(sock, [head, data] if len(data) else [head], limit)  # in one call, if all is there
    if count < len(head):
        receive_into(sock, memoryview(head)[count:], limit)
        count = len(head)
    (length,) = _LENGTH.unpack(head)
    if length != len(data):
        raise ValueError(
            f"the sent tensor has {length} bytes, the one to be filled {len(data)} (shape {list(tensor.shape)}, {tensor.dtype})"
        )
    receive_into(sock, data[count - len(head) :], limit)


def receive_into(sock: socket.socket, data: memoryview, limit: Any = None) -> None:
    """Fill `data`; `limit` is that of a waiting caller, None in a thread that may block for ever."""
    while len(data):
        data = data[_receive_some(sock, [data], limit) :]


def _receive_some(sock, buffers, limit):
    """Receive into the buffers, one after the other, as much as is there; wait until something is."""
    while True:
        try:
            count = sock.recvmsg_into(buffers, 0, socket.MSG_WAITALL if limit is None else socket.MSG_DONTWAIT)[0]
        except BlockingIOError:
            if not select.select([sock], [], [], limit.until_tick())[0]:
                limit.tick()
            continue
        if count == 0:
            raise ConnectionError("the other process has ended or closed the connection")
        return count


def has_room(sock: socket.socket, size: int) -> bool:
    """Whether the connection takes that many bytes without blocking. Known on Linux, elsewhere taken for no."""
    try:
        unsent = struct.unpack("i", fcntl.ioctl(sock, _SIOCOUTQ, b"\0" * 4))[0]
    except (OSError, AttributeError):
        return False
    # What it holds may take several times its size in the kernel.
    return 4 * (unsent + size) <= sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def _memory_of(tensor):
    """The memory of a contiguous CPU tensor of any dtype, or of an array, as bytes and without a copy."""
    if isinstance(tensor, np.ndarray):
        return memoryview(tensor).cast("B") if tensor.size else memoryview(b"")
    if not tensor.place.is_cpu_place():
        raise ValueError(f"only tensors in CPU memory can be transferred, not one on {tensor.place}")
    size = math.prod(tensor.shape) * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")
