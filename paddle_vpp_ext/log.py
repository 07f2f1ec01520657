"""The package's logger: warnings and the one line about the schedule, on stderr."""
import logging

logger = logging.getLogger("paddle_vpp_ext")
if not logger.handlers:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s paddle_vpp_ext: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
