#!/usr/bin/env bash
# Prints a Python that gaudi-bert supports and that can make virtual environments: PYTHON, or what the PATH has, first those for
# which there is a TensorFlow 2.15.
set -euo pipefail

is_between() { "$1" -c "import sys; sys.exit(not (3, $2) <= sys.version_info[:2] <= (3, $3))" 2>/dev/null; }

for candidate in ${PYTHON:-} python3.11 python3.10 python3 python3.12 python3.13 python3.14; do
  if is_between "$candidate" 10 14; then
    if ! "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
      echo "$candidate cannot make virtual environments; install its venv module (Debian, Ubuntu: apt-get install python3-venv)" >&2
      exit 2
    fi
    is_between "$candidate" 10 11 || echo "setup: $("$candidate" --version) is taken, for which there is no TensorFlow 2.15:" \
      "what needs it is left out; to have it, name a Python 3.10 or 3.11: make ... PYTHON=/path/to/python3.11" >&2
    echo "$candidate"
    exit 0
  fi
done
found=$(python3 --version 2>&1 || true)
echo "gaudi-bert needs Python 3.10 to 3.14; found: ${found:-none}." \
  "Install one (Debian, Ubuntu: apt-get install python3 python3-venv), or name one: make setup PYTHON=/path/to/python3.11" >&2
exit 2
