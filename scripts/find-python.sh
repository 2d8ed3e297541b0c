#!/usr/bin/env bash
# Prints a Python that TensorFlow 2.15 supports and that can make virtual environments: PYTHON, or what the PATH has.
set -euo pipefail

for candidate in ${PYTHON:-} python3.11 python3.10 python3; do
  if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 11))' 2>/dev/null; then
    if ! "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
      echo "$candidate cannot make virtual environments; install its venv module (Debian, Ubuntu: apt-get install python3-venv)" >&2
      exit 2
    fi
    echo "$candidate"
    exit 0
  fi
done
found=$(python3 --version 2>&1 || true)
echo "gaudi-bert needs Python 3.10 or 3.11 (TensorFlow 2.15 has no other); found: ${found:-none}." \
  "Install one (Debian 12: apt-get install python3 python3-venv; Ubuntu 22.04: the same)," \
  "or name one: make setup PYTHON=/path/to/python3.11" >&2
exit 2
