"""What pyproject.toml cannot say: extras that are computed, the README for an index, and the line for Python's start."""

import re
import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent

RELEASES = runpy.run_path(str(HERE / "paddle_vpp_ext/releases.py"))["RELEASES"]

extras = {
    "cpu": ["paddlepaddle>=2.6.2", "protobuf<7"],
    "gpu": ["paddlepaddle-gpu>=2.6.2", "protobuf<7"],
    "viz": ["matplotlib", "rich", "tqdm"],
    "test": ["pytest", "pytest-xdist", "hypothesis", "ortools", "matplotlib", "rich"],
}
# cpu-262 and so on: no dots, which older pips do not find again.
extras.update({f"cpu-{release.replace('.', '')}": [f"paddlepaddle=={release}", *pins] for release, pins in RELEASES.items()})


def readme_for_an_index():
    """README.md as a page of its own: an index shows neither pictures nor files that are beside the README, and no embedded pictures."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[([^]]*)\]\((?!https?:)([^)]+)\)", r"*(In the source distribution: a picture of \1, `\2`.)*", text)
    return re.sub(r"\[([^]]+)\]\((?!https?:|#)([^)]+)\)", r"`\2`", text)


class BuildWithActivation(build_py):
    """Puts the .pth of PADDLE_VPP_EXT=1 beside the package, into the wheel's root: Python reads it from site-packages only."""

    def run(self):
        super().run()
        # Of an editable install's build nothing is kept; what is to be installed goes straight into its wheel.
        editable = getattr(self, "editable_mode", False)
        folder = self.get_finalized_command("install").install_lib if editable else self.build_lib
        self.copy_file(str(HERE / "paddle_vpp_ext/paddle_vpp_ext.pth"), folder)


setup(
    long_description=readme_for_an_index(),
    long_description_content_type="text/markdown",
    extras_require=extras,
    cmdclass={"build_py": BuildWithActivation},
)
