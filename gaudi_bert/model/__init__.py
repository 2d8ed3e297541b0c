"""BERT for packed inputs: embeddings, mask, encoder, heads, losses. TensorFlow, static shapes, no files."""

from gaudi_bert.common.tensorflow_environment import prepare_tensorflow

prepare_tensorflow()
