"""Two hosts on one machine: two network namespaces, and between them a wire that takes its time and can be cut.

The wire is a thread that carries packets between two tun devices: many kernels have no netem to delay or to
lose them. Needs root, iproute2 and /dev/net/tun.
"""

import collections
import contextlib
import fcntl
import itertools
import os
import select
import shutil
import struct
import subprocess
import threading
import time

NETWORK = "10.213.7"
PORT = 36100  # nobody else is in these namespaces

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000

_wires = itertools.count()


def available():
    """Whether namespaces and devices can be made here."""
    if os.geteuid() != 0 or not shutil.which("ip") or not os.path.exists("/dev/net/tun"):
        return False
    name = f"vpptry{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        _run("ip", "netns", "delete", name)
    return made


class Hosts:
    """Ranks 0..n-1 are on the first, n..2n-1 on the second."""

    def __init__(self, per_host, wire):
        self.per_host, self.wire = per_host, wire
        self.names = wire.devices
        self.addresses = [f"{NETWORK}.{number}" for number in (1, 2)]

    @property
    def endpoints(self):
        return [f"{self.addresses[rank // self.per_host]}:{PORT + rank}" for rank in range(2 * self.per_host)]

    def enter(self, rank):
        """What goes before a rank's command."""
        return ["ip", "netns", "exec", self.names[rank // self.per_host]]

    def cut(self):
        """A shell command that has all packets between the two lost from now on, without a word to either."""
        return f"touch {self.wire.cut_file}"

    def listening(self):
        """Lines of the sockets that listen on either host."""
        return [line for name in self.names for line in _run("ip", "netns", "exec", name, "ss", "-Hltn").splitlines()]


@contextlib.contextmanager
def two_hosts(folder, per_host=2, latency=0.0):
    """Hosts, gone afterwards. ``latency``: seconds that a packet takes; ``folder``: for the file that cuts the wire."""
    with contextlib.ExitStack() as stack:
        wire = stack.enter_context(Wire(f"{folder}/cut", latency))
        hosts = Hosts(per_host, wire)
        for name, device, address in zip(hosts.names, wire.devices, hosts.addresses):
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "delete", name)
            _run("ip", "link", "set", device, "netns", name)
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", device)
            _run("ip", "-n", name, "link", "set", device, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        wire.start()
        yield hosts


class Wire:
    """Packets go from one tun device to the other ``latency`` seconds later, until ``cut_file`` exists."""

    def __init__(self, cut_file, latency):
        self.cut_file, self._latency = cut_file, latency
        number = next(_wires)
        self.devices = [f"vpp{os.getpid()}{letter}{number}" for letter in "ab"]
        self._ends, self._under_way, self._stopped = [], collections.deque(), False

    def __enter__(self):
        for device in self.devices:
            self._ends.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
            fcntl.ioctl(self._ends[-1], _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI))
        return self

    def __exit__(self, *error):
        self._stopped = True
        self._thread.join()
        for end in self._ends:
            os.close(end)

    def start(self):
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def _carry(self):
        while not self._stopped:
            left = self._under_way[0][0] - time.monotonic() if self._under_way else 0.2
            for end in select.select(self._ends, [], [], max(0.0, left))[0]:
                with contextlib.suppress(OSError):
                    other, arrives = self._ends[end == self._ends[0]], time.monotonic() + self._latency
                    self._under_way.append((arrives, other, os.read(end, 65536)))
            while self._under_way and self._under_way[0][0] <= time.monotonic():
                _, end, packet = self._under_way.popleft()
                if not os.path.exists(self.cut_file):
                    with contextlib.suppress(OSError):
                        os.write(end, packet)


def _run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
