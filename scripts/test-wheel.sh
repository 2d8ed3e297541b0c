#!/usr/bin/env bash
# Builds the source distribution and of that the wheel, installs it into an empty environment, and runs it from an empty
# folder: what a user has who clones nothing.
# Usage: scripts/test-wheel.sh
set -euo pipefail
cd "$(dirname "$0")/.."

python=$(scripts/find-python.sh)
constraints=$PWD/constraints.txt
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# Built from a copy, so that nothing of an earlier build gets in and nothing is left behind.
mkdir "$folder/source" "$folder/empty"
git ls-files -z --cached --others --exclude-standard | tar --create --null --files-from - | tar --extract --directory "$folder/source"
"$python" -m venv "$folder/venv"
"$python" -m venv "$folder/build"
"$folder/build/bin/python" -m pip install --quiet --constraint constraints.txt build
PIP_CONSTRAINT=$PWD/constraints.txt "$folder/build/bin/python" -m build --outdir "$folder" "$folder/source" >"$folder/build.log" ||
  { cat "$folder/build.log" >&2; exit 1; }
tar --list --gzip --file "$folder"/gaudi_bert-*.tar.gz >"$folder/contents.txt"
if grep /tests/ "$folder/contents.txt"; then echo "the source distribution holds tests, which need the clone" >&2; exit 1; fi
grep -q /CHANGELOG.md "$folder/contents.txt"
wheel=$(echo "$folder"/gaudi_bert-*.whl)
"$folder/venv/bin/python" -m pip install --quiet --constraint constraints.txt "$wheel"
rm -rf "$folder/source" "$folder/build"
echo "$(basename "$wheel"): $(stat --format=%s "$wheel") bytes"

export PATH=$folder/venv/bin:$PATH
tiny=$PWD/scripts/run-tiny-pipeline.sh
cd "$folder/empty"
gaudi-bert --help >help.txt
grep -q estimate help.txt
gaudi-bert --version
gaudi-bert estimate wikipedia-512
gaudi-bert estimate wikipedia-512 --json | python -m json.tool >/dev/null
gaudi-bert run demo --dry-run
python -c 'from gaudi_bert import pack_lengths; assert len(pack_lengths([128, 17, 300, 64, 212, 500, 9, 450], 512)) == 4'
# The core says which extra a command needs besides.
if gaudi-bert estimate wikipedia-512 --picture x.png 2>error.txt || ! grep -q "\[report\]" error.txt; then cat error.txt >&2; exit 1; fi
python -m pip install --quiet --constraint "$constraints" "$wheel[report,text]"
"$tiny" .
gaudi-bert report work/tiny
grep -q '<style>' work/tiny/report.html
gaudi-bert run tiny.yaml --set prepare.text=python-docs --render manifests
grep -q 'kind: Job' manifests/data/plan.yaml
