"""The package's logger: warnings, and the one line about the schedule.

As a library's it says nothing of its own accord: the application configures logging.
"""

import logging
import sys

logger = logging.getLogger("paddle_vpp_ext")
logger.addHandler(logging.NullHandler())


class _WhereNobodyListens(logging.StreamHandler):
    """Writes to stderr as long as the application has configured no logging that would."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter("%(levelname)s paddle_vpp_ext: %(message)s"))

    def filter(self, record):
        return super().filter(record) and not logging.getLogger().handlers


_spoken = _WhereNobodyListens()


def show() -> None:
    """Has the logger's lines, infos too, where the application's logging goes, or on stderr where it has configured none.

    A level that the application has given this logger stays. Undone by ``hide``.
    """
    logger.addHandler(_spoken)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


def hide() -> None:
    """The inverse of ``show``."""
    logger.removeHandler(_spoken)
    if logger.level == logging.INFO:
        logger.setLevel(logging.NOTSET)
