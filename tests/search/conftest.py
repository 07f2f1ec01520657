"""The oracle and hypothesis' settings are those of tests/schedule."""

import sys
from pathlib import Path

from hypothesis import settings

sys.path.append(str(Path(__file__).parents[1] / "schedule"))
settings.register_profile("schedule", deadline=None, max_examples=40)
settings.load_profile("schedule")
