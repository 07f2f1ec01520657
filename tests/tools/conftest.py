"""The command line as a user starts it, in an environment that can lack or fake packages."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def command():
    """command(*words, before=(folders ahead on the path), columns=…) -> the finished process."""

    def run(*words, before=(), columns=100, **environment):
        path = os.pathsep.join([*map(str, before), str(ROOT)])
        clean = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "NO_COLOR", "PADDLE_VPP_SCHEDULE")}
        return subprocess.run(
            [sys.executable, "-m", "paddle_vpp_ext", *map(str, words)], capture_output=True, text=True, timeout=120,
            env={**clean, "PYTHONPATH": path, "COLUMNS": str(columns), **environment},
        )

    return run


@pytest.fixture
def without(tmp_path):
    """without(name, …) -> a folder that, ahead on the path, makes these imports fail."""

    def make(*names):
        for name in names:
            (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} here')\n", encoding="utf-8")
        return tmp_path

    return make
