"""``trace merge``: recordings of known times come out as the trace, the picture and the table that they are."""

import json

import pytest

from paddle_vpp_ext.tools import recorded

# Two ranks, one micro-batch, in ms. Rank 0: F 0-10, waits until F0.0 is sent and for B1.0, B 60-80. Rank 1 (its clock 100 s ahead):
# waits for F0.0 until 15, F 15-25, B 25-55, of which it waited 5 inside; rank 0 has the gradient 5 later.
RANKS = [
    {
        "actions": [["F0.0", 0, 10], ["B0.0", 60, 80]],
        "waits": [["F0.0", 10, 11], ["B1.0", 11, 60], [None, 85, 90]],
        "posts": [["F0.0", 10], ["B1.0", 10]],
        "end": 95,
    },
    {
        "actions": [["F0.0", 15, 25], ["B0.0", 25, 55]],
        "waits": [["F0.0", 1, 15], ["F0.0", 30, 35], [None, 60, 90]],
        "posts": [["F0.0", 1], ["B1.0", 55]],
        "end": 95,
    },
]


def line(step, rank, start, training=True):
    facts = RANKS[rank]
    scaled = {key: [[first, *(x * 1000 for x in times)] for first, *times in facts[key]] for key in ("actions", "waits", "posts")}
    end = start + facts["end"] / 1000
    return {"step": step, "training": training, "accumulate_steps": 1, "start": start, "end": end, **scaled}


@pytest.fixture
def folder(tmp_path):
    """Three steps of two ranks whose clocks are 100 s apart."""
    for rank in range(2):
        write(tmp_path, rank, "10.0 [0, 1]")
    return tmp_path


def write(folder, rank, run, name="", start=1000.0, steps=3):
    head = {
        "run": run,
        "rank": rank,
        "ranks": [0, 1],
        "num_stages": 2,
        "num_chunks": 1,
        "schedule": "VPP",
        "clock_offset": 100.0 * rank,
        "clock_error": 0.001,
    }
    lines = [head, *(line(k, rank, start + k + 100.0 * rank) for k in range(steps))]
    path = folder / f"engine0-pipeline0{name}-rank{rank}.jsonl"
    path.write_text("".join(json.dumps(x) + "\n" for x in lines), encoding="utf-8")
    return path


def test_where_the_time_went_is_told_per_rank_and_for_whom(folder):
    run, _ = recorded.load(folder)
    first, second = recorded.accounts([run.steps[1], run.steps[2]])
    ms = lambda value: pytest.approx(2 * value / 1000, abs=1e-6)
    # Rank 0 waits from 11 for rank 1, which sends at 55; the rest is transfer, as is its send, for which rank 1 was ready.
    # At the end rank 0 comes last, at 85.
    assert first == (ms(95), ms(30), {1: ms(44)}, ms(1 + 5 + 5)) and first.other == ms(10)
    # Rank 1 waits from 1 for rank 0, which sends at 10, then the transfer; 5 ms of its backward were transfer, too.
    assert second == (ms(95), ms(35), {0: ms(9 + 25)}, ms(5 + 5 + 5)) and second.other == ms(11)


def test_the_trace_has_all_steps_on_one_clock(command, folder):
    done = command("trace", "merge", folder)
    assert done.returncode == 0, done.stderr
    events = json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    actions = {(e["tid"], e["name"], round(e["ts"])): round(e["dur"]) for e in events if e.get("cat") in ("forward", "backward")}
    assert len(actions) == 12
    for step in range(3):
        zero = step * 1_000_000
        assert actions[0, "F0.0", zero] == 10_000 and actions[1, "F0.0", zero + 15_000] == 10_000
        assert actions[1, "B0.0", zero + 25_000] == 30_000 and actions[0, "B0.0", zero + 60_000] == 20_000
    waits = [e for e in events if e.get("cat") == "wait"]
    assert len(waits) == 18 and {e["name"] for e in waits} == {"wait for B1.0", "wait for F0.0", "wait for all ranks"}


