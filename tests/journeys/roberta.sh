# One with a RoBERTa of his own: from texts to a trained folder.
# docs/train.md
gaudi-bert tokenize texts/ --tokenizer my-model/ --out tokens/ --max-sequence-length 64
gaudi-bert pack tokens/ --out tokens-packed/ --max-sequence-length 64
gaudi-bert train --data tokens-packed/ --out words/ --model my-model/ --set training.learning_rate=1e-4 $SMALL
