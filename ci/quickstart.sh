#!/usr/bin/env bash
# Makes .venv, installs the package with Paddle for CPU, trains a small GPT over four processes,
# and draws what happened. Arguments go to the example: bash ci/quickstart.sh --steps 20 --check
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/environment.sh

make_environment .venv
pip install -q -e '.[cpu,viz]'
python -m paddle.distributed.launch --nproc_per_node 4 --log_dir output/log \
    paddle_vpp_ext/examples/train_gpt.py "$@"
