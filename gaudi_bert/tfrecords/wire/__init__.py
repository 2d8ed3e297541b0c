"""The bytes of TFRecords and of tf.train.Example."""
