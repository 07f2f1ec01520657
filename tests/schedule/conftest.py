"""Settings of the pure tests: time limits per example say more about the machine than about the code."""

from hypothesis import settings

settings.register_profile("schedule", deadline=None, max_examples=40)
settings.load_profile("schedule")
