"""A schedule as one self-contained HTML page, on which its numbers can be changed.

The page plans what it shows by itself (html/planner.js). Orders that it cannot make, those of a
user's schedule for one, go into it as they are.
"""

import json
import os
from pathlib import Path
from typing import Any, Union

from ...planning.options import parse_schedule
from ...planning.planner import make_plan
from ...planning.registry import VARIANTS
from ...schedule.costs import Costs
from ...schedule.plan import Plan
from . import palette

PARTS = Path(__file__).with_name("html")

# What html/planner.js can plan, besides 1F1B with a whole stage in one chunk.
PAGE_SCHEDULES = [*VARIANTS["VPP"], "FthenB"]


def start_of(plan: Plan, costs: Costs) -> dict:
    """What the page shows first: a plan under costs that are the same for all model parts.

    Transfers are those beside computation, also for a plan with blocking ones.
    """
    state = {
        "p": plan.num_stages,
        "V": plan.num_chunks,
        "m": plan.accumulate_steps,
        "F": costs.forward,
        "I": costs.input_grad,
        "W": costs.weight_grad,
        "hop": costs.hop,
        "limit": None,
    }
    name = _name_in_page(plan)
    if name:
        return {"state": {**state, "schedule": name}, "given": None}
    given: dict[str, Any] = {
        "name": plan.schedule,
        "p": plan.num_stages,
        "V": plan.num_chunks,
        "m": plan.accumulate_steps,
        "orders": plan.orders,
    }
    if plan.schedule in ("VPP", "FthenB"):
        given["name"] += " as planned"
    return {"state": {**state, "schedule": given["name"]}, "given": given}


def _name_in_page(plan):
    """The page's own name of a plan's orders, or None."""
    numbers = plan.num_stages, plan.num_chunks, plan.accumulate_steps
    for text in PAGE_SCHEDULES:
        choice = parse_schedule(text)
        if plan.orders == make_plan(choice.name, *numbers, choice.options).orders:
            return text
    return None


def html(start: dict) -> str:
    """The page that begins with ``start`` (see start_of)."""
    values = {**start, "hues": palette.HUES, "lightest": palette.LIGHTEST}
    text = (PARTS / "page.html").read_text(encoding="utf-8")
    # "</" could end the script: in JSON "<\\/" is the same text.
    script = "const START = " + json.dumps(values).replace("</", "<\\/") + ";"
    for mark, part in (
        ("/*STYLE*/", (PARTS / "style.css").read_text(encoding="utf-8")),
        ("/*PLANNER*/", (PARTS / "planner.js").read_text(encoding="utf-8")),
        ("/*VIEW*/", (PARTS / "view.js").read_text(encoding="utf-8")),
        ("/*START*/", script),
    ):
        text = text.replace(mark, part)
    return text


def save(path: Union[str, os.PathLike], start: dict) -> None:
    """Writes the page. OSError if ``path`` cannot be written."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(html(start))
