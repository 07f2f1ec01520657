"""``check`` proves schedules from files, or says where they fail."""

import pytest

from paddle_vpp_ext.planning.planner import make_plan
from paddle_vpp_ext.tools import order_file

GOOD = "F0.0 F0.1 B0.0 B0.1\nF0.0 B0.0 F0.1 B0.1\n"


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        "rank 1: F0.0 B0.0 F0.1 B0.1\n# in any order\n\nrank 0: F0.0 F0.1 B0.0 B0.1",
        "rank 0,F0.0,F0.1,B0.0,B0.1\r\nrank 1,F0.0,B0.0,F0.1,B0.1,,\r\n",
        '\ufeff"rank 0";F0.0;F0.1;;B0.0;B0.1\n"rank 1";F0.0;;B0.0;F0.1;B0.1\n',
        "Rank 0\tF0.0\tF0.1\tB0.0\tB0.1\nRank 1\tF0.0\tB0.0\tF0.1\tB0.1\n",
        ",F0.0,F0.1,B0.0,B0.1\n,F0.0,,B0.0,F0.1,B0.1\n",
    ],
)
def test_csv_and_text_are_read_alike(tmp_path, text):
    path = tmp_path / "orders"
    path.write_bytes(text.encode())
    assert order_file.load(path) == order_file.parse(GOOD)


@pytest.mark.parametrize("p, num_chunks, m", [(2, 1, 1), (4, 2, 11), (12, 2, 25)])
def test_what_is_written_is_read_back(tmp_path, p, num_chunks, m):
    orders = make_plan("VPP", p, num_chunks, m).orders
    order_file.save(tmp_path / "x.csv", orders)
    assert order_file.load(tmp_path / "x.csv") == orders


@pytest.mark.parametrize("words", [[], ["--blocking"]])
def test_our_own_plan_is_ok_with_its_figures(command, tmp_path, words):
    path = tmp_path / "plan.csv"
    planned = command("plan", "--pp", 4, "--vpp", 2, "--acc", 10, "--csv", path, "--hop", 0.1, *words)
    assert planned.returncode == 0 and f"wrote {path}" in planned.stderr
    done = command("check", path, "--hop", 0.1, *words)
    assert done.returncode == 0 and done.stderr == ""
    assert "p=4 V=2 m=10" in done.stdout and "ok: complete, ordered, free of deadlock" in done.stdout
    assert planned.stdout.splitlines()[1:] == done.stdout.splitlines()[1:-1], "the same timeline"


def test_a_split_backward_and_an_evaluation_by_hand_are_ok(command, tmp_path):
    path = tmp_path / "hand.txt"
    path.write_text("F0.0 I0.0 W0.0\nF0.0 I0.0 W0.0\n", encoding="utf-8")
    assert "makespan 5," in command("check", path).stdout
    assert "makespan 5.5," in command("check", path, "--weight", 0.5).stdout
    path.write_text("F0.0 F0.1\nF0.0 F0.1\n", encoding="utf-8")
    assert "makespan 3," in command("check", path).stdout


@pytest.mark.parametrize(
    "text, sentences",
    [
        ("F0.0 B0.0\nF0.0\n", ["rank 1 has neither B0.0"]),
        ("F0.0 B0.0\nB0.0 F0.0\n", ["rank 1, instruction 0 (B0.0): it comes before F0.0", ">B0.0<  F0.0"]),
        ("F0.0 B0.0 F0.1 B0.1\nF0.1 B0.1 F0.0 B0.0", ["deadlock: rank 0 cannot start B0.0 (its action 1)", "[F0.1]"]),
        ("F0.0 F0.0 B0.0\nF0.0 B0.0", ["rank 0, instruction 1 (F0.0): it is there a second time", ">F0.0<"]),
        ("F0.0 B0.0\nF0.0 X0.0", ["line 2: rank 1, instruction 1: 'X0.0' is not an action"]),
        ("F0.0 B0.0", ["there are 1 lines with actions"]),
        ("", ["there are 0 lines"]),
        ("rank 0:\nrank 1:", ["there is no action in it"]),
        ("rank 0: F0.0\nrank 0: F0.0", ["line 2: rank 0 is there a second time"]),
        ("rank 0: F0.0\nrank 2: F0.0", ["there is no rank 1"]),
    ],
)
def test_a_fault_is_told_with_rank_instruction_and_place(command, tmp_path, text, sentences):
    path = tmp_path / "faulty.txt"
    path.write_text(text, encoding="utf-8")
    done = command("check", path)
    assert done.returncode == 1 and done.stderr == "" and done.stdout.startswith(f"{path} cannot run: ")
    assert all(sentence in done.stdout for sentence in sentences), done.stdout


def test_files_that_cannot_be_read(command, tmp_path):
    done = command("check", tmp_path / "nowhere")
    assert done.returncode == 2 and "cannot read" in done.stderr and done.stderr.count("\n") == 1
    (tmp_path / "x.png").write_bytes(b"\x89PNG\r\n\xff\xfe")
    done = command("check", tmp_path / "x.png")
    assert done.returncode == 1 and "not a text file" in done.stdout and "Traceback" not in done.stderr
