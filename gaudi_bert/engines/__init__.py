"""Frameworks that compute a run: what a run asks of one (`protocol.py`), TensorFlow, and PyTorch.

Here is which one computes a run, and why: the only module that imports one, and never both.
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
    """An engine's name, and why it was chosen."""

    name: EngineName
    reason: str

    def line(self) -> str:
        """For people."""
        return f"engine {self.name}: {self.reason}"


def is_installed(name: EngineName) -> bool:
    """Whether the framework of an engine can be imported, without importing it."""
    return importlib.util.find_spec("torch" if name == "pytorch" else name) is not None


def choose_engine(
    requested: Choice, *, is_bert: bool = True, key: str = "training.engine", stored: EngineName | None = None
) -> ChosenEngine:
    """The engine of a run.

    `stored` is that of the run that is resumed; `key` is the setting that `requested` comes from.

    Raises:
        InputError: it is not installed, or cannot run the model.
    """
    has_vendor = importlib.util.find_spec("habana_frameworks") is not None
    if requested != "auto":
        chosen = ChosenEngine(requested, "as requested")
    elif stored is not None:
        chosen = ChosenEngine(stored, "the run began with it")
    elif not is_bert:
        chosen = ChosenEngine("pytorch", "the model is not a BERT")
    elif has_vendor and importlib.util.find_spec("habana_frameworks.torch") is not None:
        chosen = ChosenEngine("pytorch", "the vendor's software here is that of PyTorch")
    elif is_installed("tensorflow"):
        chosen = ChosenEngine("tensorflow", "TensorFlow is installed, and the model is a BERT")
    else:
        chosen = ChosenEngine("pytorch", "TensorFlow is not installed")
    if chosen.name == "tensorflow" and not is_bert:
        raise InputError(f"{key} = tensorflow: TensorFlow runs BERT only here; set it to pytorch")
    if not is_installed(chosen.name):
        other = "pytorch" if chosen.name == "tensorflow" else "tensorflow"
        remedy = f"run: {install_command(chosen.name)}" + (f"; or set {key} to {other}" if requested != "auto" else "")
        raise InputError(f"engine {chosen.name} is not installed ({chosen.reason}); {remedy}")
    return chosen


def load_engine(name: EngineName) -> Engine:
    """The engine's module; its framework is imported now."""
    if name == "tensorflow":
        with _without_keras():
            return cast(Engine, importlib.import_module("gaudi_bert.engines.tensorflow.engine"))
    return cast(Engine, importlib.import_module("gaudi_bert.engines.pytorch.engine"))


@contextmanager
def _without_keras() -> Iterator[None]:
    """Inside the block, TensorFlow is imported without Keras, which it would load for others to use, and pandas with it.

    Nothing of ours uses Keras, and it takes more than a third of the time. TensorFlow does without where there is
    none, and afterwards Keras can be imported as ever.
    """
    if "tensorflow" in sys.modules or "keras" in sys.modules:
        yield
        return
    sys.modules["keras"] = None  # type: ignore[assignment]  # what Python takes for "there is none"
    try:
        yield
    finally:
        sys.modules.pop("keras", None)
