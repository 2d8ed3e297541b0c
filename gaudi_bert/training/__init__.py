"""Training: input, optimizers, the update, the loop, checkpoints, metrics, evaluation. TensorFlow."""

from gaudi_bert.common.tensorflow_environment import prepare_tensorflow

prepare_tensorflow()
