"""The VPP order: groupings, Paddle's closed form, who starts how far ahead."""

import pytest
from hypothesis import given

from oracle import pipelines
from paddle_vpp_ext.planning.registry import vpp
from paddle_vpp_ext.planning.values import read_groups, read_slope, read_switch
from paddle_vpp_ext.schedule.action import format_order
from paddle_vpp_ext.schedule.fthenb import forward_only, fthenb
from paddle_vpp_ext.schedule.grouping import even, first
from paddle_vpp_ext.schedule.interleave import interleaved


def virtual_pp_rank(step, forward, p, num_chunks, m):
    """Paddle's closed form, from the design."""
    a = m % p + p
    chunk = step // a if step < a * num_chunks else (step - a * num_chunks) % (p * num_chunks) // p
    return chunk if forward else num_chunks - 1 - chunk


@pytest.mark.parametrize("p", range(2, 9))
def test_first_grouping_gives_the_chunks_of_paddles_closed_form(p):
    for num_chunks in range(1, 6):
        for m in range(2 * p, 4 * p + 1):
            expected = [[virtual_pp_rank(s, f, p, num_chunks, m) for s in range(m * num_chunks)] for f in (True, False)]
            for order in vpp(p, num_chunks, m, groups="first"):
                chunks = [[c for kind, c, _ in order if kind == wanted] for wanted in "FB"]
                assert chunks == expected


@given(pipelines())
def test_groupings_use_up_all_micro_batches_and_keep_the_pipeline_full(pipeline):
    p, _, m = pipeline
    for groups in (first(p, m), even(p, m)):
        assert sum(groups) == m and min(groups) >= min(p, m) and groups[0] == max(groups)
    assert set(first(p, m)[1:]) <= {p}
    assert max(even(p, m)) - min(even(p, m)) <= 1 and len(even(p, m)) == max(1, m // p)


def test_groupings_of_the_design():
    assert first(4, 11) == (7, 4) and even(4, 11) == (6, 5)


@given(pipelines())
def test_every_rank_starts_as_far_ahead_as_designed(pipeline):
    p, num_chunks, m = pipeline
    for slope in (1, 2):
        for overlap in (False, True):
            for r, order in enumerate(vpp(p, num_chunks, m, "even", slope, overlap)):
                ahead = slope * (p - r - 1) + (num_chunks - 1) * even(p, m)[0] + overlap
                startup = min(ahead, m * num_chunks)
                kinds = "".join(action.kind for action in order)
                rest = m * num_chunks - startup
                assert kinds == "F" * startup + "FB" * rest + "B" * startup


def test_one_chunk_is_1f1b():
    assert [format_order(order) for order in vpp(2, 1, 3)] == [
        "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2",
        "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2",
    ]


def test_the_order_in_the_docstring_is_what_interleaved_makes():
    drawn = [line.split("rank ")[1][1:] for line in interleaved.__doc__.splitlines() if "rank " in line and "F0.0" in line]
    assert [" ".join(line.replace("|", " ").split()) for line in drawn] == [format_order(o) for o in interleaved(2, 2, (2, 2))]


def test_fthenb_does_all_forwards_first_and_evaluation_nothing_else():
    assert [format_order(o) for o in fthenb(2, 2, 2)] == ["F0.0 F0.1 F1.0 F1.1 B1.0 B1.1 B0.0 B0.1"] * 2
    assert [format_order(o) for o in forward_only(2, 2, (2, 1))] == ["F0.0 F0.1 F1.0 F1.1 F0.2 F1.2"] * 2


def test_option_values_are_read_or_refused():
    assert read_groups("even") == "even" and read_groups("7+4") == (7, 4)
    assert read_switch("on") is True and read_switch("off") is False and read_slope("1") == 1
    for read, text in ((read_groups, "odd"), (read_groups, "7+"), (read_switch, "yes"), (read_slope, "3")):
        with pytest.raises(ValueError, match=text.replace("+", r"\+")):
            read(text)
