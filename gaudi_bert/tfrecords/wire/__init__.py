"""The wire formats: TFRecord frames, tf.train.Example messages, and HDF5 files that are read as such."""
