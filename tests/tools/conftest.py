"""The command line as a user starts it, in an environment that can lack or fake packages."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))  # the tests import each other by plain names


@pytest.fixture
def command(monkeypatch, registry):
    """command(*words, before=(folders ahead on the path), columns=…) -> the finished process.

    A process is started only where it must lack packages or have another environment: it takes a second.
    """

    def run(*words, before=(), columns=100, **environment):
        words = list(map(str, words))
        for name in ("FORCE_COLOR", "NO_COLOR", "PADDLE_VPP_SCHEDULE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("COLUMNS", str(columns))
        if not before and not environment:
            monkeypatch.setattr(sys, "path", [*sys.path])
            return _run_here(words)
        path = os.pathsep.join([*map(str, before), str(ROOT)])
        return subprocess.run(
            [sys.executable, "-m", "paddle_vpp_ext", *words],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": path, **environment},
        )

    return run


def _run_here(words):
    """The command in this process."""
    from paddle_vpp_ext.tools.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(words)
        except SystemExit as end:
            status = end.code or 0
    return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())


@pytest.fixture
def without(tmp_path):
    """without(name, …) -> a folder that, ahead on the path, makes these imports fail."""

    def make(*names):
        for name in names:
            (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} here')\n", encoding="utf-8")
        return tmp_path

    return make


@pytest.fixture
def registry():
    """The schedules; what a test registers is forgotten after it."""
    from paddle_vpp_ext.planning.registry import SCHEDULES

    before = dict(SCHEDULES)
    yield SCHEDULES
    SCHEDULES.clear()
    SCHEDULES.update(before)
