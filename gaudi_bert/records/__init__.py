"""The bytes: TFRecord framing, tf.train.Example wire format, schemas. numpy and numba, no TensorFlow."""
