"""The engines, which compute a run with TensorFlow or PyTorch, and their common interface (`protocol.py`).

This module chooses the engine of a run and imports its framework. The other framework is not imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, cast

from gaudi_bert.common.errors import InputError, install_command
from gaudi_bert.config.values import Engine as Choice
from gaudi_bert.config.values import EngineName
from gaudi_bert.engines.protocol import Engine


class ChosenEngine(NamedTuple):
    """The engine that a run uses, and why it was chosen."""

    name: EngineName
    reason: str

    def format_choice(self) -> str:
        """Return a line of text for the user that names the engine and the reason."""
        return f"engine {self.name}: {self.reason}"


def is_installed(name: EngineName) -> bool:
    """Return whether the framework of an engine, TensorFlow or PyTorch, is installed. The framework is not imported."""
    return importlib.util.find_spec("torch" if name == "pytorch" else name) is not None


def choose_engine(
    requested: Choice,
    *,
    is_bert: bool = True,
    setting_name: str = "training.engine",
    previous_engine: EngineName | None = None,
    preferred: EngineName = "tensorflow",
) -> ChosenEngine:
    """Choose the engine of a run, and return it with the reason for the choice.

    The engine must support the model, and its framework must be installed.

    Args:
        requested: The name of an engine, or "auto".
        is_bert: Whether the model is a BERT. TensorFlow only runs BERT.
        setting_name: The setting that `requested` comes from, for error messages.
        previous_engine: The engine that a resumed run began with, or None.
        preferred: The engine for a BERT if both engines are installed.

    Raises:
        InputError: The engine is not installed, or cannot run the model.
    """
    has_vendor = importlib.util.find_spec("habana_frameworks") is not None
    if requested != "auto":
        chosen = ChosenEngine(requested, "as requested")
    elif previous_engine is not None:
        chosen = ChosenEngine(previous_engine, "the run started with this engine")
    elif not is_bert:
        chosen = ChosenEngine("pytorch", "the model is not a BERT")
    elif has_vendor and importlib.util.find_spec("habana_frameworks.torch") is not None:
        chosen = ChosenEngine("pytorch", "the Gaudi software for PyTorch is installed")
    elif preferred == "pytorch" and not has_vendor and is_installed("pytorch"):
        chosen = ChosenEngine("pytorch", "PyTorch is installed")
    elif is_installed("tensorflow"):
        chosen = ChosenEngine("tensorflow", "TensorFlow is installed, and the model is a BERT")
    else:
        chosen = ChosenEngine("pytorch", "TensorFlow is not installed")
    if chosen.name == "tensorflow" and not is_bert:
        raise InputError(
            f"{setting_name} = tensorflow: the TensorFlow engine supports only BERT; set {setting_name} to pytorch"
        )
    if not is_installed(chosen.name):
        other = "pytorch" if chosen.name == "tensorflow" else "tensorflow"
        remedy = f"run: {install_command(chosen.name)}" + (
            f"; or set {setting_name} to {other}" if requested != "auto" else ""
        )
        raise InputError(f"engine {chosen.name}: the framework is not installed ({chosen.reason}); {remedy}")
    if chosen.name == "pytorch":
        # Reading a tokenizer imports torch, and torch reads environment variables when it is imported. Importing the PyTorch
        # engine sets these variables, so import the engine first.
        importlib.import_module("gaudi_bert.engines.pytorch")
    return chosen


def load_engine(name: EngineName) -> Engine:
    """Import the module of an engine, together with its framework, and return the module."""
    if name == "tensorflow":
        with _prevent_keras_import():
            return cast(Engine, importlib.import_module("gaudi_bert.engines.tensorflow.engine"))
    return cast(Engine, importlib.import_module("gaudi_bert.engines.pytorch.engine"))


@contextmanager
def _prevent_keras_import() -> Iterator[None]:
    """Prevent TensorFlow from importing Keras inside a `with` block.

    Importing Keras, and pandas with it, takes more than a third of the import time of TensorFlow. We do not use Keras, and
    TensorFlow works without it. After the block, Keras can be imported as usual.
    """
    if "tensorflow" in sys.modules or "keras" in sys.modules:
        yield
        return
    sys.modules["keras"] = None  # type: ignore[assignment]  # makes Python report that the module does not exist
    try:
        yield
    finally:
        sys.modules.pop("keras", None)
