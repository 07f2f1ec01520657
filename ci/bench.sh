#!/usr/bin/env bash
# Prints the benchmark tables: planning, split backwards, step time against the ideal, the engine's own time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/environment.sh

make_environment .venv
pip install -q -e '.[cpu]'
python ci/bench/bench.py plan
OMP_NUM_THREADS=1 python ci/bench/bench.py split
python -m paddle.distributed.launch --nproc_per_node 4 --log_dir output/bench ci/bench/bench.py steps
