"""``doctor`` finds what is wrong, says what to do, and survives what it examines."""

import pytest

from paddle_vpp_ext.tools.cli.doctor import Found, Paddle, diagnose, numbers

GOOD = {"paddlepaddle": "3.3.1", "protobuf": "7.36.2", "numpy": "2.4.6", "rich": "15.0.0", "matplotlib": "3.11.2"}


def found(python=(3, 11, 7), paddle="same", **packages):
    packages = {name.replace("_", "-"): version for name, version in {**GOOD, **packages}.items() if version}
    if paddle == "same":
        version = packages.get("paddlepaddle") or packages.get("paddlepaddle-gpu")
        paddle = Paddle(version) if version else None
    return Found(python, packages, paddle)


def problems(it):
    return [(f.text, f.remedy) for f in diagnose(it) if f.mark == "PROBLEM"]


def test_the_newest_paddle_is_fine():
    assert problems(found()) == []
    assert diagnose(found())[-1].text.endswith("training on CPU (gloo)")


@pytest.mark.parametrize(
    "paddle, protobuf, is_problem",
    [
        ("2.6.2", "7.0.0", True),
        ("3.0.0", "7.1.0", True),
        ("3.2.2", "7.36.2", True),
        ("3.2.2", "6.33.0", False),
        ("3.3.0", "7.36.2", False),
        ("3.3.1", "7.36.2", False),
        ("3.2.2", "10.0", True),
    ],
)
def test_protobuf_7_is_a_problem_up_to_3_2_2(paddle, protobuf, is_problem):
    it = found(paddlepaddle=paddle, protobuf=protobuf, numpy="1.26.4", paddle=Paddle(paddle, error="no attribute 'label'"))
    remedies = [remedy for _, remedy in problems(it)]
    assert ('pip install "protobuf<7"' in remedies) == is_problem


@pytest.mark.parametrize(
    "paddle, numpy, is_problem",
    [
        ("2.6.2", "2.0.0", True),
        ("2.6.2", "1.26.4", False),
        ("3.0.0", "2.4.6", False),
        ("3.3.1", "2.4.6", False),
    ],
)
def test_numpy_2_is_a_problem_with_2_6_2(paddle, numpy, is_problem):
    it = found(paddlepaddle=paddle, numpy=numpy, protobuf="6.33.0")
    assert ('pip install "numpy<2"' in [remedy for _, remedy in problems(it)]) == is_problem


@pytest.mark.parametrize("version", ["2.5.2", "2.6.1", "2.6.0.post117", "1.8.5"])
def test_paddle_older_than_2_6_2_is_not_supported(version):
    ((text, remedy),) = problems(found(paddlepaddle=version, numpy="1.26.4", protobuf="3.20.3"))
    assert version in text and "not supported" in text and "pip install -U" in remedy


def test_no_paddle_says_how_to_install_one_and_that_planning_works():
    it = found(paddlepaddle=None)
    ((text, remedy),) = problems(it)
    assert "not installed" in text and "pip install paddlepaddle" in remedy
    assert "works: planning" in diagnose(it)[-1].text and "does not: training" in diagnose(it)[-1].text


def test_no_numpy_and_an_old_python_are_problems():
    assert ("numpy is not installed", "pip install numpy") in problems(found(numpy=None))
    assert any("too old" in text for text, _ in problems(found(python=(3, 8, 10))))


def test_two_paddles_at_once_are_a_problem():
    assert any("overwrite each other" in text for text, _ in problems(found(paddlepaddle_gpu="2.6.2")))


def test_a_paddle_that_fails_for_another_reason_is_shown():
    ((text, remedy),) = problems(found(paddle=Paddle(error="ImportError: libcudnn.so.8: cannot open")))
    assert "3.3.1" in text and "libcudnn.so.8" in text and remedy


def test_the_device_is_told():
    device = lambda paddle: next(f for f in diagnose(found(paddle=paddle)) if "GPU" in f.text or "CPU" in f.text)
    assert device(Paddle("3.3.1")).text == "device: CPU (gloo)"
    assert device(Paddle("3.3.1", True, 8)).text == "device: 8 GPUs (NCCL)"
    assert device(Paddle("3.3.1", True, 0)).mark == "note" and "CUDA_VISIBLE_DEVICES" in device(Paddle("3.3.1", True, 0)).remedy


def test_a_paddle_that_was_not_tried_is_noted():
    assert any(f.mark == "note" and "9.9.9" in f.text for f in diagnose(found(paddlepaddle="9.9.9")))


def test_missing_picture_packages_are_a_note():
    (note,) = [f for f in diagnose(found(rich=None)) if f.mark == "note"]
    assert "rich" in note.text and note.remedy == "pip install paddle_vpp_ext[viz]"


def test_versions_of_all_sorts_are_read():
    assert numbers("3.0.0b2") == (3, 0, 0) and numbers("2.6.2.post117") == (2, 6, 2)
    assert numbers("7") == (7, 0, 0) and numbers("unknown") == ()


@pytest.fixture
def fake(tmp_path):
    """fake(paddle=…, protobuf=…, code=…) -> a folder with these versions installed, and a paddle of this code."""

    def make(paddle="3.3.1", protobuf="7.0.0", numpy="2.4.6", code=""):
        for name, version in (("paddlepaddle", paddle), ("protobuf", protobuf), ("numpy", numpy)):
            info = tmp_path / f"{name}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
        (tmp_path / "paddle").mkdir()
        (tmp_path / "paddle" / "__init__.py").write_text(code, encoding="utf-8")
        return tmp_path

    return make


WORKING = """
print("a banner that paddle might print")
__version__ = "3.3.1"
is_compiled_with_cuda = lambda: True
class device:
    class cuda:
        device_count = staticmethod(lambda: 2)
"""


def test_a_working_paddle_gives_status_0(command, fake):
    done = command("doctor", before=[fake(code=WORKING)])
    assert done.returncode == 0 and done.stderr == ""
    for words in ("python 3.", "numpy 2.4.6", "protobuf 7.0.0", "Paddle 3.3.1", "2 GPUs (NCCL)", "no problem found"):
        assert words in done.stdout


@pytest.mark.parametrize(
    "code",
    [
        "raise AttributeError(\"'FieldDescriptor' object has no attribute 'label'\")",
        "import sys; sys.exit(3)",
        "import os; os.abort()",
        "import no_such_module",
    ],
)
def test_a_broken_paddle_gives_status_1_and_no_traceback(command, fake, code):
    done = command("doctor", before=[fake(paddle="3.2.2", code=code)])
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    assert 'pip install "protobuf<7"' in done.stdout and "importing it fails" in done.stdout
    assert "problems found" in done.stdout
