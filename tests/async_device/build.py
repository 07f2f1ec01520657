"""Builds the device for the installed Paddle, once: ``device_folder()`` is what ``CUSTOM_DEVICE_ROOT`` names.

Or from a shell: ``export CUSTOM_DEVICE_ROOT=$(python tests/async_device/build.py)``.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import shutil
import subprocess
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
CACHE = HERE.parents[1] / ".async_device"
LIBRARY = "libasync_device.so"
FLAGS = [
    "-std=c++17",
    "-O1",
    "-g",
    "-Wall",
    "-Wextra",
    "-Wno-missing-field-initializers",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-Wl,-z,nodelete",
]  # its threads live on where Paddle closes the library at exit


def device_folder():
    """The folder with the compiled device; compiles it if there is none of these sources, this compiler and this Paddle."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not compiler:
        raise RuntimeError(
            "the asynchronous device has to be compiled: install g++ (Debian, Ubuntu: apt-get install g++), or name a C++17 compiler in CXX"
        )
    folder = CACHE / _fingerprint(compiler)
    if not (folder / LIBRARY).exists():
        folder.mkdir(parents=True, exist_ok=True)
        (CACHE / ".gitignore").write_text("*\n")
        _compile(compiler, folder)
    return folder


def _compile(compiler, folder):
    handle, made = tempfile.mkstemp(dir=CACHE, suffix=".so")  # not in the folder: Paddle loads every library there
    os.close(handle)
    sources = sorted(str(path) for path in HERE.glob("*.cc"))
    includes, library = f"-I{_paddle() / 'include'}", str(_paddle() / "base" / "libpaddle.so")
    command = [compiler, *FLAGS, includes, *sources, library, "-o", made, "-lpthread", "-ldl"]
    try:
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"the asynchronous device does not compile with {compiler}:\n{result.stderr}")
        os.chmod(made, 0o755)
        os.replace(made, folder / LIBRARY)
    finally:
        pathlib.Path(made).unlink(missing_ok=True)


def _fingerprint(compiler):
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256("\n".join([version, _paddle_version(), *FLAGS]).encode())
    for path in sorted(HERE.glob("*.h")) + sorted(HERE.glob("*.cc")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _paddle():
    return pathlib.Path(importlib.util.find_spec("paddle").submodule_search_locations[0])  # without importing it


def _paddle_version():
    for name in ("paddlepaddle", "paddlepaddle-gpu"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return str(_paddle())


if __name__ == "__main__":
    print(device_folder())
