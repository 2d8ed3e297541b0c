"""The bytes on the disk: TFRecord framing, CRC-32C, the wire format of tf.train.Example."""
