"""``--costs FILE``: the same file for plan and compare, refused in one sentence where it is wrong."""

import json

import pytest

from paddle_vpp_ext.schedule.costs import Costs
from paddle_vpp_ext.tools.cli.main import main

PIPELINE = ["--pp", "2", "--vpp", "2", "--acc", "4"]


def test_a_plan_takes_its_costs_from_a_file(tmp_path, capsys):
    path = tmp_path / "costs.json"
    Costs((1, 1, 1, 3), 1, 1, 0.25).save(path)
    assert main(["plan", *PIPELINE, "--schedule", "auto:memory=4", "--costs", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["makespan"] >= 4 * (1 + 3 + 2 * 2) and "VPP:groups=first" in report["note"]


@pytest.mark.parametrize("content, named", [('{"forward": -1}', "forward"), ('{"forward": [1, 2]}', "4 parts"), (None, "cannot read")])
def test_a_wrong_file_is_refused(tmp_path, capsys, content, named):
    path = tmp_path / "costs.json"
    if content:
        path.write_text(content)
    assert main(["plan", *PIPELINE, "--costs", str(path)]) == 2
    assert named in capsys.readouterr().err
