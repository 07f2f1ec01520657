import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "paddle_vpp_ext/__init__.py").read_text())[1]

# What a release of Paddle breaks with and does not say: protobuf 7 and no setuptools (Python has had none since 3.12)
# up to 3.2.2, numpy 2 with 2.6.
PINS = {
    "2.6.2": ["protobuf<7", "setuptools", "numpy<2"],
    "3.0.0": ["protobuf<7", "setuptools"],
    "3.1.1": ["protobuf<7", "setuptools"],
    "3.2.2": ["protobuf<7", "setuptools"],
    "3.3.1": [],
}

extras = {
    "cpu": ["paddlepaddle>=2.6.2", "protobuf<7"],
    "gpu": ["paddlepaddle-gpu>=2.6.2", "protobuf<7"],
    "viz": ["matplotlib", "rich", "tqdm"],
    "test": ["pytest", "hypothesis", "ortools", "matplotlib", "rich"],
}
# cpu-262 and so on: no dots, which older pips do not find again.
extras.update({f"cpu-{release.replace('.', '')}": [f"paddlepaddle=={release}", *pins] for release, pins in PINS.items()})


class BuildWithActivation(build_py):
    """Puts the .pth of PADDLE_VPP_EXT=1 beside the package, into the wheel's root: Python reads it from site-packages only."""

    def run(self):
        super().run()
        # Of an editable install's build nothing is kept; what is to be installed goes straight into its wheel.
        editable = getattr(self, "editable_mode", False)
        folder = self.get_finalized_command("install").install_lib if editable else self.build_lib
        self.copy_file(str(HERE / "paddle_vpp_ext/paddle_vpp_ext.pth"), folder)


setup(
    name="paddle_vpp_ext",
    version=VERSION,
    description="Virtual pipeline for any accumulate_steps, and forward-backward overlap, for every PaddlePaddle from 2.6.2 on",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.9",
    packages=find_packages(include=["paddle_vpp_ext", "paddle_vpp_ext.*"]),
    package_data={"paddle_vpp_ext": ["*.pth"], "paddle_vpp_ext.tools.draw": ["html/*"]},
    install_requires=["numpy"],
    extras_require=extras,
    cmdclass={"build_py": BuildWithActivation},
    entry_points={"console_scripts": ["paddle-vpp=paddle_vpp_ext.tools.cli.main:main"]},
)
