#!/usr/bin/env bash
# Faults that need no run: ruff's rules, its format, and mypy, as pyproject.toml configures them. All three run before it fails.
# bash ci/lint.sh --fix puts right first what ruff can.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/environment.sh

make_environment .venv-lint
pip install -q -r ci/lint.txt
if [ "${1:-}" = --fix ]; then
    ruff check -q --fix . || true
    ruff format -q .
fi
failed=()
ruff check . || failed+=("ruff check")
ruff format --check . || failed+=("ruff format --check")
mypy || failed+=(mypy)
if [ ${#failed[@]} -gt 0 ]; then
    printf 'ci/lint.sh: %s found faults; bash ci/lint.sh --fix puts right what ruff can\n' "${failed[@]}" >&2
    exit 1
fi
