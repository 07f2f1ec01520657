#!/usr/bin/env bash
# The README's set-up where neither browser nor compiler is there. What is missing has to be told in the first second, with the
# command to type, and before an environment is made; where apt-get may install it, the set-up goes on by itself.
# Takes seconds and no network: apt-get, id and what follows the set-up (venv, pip, pytest) are stand-ins that log their words.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/clone" "$work/machine"
cp -r ci tests README.md "$work/clone"
log=$work/log

# The machine: every program of this one but those, and stand-ins.
IFS=: read -ra folders <<<"$PATH"
for folder in "${folders[@]}"; do
    [ ! -d "$folder" ] || cp -sn "$folder"/* "$work/machine" 2>/dev/null || true # the first in PATH wins
done
(cd "$work/machine" && rm -f *chrom* g++* *-g++* c++* *-c++* gcc* *-gcc* cc clang* apt-get id python3 python)
program() { cat >"$work/machine/$1" && chmod +x "$work/machine/$1"; }
program id <<'END'
echo "$BARE_USER"
END
program apt-get <<END
echo "apt-get \$*" >>$log
[ "\$BARE_NETWORK" = yes ] || { echo "E: Unable to fetch some archives" >&2; exit 100; }
[ "\$1" = install ] || exit 0
for word; do
    case \$word in chromium | g++) echo "exit 0" >$work/machine/\$word; chmod +x $work/machine/\$word ;; python3-venv) touch $work/venv ;; esac
done
END
real=$("${PYTHON:-python3}" -c 'import sys; print(sys.executable)')
program python3 <<END
case "\$*" in
"-m venv --clear "*)
    echo "venv \$4" >>$log
    mkdir -p "\$4/bin"
    for name in pip python paddle-vpp; do echo "echo \$name \"\\\$*\" >>$log" >"\$4/bin/\$name" && chmod +x "\$4/bin/\$name"; done
    ;;
"-c import ensurepip") [ -e $work/venv ] ;;
*) exec "$real" "\$@" ;;
esac
END

# bare COMMAND: runs it on that machine as it was before; leaves its status, milliseconds, words and the log of the stand-ins.
# Variables: user (0 is root), network (whether apt-get can install), venv (whether Python can make environments).
user=1000 network=yes venv=yes
bare() {
    rm -rf "$work"/clone/.venv* "$work"/machine/{chromium,g++} "$work/venv" "$log"
    touch "$log"
    if [ "$venv" = yes ]; then touch "$work/venv"; fi
    local start=${EPOCHREALTIME/./}
    status=0
    words=$(cd "$work/clone" && env -u PYTHON -u CHROMIUM -u CXX PATH="$work/machine" BARE_USER=$user BARE_NETWORK=$network \
        bash -c "$1" 2>&1) || status=$?
    took=$(((${EPOCHREALTIME/./} - start) / 1000))
    did=$(cat "$log")
    command=$1
}

checks=0
fail() {
    printf '%s\n' "ci/bare.sh: as user $user, network $network, venv $venv: $command" "$1; it said:" "$words" "and did:" "$did" >&2
    exit 1
}
# stops TEXT…: it stopped in the first second, said these texts, and made nothing.
stops() {
    [ "$status" != 0 ] || fail "that should have stopped"
    [ "$took" -lt 1000 ] || fail "that should have stopped in the first second, not after $took ms"
    [[ $did != *"venv ."* && $did != *pip* ]] || fail "that should have stopped before the environment is made"
    for text; do [[ $words == *"$text"* ]] || fail "that should have said: $text"; done
    checks=$((checks + 1))
}
# goes_on TEXT…: it came to its end, and did these things in this order.
goes_on() {
    [ "$status" = 0 ] || fail "that should have gone on"
    local rest=$did
    for text; do
        [[ $rest == *"$text"* ]] || fail "that should have done, in this order: $*"
        rest=${rest#*"$text"}
    done
    checks=$((checks + 1))
}
untouched() { [[ $did != *apt-get* ]] || fail "that should have left apt-get alone"; }

# The two commands, as the README has them. The test is worth nothing if it finds none.
mapfile -t set_up < <(sed -n '/^## Try it/,/^## /s/^\(bash ci[^ ]*\.sh\).*/\1/p' README.md)
[ "${set_up[*]}" = "bash ci/quickstart.sh bash ci/test.sh" ] || { echo "ci/bare.sh: the README's set-up is other than this test's: ${set_up[*]}" >&2; exit 1; }
quickstart=${set_up[0]} test=${set_up[1]}

# Not allowed to install: told at once, with the command.
bare "$test" && stops "Chromium" "C++ compiler" "On Debian, as root: apt-get install chromium g++" && untouched
venv=no
bare "$test" && stops "On Debian, as root: apt-get install python3-venv chromium g++" && untouched
bare "$quickstart" && stops "On Debian, as root: apt-get install python3-venv" && untouched
venv=yes
bare "$quickstart" && goes_on "venv .venv" "pip install" "python -m paddle.distributed.launch" && untouched

# Only what is asked for is wanted.
bare "$test tests/schedule -x" && goes_on "venv .venv" "pip install" "python -m pytest -q tests/schedule -x" && untouched
bare "$test --pure" && goes_on "venv .venv-pure" "pip install" "pytest -q -n auto --maxprocesses 4 tests/schedule tests/executor" && untouched
bare "$test tests/tools" && stops "On Debian, as root: apt-get install chromium"
bare "$test tests/tools/test_page.py::test_x" && stops "On Debian, as root: apt-get install chromium"
bare "$test tests/tools --ignore tests/tools/test_page.py" && goes_on "venv .venv" && untouched
bare "$test tests/tools/test_doctor.py" && goes_on "venv .venv" && untouched

# Named by a variable.
bare "CHROMIUM=/no/browser $test" && stops "CHROMIUM=/no/browser is not a program"
bare "CHROMIUM=/bin/true CXX=/bin/true $test" && goes_on "venv .venv" && untouched

# Allowed: installed, and on it goes, also in an environment that is there already. No network: said like the rest.
user=0
bare "$test" && goes_on "apt-get update" "apt-get install -y -qq chromium g++" "venv .venv" "pip install" "python -m pytest -q"
venv=no
bare "$test" && goes_on "apt-get install -y -qq python3-venv chromium g++" "venv .venv" "pip install" "python -m pytest -q"
bare "$quickstart" && goes_on "apt-get install -y -qq python3-venv" "venv .venv" "pip install" "python -m paddle.distributed.launch"
venv=yes
bare "$quickstart && $test" && goes_on "venv .venv" "paddle.distributed.launch" "apt-get install -y -qq chromium g++" "python -m pytest -q"
network=no
bare "$test" && stops "E: Unable to fetch some archives" "apt-get could not install what is missing" "apt-get install chromium g++"

# A machine without apt-get.
rm "$work/machine/apt-get"
bare "$test" && stops "this machine lacks" "apt-get install chromium g++"

# The gate gets nothing that these commands don't.
if grep -nE 'apt-get|pip install' .ci/run; then
    echo "ci/bare.sh: .ci/run installs something by itself; ci/environment.sh is the place, for those without .ci/run" >&2
    exit 1
fi
echo "a bare machine: $checks set-ups as they should be"
