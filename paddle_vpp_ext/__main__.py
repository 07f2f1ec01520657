"""``python -m paddle_vpp_ext``."""

import sys

from .tools.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
