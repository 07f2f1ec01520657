"""Rows, traces and pictures show what they were made from."""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from paddle_vpp_ext.planning.planner import make_plan
from paddle_vpp_ext.schedule.action import Action
from paddle_vpp_ext.schedule.costs import Costs
from paddle_vpp_ext.schedule.plan import plan_orders
from paddle_vpp_ext.tools.draw import palette, text, timeline
from paddle_vpp_ext.tools.draw import perfetto as trace
from paddle_vpp_ext.tools.draw.timeline import Block


def timeline_of(p=4, num_chunks=2, m=10, **more):
    return timeline.from_plan(make_plan("VPP", p, num_chunks, m, **more))


def split_rows():
    orders = [
        [part for a in order for part in ([a] if a.kind == "F" else [Action("I", *a[1:]), Action("W", *a[1:])])]
        for order in make_plan("VPP", 2, 2, 4).orders
    ]
    return timeline.from_plan(plan_orders(orders, 2, 4))


def test_rows_have_the_plans_actions_and_times():
    plan, costs = make_plan("VPP", 2, 2, 3), Costs(2, 1, 1, 0.5)
    blocks, result = timeline.from_plan(plan, costs), plan.simulate(costs)
    for rank, of_rank in timeline.by_rank(blocks).items():
        assert [b.action for b in of_rank] == plan.orders[rank]
        assert [(b.start, b.end) for b in of_rank] == result.spans[rank]
    assert timeline.summary(blocks) == (result.makespan, pytest.approx(result.idle_share), result.peak_activations)


def test_measured_rows_may_start_anywhere_and_be_plain_lists():
    blocks = timeline.to_timeline([[0, 105, 107, "B", 0, 0], [0, 100, 101, "F", 0, 0]])
    assert timeline.summary(blocks) == (7.0, [pytest.approx(4 / 7)], [1])
    assert timeline.from_zero(blocks)[0] == Block(0, 5.0, 7.0, "B", 0, 0)


@pytest.mark.parametrize(
    "block", [(0, 1, 2, "F", 0), (0, 2, 1, "F", 0, 0), (0, 1, 2, "X", 0, 0), (0, 1, float("nan"), "F", 0, 0), 7, ("a", 1, 2, "F", 0, 0)]
)
def test_what_is_no_block_is_refused_and_shown(block):
    with pytest.raises(ValueError, match="is not a block"):
        timeline.to_timeline([block])


def test_shades_and_inks_differ():
    for chunks in (1, 2, 4, 8):
        colours = {palette.shade(kind, c, chunks) for kind in "FBIW" for c in range(chunks)}
        assert len(colours) == 4 * chunks
    assert palette.ink("#000000") == "#ffffff" and palette.ink("#ffffff") == "#000000"


def test_text_draws_what_runs_in_every_column():
    page = text.plain(timeline_of(2, 1, 2), "head", 60)
    assert page.splitlines()[:5] == [
        "head",
        "",
        "       |0             |5",
        "rank 0 a0-a1-......A0====...A1====",
        "rank 1 ...a0-A0====a1-A1====......",
    ]


def test_text_tells_split_backwards_apart():
    page = text.plain(split_rows(), "", 120)
    assert "B0~B0+" in page and "input gradient" in page and "weight gradient" in page


def test_text_of_nothing_and_of_no_time_is_still_text():
    assert "makespan 0" in text.plain([], "nothing", 80)
    assert "makespan 0" in text.plain([Block(0, 3.0, 3.0, "F", 0, 0)], "", 80)


def test_text_cut_into_bands_shows_all_columns():
    blocks = timeline_of()
    wide, narrow = (text.plain(blocks, "", width) for width in (400, 80))
    line = lambda page, rank: "".join(row[7:] for row in page.splitlines() if row.startswith(f"rank {rank} "))
    assert all(len(line(wide, rank)) == 69 * 3 for rank in range(4))
    # A number may be written once more where its block is cut, so only the idle columns are compared.
    idle = lambda columns: [c == "." for c in columns]
    assert all(idle(line(wide, rank)) == idle(line(narrow, rank)) for rank in range(4))


