"""The releases of Paddle that this package is tested with. Also read by setup.py and ci/, so it imports nothing of the package."""

import re

# What each release breaks with and does not say: protobuf 7 and no setuptools (Python has had none since 3.12)
# up to 3.2.2, numpy 2 with 2.6.
RELEASES: dict[str, list[str]] = {
    "2.6.2": ["protobuf<7", "setuptools", "numpy<2"],
    "3.0.0": ["protobuf<7", "setuptools"],
    "3.1.1": ["protobuf<7", "setuptools"],
    "3.2.2": ["protobuf<7", "setuptools"],
    "3.3.1": [],
}
OLDEST = "2.6.2"


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, three at least: ``3.0.0b2`` is (3, 0, 0). Empty if there are none."""
    found = re.match(r"\d+(\.\d+)*", version)
    if not found:
        return ()
    parts = tuple(int(part) for part in found[0].split("."))
    return parts + (0,) * (3 - len(parts))


if __name__ == "__main__":  # for ci/matrix.sh
    print(*RELEASES)
