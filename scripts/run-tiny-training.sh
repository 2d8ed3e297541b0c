#!/usr/bin/env bash
# Trains, fine-tunes, predicts and embeds by PyTorch with the `gaudi-bert` of the PATH, after run-tiny-pipeline.sh in a folder.
# Usage: scripts/run-tiny-training.sh FOLDER
set -euo pipefail
cd "$1"

export OMP_NUM_THREADS=1
few=(--set training.updates=4 --set training.warmup_updates=1 --set training.global_batch_sequences=32
  --set training.micro_batch_packs=8 --set training.measure_speedup=false --set model.num_hidden_layers=1)
gaudi-bert run tiny.yaml --stages train,evaluate,report "${few[@]}" 2>&1 | tee train.log
grep -q '^train: engine pytorch: TensorFlow is not installed' train.log
gaudi-bert verify-model --checkpoint work/tiny/train

for row in $(seq 30); do
  echo "{\"text\": \"The number of this line is $row.\", \"label\": \"first\"}"
  echo "{\"text\": \"Its document has the number $row.\", \"label\": \"second\"}"
done >rows.jsonl
gaudi-bert finetune --task classification --model work/tiny/train --data rows.jsonl --evaluation rows.jsonl --out finetuned \
  --set finetune.epochs=1 --set finetune.max_sequence_length=32
gaudi-bert predict --model finetuned --data rows.jsonl --out answers.jsonl
[ "$(wc -l <answers.jsonl)" = 60 ]
gaudi-bert embed --model finetuned --data rows.jsonl --out vectors.npy
gaudi-bert export --checkpoint work/tiny/train --out exported
