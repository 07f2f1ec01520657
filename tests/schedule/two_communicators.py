"""A model of devices that do the grouped calls of two communicators, one at a time, in the order in which a rank issues them."""

from oracle import is_exchange
from paddle_vpp_ext.schedule.dependencies import Exchange


def in_order_of_issue(program):
    """The program with each exchange as its call for F, then its call for B."""
    calls = []
    for instruction in program:
        if not is_exchange(instruction):
            calls.append(instruction)
            continue
        for kind in "FB":
            sends, receives = (tuple(t for t in transfers if t.kind == kind) for transfers in instruction)
            if sends or receives:
                calls.append(Exchange(sends, receives))
    return calls


def calls_of(program):
    """[(how many actions are issued before it, sends, receives)] of a rank's calls."""
    calls, issued = [], 0
    for instruction in in_order_of_issue(program):
        if is_exchange(instruction):
            calls.append((issued, *instruction))
        else:
            issued += 1
    return calls


def hangs(programs, dependencies):
    """Whether the devices stop before all is done.

    Each rank's host issues everything at once. A call begins when the one before it has ended, and the actions that were issued before
    it; it ends when all its peers have begun. An action begins when the one before it has ended, and what it needs has come.
    """
    p = len(programs)
    calls = [calls_of(program) for program in programs]
    begun, ended, done = [0] * p, [0] * p, [0] * p
    begun_transfers = [set() for _ in range(p)]
    came = [set() for _ in range(p)]
    moved = True
    while moved:
        moved = False
        for rank in range(p):
            order = dependencies.orders[rank]
            while True:
                if done[rank] < len(order):
                    need = dependencies.needs[rank][done[rank]]
                    if need < 0 or dependencies.transfer(need) in came[rank]:
                        done[rank] += 1
                        moved = True
                        continue
                if begun[rank] == ended[rank] and begun[rank] < len(calls[rank]):
                    issued, sends, receives = calls[rank][begun[rank]]
                    if done[rank] >= issued:
                        begun[rank] += 1
                        begun_transfers[rank].update(sends, receives)
                        moved = True
                if begun[rank] > ended[rank]:
                    _, sends, receives = calls[rank][ended[rank]]
                    there = lambda transfer, peer: transfer in begun_transfers[peer % p]
                    if all(there(t, t.to_part) for t in sends) and all(there(t, t.part) for t in receives):
                        ended[rank] += 1
                        came[rank].update(receives)
                        moved = True
                        continue
                break
    return any(done[rank] < len(dependencies.orders[rank]) or ended[rank] < len(calls[rank]) for rank in range(p))
