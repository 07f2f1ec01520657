"""A page in headless Chromium: what it made of itself, or how it looks."""

import os
import shutil
import subprocess

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--window-size=1400,800",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)


def browser():
    """The program that CHROMIUM names, or the first that is there."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    assert found, (
        "the tests of the HTML page need Chromium or Chrome in PATH, or its path in the variable CHROMIUM; "
        "on Debian: apt-get install chromium (ci/test.sh --ignore tests/tools/test_page.py leaves them out)"
    )
    return found


def dump(path, folder):
    """The document after its scripts have run. ``folder`` becomes the fresh profile."""
    return _run(folder, "--dump-dom", path.as_uri()).stdout


def screenshot(path, folder, image):
    """Writes a picture of the page into ``image``."""
    _run(folder, f"--screenshot={image}", path.as_uri())


def _run(folder, *words):
    done = subprocess.run(
        [browser(), *FLAGS, f"--user-data-dir={folder}", *words], capture_output=True, text=True, encoding="utf-8", timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done
