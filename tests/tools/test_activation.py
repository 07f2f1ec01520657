"""PADDLE_VPP_EXT=1: what pip installs for it, what it costs without, and what it does with any Python that it reaches."""

import importlib.util
import os
import shutil
import subprocess
import sys
import timeit
import venv
from pathlib import Path

import pytest

from paddle_vpp_ext.activation import PTH
from paddle_vpp_ext.tools.cli.doctor import Activation, Found, Paddle, diagnose

ROOT = Path(__file__).resolve().parents[2]
FAKE_PADDLE = "print('paddle')\n"
TELLING_ENABLE = "import paddle_vpp_ext\npaddle_vpp_ext.enable = lambda: print('enabled')\n"


class Environment:
    """A virtual environment without packages; ``before`` are folders of the path of its Python."""

    def __init__(self, folder):
        venv.create(folder, symlinks=True)
        self.python = folder / "bin" / "python"
        self.packages = Path(self.run("import site; print(site.getsitepackages()[0])").stdout.strip())

    def run(self, code, *before, variable=None, flags=()):
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PADDLE_VPP_", "PYTHON"))}
        kept.update({"PYTHONPATH": os.pathsep.join(map(str, before))} if before else {})
        kept.update({"PADDLE_VPP_EXT": variable} if variable is not None else {})
        return subprocess.run([self.python, *flags, "-c", code], capture_output=True, text=True, timeout=60, env=kept)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """As after ``pip install -e`` of a package that has no line for Python's start; with a Paddle that prints."""
    made = Environment(tmp_path_factory.mktemp("plain"))
    (made.packages / "__editable__.pth").write_text(f"{ROOT}\n", encoding="utf-8")
    (made.packages / "paddle.py").write_text(FAKE_PADDLE, encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def activated(tmp_path_factory, plain):
    """The same with the line."""
    made = Environment(tmp_path_factory.mktemp("activated"))
    for path in (*plain.packages.iterdir(), ROOT / "paddle_vpp_ext" / PTH):
        shutil.copy(path, made.packages)
    return made


@pytest.fixture
def telling(tmp_path):
    """A folder that, on the path, makes ``enable`` print, and need no Paddle."""
    (tmp_path / "sitecustomize.py").write_text(TELLING_ENABLE, encoding="utf-8")
    return tmp_path


def test_without_the_variable_python_starts_as_if_nothing_were_installed(plain, activated):
    loaded = "import sys; print(sorted(sys.modules), [getattr(finder, '__name__', finder) for finder in sys.meta_path])"
    assert activated.run(loaded).stdout == plain.run(loaded).stdout
    assert "paddle" not in activated.run(loaded).stdout


def test_without_the_variable_the_line_takes_microseconds(monkeypatch):
    monkeypatch.delenv("PADDLE_VPP_EXT", raising=False)
    line = (ROOT / "paddle_vpp_ext" / PTH).read_text(encoding="utf-8")
    assert line.startswith("import ") and line.count("\n") == 1  # what Python executes, and all of it
    assert min(timeit.repeat(lambda: exec(line), number=1, repeat=20)) < 0.001


def test_with_the_variable_python_starts_without_paddle(activated):
    done = activated.run("import sys; print([name for name in sys.modules if 'paddle' in name])", variable="1")
    assert done.stdout.strip() == "['paddle_vpp_ext', 'paddle_vpp_ext.activation']" and done.stderr == ""


def test_enable_follows_the_first_import_of_paddle(activated, telling):
    code = "import sys, paddle, paddle; del sys.modules['paddle']; import paddle; print('end')"
    done = activated.run(code, telling, variable="1")
    assert done.stdout.split() == ["paddle", "enabled", "paddle", "end"] and done.stderr == ""


def test_looking_for_paddle_does_not_use_the_hook_up(activated, telling):
    code = "import importlib.util as u; print(u.find_spec('paddle').origin is not None, u.find_spec('no_such')); import paddle"
    done = activated.run(code, telling, variable="1")
    assert done.stdout.split() == ["True", "None", "paddle", "enabled"]


def test_paddles_own_failure_stays_its_own(activated, telling):
    (telling / "paddle.py").write_text("1 / 0\n", encoding="utf-8")
    done = activated.run("import paddle", telling, variable="1")
    assert "ZeroDivisionError" in done.stderr and "enabled" not in done.stdout and "paddle_vpp_ext" not in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("variable", ["0", ""])
def test_zero_means_no(activated, telling, variable):
    assert activated.run("import paddle", telling, variable=variable).stdout.split() == ["paddle"]


def test_any_other_value_is_an_error_when_paddle_is_imported_and_not_before(activated):
    assert activated.run("print('fine')", variable="yes").stdout == "fine\n"
    done = activated.run("import paddle", variable="yes")
    assert done.stderr.splitlines()[-1] == "ValueError: PADDLE_VPP_EXT='yes': write 1 to train with paddle_vpp_ext, 0 to train without"


@pytest.mark.parametrize("error", ["RuntimeError", "ImportError"])
def test_an_extension_that_cannot_be_enabled_says_which_variable_asked_for_it(activated, tmp_path, error):
    (tmp_path / "sitecustomize.py").write_text(
        f"import paddle_vpp_ext\ndef enable():\n    raise {error}('it needs Paddle 2.6.2')\npaddle_vpp_ext.enable = enable\n",
        encoding="utf-8",
    )
    done = activated.run("import paddle", tmp_path, variable="1")
    assert done.stderr.splitlines()[-1] == (
        "RuntimeError: PADDLE_VPP_EXT=1, but it needs Paddle 2.6.2; unset PADDLE_VPP_EXT to train without paddle_vpp_ext"
    )


def test_a_line_left_behind_without_the_package_does_not_stop_python(tmp_path):
    left = Environment(tmp_path)
    shutil.copy(ROOT / "paddle_vpp_ext" / PTH, left.packages)
    done = left.run("print('fine')", variable="1")
    assert done.stdout == "fine\n" and "No module named 'paddle_vpp_ext'" in done.stderr
    assert left.run("print('fine')").stderr == ""


@pytest.mark.parametrize("editable", [False, True], ids=["wheel", "editable"])
def test_pip_installs_the_line_and_uninstalls_it(tmp_path, editable):
    source, made = tmp_path / "source", Environment(tmp_path / "environment")
    shutil.copytree(ROOT / "paddle_vpp_ext", source / "paddle_vpp_ext", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    pip(made, "install", "--no-deps", *(["-e"] if editable else []), source)
    assert (made.packages / PTH).read_text(encoding="utf-8") == (ROOT / "paddle_vpp_ext" / PTH).read_text(encoding="utf-8")
    loaded = "import sys; print('paddle_vpp_ext.activation' in sys.modules)"
    assert made.run(loaded, variable="1").stdout == "True\n" and made.run(loaded).stdout == "False\n"
    pip(made, "uninstall", "-y", "paddle_vpp_ext")
    assert not [*made.packages.parent.rglob("*vpp*")]


def pip(environment, *words):
    """This Python's pip at work in an environment without one."""
    if words[0] == "install" and importlib.util.find_spec("setuptools") and importlib.util.find_spec("wheel"):
        words = ["install", "--no-build-isolation", *words[1:]]  # spares a download
    command = [sys.executable, "-m", "pip", "--python", environment.python, *words]
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=180)
    assert done.returncode == 0, done.stdout


FINE = Paddle("3.3.1")


@pytest.mark.parametrize(
    "paddle, variable, pth, mark, words",
    [
        (FINE, "", "", "ok", "by paddle_vpp_ext.enable() in the script or paddle-vpp run"),
        (FINE, "0", "/p.pth", "ok", "PADDLE_VPP_EXT=1 would do, but is not set"),
        (FINE._replace(enabled=True), "1", "/p.pth", "ok", "PADDLE_VPP_EXT=1, every script that imports Paddle"),
        (FINE, "1", "", "PROBLEM", "no effect: paddle_vpp_ext.pth is not in site-packages"),
        (FINE, "1", "/p.pth", "PROBLEM", "importing Paddle does not enable the extension"),
        (None, "1", "/p.pth", "PROBLEM", "importing Paddle does not enable the extension"),
        (FINE, "yes", "/p.pth", "PROBLEM", "PADDLE_VPP_EXT='yes': write 1"),
    ],
)
def test_doctor_says_which_activation_there_is(paddle, variable, pth, mark, words):
    packages = {"paddlepaddle": "3.3.1", "protobuf": "7.0.0", "numpy": "2.4.6"}
    (finding,) = [f for f in diagnose(Found((3, 11, 7), packages, paddle, Activation(variable, pth))) if "activation" in f.text]
    assert finding.mark == mark and words in finding.text and bool(finding.remedy) == (mark == "PROBLEM")


def test_doctor_tries_it(command, tmp_path):
    """In the process that imports Paddle, by the line that Python would read."""
    (tmp_path / "paddle.py").write_text(
        "__version__ = '3.3.1'\nis_compiled_with_cuda = lambda: False\n"
        "import sys, types\nours = types.ModuleType('ours')\nours.enable, ours.is_enabled = lambda: None, lambda: True\n"
        "sys.modules['paddle_vpp_ext.fleet.engine.selector'] = ours\n",
        encoding="utf-8",
    )
    done = command("doctor", before=[tmp_path], PADDLE_VPP_EXT="1")
    assert "activation: PADDLE_VPP_EXT=1, every script that imports Paddle gets the extension" in done.stdout
