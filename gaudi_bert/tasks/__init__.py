"""What a downstream task is: its rows, its head, its loss, its metrics, its answers. One task, one file."""

from gaudi_bert.common.tensorflow_environment import prepare_tensorflow

prepare_tensorflow()
