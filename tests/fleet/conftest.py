import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # the tests and the workers import each other by plain names

import pool  # noqa: E402


def pytest_sessionfinish(session):
    pool.close_pools()
