#!/usr/bin/env bash
# Installs the wheel under every Python from 3.10 to 3.14 that is at hand, beside numpy 2, and runs tests of the data side there,
# outside the checkout, so that what is tested is the wheel. A version that is not at hand is at least resolved: every
# dependency must have a wheel for it.
# Usage: scripts/test-pythons.sh [VERSION...]   (default: 3.10 3.12 3.13 3.14; the environments are kept in .venv-pythons/)
set -euo pipefail
cd "$(dirname "$0")/.."

versions=("$@")
[ $# -gt 0 ] || versions=(3.10 3.12 3.13 3.14) # 3.11 is what `make test` runs on
# Of each room of the data side what could differ between Pythons and between numpy 1 and 2.
tests=(
  test_python_page.py test_start.py common/test_dealing.py common/test_permutation.py cli/test_main.py
  packing/test_lengths.py packing/test_pack_lengths.py packing/test_mixture.py packing/heuristics
  records/wire/test_framing.py records/wire/test_values.py records/write/test_rows.py stages/data/test_plan.py
)
environments=$PWD/.venv-pythons
mkdir -p "$environments"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# The interpreter of a version, or nothing: of the PATH, or of pyenv whatever is chosen there.
find_version() {
  for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
    if "$candidate" -c "import sys, ensurepip, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
}

# Built from a copy, so that nothing of an earlier build gets in and nothing is left behind.
mkdir "$folder/source" "$folder/wheel"
git ls-files -z --cached --others --exclude-standard | tar --create --null --files-from - | tar --extract --directory "$folder/source"
sed 's/^numpy==.*/numpy==2.2.6 ; python_version < "3.11"\nnumpy==2.5.5 ; python_version >= "3.11"/' constraints.txt >"$folder/constraints.txt"
"$(scripts/find-python.sh)" -m pip wheel --quiet --no-deps --wheel-dir "$folder/wheel" "$folder/source"
wheel=$(echo "$folder"/wheel/gaudi_bert-*.whl)
rm -rf "$folder/source/gaudi_bert"

tested=0
newest=
for version in "${versions[@]}"; do
  started=$SECONDS
  python=$(find_version "$version")
  if [ -z "$python" ]; then
    # Markers are those of the Python that resolves, so the newest at hand does.
    "${newest:-$(scripts/find-python.sh)}" -m pip install --quiet --dry-run --ignore-installed --target "$folder/none" \
      --python-version "$version" --ignore-requires-python --only-binary=:all: --constraint "$folder/constraints.txt" "$wheel"
    echo "Python $version: not at hand; every dependency has a wheel for it"
    continue
  fi
  environment=$environments/$version
  [ -x "$environment/bin/python" ] || "$python" -m venv "$environment"
  "$environment/bin/python" -m pip install --quiet --constraint "$folder/constraints.txt" --force-reinstall --no-deps "$wheel"
  "$environment/bin/python" -m pip install --quiet --constraint "$folder/constraints.txt" "$wheel[parquet]" hypothesis pytest pytest-xdist
  "$environment/bin/python" -c 'import numpy, sys; print("Python", sys.version.split()[0], "with numpy", numpy.__version__)'
  (
    cd "$folder/source"
    "$environment/bin/python" -m pytest -q -n 2 -p no:cacheprovider -m 'not slow' "${tests[@]/#/tests/}"
  )
  rm -rf "$folder/tiny"
  mkdir "$folder/tiny"
  PATH=$environment/bin:$PATH scripts/run-tiny-pipeline.sh "$folder/tiny"
  newest=$environment/bin/python
  tested=$((tested + 1))
  echo "Python $version: $((SECONDS - started)) s"
done
[ "$tested" -gt 0 ] || { echo "none of Python ${versions[*]} is at hand; install one, for example with pyenv" >&2; exit 1; }
