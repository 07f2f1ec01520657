"""``compare`` ranks all schedules, marks the selector's choice, and says why one is not possible."""

import pytest

from paddle_vpp_ext.planning.planner import make_plan
from paddle_vpp_ext.planning.registry import register_schedule
from paddle_vpp_ext.schedule.costs import Costs
from paddle_vpp_ext.tools.cli.compare import table
from paddle_vpp_ext.tools.comparison import compare

OWN = "paddle_vpp_ext/examples/own_schedule.py"


def test_the_table_is_that_of_the_plans_best_first():
    rows = compare(8, 4, 39, Costs(1, 1, 1, 0.1), False)
    figures = {row.schedule: (pytest.approx(row.makespan), row.peak / 4) for row in rows}
    assert figures["VPP:groups=first,slope=2"] == (493.6, 15.0)
    assert figures["VPP:groups=even,slope=2"] == (490.4, 11.25)
    assert figures["VPP:groups=even,slope=1"] == (512.2, 9.5)
    assert [row.makespan for row in rows] == sorted(row.makespan for row in rows)
    assert next(row.schedule for row in rows if row.schedule.startswith("VPP")) == "VPP:groups=even,slope=2"
    assert [row.schedule for row in rows if row.chosen] == ["VPP:groups=first,slope=2"]
    expected = make_plan("FthenB", 8, 4, 39).simulate(Costs(1, 1, 1, 0.1))
    fthenb = next(row for row in rows if row.schedule == "FthenB")
    assert fthenb.idle == pytest.approx(sum(expected.idle_share) / 8) and fthenb.peak == 4 * 39


@pytest.mark.parametrize(
    "v, m, chosen", [(2, 8, "VPP:groups=first,slope=2"), (2, 7, "FthenB"), (1, 3, "VPP:groups=first,slope=1"), (2, 3, None)]
)
def test_the_selectors_choice_is_marked(v, m, chosen):
    assert [row.schedule for row in compare(4, v, m, Costs(), False) if row.chosen] == ([chosen] if chosen else [])


def test_schedules_that_come_to_the_same_orders_share_a_row():
    rows = compare(4, 2, 8, Costs(), False)
    assert {row.schedule: row.same for row in rows}["VPP:groups=first,slope=2"] == ["VPP:groups=even,slope=2"]


def test_why_one_is_not_possible_is_told_last(registry):
    register_schedule("Wrong", lambda p, v, m: ["F0.0 B0.0"] * p)
    rows = compare(4, 2, 8, Costs(), False)
    assert rows[-1].schedule == "Wrong" and rows[-1].problem == "rank 0 has no F0.1"
    assert "Wrong                     not possible: rank 0 has no F0.1" in table(rows, 2)


def test_the_command_shows_all_with_a_users_own(command):
    done = command("compare", "--pp", 4, "--vpp", 2, "--acc", 11, "--hop", 0.1, "--schedule-file", OWN)
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0].startswith("p=4 V=2 m=11  F=1 B=2 hop=0.1")
    assert any(line.startswith("* VPP:groups=first,slope=2") for line in lines)
    assert ["Waves", "89"] in [line.split()[:2] for line in lines]


def test_where_the_rule_refuses_the_table_says_so(command):
    done = command("compare", "--pp", 4, "--vpp", 2, "--acc", 3, "--blocking")
    assert done.returncode == 0 and "the selector's rule refuses m=3 < p=4" in done.stdout


def test_a_users_schedule_is_planned_from_a_file_or_a_module(command):
    by_file = command("plan", "--pp", 4, "--vpp", 2, "--acc", 11, "--schedule-file", OWN)
    assert by_file.returncode == 0 and by_file.stdout.startswith("Waves  p=4") and "makespan 87" in by_file.stdout
    words = ["--schedule-file", "paddle_vpp_ext.examples.own_schedule:waves", "--schedule", "waves"]
    by_name = command("plan", "--pp", 4, "--vpp", 2, "--acc", 11, *words)
    assert by_name.stdout == by_file.stdout.replace("Waves", "waves", 1)


@pytest.mark.parametrize(
    "source, code, sentence",
    [
        ("nowhere.py", None, "there is no file nowhere.py"),
        ("mine", None, "neither FILE.py nor MODULE:FUNCTION"),
        ("no_such_module:function", None, "failed with ModuleNotFoundError"),
        ("paddle_vpp_ext.planning.options:waves", None, "failed with AttributeError"),
        ("mine.py", "x = 1", "registers no schedule"),
        ("mine.py", "1 / 0", "failed with ZeroDivisionError"),
        ("mine.py", "import sys; sys.exit(3)", "failed with SystemExit"),
        ("mine.py", "import paddle_vpp_ext\npaddle_vpp_ext.register_schedule('V PP', print)", "cannot be a schedule's name"),
        ("mine.py", "import paddle_vpp_ext\npaddle_vpp_ext.register_schedule('M', lambda p, v, m: 1 / 0)", "schedule M, called with p=4"),
    ],
)
def test_a_wrong_schedule_file_gets_one_sentence_and_status_2(command, tmp_path, monkeypatch, source, code, sentence):
    if code:
        (tmp_path / source).write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    done = command("plan", "--pp", 4, "--acc", 8, "--schedule-file", source)
    assert done.returncode == 2 and sentence in done.stderr and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
