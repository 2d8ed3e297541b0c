# A data engineer with TFRecords of her own: packed, proven, trained on.
# README.md
gaudi-bert pack my-tfrecords/ --out packed/ --verify
gaudi-bert train --data packed/ --out run/ --model bert-base --set training.learning_rate=1e-4 $SMALL
