"""A transport with a thread per rank that enforces NCCL's rules, and fails where they would hang.

An exchange is one grouped call; a send and its receive complete only together; for an ordered
pair of ranks the k-th send meets the k-th receive, whatever they carry; a rank's exchanges run
one after the other. Where they run beside the computation there is one communicator for
activations and one for gradients, each with these rules. A turn goes from rank to rank (picked by a seed), so that a run can be
repeated, and so that "nobody can go on" is known at once instead of after a timeout.
"""
import random
import threading

from paddle_vpp_ext.executor import Pending


class Hang(Exception):
    """Under NCCL this would never return."""


class World:
    """The ranks of one pipeline. ``blocking`` as in Transport; ``seed`` picks whose turn it is."""

    def __init__(self, num_stages, blocking, seed=0):
        self.num_stages, self.blocking = num_stages, blocking
        self.random = random.Random(seed)
        self.lock = threading.Condition()
        self.sent = {}  # (sender, receiver, communicator): [(transfer, payload)]
        self.received = {}  # the same: [(transfer, None)]
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
            if self.turn == rank:
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


class Group:
    """One exchange of one rank."""

    def __init__(self, world, rank, communicator, sends, receives):
        self.world, self.rank, self.communicator = world, rank, communicator
        self.sends, self.receives = sends, receives
        self.posted = self.finished = False
        self.values = {}

    def __repr__(self):
        return f"rank {self.rank}: send {[str(t) for t, _ in self.sends]} receive {[str(t) for t in self.receives]}"

    def post(self):
        p, world = self.world.num_stages, self.world
        self.ends = []
        for transfer, payload in self.sends:
            pair = self.rank, transfer.to_part % p, self.communicator
            mine = world.sent.setdefault(pair, [])
            mine.append((transfer, payload))
            self.ends.append((world.received.setdefault(pair, []), len(mine) - 1, transfer, False))
        for transfer in self.receives:
            pair = transfer.part % p, self.rank, self.communicator
            mine = world.received.setdefault(pair, [])
            mine.append((transfer, None))
            self.ends.append((world.sent.setdefault(pair, []), len(mine) - 1, transfer, True))
        self.posted = True

    def can_end(self):
        return self.posted and all(index < len(other) for other, index, _, _ in self.ends)

    def end(self):
        for other, index, transfer, is_receive in self.ends:
            met, payload = other[index]
            if met != transfer:
                self.world.error = self.world.error or Hang(f"rank {self.rank}: {transfer} meets {met}")
            if is_receive:
                self.values[transfer] = payload
        self.finished = True


class Ticket:
    def __init__(self, group, transfer=None):
        self.group, self.transfer = group, transfer

    def done(self):
        return self.group.finished

    def early(self):
        return None

    def wait(self):
        world = self.group.world
        if not self.group.finished:
            world.yield_until(self.group.rank, lambda: self.group.finished)
        return self.group.values.get(self.transfer)


class Endpoint:
    """One rank's transport."""

    def __init__(self, world, rank):
        self.world, self.rank, self.blocking = world, rank, world.blocking

    def exchange(self, sends, receives):
        groups = {}
        for name in ("all",) if self.blocking else ("F", "B"):
            mine = lambda transfer: name in ("all", transfer.kind)
            going = [send for send in sends if mine(send[0])]
            coming = [transfer for transfer in receives if mine(transfer)]
            if going or coming:
                group = Group(self.world, self.rank, name, going, coming)
                groups.update(dict.fromkeys([t for t, _ in going] + coming, group))
                with self.world.lock:
                    self.world.streams.setdefault((self.rank, name), []).append(group)
        self.world.yield_until(self.rank, lambda: True)
        return Pending([Ticket(groups[t]) for t, _ in sends], [Ticket(groups[t], t) for t in receives])
