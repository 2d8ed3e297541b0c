#!/usr/bin/env bash
# Types the scripts of tests/journeys/ as strangers do: in a fresh clone and a fresh environment, with data of their own. Prints
# what each command took. The data are made by the Python that tests run on (PYTHON, default .venv/bin/python).
# Usage: scripts/type-journeys.sh [lengths|records|roberta|classifier|vectors|cluster]...   (default: all; HOME_DATA=FOLDER
#   takes other data, and EPOCH= and SMALL= leave the training as large as the pages have it)
set -euo pipefail
unset PYTHONPATH
cd "$(dirname "$0")/.."

python=${PYTHON:-$PWD/.venv/bin/python}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${HOME_DATA:-}" ]; then
  HOME_DATA=$folder/home
  "$python" -m tests.journeys.home "$HOME_DATA"
fi
export SMALL=${SMALL-$("$python" -c 'from tests.journeys import home; print(home.SMALL)')}
export EPOCH=${EPOCH-$("$python" -c 'from tests.journeys import home; print(home.EPOCH)')}

# What the page tells each of them to install.
declare -A extras=([lengths]="" [records]="[parquet,pytorch]" [roberta]="[parquet,pytorch]" [classifier]="[parquet,pytorch]"
  [vectors]="[parquet,pytorch]" [cluster]="[kubernetes]")

# Runs a command; prints its seconds by the clock and of the processors, and stops where it fails.
measured() {
  local TIMEFORMAT='%R %U %S'
  local log=$folder/log
  { time bash -c "$1" >"$log" 2>&1 </dev/null || touch "$folder/failed"; } 2>"$folder/time"
  awk -v command="$1" '{ printf "%8.1f s, %7.1f s of CPU   %s\n", $1, $2 + $3, command }' "$folder/time"
  if [ -e "$folder/failed" ]; then
    cat "$log" >&2
    exit 1
  fi
}

for name in "${@:-lengths records roberta classifier vectors cluster}"; do
  for journey in $name; do
    echo "$journey"
    there=$folder/$journey
    mkdir "$there"
    cp -rL "$HOME_DATA"/. "$there"
    (
      cd "$there"
      measured "git clone --quiet '$OLDPWD' gaudi-bert"
      python3 -m venv environment
      export PATH=$there/environment/bin:$PATH
      measured "pip install --quiet './gaudi-bert${extras[$journey]}'"
      grep -v '^#' "$OLDPWD/tests/journeys/$journey.sh" | while read -r command; do measured "$command"; done
    )
    rm -rf "$there"
  done
done
