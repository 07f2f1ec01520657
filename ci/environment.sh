# To be sourced: make_environment FOLDER makes or reuses a virtual environment and puts it first in PATH.

make_environment() {
    local folder=$1 python=${PYTHON:-python3}
    if [ ! -x "$folder/bin/pip" ]; then
        if ! "$python" -c 'import sys; sys.exit(not (3, 9) <= sys.version_info[:2] <= (3, 13))'; then
            echo "PaddlePaddle has wheels for Python 3.9 to 3.13, but $python is $("$python" -V 2>&1); set PYTHON to another one" >&2
            return 1
        fi
        if ! "$python" -c 'import ensurepip' 2>/dev/null; then
            if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
                apt-get update -qq && apt-get install -y -qq python3-venv
            else
                echo "$python cannot make virtual environments; on Debian: apt-get install python3-venv" >&2
                return 1
            fi
        fi
        "$python" -m venv --clear "$folder"
    fi
    PATH=$(cd "$folder" && pwd)/bin:$PATH
    export PATH
}

# Several processes share the cores: one thread each, and no chatter of Paddle's start.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} GLOG_minloglevel=${GLOG_minloglevel:-2} PIP_DISABLE_PIP_VERSION_CHECK=1
