# To be sourced: make_environment FOLDER [PARTS…] makes or reuses a virtual environment and puts it first in PATH;
# need PARTS… gets what a machine may lack: browser, compiler, venv.

# browser: prints the program that CHROMIUM names, or the first that is there (the same names as in tests/tools/browser.py).
browser() {
    local name
    for name in ${CHROMIUM:+"$CHROMIUM"} chromium chromium-browser google-chrome google-chrome-stable chrome; do
        if command -v "$name"; then return; fi
        [ "$name" != "${CHROMIUM:-}" ] || return 1 # the tests would start that one, and no other
    done
    return 1
}

# compiler: prints the C++ compiler.
compiler() { command -v "${CXX:-g++}"; }

# venv: whether Python can make virtual environments.
venv() { "${PYTHON:-python3}" -c 'import ensurepip' 2>/dev/null; }

# need PARTS…: all that is missing is installed where that is allowed, else all of it is told at once, before anything else is done.
need() {
    local part packages=() words=()
    for part in "$@"; do
        if "$part" >/dev/null; then continue; fi
        case $part in
        browser)
            if [ -n "${CHROMIUM:-}" ]; then
                echo "CHROMIUM=$CHROMIUM is not a program; set it to the path of Chromium or Chrome, or unset it" >&2
                return 1
            fi
            packages+=(chromium)
            words+=("Chromium or Chrome, for the tests of the HTML page (in PATH, or its path in CHROMIUM)")
            ;;
        compiler)
            if [ -n "${CXX:-}" ]; then
                echo "CXX=$CXX is not a program; set it to a C++ compiler, or unset it to use g++" >&2
                return 1
            fi
            packages+=(g++)
            words+=("a C++ compiler, for the tests of devices (g++ in PATH, or another one in CXX)")
            ;;
        venv)
            packages+=(python3-venv)
            words+=("what ${PYTHON:-python3} makes virtual environments with")
            ;;
        *)
            echo "need: there is no part $part, only browser, compiler and venv" >&2
            return 2
            ;;
        esac
    done
    [ ${#packages[@]} -gt 0 ] || return 0
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "installing ${packages[*]}" >&2
        if (export DEBIAN_FRONTEND=noninteractive && apt-get update -qq && apt-get install -y -qq "${packages[@]}") >/dev/null; then
            hash -r
            for part in "$@"; do
                if "$part" >/dev/null; then continue; fi
                echo "apt-get installed ${packages[*]}, but a $part is still not there; install one by hand" >&2
                return 1
            done
            return
        fi
        echo "apt-get could not install what is missing:" >&2
    else
        echo "this machine lacks:" >&2
    fi
    printf -- '- %s\n' "${words[@]}" >&2
    echo "On Debian, as root: apt-get install ${packages[*]}" >&2
    return 1
}

# make_environment FOLDER [PARTS…]: the parts, and what Python itself lacks, come first.
make_environment() {
    local folder=$1 python=${PYTHON:-python3}
    shift
    if [ -x "$folder/bin/pip" ]; then
        need "$@" || return
    else
        if ! "$python" -c 'import sys; sys.exit(not (3, 9) <= sys.version_info[:2] <= (3, 13))'; then
            echo "PaddlePaddle has wheels for Python 3.9 to 3.13, but $python is $("$python" -V 2>&1); set PYTHON to another one" >&2
            return 1
        fi
        need venv "$@" || return
        "$python" -m venv --clear "$folder"
    fi
    PATH=$(cd "$folder" && pwd)/bin:$PATH
    export PATH
}

# Several processes share the cores: one thread each, and no chatter of Paddle's start.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} GLOG_minloglevel=${GLOG_minloglevel:-2} PIP_DISABLE_PIP_VERSION_CHECK=1
