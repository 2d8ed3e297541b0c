#!/usr/bin/env bash
# Runs the tests of what computes as if this were another kind of processor: TensorFlow's products with oneDNN and without it,
# oneDNN and numba with AVX2 at most, numpy without the widest vectors that this processor has.
# Usage: scripts/test-imitated.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."

rooms=(tests/model tests/training tests/packing tests/tfrecords tests/reporting)
widest=$(.venv/bin/python - <<'PYTHON'
from numpy.core._multiarray_umath import __cpu_dispatch__, __cpu_features__

vectors = [name for name in __cpu_dispatch__ if __cpu_features__[name] and name.startswith(("AVX512", "AVX2", "FMA3"))]
print(*([name for name in vectors if name.startswith("AVX512")] or vectors))
PYTHON
)
export ONEDNN_MAX_CPU_ISA=AVX2 NPY_DISABLE_CPU_FEATURES=$widest NUMBA_CPU_NAME=x86-64-v3 NUMBA_CPU_FEATURES=+sse4.2,+pclmul
for onednn in 0 1; do
  export TF_ENABLE_ONEDNN_OPTS=$onednn
  echo "TF_ENABLE_ONEDNN_OPTS=$onednn, oneDNN and numba: AVX2 at most, numpy without: ${widest:-nothing}"
  .venv/bin/python -m pytest --quiet "$@" "${rooms[@]}"
done
