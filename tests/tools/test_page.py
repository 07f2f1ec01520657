"""The HTML page: its planner gives Python's numbers to the last bit, and what a person changes is what it shows."""

import html
import itertools
import json
import re

import pytest

import browser
from paddle_vpp_ext.examples.own_schedule import waves
from paddle_vpp_ext.planning.options import parse_schedule
from paddle_vpp_ext.planning.planner import make_plan
from paddle_vpp_ext.planning.registry import register_schedule
from paddle_vpp_ext.planning.select import select
from paddle_vpp_ext.schedule.costs import Costs
from paddle_vpp_ext.tools.draw import page

COSTS = [(1, 1, 1, 0), (1, 1.2, 0.8, 0.1), (0.3, 0.7, 0, 0.013), (2, 0, 0, 1), (0, 0, 0, 0), (1, 0.1, 0.2, 7)]
SHAPES = [
    (p, v, m)
    for p, v in ((2, 1), (2, 3), (3, 2), (4, 1), (4, 2), (5, 4), (8, 2), (16, 4))
    for m in (1, p - 1, p, p + 1, 2 * p, 2 * p + 3, 5 * p + 1)
]


def configurations():
    """(state, schedule): each shape with all schedules, the costs in turn."""
    costs = itertools.cycle(COSTS)
    for (p, v, m), name in itertools.product(SHAPES, [*page.PAGE_SCHEDULES, "1F1B"]):
        yield dict(zip("pVmFIW", (p, v, m)), **dict(zip(("F", "I", "W", "hop"), next(costs)))), name


def pythons(state, name):
    """What the page's ``plan`` returns, by the package; of the spans a sum that every one of them changes."""
    p, v, m, forward, input_grad, weight_grad, hop = (state[key] for key in ("p", "V", "m", "F", "I", "W", "hop"))
    if name == "1F1B":
        plan = make_plan("VPP", p, 1, m)
        costs = Costs(forward * v, input_grad * v, weight_grad * v, hop)
    else:
        choice = parse_schedule(name)
        plan, costs = make_plan(choice.name, p, v, m, choice.options), Costs(forward, input_grad, weight_grad, hop)
    total = plan.simulate(costs)
    digest = 0.0
    for rank, span in enumerate(total.spans):
        for j, (start, end) in enumerate(span):
            digest += (start + 2 * end) * (rank + 3 * j + 1)
    return {"makespan": total.makespan, "idle": total.idle_share, "peak": total.peak_activations, "digest": digest}


EVALUATE = """
const answers = CONFIGURATIONS.map(([state, name]) => {
  const {makespan, idle, peak, spans} = plan(name, state);
  let digest = 0;
  spans.forEach((span, rank) => span.forEach(([start, end], j) => { digest += (start + 2 * end) * (rank + 3 * j + 1); }));
  return {makespan, idle, peak, digest};
});
const rules = CONFIGURATIONS.map(([{p, V, m}]) => select(p, V, m));
answer({answers, rules});
"""


def ask(tmp_path, script, start=None, **values):
    """What ``script``, run on the page after its own, gives to ``answer``."""
    start = start or page.start_of(make_plan("VPP", 4, 2, 11, {"groups": "even"}), Costs())
    given = "".join(f"const {name} = {json.dumps(value)};\n" for name, value in values.items())
    frame = (
        'const answer = x => { const p = document.createElement("pre"); p.id = "answer"; '
        "p.textContent = JSON.stringify(x); document.body.append(p); };\n"
    )
    path = tmp_path / "page.html"
    path.write_text(page.html(start).replace("</body>", f"<script>{frame}{given}{script}</script></body>"), encoding="utf-8")
    found = re.search(r'<pre id="answer">(.*?)</pre>', browser.dump(path, tmp_path / "profile"), re.DOTALL)
    assert found, "the script did not come to its end"
    return json.loads(html.unescape(found[1]))


def test_the_pages_numbers_are_pythons_to_the_last_bit(tmp_path):
    given = list(configurations())
    assert len(given) >= 300
    found = ask(tmp_path, EVALUATE, CONFIGURATIONS=given)
    for (state, name), answer, rule in zip(given, found["answers"], found["rules"]):
        assert answer == pythons(state, name), (state, name)
        assert rule == pages_rule(state["p"], state["V"], state["m"])


def pages_rule(p, v, m):
    """The selector's choice, by the page's names."""
    try:
        name = select(p, v, m)
    except ValueError:
        return None
    return name if name == "FthenB" else f"VPP:groups=first,slope={1 if v == 1 else 2}"


