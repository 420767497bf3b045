#!/usr/bin/env bash
# install.sh light|runtime|test: puts one requirement file, by its hashes, and this package (editable) into .venv.
#
# Only adds: the files agree on versions, so installing `light` after `test` removes nothing. What a larger set brings
# the smaller ones need no more, hence the stamps of those too. Without uv (none on PATH, none to be had) pip does it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

kind=$1
python=.venv/bin/python
case $kind in
    light) stamps=(light) ;;
    runtime) stamps=(light runtime) ;;
    test) stamps=(light runtime test) ;;
    *) echo "install.sh: light, runtime or test, not '$kind'" >&2 && exit 2 ;;
esac
export UV_PYTHON_DOWNLOADS=never PIP_DISABLE_PIP_VERSION_CHECK=1
uv=$(requirements/uv.sh) || uv=

if ! $python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    base=$(requirements/python.sh)
    rm -rf .venv
    if [[ -n $uv ]]; then "$uv" venv --quiet --python "$base" .venv; else "$base" -m venv .venv; fi
fi
if [[ -n $uv ]]; then
    install=("$uv" pip install --python $python)
else
    echo "going on with pip, which takes longer" >&2
    $python -m pip --version >/dev/null 2>&1 || $python -m ensurepip >/dev/null
    install=($python -m pip install --quiet)
fi
echo "installing requirements/$kind.txt into .venv" >&2
"${install[@]}" --require-hashes -r "requirements/$kind.txt"
"${install[@]}" --no-deps --no-build-isolation --editable .
for stamp in "${stamps[@]}"; do touch ".venv/.installed-$stamp"; done
