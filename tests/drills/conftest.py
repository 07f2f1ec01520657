import pathlib
import sys

TESTS = pathlib.Path(__file__).resolve().parents[1]
# The drills, the tests and the workers import each other by plain names.
sys.path[:0] = [str(TESTS / name) for name in ("drills", "fleet", "executor")]

import forks  # noqa: E402
import pool  # noqa: E402


def pytest_sessionfinish(session):
    forks.close()
    pool.close_pools()
