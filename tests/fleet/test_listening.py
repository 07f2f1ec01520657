"""Who may speak to a rank: its neighbours, at the address that the launch gave it, in plain data."""

import ast
import os
import pathlib
import re

from paddle.distributed.fleet.meta_parallel import LayerDesc

import paddle_vpp_ext
from paddle_vpp_ext.fleet import group_stores
from paddle_vpp_ext.fleet.transport import channels
from pool import get_pool
from training import Block, batch, build

UNSAFE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
# They unpickle what comes from a peer.
UNSAFE_NAMES = re.compile(
    r"(?<!\.)\b(eval|exec)\(|"
    r"\b(all_gather_object|broadcast_object_list|scatter_object_list|convert_tensor_to_object|paddle\.load|np\.load)\("
)


def test_nothing_from_a_peer_is_unpickled_or_run():
    for path in pathlib.Path(paddle_vpp_ext.__file__).parent.rglob("*.py"):
        text = path.read_text()
        imported = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").split(".")[0])
        assert not UNSAFE & imported, path
        assert path.parent.name != "fleet" or not UNSAFE_NAMES.search(text), path


def listening():
    """{(address in hexadecimal, port)} of the sockets of this process that listen."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            pass
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as file:
            rows = [line.split() for line in file][1:]
        found |= {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}
    return found


def listen_while_an_engine_is_made():
    before, opened = listening(), []
    listen = channels.listen

    def noted(host, backlog):
        sock = listen(host, backlog)
        opened.append((sock.getsockname()[0], listening() - before))
        return sock

    channels.listen = noted
    try:
        engine, optimizer = build([LayerDesc(Block) for _ in range(4)], 2, "VPP", 4)
        engine.train_batch(list(batch(0, 8)), optimizer)
    finally:
        channels.listen = listen
    return group_stores.own_host(), opened, len(listening() - before)


def test_channels_listen_at_the_launched_address_only_and_stop_once_the_neighbours_are_there():
    for host, opened, left in get_pool(2).run(listen_while_an_engine_is_made):
        assert [address for address, _ in opened] == [host]
        assert len(opened[0][1]) == 1 and left == 0


def test_a_process_finds_the_interface_of_its_own_address():
    names = {group_stores._interface_of("127.0.0.1"), group_stores._interface_of("localhost")}
    assert names <= {"lo", "lo0", None}
    assert group_stores._interface_of("no such host.invalid") is None
