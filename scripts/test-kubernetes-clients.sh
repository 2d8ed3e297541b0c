#!/usr/bin/env bash
# Runs the tests of the Kubernetes runner with the oldest major version of the client that pyproject.toml allows, in a virtual
# environment of its own. `make test` runs them with the version that constraints.txt pins.
# Usage: scripts/test-kubernetes-clients.sh [FOLDER]   (default .venv-kubernetes-35)
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${1:-.venv-kubernetes-35}
[ -x "$folder/bin/python" ] || .venv/bin/python -m venv "$folder"
grep -v '^kubernetes==' constraints.txt >"$folder/constraints.txt"
"$folder/bin/python" -m pip install --quiet --constraint "$folder/constraints.txt" \
  'kubernetes==35.*' hypothesis numpy pydantic pytest pyyaml rich typer
"$folder/bin/python" -c 'import kubernetes; print("kubernetes client", kubernetes.__version__)'
PYTHONPATH=. "$folder/bin/python" -m pytest -q -p no:cacheprovider tests/runners/kubernetes tests/runners/test_doctor.py
