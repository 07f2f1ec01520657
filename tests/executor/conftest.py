"""Ranks are threads that take turns: on one core they hand over in two thirds of the time."""

import os

import pytest


@pytest.fixture(autouse=True)
def one_core_per_worker():
    """Where pytest-xdist shares the tests out, each of its workers keeps to a core while one of these runs."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if not worker or not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker[2:]) % len(cores)]})
    yield
    os.sched_setaffinity(0, cores)
