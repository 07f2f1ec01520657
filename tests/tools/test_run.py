"""``run`` as a user types it; with Paddle's launcher it is tested in tests/fleet/test_run_command.py."""

import pytest


def test_a_script_that_is_not_there_and_none_at_all(command):
    for words, sentence in ((["run", "nowhere.py"], "there is no script nowhere.py"), (["run"], "required: SCRIPT")):
        done = command(*words)
        assert done.returncode == 2 and sentence in done.stderr and done.stderr.count("\n") == 1


def test_without_paddle_it_says_who_knows_more(command, without, tmp_path):
    (tmp_path / "train.py").write_text("print('never')\n", encoding="utf-8")
    done = command("run", tmp_path / "train.py", before=[without("paddle")])
    assert done.returncode == 1 and done.stdout == "" and "doctor says more" in done.stderr and "Traceback" not in done.stderr


@pytest.fixture
def enabled(tmp_path):
    """A folder in which the package's ``enable`` says that it was called, and needs no Paddle."""
    (tmp_path / "sitecustomize.py").write_text(
        "import paddle_vpp_ext\npaddle_vpp_ext.enable = lambda: print('enabled')\n", encoding="utf-8"
    )
    return tmp_path


@pytest.mark.parametrize("end, status", [("", 0), ("sys.exit(3)", 3), ("sys.exit('no data')", 1)])
def test_the_script_gets_its_arguments_its_folder_and_its_exit_status(command, enabled, tmp_path, end, status):
    (tmp_path / "beside.py").write_text("VALUE = 7\n", encoding="utf-8")
    script = tmp_path / "train.py"
    script.write_text(f"import sys\nfrom beside import VALUE\nprint(__name__, sys.argv, VALUE)\n{end}\n", encoding="utf-8")
    done = command("run", script, "--help", "-x", "--", "a b", before=[enabled])
    assert done.stdout.splitlines() == ["enabled", f"__main__ {[str(script), '--help', '-x', '--', 'a b']} 7"]
    assert done.returncode == status


def test_a_scripts_own_error_keeps_its_traceback(command, enabled, tmp_path):
    (tmp_path / "train.py").write_text("1 / 0\n", encoding="utf-8")
    done = command("run", tmp_path / "train.py", before=[enabled])
    assert done.returncode == 1 and "Traceback" in done.stderr and "ZeroDivisionError" in done.stderr