def test_a_trace_has_every_block_in_microseconds_on_its_ranks_track(tmp_path):
    blocks = [Block(0, 1.0, 1.5, "F", 1, 7), Block(1, 1.5, 2.5, "B", 0, 3)]
    path = tmp_path / "trace.json"
    trace.save(path, blocks, unit_us=1e6)
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    complete = [(e["name"], e["cat"], e["tid"], e["ts"], e["dur"], e["args"]) for e in events if e["ph"] == "X"]
    assert complete == [
        ("F1.7", "forward", 0, 1e6, 5e5, {"chunk": 1, "micro_batch": 7}),
        ("B0.3", "backward", 1, 1.5e6, 1e6, {"chunk": 0, "micro_batch": 3}),
    ]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "rank 0", 1: "rank 1"} and all("pid" in e and e["ph"] in "XM" for e in events)


def test_a_traces_tracks_never_overlap():
    events = [e for e in trace.events(timeline_of(blocking=True)) if e["ph"] == "X"]
    assert len(events) == 4 * 2 * 2 * 10
    for rank in range(4):
        track = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == rank)
        assert all(end <= start for (_, end), (start, _) in zip(track, track[1:]))


SVG = "{http://www.w3.org/2000/svg}"


def words_of(path):
    return ["".join(node.itertext()).strip() for node in ElementTree.parse(path).iter(f"{SVG}text")]


@pytest.fixture
def picture():
    pytest.importorskip("matplotlib")
    from paddle_vpp_ext.tools.draw import picture

    return picture


def test_a_picture_has_ranks_figures_and_a_number_in_every_block(picture, tmp_path):
    picture.save(tmp_path / "x.svg", {"plan": timeline_of(m=8)}, "a title", unit="ms")
    words = words_of(tmp_path / "x.svg")
    for wanted in ("a title", "plan", "rank 0", "rank 3", "forward", "backward", "idle", "peak", "time (ms)"):
        assert wanted in words
    for number in range(8):
        # In 4 ranks x 2 chunks x 2 kinds; 0 and 1 are chunks in the legend, too, and numbers of the axis or peaks may add to it.
        assert words.count(str(number)) >= 16


def test_a_picture_of_plan_and_run_has_both_on_one_scale(picture, tmp_path):
    plan = timeline_of()
    run = [tuple(b._replace(start=b.start * 1.1 + 1e6, end=b.end * 1.1 + 1e6)) for b in plan]
    drawn = picture.figure({"plan": plan, "run": run})
    assert [axes.get_xlim() for axes in drawn.axes] == [(0, pytest.approx(69 * 1.1))] * 2
    assert drawn.axes[0].get_position().y0 > drawn.axes[1].get_position().y1
    picture.save(tmp_path / "x.svg", {"plan": plan, "run": run})
    words = words_of(tmp_path / "x.svg")
    assert "plan" in words and "run" in words and words.count("rank 2") == 2


def test_panels_in_different_units_get_scales_of_their_own(picture):
    plan = timeline_of()
    run = [b._replace(start=b.start / 1000, end=b.end / 1000) for b in plan]
    assert [axes.get_xlim()[1] for axes in picture.figure({"plan": plan, "run": run}).axes] == [69, pytest.approx(0.069)]


def test_bars_have_the_colours_of_kind_and_chunk(picture):
    from matplotlib.colors import to_hex

    (axes,) = picture.figure({"plan": split_rows()}).axes
    colours = {to_hex(face) for bars in axes.collections for face in bars.get_facecolor()}
    assert colours == {palette.shade(kind, c, 2) for kind in "FIW" for c in range(2)} | {picture.IDLE}


def test_the_same_plan_gives_the_same_svg(picture, tmp_path):
    for name in "ab":
        picture.save(tmp_path / f"{name}.svg", {"plan": timeline_of()})
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_pictures_of_nothing_of_no_time_and_of_many_blocks_are_drawn(picture, tmp_path):
    for blocks in ([], [Block(0, 3.0, 3.0, "F", 0, 0)], timeline_of(8, 4, 100)):
        picture.save(tmp_path / "x.png", {"plan": blocks})
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_the_users_matplotlib_stays_as_it_is(picture, tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    picture.save(tmp_path / "x.png", {"plan": timeline_of(2, 1, 2)})
    assert dict(matplotlib.rcParams) == before


def test_an_unknown_picture_format_and_no_panels_are_refused(picture, tmp_path):
    with pytest.raises(ValueError, match="png or svg"):
        picture.save(tmp_path / "x.gif", {"plan": timeline_of()})
    with pytest.raises(ValueError, match="at least one panel"):
        picture.save(tmp_path / "x.png", {})


def test_without_matplotlib_the_error_names_what_to_install(monkeypatch, tmp_path):
    import sys

    from paddle_vpp_ext.tools.draw import picture

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install paddle_vpp_ext\[viz\]"):
        picture.save(tmp_path / "x.png", {"plan": []})
