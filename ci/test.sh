#!/usr/bin/env bash
# Makes or reuses .venv, installs the package with the test tools, and runs all tests.
# Arguments go to pytest: bash ci/test.sh tests/schedule -x
# bash ci/test.sh --pure: in .venv-pure, which has no Paddle, the tests that need none: of schedules and of the executor.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/environment.sh

pure=
if [ "${1:-}" = --pure ]; then pure=1 && shift; fi

paths=() before= # what the arguments ask for; without any it is everything
for word in "$@"; do
    if [[ $before != --ignore && $before != --deselect && $word != -* && -e ${word%%::*} ]]; then paths+=("${word%%::*}"); fi
    before=$word
done

if [ -n "$pure" ]; then
    folders=(tests/schedule tests/executor tests/search)
    [ ${#paths[@]} -eq 0 ] || folders=()
    make_environment .venv-pure
    pip install -q -e '.[test]'
    if ! python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("paddle") is not None)'; then
        echo "there is a Paddle in .venv-pure, and these tests have to do without: remove the folder, or unset PYTHONPATH" >&2
        exit 1
    fi
    exec python -m pytest -q -n auto --maxprocesses 4 "${folders[@]}" "$@"
fi

parts=()
if [[ "$*" != *--ignore*test_page.py* ]] && grep -rqE --include='*.py' '^(import|from) browser' "${paths[@]:-tests}"; then
    parts+=(browser)
fi
if [ ${#paths[@]} -eq 0 ]; then parts+=(compiler); fi
make_environment .venv "${parts[@]}"
pip install -q -e '.[cpu,viz,test]'
python -m pytest -q "$@"
