"""PADDLE_VPP_EXT=1 and Paddle's launcher: an unmodified script trains with our engine."""

import os
import shutil
import site
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

import pool
from paddle_vpp_ext.activation import PTH
from test_run_command import BESIDE, SCRIPT


@pytest.fixture
def python(tmp_path):
    """A Python with the packages of this one, and with the line that pip installs."""
    folder = tmp_path / "environment"
    venv.create(folder, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    these = [path for path in [*site.getsitepackages(), site.getusersitepackages()] if Path(path).is_dir()]
    (packages / "__editable__.pth").write_text("\n".join([str(pool.ROOT), *these]) + "\n", encoding="utf-8")
    shutil.copy(pool.ROOT / "paddle_vpp_ext" / PTH, packages)
    return folder / "bin" / "python"


@pytest.mark.parametrize("schedule, name", [(None, "VPP"), ("VPP:groups=even", "VPP:groups=even")])
def test_an_unmodified_script_trains_with_our_engine(python, tmp_path, schedule, name):
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "beside.py").write_text(BESIDE, encoding="utf-8")
    output = launch(python, tmp_path, PADDLE_VPP_EXT="1", **({"PADDLE_VPP_SCHEDULE": schedule} if schedule else {}))
    # With p=2 and m=5, which Paddle refuses for V=2; one line says what it trains with.
    assert output.count(f"pipeline schedule {name} (") == 1
    logs = [path.read_text(encoding="utf-8") for path in sorted((tmp_path / "log").glob("workerlog.*"))]
    assert [log.count("trained paddle_vpp_ext.fleet.engine.pipeline ['--acc', '5'] __main__ ") for log in logs] == [1, 1]


def launch(python, folder, **variables):
    """The output of Paddle's launcher with two processes of train.py."""
    pool.close_pools()  # cores are scarce
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PADDLE_", "MASTER_", "PYTHON"))}
    done = subprocess.run(
        [python, "-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir", "log", "train.py", "--acc", "5"],
        cwd=folder,
        env={**kept, "OMP_NUM_THREADS": "1", "GLOG_minloglevel": "2", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout
