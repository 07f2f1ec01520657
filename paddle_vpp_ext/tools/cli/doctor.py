"""``doctor``: what is installed, what works with it, and what to do.

Versions are read from the packages' metadata, and the import of Paddle is tried in a process
of its own: a broken Paddle is a finding here, not a traceback.
"""

import argparse
import json
import os
import site
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, Optional

from ...activation import PTH, VARIABLE, is_wanted
from ...releases import OLDEST, RELEASES, numbers
from .command import PROGRAM, STATUS

OLDEST_PYTHON = (3, 9)
PADDLE_PACKAGES = ("paddlepaddle", "paddlepaddle-gpu")
INSTALL = "pip install paddlepaddle (CPU), or for GPUs see https://www.paddlepaddle.org.cn/install/quick"

IMPORT_SECONDS = 120
PROBE = """
import json, paddle, sys
gpu = paddle.is_compiled_with_cuda()
ours = sys.modules.get("paddle_vpp_ext.fleet.engine.selector")
print()
print(json.dumps({"version": paddle.__version__, "gpu": gpu, "count": paddle.device.cuda.device_count() if gpu else 0,
                  "enabled": bool(ours) and ours.is_enabled()}))
"""


class Paddle(NamedTuple):
    """What importing Paddle in a process of its own gave.

    ``error`` is empty, or the last line of its complaint; ``enabled``: whether the import alone enabled the extension.
    """

    version: str = ""
    gpu: bool = False
    count: int = 0  # type: ignore[assignment]  # hides tuple's, which nobody calls here
    error: str = ""
    enabled: bool = False


class Activation(NamedTuple):
    """How a script that does not call ``enable()`` gets the extension: the variable's value, where its .pth is, if anywhere."""

    variable: str = ""
    pth: str = ""


class Found(NamedTuple):
    """``packages``: the installed versions by name; ``paddle``: None if it is not installed."""

    python: tuple[int, ...]
    packages: dict[str, str]
    paddle: Optional[Paddle]
    activation: Activation = Activation()


class Finding(NamedTuple):
    """One line of the report: ``mark`` is ok, note or PROBLEM; ``remedy`` is what to do about it."""

    mark: str
    text: str
    remedy: str = ""


def add_command(commands: argparse._SubParsersAction) -> None:
    """Adds ``doctor`` to the parser's commands."""
    parser = commands.add_parser(
        "doctor",
        help="show what is installed, what works, and what to do",
        description="Looks at Paddle, device, protobuf, numpy and python, and says what works and what to do.",
        epilog=f"example:\n  {PROGRAM} doctor && echo ready to train\n{STATUS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=lambda args: run())


def run() -> int:
    """Prints the findings; 1 if there is a problem among them."""
    findings = diagnose(look())
    for mark, text, remedy in findings:
        print(f"{mark:8}{text}")
        if remedy:
            print(f"{'':8}-> {remedy}")
    problems = sum(finding.mark == "PROBLEM" for finding in findings)
    print(f"\n{problems} problem{'s' * (problems != 1)} found" if problems else "\nno problem found")
    return 1 if problems else 0


def look() -> Found:
    """What is installed here."""
    packages = {}
    for name in (*PADDLE_PACKAGES, "protobuf", "numpy", "rich", "matplotlib"):
        try:
            packages[name] = metadata.version(name) or "unknown"
        except metadata.PackageNotFoundError:
            pass
    folders = [*site.getsitepackages(), site.getusersitepackages()]  # Python reads a .pth nowhere else
    pth = next((str(Path(folder, PTH)) for folder in folders if Path(folder, PTH).is_file()), "")
    return Found(tuple(sys.version_info[:3]), packages, _try_import(), Activation(os.environ.get(VARIABLE, ""), pth))


def _try_import() -> Optional[Paddle]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=IMPORT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return Paddle(error=f"the import took more than {IMPORT_SECONDS} s")
    if done.returncode == 0:
        return Paddle(**json.loads(done.stdout.splitlines()[-1]))
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    error = lines[-1].strip() if lines else f"the import ended with status {done.returncode}"
    return None if error == "ModuleNotFoundError: No module named 'paddle'" else Paddle(error=error)


def diagnose(found: Found) -> list[Finding]:
    """The report on what was found."""
    findings = [_python(found), _numpy(found), _protobuf(found), *_paddle(found), _pictures(found), _activation(found)]
    broken = any(f.mark == "PROBLEM" for f in findings)
    planning = "planning (python -m paddle_vpp_ext plan)"
    if "numpy" not in found.packages:
        return findings + [Finding("note", f"works: nothing yet; {planning} needs numpy")]
    if broken:
        return findings + [Finding("note", f"works: {planning}; does not: training, until the problems are solved")]
    return findings + [Finding("ok", f"works: {planning}, and training on {_device(found.paddle)}")]


def _python(found):
    text = "python " + ".".join(map(str, found.python))
    if found.python[:2] < OLDEST_PYTHON:
        return Finding("PROBLEM", f"{text} is too old", "use python 3.9 or newer")
    return Finding("ok", text)


def _numpy(found):
    version = found.packages.get("numpy")
    if not version:
        return Finding("PROBLEM", "numpy is not installed", "pip install numpy")
    if numbers(version) >= (2,) and () < numbers(_paddle_version(found)) < (3,):
        return Finding("PROBLEM", f"numpy {version} breaks Paddle {_paddle_version(found)}", 'pip install "numpy<2"')
    return Finding("ok", f"numpy {version}")


def _protobuf(found):
    version = found.packages.get("protobuf")
    if not version:
        return Finding("note", "protobuf is not installed; it comes with Paddle")
    if numbers(version) >= (7,) and () < numbers(_paddle_version(found)) <= (3, 2, 2):
        return Finding("PROBLEM", f"protobuf {version} breaks Paddle {_paddle_version(found)}", 'pip install "protobuf<7"')
    return Finding("ok", f"protobuf {version}")


def _paddle_version(found):
    installed = [found.packages[name] for name in PADDLE_PACKAGES if name in found.packages]
    imported = found.paddle.version if found.paddle else ""
    return imported or (installed[0] if installed else "")


def _paddle(found):
    """Findings on Paddle itself and on its device."""
    names = [name for name in PADDLE_PACKAGES if name in found.packages]
    version = _paddle_version(found)
    if not found.paddle:
        return [Finding("PROBLEM", "Paddle is not installed", INSTALL)]
    findings, title = [], f"Paddle {version}" + (f" ({', '.join(names)})" if names else "")
    if len(names) > 1:
        findings.append(
            Finding(
                "PROBLEM",
                f"both {' and '.join(names)} are installed and overwrite each other",
                f"pip uninstall -y {' '.join(names)}, then {INSTALL}",
            )
        )
    if () < numbers(version) < numbers(OLDEST) and version != "0.0.0":
        text = f"{title} is not supported, {OLDEST} is the oldest that is"
        findings.append(Finding("PROBLEM", text, "pip install -U paddlepaddle"))
    elif found.paddle.error:
        findings.append(
            Finding(
                "PROBLEM",
                f"{title} is installed, but importing it fails: {found.paddle.error}",
                "solve the other problems listed here first, else install Paddle anew: " + INSTALL,
            )
        )
    elif numbers(version)[:3] not in map(numbers, RELEASES):
        findings.append(Finding("note", f"{title}: training was not tried with it yet, only with {', '.join(RELEASES)}"))
    else:
        findings.append(Finding("ok", title))
    if not found.paddle.error:
        findings.append(_device_finding(found.paddle))
    return findings


def _device_finding(paddle):
    if paddle.gpu and not paddle.count:
        return Finding("note", "GPU build of Paddle, but no GPU is visible", "check nvidia-smi and CUDA_VISIBLE_DEVICES")
    return Finding("ok", f"device: {_device(paddle)}")


def _device(paddle):
    if paddle.gpu and paddle.count:
        return f"{paddle.count} GPU{'s' * (paddle.count > 1)} (NCCL)"
    return "CPU (gloo)"


def _activation(found):
    """Which way a script gets the extension here."""
    value, pth = found.activation
    try:
        wanted = is_wanted({VARIABLE: value})
    except ValueError as error:
        return Finding("PROBLEM", f"activation: {error}", f"export {VARIABLE}=1")
    others = "paddle_vpp_ext.enable() in the script or paddle-vpp run"
    if not wanted:
        return Finding("ok", f"activation: by {others}" + (f"; {VARIABLE}=1 would do, but is not set" if pth else ""))
    if found.paddle and found.paddle.enabled:
        return Finding("ok", f"activation: {VARIABLE}=1, every script that imports Paddle gets the extension")
    if not pth:
        return Finding(
            "PROBLEM",
            f"activation: {VARIABLE}=1 has no effect: {PTH} is not in site-packages",
            f"install the package with pip, or use {others}",
        )
    return Finding(
        "PROBLEM",
        f"activation: {VARIABLE}=1 and {pth} are there, but importing Paddle does not enable the extension",
        "solve the other problems listed here first; python -S reads no .pth files",
    )


def _pictures(found):
    missing = [name for name in ("rich", "matplotlib") if name not in found.packages]
    if missing:
        text = f"{' and '.join(missing)} not installed: no {_what(missing)}"
        return Finding("note", text, "pip install paddle_vpp_ext[viz]")
    versions = ", ".join(f"{name} {found.packages[name]}" for name in ("rich", "matplotlib"))
    return Finding("ok", f"{versions} (colours and pictures)")


def _what(missing):
    return " and no ".join({"rich": "colours in the terminal", "matplotlib": "pictures"}[name] for name in missing)
