"""The fixtures of tasks, for the job that learns them."""

from tests.tasks.conftest import files, finished, model

__all__ = ["files", "finished", "model"]
