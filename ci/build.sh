#!/usr/bin/env bash
# The package as it would be published: builds sdist and wheel into dist/, checks both, installs the wheel into an empty environment
# and uses it from a folder without the sources: planning without Paddle, then a training over two ranks.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/environment.sh

rm -rf dist build ./*.egg-info # left-overs of a build get into the next one
(
    make_environment .venv-build
    pip install -q -r ci/build.txt
    python -m build . >.venv-build/log 2>&1 || { cat .venv-build/log >&2 && exit 1; }
    twine check --strict dist/*
    python ci/check_dist.py dist
)

wheel=$(echo "$PWD"/dist/*.whl) installed=$PWD/.venv-installed
rm -rf .venv-installed
make_environment .venv-installed
unset PYTHONPATH PADDLE_VPP_EXT PADDLE_VPP_SCHEDULE PADDLE_VPP_TRACE
away=$(mktemp -d)
trap 'rm -rf "$away"' EXIT
cd "$away"

# says TEXT COMMAND…: the command succeeds, or with STATUS=1 does not, and says that.
says() {
    local text=$1 status=0
    shift
    "$@" >said 2>&1 || status=$?
    if [ "$status" != "${STATUS:-0}" ] || ! grep -qF -- "$text" said; then
        cat said >&2
        echo "ci/build.sh: the installed wheel: $* ended with $status, and should have with ${STATUS:-0}, and said: $text" >&2
        exit 1
    fi
    echo "installed: $* -> $text"
}

pip install -q "$wheel"
package=$(python -c 'import paddle_vpp_ext; print(paddle_vpp_ext.__path__[0])')
[[ $package == "$installed"/* ]] || { echo "ci/build.sh: the package in use is $package, not the installed wheel" >&2; exit 1; }
says "makespan 75" paddle-vpp plan --pp 4 --vpp 2 --acc 11
STATUS=1 says "works: planning (python -m paddle_vpp_ext plan); does not: training" paddle-vpp doctor

pip install -q "$wheel[cpu]"
says "works: planning" paddle-vpp doctor
export PADDLE_VPP_EXT=1 # by the line that the wheel brings
says "activation: PADDLE_VPP_EXT=1, every script that imports Paddle gets the extension" paddle-vpp doctor
unset PADDLE_VPP_EXT
says "idle share: planned" python -m paddle.distributed.launch --nproc_per_node 2 --log_dir log "$package/examples/train_gpt.py" \
    --pp 2 --vpp 2 --acc 5 --layers 4 --width 32 --steps 3 --check
