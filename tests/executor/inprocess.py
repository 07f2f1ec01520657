"""A transport with a thread per rank that enforces NCCL's rules, and fails where they would hang.

An exchange is one grouped call; a send and its receive complete only together; for an ordered
pair of ranks the k-th send meets the k-th receive, whatever they carry; a rank's exchanges run
one after the other. Where they run beside the computation there is one communicator for
activations and one for gradients, each with these rules. A turn goes from rank to rank (picked by a seed), so that a run can be
repeated, and so that "nobody can go on" is known at once instead of after a timeout.
"""

import random
import threading
from functools import partial
from typing import Any, NamedTuple

from paddle_vpp_ext.executor import Pending


class Hang(Exception):
    """Under NCCL this would never return."""


class World:
    """The ranks of one pipeline. ``blocking`` as in Transport; ``seed`` picks whose turn it is."""

    def __init__(self, num_stages, blocking, seed=0):
        self.num_stages, self.blocking = num_stages, blocking
        self.random = random.Random(seed)
        self.lock = threading.Condition()
        self.sent = {}  # (sender, receiver, communicator): ends, in the order in which they were posted
        self.received = {}
        self.streams = {}  # (rank, communicator): started exchanges that are not done
        self.wants = [None] * num_stages  # what a waiting rank waits for: a function that says whether it can go on
        self.alive = set(range(num_stages))
        self.turn = None
        self.error = None

    def run(self, function):
        """``function(rank, transport)`` on every rank; its results, or the first exception."""
        results = [None] * self.num_stages
        threads = [threading.Thread(target=self._rank, args=(function, r, results), daemon=True) for r in range(self.num_stages)]
        for thread in threads:
            thread.start()
        with self.lock:
            self._pass_turn()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank neither ends nor waits"
        if self.error:
            raise self.error
        return results

    def _rank(self, function, rank, results):
        try:
            self.yield_until(rank, lambda: True)
            results[rank] = function(rank, Endpoint(self, rank))
        except BaseException as error:
            self.error = self.error or error
        finally:
            with self.lock:
                self.alive.discard(rank)
                self.wants[rank] = None
                self._pass_turn()

    def yield_until(self, rank, ready):
        """Gives the turn away until ``ready()`` and this rank has been picked again."""
        with self.lock:
            self.wants[rank] = ready
            if self.turn is None or self.turn == rank:  # None: the last thread to start finds the others waiting
                self._pass_turn()
            if not self.lock.wait_for(lambda: self.turn == rank or self.error, 60):
                raise Hang(f"rank {rank} was never picked")
            if self.error:
                raise Hang("another rank failed")
            self.wants[rank] = None

    def _pass_turn(self):
        self._progress()
        if len([r for r in self.alive if self.wants[r]]) < len(self.alive):
            return  # threads that have not started yet will pass it on
        ready = [r for r in sorted(self.alive) if self.wants[r]()]
        self.turn = self.random.choice(ready) if ready else None
        if self.alive and not ready:
            self.error = self.error or Hang(f"ranks {sorted(self.alive)} wait for each other: {self.streams}")
        self.lock.notify_all()

    def _progress(self):
        """Completes what the rules allow: the oldest exchange of a rank once both ends of all its transfers are posted."""
        moved = True
        while moved:
            moved = False
            for stream in self.streams.values():
                if stream and stream[0].can_end():
                    stream.pop(0).end()
                    moved = True
            # A transfer's ends are posted when their exchanges are the oldest of their ranks.
            for stream in self.streams.values():
                if stream and not stream[0].posted:
                    stream[0].post()
                    moved = True


class End(NamedTuple):
    """One end of a transfer: what to whom, or what from whom and what to do with it."""

    peer: int
    is_send: bool
    label: Any  # both ends have to agree on it
    value: Any = None
    deliver: Any = None


class Group:
    """One exchange of one rank. All that it does on its communicator, it does together."""

    def __init__(self, world, rank, communicator, ends):
        self.world, self.rank, self.communicator, self.ends = world, rank, communicator, ends
        self.posted = self.finished = False
        with world.lock:
            world.streams.setdefault((rank, communicator), []).append(self)

    def __repr__(self):
        return f"rank {self.rank}: " + " ".join(f"{'send' if e.is_send else 'receive'} {e.label}" for e in self.ends)

    def post(self):
        world = self.world
        self.met = []
        for end in self.ends:
            pair = (self.rank, end.peer) if end.is_send else (end.peer, self.rank)
            sent, received = (side.setdefault(pair + (self.communicator,), []) for side in (world.sent, world.received))
            mine, other = (sent, received) if end.is_send else (received, sent)
            mine.append(end)
            self.met.append((other, len(mine) - 1))
            if len(mine) <= len(other):
                self.transfer(end, other[len(mine) - 1])
        self.posted = True

    def transfer(self, end, other):
        """Both ends are there: what is sent arrives."""
        if end.label != other.label:
            self.world.error = self.world.error or Hang(f"rank {self.rank}: {end.label} meets {other.label}")
        elif end.is_send:
            other.deliver(end.value)
        else:
            end.deliver(other.value)

    def can_end(self):
        return self.posted and all(index < len(other) for other, index in self.met)

    def end(self):
        self.finished = True

    def wait(self):
        if not self.finished:
            self.world.yield_until(self.rank, lambda: self.finished)


class Ticket:
    def __init__(self, group, values=None, transfer=None):
        self.group, self.values, self.transfer = group, values, transfer

    def done(self):
        return self.group.finished

    def early(self):
        return None

    def wait(self):
        self.group.wait()
        return self.values and self.values[self.transfer]


class Endpoint:
    """One rank's transport."""

    def __init__(self, world, rank):
        self.world, self.rank, self.blocking = world, rank, world.blocking

    def exchange(self, sends, receives):
        p, values, groups = self.world.num_stages, {}, {}
        for name in ("all",) if self.blocking else ("F", "B"):
            mine = lambda transfer, name=name: name in ("all", transfer.kind)
            ends = [End(t.to_part % p, True, t, payload) for t, payload in sends if mine(t)]
            ends += [End(t.part % p, False, t, None, partial(values.__setitem__, t)) for t in receives if mine(t)]
            if ends:
                group = Group(self.world, self.rank, name, ends)
                groups.update((end.label, group) for end in ends)
        self.world.yield_until(self.rank, lambda: True)
        return Pending([Ticket(groups[t]) for t, _ in sends], [Ticket(groups[t], values, t) for t in receives])
