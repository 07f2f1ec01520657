#!/usr/bin/env bash
# Runs the tests on several releases of Paddle: bash ci/matrix.sh [versions…], all supported ones by default.
# Each release gets an environment of its own under .matrix, reused by the next run. The pure part runs once, on the last one.
# JOBS=2 tests two releases at a time, which takes some 3 GB of memory.
# TESTED=FILE, the JUnit report of a run of all tests on the last release, stands for that release and the pure part.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/environment.sh

releases=("$@")
[ $# -gt 0 ] || read -ra releases <<<"$("${PYTHON:-python3}" paddle_vpp_ext/releases.py)"
pure=(house schedule search executor tools)

# environment RELEASE: makes it, or reuses one that was completed from the same requirements and Python in this place, and enters it.
environment() {
    local folder=.matrix/$1 recipe
    recipe="$("${PYTHON:-python3}" -V) $(cat setup.py paddle_vpp_ext/releases.py <(grep ^dependencies pyproject.toml) | cksum) $PWD"
    [ "$(cat "$folder/complete" 2>/dev/null)" = "$recipe" ] || rm -rf "$folder"
    make_environment "$folder"
    if [ ! -e "$folder/complete" ]; then
        if ! pip install -q "paddlepaddle==$1" -e ".[cpu-${1//./},test]"; then
            echo "could not install Paddle $1 for $(python -V): it has wheels for Python 3.9 to 3.12, from 3.0.0 on for 3.13 too; set PYTHON to another one" >&2
            return 1
        fi
        echo "$recipe" >"$folder/complete"
    fi
}

# tests RELEASE AREA [OPTIONS]: the release only names the report. A hang in a test ends by the test's own limits, one elsewhere here.
tests() {
    echo "---- Paddle $1: tests/$2"
    timeout --kill-after=30 1200 python -m pytest -q --disable-warnings "tests/$2" "${@:3}" -o junit_family=xunit1 --junitxml ".matrix/reports/$1/$2.xml" || true
}

# apart COMMANDS: in a bash of its own, for the PATH and for set -e. What it leaves undone the report counts as failed.
apart() {
    bash -euo pipefail -c "$(declare -f); $1" || true
}

# fleet RELEASE: its tests, in one piece of output. The newest release has them all.
fleet() {
    local only="-m 'not one_release'"
    [ "$1" != "${releases[-1]}" ] || only=
    apart "environment $1; tests $1 fleet $only" >".matrix/reports/$1.txt" 2>&1
    cat ".matrix/reports/$1.txt"
}

rm -rf .matrix/reports
mkdir -p .matrix/reports
todo=("${releases[@]}")
[ -z "${TESTED:-}" ] || unset 'todo[-1]'
for release in "${todo[@]}"; do # one after the other, since all are made from the same folder
    apart "environment $release"
done
for release in "${todo[@]}"; do
    while [ "$(jobs -rp | wc -l)" -ge "${JOBS:-1}" ]; do wait -n || true; done
    fleet "$release" &
done
wait
[ -n "${TESTED:-}" ] || apart "environment ${releases[-1]}; for area in ${pure[*]}; do tests any \$area; done"

"${PYTHON:-python3}" ci/matrix_report.py .matrix "${releases[*]}" "${pure[*]}" ${TESTED:+"$TESTED"}
