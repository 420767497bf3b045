#!/usr/bin/env bash
# Prints a Python that is new enough for this project: $PYTHON, python3, or one with its version in its name.
set -euo pipefail

for name in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        "$name" -c 'import sys; print(sys.executable)'
        exit 0
    fi
done
echo "Python 3.11 or newer is needed, and there is none (looked for: ${PYTHON:-python3, python3.11 to 3.14})." >&2
echo "On Debian: apt-get install python3 python3-venv. Elsewhere: make PYTHON=/path/to/python ..." >&2
exit 1
