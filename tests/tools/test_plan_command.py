"""``python -m paddle_vpp_ext plan`` as a user calls it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

KEYS = ["schedule", "num_stages", "num_chunks", "accumulate_steps", "groups", "orders", "makespan", "idle_share", "peak_activations"]


def test_json_is_exactly_what_is_documented(command):
    done = command("plan", "--pp", 2, "--vpp", 1, "--acc", 3, "--json")
    assert done.returncode == 0 and done.stderr == ""
    assert json.loads(done.stdout) == {
        "schedule": "VPP",
        "num_stages": 2,
        "num_chunks": 1,
        "accumulate_steps": 3,
        "groups": [3],
        "orders": [
            ["F0.0", "F0.1", "B0.0", "F0.2", "B0.1", "B0.2"],
            ["F0.0", "B0.0", "F0.1", "B0.1", "F0.2", "B0.2"],
        ],
        "makespan": 12.0,
        "idle_share": [0.25, 0.25],
        "peak_activations": [2, 1],
    }
    assert list(json.loads(done.stdout)) == KEYS


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--schedule", "VPP:groups=even"], {"groups": [6, 5], "makespan": 75, "peak_activations": [13, 11, 9, 7]}),
        (["--schedule", "VPP:groups=even,slope=1"], {"peak_activations": [10, 9, 8, 7]}),
        (["--schedule", "VPP:groups=even", "--hop", 0.1], {"makespan": pytest.approx(75.6)}),
        (["--schedule", "VPP:groups=even", "--blocking"], {"makespan": 76}),
        (["--schedule", "FthenB"], {"schedule": "FthenB", "groups": [11], "makespan": 75, "peak_activations": [22] * 4}),
        (["--forward", 10, "--backward", 20], {"groups": [7, 4], "makespan": 750}),
        (["--backward", 1], {"makespan": 50}),
        (["--forward", 0, "--backward", 0], {"makespan": 0, "idle_share": [0] * 4}),
    ],
)
def test_schedule_and_costs_are_used(command, words, expected):
    done = command("plan", "--pp", 4, "--vpp", 2, "--acc", 11, "--json", *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize("m, schedule", [(8, "VPP"), (6, "FthenB"), (4, "FthenB")])
def test_by_default_the_selectors_rule_picks(command, m, schedule):
    for words in ([], ["--schedule", "1F1B:groups=even"]):
        done = command("plan", "--pp", 4, "--vpp", 2, "--acc", m, "--json", *words)
        assert json.loads(done.stdout)["schedule"] == schedule


def test_the_timeline_shows_ranks_numbers_and_figures(command):
    done = command("plan", "--pp", 4, "--vpp", 2, "--acc", 10)
    assert done.returncode == 0 and done.stderr == ""
    for words in ("p=4 V=2 m=10", "groups 6+4", "rank 0 a0-a1-a2", "rank 3 .........a0-a1", "B0====", "makespan 69", "13.0 %", "peak"):
        assert words in done.stdout
    assert done.stdout.isascii() and max(map(len, done.stdout.splitlines())) <= 110


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_timeline_fits_the_terminal(command, columns):
    for words in (["--pp", 4, "--vpp", 2, "--acc", 10], ["--pp", 8, "--vpp", 4, "--acc", 39]):
        lines = command("plan", *words, columns=columns).stdout.splitlines()
        assert max(len(line) for line in lines if line.startswith("rank ")) <= columns


def test_a_squeezed_timeline_says_so(command):
    assert "squeezed: a column is" in command("plan", "--pp", 8, "--vpp", 4, "--acc", 39, columns=80).stdout


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--pp", 1, "--acc", 4], "--pp: '1' is not a whole number of at least 2"),
        (["--pp", 4, "--acc", 0], "--acc: '0' is not a whole number"),
        (["--pp", 4, "--acc", "ten"], "'ten' is not a whole number"),
        (["--pp", 4, "--vpp", "1.5", "--acc", 8], "--vpp: '1.5'"),
        (["--pp", 4], "required: --acc"),
        ([], "required: --pp, --acc"),
        (["--pp", 4, "--acc", 8, "--hop", "-1"], "--hop: '-1' is not a time"),
        (["--pp", 4, "--acc", 8, "--forward", "nan"], "--forward: 'nan' is not a time"),
        (["--pp", 4, "--acc", 8, "--weight", "3"], "--weight 3 is a part of --backward 2"),
        (["--pp", 4, "--acc", 8, "--color"], "unrecognized arguments: --color"),
        (["--pp", 4, "--vpp", 2, "--acc", 3], "add --schedule VPP"),
        (["--pp", 4, "--acc", 8, "--schedule", "VVP"], "VVP"),
        (["--pp", 4, "--acc", 8, "--schedule", "VPP:group=even"], "group=even"),
        (["--pp", 4, "--acc", 8, "--schedule", "VPP:groups=odd"], "'odd'"),
        (["--pp", 4, "--acc", 8, "--schedule", "VPP:groups=7+4"], "7+4"),
        (["--pp", 4, "--acc", 8, "--schedule", "paddle"], "paddle is not planned here"),
    ],
)
def test_a_mistake_gets_one_sentence_and_status_2(command, words, sentence):
    done = command("plan", *words)
    assert done.returncode == 2 and done.stdout == ""
    assert sentence in done.stderr and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith("python -m paddle_vpp_ext")


def test_groups_that_hang_are_refused_and_the_place_is_drawn(command):
    done = command("plan", "--pp", 4, "--vpp", 2, "--acc", 12, "--schedule", "VPP:groups=2+6+4")
    assert done.returncode == 2 and "rank 2, instruction" in done.stderr and ">B1.2<" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_or_unknown_command_gets_one_sentence(command):
    for words in ([], ["plain"]):
        done = command(*words)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words", [[*words, "--help"] for words in ([], ["plan"], ["compare"], ["check"], ["run"], ["trace"], ["trace", "merge"], ["doctor"])]
)
def test_help_has_an_example_and_the_exit_status(command, words):
    done = command(*words)
    assert done.returncode == 0
    assert "example" in done.stdout and "python -m paddle_vpp_ext " in done.stdout and "exit status" in done.stdout


def test_plan_needs_no_paddle(command, without):
    done = command("plan", "--pp", 4, "--vpp", 2, "--acc", 10, before=[without("paddle")])
    assert done.returncode == 0 and done.stderr == "" and "makespan 69" in done.stdout


def test_without_rich_the_timeline_is_plain_even_on_a_terminal(command, without):
    done = command("plan", "--pp", 2, "--acc", 4, before=[without("rich")], FORCE_COLOR="1")
    assert done.returncode == 0 and "\x1b" not in done.stdout and "rank 0 a0-" in done.stdout


def test_on_a_terminal_colours_tell_kinds_and_chunks_apart(command):
    pytest.importorskip("rich")
    done = command("plan", "--pp", 2, "--vpp", 2, "--acc", 4, FORCE_COLOR="1", TERM="xterm-256color", COLORTERM="truecolor")
    assert done.returncode == 0
    for red, green, blue in ((31, 95, 168), (200, 86, 10)):  # forward, backward of chunk 0
        assert f"48;2;{red};{green};{blue}m" in done.stdout
    assert len({part.split("m")[0] for part in done.stdout.split("48;2;")[1:]}) == 4


def test_no_color_is_respected(command):
    done = command("plan", "--pp", 2, "--acc", 4, FORCE_COLOR="1", NO_COLOR="1")
    assert "\x1b[" not in done.stdout and "a0-" in done.stdout


def test_files_are_written_beside_the_json(command, tmp_path):
    pytest.importorskip("matplotlib")
    files = {kind: tmp_path / f"plan.{kind}" for kind in ("png", "svg", "trace", "csv", "html")}
    words = [word for kind, path in files.items() for word in (f"--{kind}", path)]
    done = command("plan", "--pp", 2, "--vpp", 2, "--acc", 5, "--json", *words)
    assert done.returncode == 0 and json.loads(done.stdout)["accumulate_steps"] == 5
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in files["svg"].read_text(encoding="utf-8")
    assert json.loads(files["trace"].read_text(encoding="utf-8"))["traceEvents"]
    assert files["csv"].read_text(encoding="utf-8").startswith("rank 0,F0.0,F0.1")
    assert files["html"].read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert all(f"wrote {path}" in done.stderr for path in files.values())


def test_without_matplotlib_a_picture_says_what_to_install(command, without, tmp_path):
    done = command("plan", "--pp", 2, "--acc", 4, "--png", tmp_path / "x.png", before=[without("matplotlib")])
    assert done.returncode == 1 and "pip install paddle_vpp_ext[viz]" in done.stderr
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


@pytest.mark.parametrize("kind", ["png", "svg", "trace", "csv", "html"])
def test_a_file_that_cannot_be_written_is_named(command, tmp_path, kind):
    path = tmp_path / "nowhere" / "x"
    done = command("plan", "--pp", 2, "--acc", 4, f"--{kind}", path)
    assert done.returncode == 1 and f"cannot write {path}: No such file" in done.stderr
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell with pipes")
def test_a_reader_that_stops_early_gets_no_traceback():
    done = subprocess.run(
        f"{sys.executable} -m paddle_vpp_ext plan --pp 8 --vpp 4 --acc 200 --json | head -c 10",
        shell=True,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout == '{"schedule' and done.stderr == ""
