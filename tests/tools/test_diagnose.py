"""``diagnose``: from the positions in the logs to the rank or the edge at fault."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_vpp_ext.diagnosis import judge, line_of, positions_in, table_of
from paddle_vpp_ext.tools.cli.main import main

RANKS = [4, 5, 6, 7]


def position(rank, peer=None, number=5, error=None, step=3):
    return {
        "ranks": RANKS,
        "rank": rank,
        "step": step,
        "number": number,
        "of": 40,
        "last": ["F0.0", "send(F4.0)", "F0.1"],
        "waits_for": f"the receive from rank {peer}" if peer is not None else None,
        "peer": peer,
        "since": "2026-12-01 10:00:00" if peer is not None else None,
        "error": error,
    }


def test_a_position_is_found_in_a_log_among_other_lines():
    one = position(5, peer=4, error="TimeoutError: é")
    log = f'noise\nERROR paddle_vpp_ext: {line_of(one)}\nmore\nposition {{broken\nposition [1]\nposition {{"rank": 5}}\n'
    assert positions_in(log) == [one]


def test_the_rank_that_all_others_wait_for_and_that_waits_for_nobody_is_behind():
    verdict = judge([position(4), position(5, 4), position(6, 5), position(7, 6)], RANKS)
    assert verdict.culprit == 4 and verdict.edge is None
    assert "rank 4 is behind" in verdict.why and "instruction 5 of 40, F0.1" in verdict.why


def test_a_rank_that_says_nothing_is_the_culprit():
    verdict = judge([position(5, 4), position(6, 5), position(7, 6)], RANKS)
    assert verdict.culprit == 4 and verdict.edge == (5, 4) and "rank 4 says nothing" in verdict.why


def test_an_error_of_its_own_comes_before_what_the_others_suffer():
    positions = [
        position(4, 5, error="ConnectionError: rank 5 has closed"),
        position(5, error="ValueError: the layer fails"),
        position(6, 5, error="PeerFailed: rank 5"),
        position(7, 6, error="TimeoutError: not done"),
    ]
    verdict = judge(positions, RANKS)
    assert verdict.culprit == 5 and "ValueError: the layer fails" in verdict.why


def test_ranks_that_wait_for_each_other_have_a_broken_edge():
    verdict = judge([position(4, 5, number=9), position(5, 6, number=9), position(6, 5, number=20), position(7, 6, number=9)], RANKS)
    assert verdict.culprit is None and verdict.edge == (6, 5) and "what rank 6 sent to rank 5 has not come" in verdict.why


peers = st.none() | st.sampled_from(RANKS) | st.integers(0, 99)
errors = st.none() | st.sampled_from(["ValueError: x", "PeerFailed: y", "TimeoutError: z"])


@given(st.dictionaries(st.sampled_from(RANKS), st.tuples(peers, st.none() | st.integers(1, 40), errors)))
def test_any_positions_have_a_verdict(of_rank):
    positions = [position(rank, *values) for rank, values in of_rank.items()]
    verdict = judge(positions, RANKS)
    assert verdict.why and table_of(positions).count("\n") + 1 == max(1, len(positions))
    assert verdict.culprit is None or verdict.culprit in RANKS


@given(
    st.text()
    | st.recursive(
        st.none() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.sampled_from(list(position(4))), v)
    ).map(json.dumps)
)
def test_any_line_of_a_log_is_read_or_left_out(text):
    for found in positions_in(f"position {text}\nposition {{{text}}}"):
        judge([found], found["ranks"])
        table_of([found])


def write(folder, logs):
    for name, text in logs.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def test_the_logs_of_several_hosts_are_read_together(tmp_path, capsys):
    write(
        tmp_path,
        {
            "a/workerlog.0": f"{line_of(position(4))}\n",
            "a/workerlog.1": f"{line_of(position(5, 4))}\n",
            "b/workerlog.0": f"{line_of(position(6, 5))}\n",
            "b/workerlog.1": f"{line_of(position(7, 6))}\n",
        },
    )
    assert main(["diagnose", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "pipeline of ranks 4, 5, 6, 7" in out and "culprit: rank 4" in out and out.count("step 3, instruction 5 of 40") >= 4


def test_a_rank_without_a_position_is_told_with_the_last_words_of_its_log(tmp_path, capsys):
    logs = {f"workerlog.{rank}": f"{line_of(position(rank, rank - 1))}\n" for rank in RANKS[1:]}
    write(tmp_path, {**logs, "workerlog.4": "step 1\nMemoryError: no more\nbye\n"})
    assert main(["diagnose", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "culprit: rank 4" in out and "broken edge: rank 5 - rank 4" in out
    assert "rank 4: told no position; the last words of its log: MemoryError: no more" in out


def test_a_position_of_an_earlier_step_counts_no_more(tmp_path, capsys):
    old = position(4, error="ValueError: caught by the user", step=1)
    write(tmp_path, {"workerlog.0": f"{line_of(old)}\n", "workerlog.1": f"{line_of(position(5, 4))}\n"})
    assert main(["diagnose", str(tmp_path)]) == 1
    assert "rank 4 says nothing" in capsys.readouterr().out


def test_logs_without_trouble_say_so(tmp_path, capsys):
    write(tmp_path, {"workerlog.0": "all is well\n"})
    assert main(["diagnose", str(tmp_path)]) == 0
    assert "no rank in 1 logs" in capsys.readouterr().out


@pytest.mark.parametrize("what", ("nothing", "empty"))
def test_a_folder_without_logs_is_refused(what, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["diagnose", str(tmp_path / what)]) == 2
    assert "there is no " in capsys.readouterr().err


def test_positions_are_one_line_of_json():
    line = line_of(position(5, 4, error="two\nlines"))
    assert "\n" not in line and json.loads(line.partition(" ")[2])["rank"] == 5
