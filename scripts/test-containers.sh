#!/usr/bin/env bash
# Containers for real, on a machine that needs to have nothing: Docker, base image, images, and the tests of tests/docker, which
# run the demo pipeline with --on docker to the end.
# Prints one loud line and ends well where no container can run.
# Usage: scripts/test-containers.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$(mktemp -d)
stop() {
  # Only a daemon that was started here is ended; its containers are gone by then.
  if [ -s "$folder/dockerd.pid" ]; then kill "$(cat "$folder/dockerd.pid")" 2>/dev/null || true; fi
  rm -rf "$folder"
}
trap stop EXIT

status=0
scripts/start-docker.sh "$folder" || status=$?
if [ "$status" = 75 ]; then exit 0; fi
if [ "$status" != 0 ]; then exit "$status"; fi
echo "docker is ready after $SECONDS s"

# A machine may have PyTorch's build for CPUs as a file; elsewhere, the images' own script finds it.
base=gaudi-bert-base:bookworm
mkdir "$folder/wheels"
.venv/bin/python -m pip download --quiet --no-index --no-deps --constraint constraints.txt --dest "$folder/wheels" torch \
  >"$folder/wheels.log" 2>&1 || true
DOCKER_BUILDKIT=1 /usr/bin/docker build --quiet --build-arg BASE_IMAGE=$base --tag gaudi-bert-base:wheels \
  --file tests/docker/stand-in/wheels.Dockerfile "$folder/wheels" >/dev/null

export BASE_IMAGE=$base
# Both at once: one mostly waits for the network while the other compiles.
scripts/make-images.sh data >"$folder/data.log" 2>&1 &
data=$!
scripts/make-images.sh train-cpu >"$folder/train-cpu.log" 2>&1 || { tail -n 40 "$folder/train-cpu.log"; exit 1; }
wait "$data" || { tail -n 40 "$folder/data.log"; exit 1; }
BASE_IMAGE=gaudi-bert-base:wheels scripts/make-images.sh train-cpu-pytorch >"$folder/pytorch.log" 2>&1 ||
  { tail -n 40 "$folder/pytorch.log"; exit 1; }
tail -q -n 1 "$folder/data.log" "$folder/train-cpu.log" "$folder/pytorch.log"
echo "images are ready after $SECONDS s"

[ "$#" -gt 0 ] || set -- tests/docker tests/runners/test_docker.py
GAUDI_BERT_TEST_CONTAINERS=1 .venv/bin/python -m pytest --durations=8 "$@"