def test_the_table_and_the_picture_show_plan_and_run(command, folder):
    pytest.importorskip("matplotlib")
    done = command("trace", "merge", folder)
    assert done.returncode == 0 and "3 steps of 2 ranks, clocks aligned to 1.0 ms" in done.stdout
    assert "mean of 2 training steps, all but the first" in done.stdout
    rows = [row.split() for row in done.stdout.splitlines() if row[:5].strip().isdigit()]
    assert rows[0] == ["0", "95.0", "30.0", "32", "%", "44.0", "46", "%", "11.0", "12", "%", "10.0", "11", "%", "rank", "1", "44.0"]
    assert rows[1] == ["1", "95.0", "35.0", "37", "%", "34.0", "36", "%", "15.0", "16", "%", "11.0", "12", "%", "rank", "0", "34.0"]
    assert all(f"wrote {folder / name}" in done.stderr for name in ("trace.json", "timeline.png"))
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
    run, _ = recorded.load(folder)
    plan = recorded.planned(run, run.steps[2])
    ends = {(b.rank, b.kind): pytest.approx(b.end) for b in plan}
    assert ends == {(0, "F"): 0.010, (1, "F"): 0.020, (1, "B"): 0.050, (0, "B"): 0.070}, "the measured times, without waits"


def test_one_step_can_be_asked_for_and_written_elsewhere(command, folder, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "out").mkdir()
    done = command("trace", "merge", folder, "--step", 1, "--out", tmp_path / "out")
    assert done.returncode == 0 and "(step 1)" in done.stdout and (tmp_path / "out" / "timeline.png").exists()
    done = command("trace", "merge", folder, "--step", 9)
    assert done.returncode == 2 and "there is no step 9 that all ranks have recorded, there is 0 to 2" in done.stderr


def test_the_newest_run_is_taken_and_older_files_are_told(command, folder):
    pytest.importorskip("matplotlib")
    for rank in range(2):
        write(folder, rank, "20.0 [0, 1]", name="-new", start=5000.0, steps=1)
    done = command("trace", "merge", folder)
    assert "1 steps of 2 ranks (1 other recordings in the folder are left out)" in done.stdout


def test_the_pipeline_of_one_process_can_be_asked_for(command, folder):
    done = command("trace", "merge", folder, "--rank", 2)
    assert done.returncode == 2 and "has no recording with rank 2" in done.stderr
    assert recorded.load(folder, 1)[0].head["ranks"] == [0, 1]


def test_steps_that_a_rank_lacks_are_left_out(folder):
    path = write(folder, 1, "10.0 [0, 1]")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:3]) + lines[3][:40], encoding="utf-8")  # killed in the third step
    run, _ = recorded.load(folder)
    assert list(run.steps) == [0, 1]


@pytest.mark.parametrize(
    "spoil, sentence",
    [
        (lambda folder: [path.unlink() for path in folder.glob("*.jsonl")], "has no recording"),
        (lambda folder: (folder / "engine0-pipeline0-rank0.jsonl").unlink(), "has no file of rank 0: copy the files of all 2 ranks"),
        (
            lambda folder: (folder / "engine0-pipeline0-rank1.jsonl").write_text("nonsense\n", encoding="utf-8"),
            "is not a recording of paddle_vpp_ext",
        ),
        (
            lambda folder: (folder / "engine0-pipeline0-rank1.jsonl").write_text("[1]\n", encoding="utf-8"),
            "is not a recording of paddle_vpp_ext",
        ),
        (lambda folder: (folder / "engine0-pipeline0-rank1.jsonl").write_bytes(b"\xff\xfe\n"), "is not a recording of paddle_vpp_ext"),
        (
            lambda folder: (folder / "engine0-pipeline0-rank1.jsonl").write_text("", encoding="utf-8"),
            "is not a recording of paddle_vpp_ext",
        ),
        (lambda folder: [write(folder, rank, "10.0 [0, 1]", steps=0) for rank in range(2)], "has no step that all ranks have recorded"),
    ],
)
def test_what_is_missing_is_told_in_one_sentence(command, folder, spoil, sentence):
    spoil(folder)
    done = command("trace", "merge", folder)
    assert done.returncode in (1, 2) and sentence in done.stderr and done.stderr.count("\n") == 1 and done.stdout == ""


def test_without_matplotlib_trace_and_table_are_there_all_the_same(command, folder, without):
    done = command("trace", "merge", folder, before=[without("matplotlib")])
    assert done.returncode == 1 and "where the time went" in done.stdout and "pip install paddle_vpp_ext[viz]" in done.stderr
    assert (folder / "trace.json").exists() and "Traceback" not in done.stderr
