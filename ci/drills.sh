#!/usr/bin/env bash
# All failure drills, many timings and a long soak. Arguments go to pytest: bash ci/drills.sh -k network
# The drills of two hosts and of a full disk want root, iproute2 and /dev/net/tun; without them they are skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/environment.sh

make_environment .venv
pip install -q -e '.[cpu,test]'
mkdir -p output
rm -f output/drills.jsonl
export DRILLS_REPORT=$PWD/output/drills.jsonl
export SOAK_STEPS=${SOAK_STEPS:-2000} TIMINGS=${TIMINGS:-60} TIMING_SEEDS=${TIMING_SEEDS:-10000}
python -m pytest -q tests/drills/drills.py tests/fleet/test_drills.py tests/fleet/test_soak.py tests/executor/test_timing.py "$@"
python tests/drills/report.py "$DRILLS_REPORT"
