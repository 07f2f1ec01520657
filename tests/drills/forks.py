"""Processes with Paddle imported already: the import takes longer than a drill.

A server that is started once imports rank.py and forks for each rank. What comes after that is as in a process of its own:
the child runs rank.py's main and ends as any Python does. The server and all children end with the process that started it.

    process = start(environment, arguments, log)      # as a Popen: pid, poll(), returncode, wait()
"""

import atexit
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pool

_server, _starting = None, threading.Lock()


def start(environment, arguments, log):
    """Runs ``rank.py arguments`` with that environment; it writes into the file ``log``."""
    global _server
    with _starting:
        if _server is None:
            _server = _Server()
    return _Forked(_server, _server.ask({"environment": environment, "arguments": arguments, "log": log}))


def close():
    """Ends the server."""
    global _server
    if _server is not None:
        _server.close()
        _server = None


atexit.register(close)


class _Server:
    def __init__(self):
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env=pool.environment(0, ["127.0.0.1:0"]),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._connection, self._lock = ours.makefile("rw"), threading.Lock()
        ours.close()

    def ask(self, question):
        with self._lock:
            self._connection.write(json.dumps(question) + "\n")
            self._connection.flush()
            answer = self._connection.readline()
        assert answer, "the server of forks has ended"
        return json.loads(answer)

    def close(self):
        self._connection.close()  # to the server this is the word to exit
        self._process.wait()


class _Forked:
    """A child of the server. ``returncode`` as Popen's, None while it runs."""

    def __init__(self, server, pid):
        self._server, self.pid, self.returncode = server, pid, None

    def poll(self):
        if self.returncode is None:
            self.returncode = self._server.ask({"pid": self.pid})
        return self.returncode

    def wait(self):
        while self.poll() is None:
            time.sleep(0.01)


# ---- in the server


def serve(connection):
    """Answers until the other end is closed; returns in a child only, where rank.py is to run."""
    for line in connection:
        question = json.loads(line)
        if "pid" in question:
            answer = _exit_code(question["pid"])
        else:
            answer = os.fork()
            if answer == 0:
                return _become(question)
            os.setpgid(answer, answer)
        connection.write(json.dumps(answer) + "\n")
        connection.flush()
    os._exit(0)


def _exit_code(pid):
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _become(question):
    _die_with_the_server()
    log = os.open(question["log"], os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    os.environ.clear()
    os.environ.update(question["environment"])
    sys.argv[1:] = question["arguments"]


def _die_with_the_server():
    if sys.platform.startswith("linux"):
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    import rank

    with socket.socket(fileno=int(sys.argv[1])) as server:
        serve(server.makefile("rw"))
    rank.run()