CHANGE = """
const set = (id, value) => { const field = byId(id); field.value = value; field.dispatchEvent(new Event("input")); };
const texts = of => [...document.querySelectorAll(of)].map(node => node.textContent);
const row = name => document.querySelector(`tr[data-name="${name}"]`).innerText;
const drawn = () => byId("canvas").toDataURL();
const look = () => ({name: byId("name").textContent, figures: byId("figures").innerText, idle: texts(".idle.bar"), peak: texts(".peak.bar"),
                     bad: texts(".peak.bad"), p: byId("p").value, number: byId("p-number").value});
const before = look(), image = drawn();
set("p", 8); set("V-number", 4); set("m-number", 39); set("hop-number", 0.1);
const after = look();
document.querySelector('tr[data-name="VPP:groups=first,slope=2"]').click();
const other = look();
set("limit-number", 12);
const limited = look(), table = row("VPP:groups=first,slope=2"), fitting = row("VPP:groups=even,slope=2");
set("p-number", "0"); set("m-number", "");
const invalid = look(), changed = drawn() !== image;
const spans = shown.spans[0], box = byId("canvas").getBoundingClientRect();
byId("canvas").dispatchEvent(new MouseEvent("mousemove", {clientX: box.left + 1, clientY: box.top + 5}));
answer({before, after, other, limited, table, fitting, invalid, changed, hint: byId("hint").textContent});
"""


def test_changing_a_field_changes_figures_ranks_and_timeline(tmp_path):
    found = ask(tmp_path, CHANGE)
    assert found["before"]["name"] == "VPP:groups=even,slope=2"
    assert "75" in found["before"]["figures"] and "12.0 %" in found["before"]["figures"] and "6.5" in found["before"]["figures"]
    assert found["before"]["peak"] == ["6.5", "5.5", "4.5", "3.5"] and len(found["before"]["idle"]) == 4
    assert "490.4" in found["after"]["figures"] and found["after"]["peak"][0] == "11.25" and found["after"]["number"] == "8"
    assert "493.6" in found["other"]["figures"] and found["other"]["peak"][0] == "15" and found["other"]["bad"] == []
    assert found["limited"]["bad"] == ["15", "14.5", "14", "13.5", "13", "12.5"]  # a rank with 12 is within the limit
    assert "over the memory limit" in found["table"] and "over" not in found["fitting"]
    assert found["invalid"]["figures"] == found["limited"]["figures"], "a number that makes no pipeline changes nothing"
    assert found["changed"] and found["hint"] == "F0.0 on rank 0: forward of chunk 0, micro-batch 0, 0 to 1"


def test_orders_that_only_python_plans_are_shown_for_their_own_numbers(tmp_path, registry):
    register_schedule("Waves", waves)
    start = page.start_of(make_plan("Waves", 4, 2, 11), Costs())
    script = """
    const first = [byId("name").textContent, byId("figures").innerText];
    byId("m").value = 12; byId("m").dispatchEvent(new Event("input"));
    answer([...first, byId("name").textContent, document.querySelector('tr[data-name="Waves"]').innerText]);
    """
    name, figures, later, row = ask(tmp_path, script, start)
    expected = make_plan("Waves", 4, 2, 11).simulate()
    assert name == "Waves" and f"{expected.makespan:g}" in figures
    assert later.startswith("VPP") and "planned for p=4, V=2, m=11 only" in row


def test_the_page_asks_for_nothing_from_the_network(command, tmp_path):
    path = tmp_path / "plan.html"
    done = command("plan", "--pp", 4, "--vpp", 2, "--acc", 10, "--html", path)
    assert done.returncode == 0 and f"wrote {path}" in done.stderr
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"https?:|//cdn|@import|<link[^>]+stylesheet|\bsrc=|fetch\(|XMLHttpRequest", text)
    assert "/*PLANNER*/" not in text and len(text) < 40_000


def test_a_screenshot_has_the_colours_of_the_timeline(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "page.html"
    page.save(path, page.start_of(make_plan("VPP", 4, 2, 11), Costs()))
    browser.screenshot(path, tmp_path / "profile", tmp_path / "page.png")
    pixels = (image.imread(tmp_path / "page.png")[..., :3] * 255).round().astype(int).reshape(-1, 3)
    for colour in ((31, 95, 168), (200, 86, 10), (236, 239, 242)):  # forward and backward of chunk 0, idle
        assert (abs(pixels - colour).sum(axis=1) == 0).mean() > 0.005
