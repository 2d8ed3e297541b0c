#!/usr/bin/env bash
# Installs the wheel under every Python from 3.10 to 3.14 that is at hand, with numpy 2 and PyTorch, without TensorFlow. There
# it runs tests of the data side, and trains, fine-tunes and predicts; outside the checkout, so that the wheel is tested. A version that is not at hand is at least resolved: every
# dependency must have a wheel for it.
# Usage: scripts/test-pythons.sh [VERSION...]   (default: 3.10 3.12 3.13 3.14; the environments are kept in .venv-pythons/)
set -euo pipefail
cd "$(dirname "$0")/.."

versions=("$@")
[ $# -gt 0 ] || versions=(3.10 3.12 3.13 3.14) # 3.11 is what `make test` runs on
# Of each room of the data side what could differ between Pythons and between numpy 1 and 2.
tests=(
  tests/test_documentation.py::test_every_snippet_prints_what_the_page_says
  tests/test_documentation.py::test_the_session_of_the_readme_prints_what_it_shows
  tests/test_start.py tests/common/test_arrays.py tests/cli/test_main.py tests/cli/test_output.py
  tests/cli/test_data_commands.py::test_pack_and_verify  # tables, where no pandas is
  tests/packing/test_histogram.py tests/packing/test_pack_lengths.py tests/packing/test_strategies.py tests/packing/test_heuristics.py
  tests/tfrecords/wire/test_example.py tests/tfrecords/wire/test_values.py tests/tfrecords/test_plan.py
)
# shellcheck source=scripts/install.sh
source scripts/install.sh
environments=$PWD/.venv-pythons
mkdir -p "$environments"
folder=$(mktemp -d)
trap 'jobs -p | xargs --no-run-if-empty kill 2>/dev/null || true; rm -rf "$folder"' EXIT

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
grep -v '^numpy==' constraints.txt >"$folder/constraints.txt"
printf 'numpy==%s\n' '2.2.6 ; python_version < "3.11"' '2.5.5 ; python_version >= "3.11"' >>"$folder/constraints.txt"
"$(scripts/find-python.sh)" -m pip wheel --quiet --no-deps --wheel-dir "$folder/wheel" "$folder/source"
wheel=$(echo "$folder"/wheel/gaudi_bert-*.whl)
rm -rf "$folder/source/gaudi_bert"

# Installs the wheel under one version and tests it there; two versions at a time, so each keeps to one process.
test_version() {
  local version=$1 python=$2 started=$SECONDS environment=$environments/$1
  [ -x "$environment/bin/python" ] || "$python" -m venv "$environment"
  # The wheel by itself, since an environment of an earlier run has that run's. Without --no-compile, pip compiles every file
  # of every dependency, of which few are imported.
  "$environment/bin/python" -m pip install --quiet --no-compile --force-reinstall --no-deps "$wheel"
  install_into "$environment/bin/python" "$folder/constraints.txt" --quiet "$wheel[parquet,pytorch]" hypothesis pytest
  "$environment/bin/python" -c 'import numpy, sys; print("Python", sys.version.split()[0], "with numpy", numpy.__version__)'
  (
    cd "$folder/source"
    "$environment/bin/python" -m pytest -q -p no:cacheprovider -m 'not slow' "${tests[@]}"
  )
  mkdir "$folder/tiny-$version"
  PATH=$environment/bin:$PATH scripts/run-tiny-pipeline.sh "$folder/tiny-$version"
  PATH=$environment/bin:$PATH scripts/run-tiny-training.sh "$folder/tiny-$version"
  echo "Python $version: $((SECONDS - started)) s"
}

at_hand=()
missing=()
for version in "${versions[@]}"; do
  if [ -n "$(find_version "$version")" ]; then at_hand+=("$version"); else missing+=("$version"); fi
done
[ ${#at_hand[@]} -gt 0 ] || { echo "none of Python ${versions[*]} is at hand; install one, for example with pyenv" >&2; exit 1; }

declare -A running=()
failed=()
# Waits for the version that was started first, and prints what it said.
finish_first() {
  local version=${started_versions[0]}
  started_versions=("${started_versions[@]:1}")
  wait "${running[$version]}" || failed+=("$version")
  cat "$folder/log-$version"
}
started_versions=()
for version in "${at_hand[@]}"; do
  [ ${#started_versions[@]} -lt 2 ] || finish_first
  test_version "$version" "$(find_version "$version")" >"$folder/log-$version" 2>&1 &
  running[$version]=$!
  started_versions+=("$version")
done
while [ ${#started_versions[@]} -gt 0 ]; do finish_first; done
[ ${#failed[@]} -eq 0 ] || { echo "Python ${failed[*]}: failed, see above" >&2; exit 1; }

for version in "${missing[@]}"; do
  # Markers are those of the Python that resolves, so the newest at hand does.
  "$environments/${at_hand[-1]}/bin/python" -m pip install --quiet --dry-run --ignore-installed --target "$folder/none" \
    --python-version "$version" --ignore-requires-python --only-binary=:all: --constraint "$folder/constraints.txt" "$wheel"
  echo "Python $version: not at hand; every dependency has a wheel for it"
done
