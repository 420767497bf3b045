#!/usr/bin/env bash
# Prints the path of uv: the one on PATH, else one put into .tools/uv from the package index, by its hash.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if command -v uv; then exit 0; fi
home=.tools/uv
if ! cmp -s requirements/uv.txt $home/installed; then
    echo "no uv on PATH: installing one into $home" >&2
    rm -rf $home
    "$(requirements/python.sh)" -m venv $home >&2
    $home/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.txt >&2
    cp requirements/uv.txt $home/installed
fi
echo "$PWD/$home/bin/uv"
