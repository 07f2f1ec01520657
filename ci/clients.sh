#!/usr/bin/env bash
# Trains a tiny Llama through the Trainers of PaddleFormers and PaddleNLP, in one process and over stages with this
# package, and compares the losses: bash ci/clients.sh [--cached] [clients…], all by default: the names in ci/clients/*.txt.
# Each client gets an environment of its own under .clients (CLIENTS=FOLDER: there), reused by the next run.
# --cached takes only the clients whose environment is there already.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/environment.sh

environments=${CLIENTS:-.clients}
cached=
if [ "${1:-}" = --cached ]; then cached=1; shift; fi
clients=("$@")
[ $# -gt 0 ] || clients=(paddleformers-1.2.0 paddlenlp-2.8.1 paddlenlp-3.0.0b4)

# complete CLIENT: whether its environment was made from the same requirements and Python.
recipe() { echo "$("${PYTHON:-python3}" -V) $(cksum <"ci/clients/$1.txt")"; }
complete() { [ "$(cat "$environments/$1/complete" 2>/dev/null)" = "$(recipe "$1")" ]; }

# environment CLIENT: makes it, or reuses it, and puts this package as it is now into it.
environment() (
    folder=$environments/$1
    complete "$1" || rm -rf "$folder"
    make_environment "$folder"
    if ! complete "$1"; then
        echo "---- installing $1"
        pip install -q -r "ci/clients/$1.txt"
        recipe "$1" >"$folder/complete"
    fi
    pip install -q --no-deps -e .
)

mkdir -p "$environments"
trained=()
for client in "${clients[@]}"; do
    if [ ! -e "ci/clients/$client.txt" ]; then
        echo "there is no client $client, only $(cd ci/clients && ls *.txt | sed 's/\.txt$//' | xargs)" >&2
        exit 2
    fi
    if [ -n "$cached" ] && ! complete "$client"; then continue; fi
    environment "$client"
    trained+=("$client=$environments/$client")
done
[ ${#trained[@]} -gt 0 ] || exit 0
"${PYTHON:-python3}" ci/clients/run.py output/clients "${trained[@]}"
