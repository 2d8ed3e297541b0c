#!/bin/sh
# Make the environment of the S3 server that tests and benchmarks talk to (moto), apart from ours, in .venv/s3-server/.
# Does nothing where it is there already.
set -eu
cd "$(dirname "$0")/.."
folder=.venv/s3-server
if [ ! -e "$folder/made" ]; then
  .venv/bin/python -m venv "$folder"
  "$folder/bin/python" -m pip install --quiet --requirement scripts/s3-server.txt
  touch "$folder/made"
fi
