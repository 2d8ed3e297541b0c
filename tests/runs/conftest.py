"""The fixtures of tasks and of training, for the jobs that use both."""

from tests.tasks.conftest import files, finished, model
from tests.training.conftest import held_out, one_thread, packed, whole_run, work

__all__ = ["files", "finished", "held_out", "model", "one_thread", "packed", "whole_run", "work"]
