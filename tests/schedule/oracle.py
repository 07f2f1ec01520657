"""A second opinion on schedules: longest paths over a graph in dictionaries, slow and obviously right.

Shares nothing with the package but the tuples that orders and programs are made of.
"""

import sys
from fractions import Fraction

from hypothesis import strategies as st

sys.setrecursionlimit(100_000)


class Circle(Exception):
    """Somebody waits for what waits for it."""


def longest_paths(before, time):
    """{node: when it ends}; ``before``: {node: [(node that must end first, delay)]}, ``time``: {node: duration}."""
    ends, on_the_way = {}, set()

    def end(node):
        if node not in ends:
            if node in on_the_way:
                raise Circle(node)
            on_the_way.add(node)
            ends[node] = max([end(n) + delay for n, delay in before[node]], default=Fraction(0)) + time[node]
        return ends[node]

    for node in before:
        end(node)
    return ends


def depends_on(kind, part, num_parts):
    """The action (kind, part) of the same micro-batch on another part whose output this one needs, or None."""
    if kind == "F":
        return ("F", part - 1) if part else None
    if kind == "B":
        return ("B", part + 1) if part < num_parts - 1 else None
    raise ValueError(kind)


def makespan_without_blocking(orders, num_chunks, forward, backward, hop):
    """Each action when the one before it on its rank, and what it needs plus the hop, are there."""
    p = len(orders)
    before, time = {}, {}
    for rank, order in enumerate(orders):
        previous = None
        for kind, chunk, i in order:
            part = chunk * p + rank
            node = kind, part, i
            before[node] = [(previous, 0)] if previous else []
            need = depends_on(kind, part, p * num_chunks)
            if need:
                before[node].append(((*need, i), Fraction(hop)))
            time[node] = Fraction(forward if kind == "F" else backward)
            previous = node
    return max(longest_paths(before, time).values())


def check_programs(programs, num_chunks):
    """Asserts that data flows; raises Circle on a deadlock. The k-th send meets the k-th receive of a pair of ranks."""
    for rank, program in enumerate(programs):
        made, there = set(), set()
        for item in program:
            if is_exchange(item):
                assert set(item.sends) <= made
                there |= set(item.receives)
                continue
            kind, chunk, i = item
            part = chunk * len(programs) + rank
            need = depends_on(kind, part, len(programs) * num_chunks)
            assert need is None or (*need, i) in there
            made.add((kind, part, i))
    for sent, received in zip(*channels(programs)):
        assert [t for _, t in sent] == [t for _, t in received]
    makespan_blocking(programs, 0, 0, 0)


def makespan_blocking(programs, forward, backward, hop):
    """A rank leaves an exchange when it and all at its other ends have come there, plus the hop."""
    before, time = {}, {}
    came = lambda node: (node[0], node[1] - 1)  # what ends when its rank comes to this node
    for rank, program in enumerate(programs):
        before[rank, -1], time[rank, -1] = [], Fraction(0)
        for at, item in enumerate(program):
            node = rank, at
            before[node] = [(came(node), 0)]
            time[node] = Fraction(hop if is_exchange(item) else forward if item.kind == "F" else backward)
    for sent, received in zip(*channels(programs)):
        for (one, _), (other, _) in zip(sent, received):
            before[one].append((came(other), 0))
            before[other].append((came(one), 0))
    ends = longest_paths(before, time)
    return max(ends[r, at] for r, q in enumerate(programs) for at, item in enumerate(q) if not is_exchange(item))


def channels(programs):
    """Per ordered pair of ranks, ((rank, index), transfer) of its sends and of its receives, in program order."""
    p = len(programs)
    sent, received = {}, {}
    for rank, program in enumerate(programs):
        for at, item in enumerate(program):
            if is_exchange(item):
                for t in item.sends:
                    to = (t.part + (1 if t.kind == "F" else -1)) % p
                    sent.setdefault((rank, to), []).append(((rank, at), t))
                for t in item.receives:
                    received.setdefault((t.part % p, rank), []).append(((rank, at), t))
    assert sent.keys() == received.keys()
    return sent.values(), [received[pair] for pair in sent]


def is_exchange(item):
    return hasattr(item, "sends")


@st.composite
def pipelines(draw, max_p=8, max_v=4):
    """(p, V, m) of the grid: p 2..8, V 1..4, m 1..3p+3."""
    p = draw(st.integers(2, max_p))
    return p, draw(st.integers(1, max_v)), draw(st.integers(1, 3 * p + 3))


@st.composite
def vpp_options(draw, p, m):
    """Options of VPP: groupings by name, or sizes that keep the pipeline full (the first the largest, none below p)."""
    options = {"slope": draw(st.sampled_from((None, 1, 2))), "overlap": m >= p and draw(st.booleans())}
    options["groups"] = draw(st.one_of(st.sampled_from(("first", "even")), sizes(p, m)))
    return options


@st.composite
def sizes(draw, p, m):
    rest, found = m, []
    while rest >= 2 * p and draw(st.booleans()):
        found.append(draw(st.integers(p, rest - p)))
        rest -= found[-1]
    return tuple(sorted(found + [rest], reverse=True))
