"""TensorFlow: BERT, its heads and losses, updates, Horovod, the Gaudi of release 1.14."""

from gaudi_bert.common.tensorflow_environment import prepare_tensorflow

prepare_tensorflow()
