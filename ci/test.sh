#!/usr/bin/env bash
# Makes or reuses .venv, installs the package with the test tools, and runs all tests.
# Arguments go to pytest: bash ci/test.sh tests/schedule -x
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/environment.sh

make_environment .venv
pip install -q -e '.[cpu,viz,test]'
python -m pytest -q "$@"
