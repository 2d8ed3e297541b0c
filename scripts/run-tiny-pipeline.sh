#!/usr/bin/env bash
# Runs the data side of a tiny pipeline with the `gaudi-bert` of the PATH, in an empty folder.
# Usage: scripts/run-tiny-pipeline.sh FOLDER
set -euo pipefail
cd "$1"

cat >tiny.yaml <<'YAML'
name: tiny
prepare: {text: text.txt, train_vocab: 101, max_sequence_length: 32, max_predictions: 5, duplicates: 2, shards: 2}
packing: {shard_multiple: 2}
YAML
for document in $(seq 40); do
  for line in $(seq 9); do echo "The number of this line is $line, and its document has the number $((document * line))."; done
  echo
done >text.txt
gaudi-bert run tiny.yaml --stages prepare,histogram,plan,write,verify
