import pathlib
import sys

# The tests and the workers import each other by plain names.
sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[1] / "executor")]

import pool  # noqa: E402


def pytest_sessionfinish(session):
    pool.close_pools()
