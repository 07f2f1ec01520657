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
# One core has the timings while most drills wait; with arguments they run with the others.
(
    [ $# -gt 0 ] || exec python -m pytest -q tests/executor/test_timing.py >output/timings.txt 2>&1
) &
timings=$!
trap 'kill $timings 2>/dev/null || true' EXIT
quick=tests/fleet/test_drills.py # of these, what is no drill of drills.py
python -m pytest -q --durations=10 tests/drills/drills.py $quick::test_a_rank_that_hangs_is_named_by_the_others_and_by_diagnose \
    $quick::test_a_full_disk_while_tracing_leaves_whole_lines_and_ends_nothing tests/fleet/test_soak.py ${1:+tests/executor/test_timing.py "$@"}
wait $timings || { cat output/timings.txt && false; }
trap - EXIT
python tests/drills/report.py "$DRILLS_REPORT"
