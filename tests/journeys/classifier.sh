# One with labelled rows: a classifier, and its answers.
# README.md
gaudi-bert finetune --task classification --data train.jsonl --evaluation dev.jsonl --model MODEL --out tuned/ $EPOCH
gaudi-bert predict --model tuned/ --data new.jsonl --out answers.jsonl
