#!/usr/bin/env bash
# Draws the README's pictures anew: a plan, the page, and a recorded run of the example beside its plan.
# Wants Chromium, which ci/environment.sh gets, and two idle cores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/environment.sh

make_environment .venv browser
pip install -q -e '.[cpu,viz]'
pictures=paddle_vpp_ext/examples/pictures
work=output/pictures
mkdir -p "$work"

plan=(paddle-vpp plan --pp 4 --vpp 2 --acc 11 --schedule VPP:groups=even)
"${plan[@]}" --png "$pictures/plan.png" >/dev/null
"${plan[@]}" --hop 0.1 --html "$work/plan.html" >/dev/null
"$(browser)" --headless --no-sandbox --disable-gpu --disable-background-networking --disable-component-update \
    --disable-sync --no-first-run --user-data-dir="$(mktemp -d)" --window-size=1400,730 \
    --screenshot="$pictures/page.png" "file://$PWD/$work/plan.html"

rm -rf "$work/recorded"
python -m paddle.distributed.launch --nproc_per_node 2 --log_dir "$work/log" paddle_vpp_ext/examples/train_gpt.py \
    --pp 2 --vpp 2 --acc 5 --width 128 --steps 10 --schedule "VPP:groups=even,trace=$work/recorded" --out "$work"
paddle-vpp trace merge "$work/recorded" --step 9
cp "$work/recorded/timeline.png" "$pictures/timeline.png"
