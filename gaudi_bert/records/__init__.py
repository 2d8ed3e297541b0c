"""The bytes: TFRecord framing, the wire format of tf.train.Example, schemas and metadata. numpy and numba, no TensorFlow."""
