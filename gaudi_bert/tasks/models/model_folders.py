"""Which software runs a model's folder: TensorFlow a BERT, PyTorch any other encoder (and BERT without TensorFlow).

The one or the other is imported when it is known which one is needed: neither is installed everywhere, and each takes
seconds to load.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gaudi_bert.common.arrays import Float32Array
from gaudi_bert.common.errors import InputError, has_tensorflow, install_command
from gaudi_bert.common.files import check_model, read_json
from gaudi_bert.common.tensorflow_environment import without_keras
from gaudi_bert.config.sections import TaskName, TaskSettings
from gaudi_bert.config.values import Precision
from gaudi_bert.rows.tokenizer import RowTokenizer
from gaudi_bert.rows.types import Row, Sequences
from gaudi_bert.rows.window_plan import Runner
from gaudi_bert.training.weights.model_files import Pooling


class ModelFolder(Protocol):
    """A model's folder, as BERT in TensorFlow or another encoder in PyTorch.

    Attributes:
        hidden_size, positions: of the model.
        usual_length: most tokens of a text, unless it is requested otherwise.
        identity: of the weights.
    """

    hidden_size: int
    positions: int
    usual_length: int
    identity: str

    def check_fits(self, tokenizer: RowTokenizer) -> None:
        """Refuse a tokenizer of another model."""

    def embedder(self, pooling: Pooling, normalize: bool, precision: Precision, longest: int) -> Runner:
        """The encoder, its outputs pooled; `longest` is the most tokens of a text."""


class TaskFolder(ModelFolder, Protocol):
    """A model with the head of a task.

    Attributes:
        task: its name.
        labels: of its classes.
        settings: those it was trained with.
    """

    task: TaskName
    labels: tuple[str, ...]
    settings: TaskSettings

    def answerer(self, settings: TaskSettings, precision: Precision, longest: int) -> Runner:
        """The model; `longest` is the most tokens of a sequence."""

    def answers(
        self, settings: TaskSettings, values: Float32Array, sequences: Sequences, rows: Sequence[Row]
    ) -> Iterable[Mapping[str, Any]]:
        """The model's outputs as one JSON object for each row."""


def open_model_folder(path: Path) -> ModelFolder:
    """An encoder, whatever head it has."""
    if _is_for_tensorflow(path):
        with without_keras():
            from gaudi_bert.tasks.models.bert_folder import BertFolder
        return BertFolder(path)
    from gaudi_bert.tasks.models.torch_folder import TorchFolder

    return TorchFolder(path)


def open_task_folder(path: Path) -> TaskFolder:
    """A model with the head of a task."""
    if _is_for_tensorflow(path):
        with without_keras():
            from gaudi_bert.tasks.models.bert_folder import BertTaskFolder
        return BertTaskFolder(path)
    from gaudi_bert.tasks.models.torch_folder import TorchTaskFolder

    return TorchTaskFolder(path)


def _is_for_tensorflow(path: Path) -> bool:
    """Whether TensorFlow runs it; refused where PyTorch would have to and is not there."""
    check_model(path)
    config = path / "config.json"
    content = read_json(config) if config.is_file() else {}
    kind = content.get("model_type", "bert") if isinstance(content, dict) else "bert"
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if kind == "bert" and importlib.util.find_spec("tensorflow") is not None:
        return True
    if missing and kind == "bert" and has_tensorflow():
        return True  # which is then named as missing
    if missing:
        raise InputError(
            f"{path}: is a model of type {kind}, which needs {missing[0]} on this Python; run: {install_command('pytorch')}"
        )
    return False
