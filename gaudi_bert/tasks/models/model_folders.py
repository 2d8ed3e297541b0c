"""Which software runs a model's folder: an engine of ours a BERT, `transformers` any other encoder.

The one or the other is imported when it is known which one is needed: neither is installed everywhere, and each takes
seconds to load.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gaudi_bert.common.arrays import Float32Array
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import check_model, read_json
from gaudi_bert.common.installation import install_command
from gaudi_bert.config.sections import TaskName, TaskSettings
from gaudi_bert.config.values import Engine as EngineChoice
from gaudi_bert.config.values import Precision
from gaudi_bert.engines.choose import choose_engine, load_engine
from gaudi_bert.model.heads import Pooling
from gaudi_bert.rows.tokenizer import RowTokenizer
from gaudi_bert.rows.types import Row, Sequences
from gaudi_bert.rows.window_plan import Runner


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


def open_model_folder(path: Path, engine: EngineChoice = "auto") -> ModelFolder:
    """An encoder, whatever head it has."""
    if _is_bert(path):
        from gaudi_bert.tasks.models.bert_folder import BertFolder

        return BertFolder(path, load_engine(choose_engine(engine, key="--engine").name))
    choose_engine(engine, is_bert=False, key="--engine")
    from gaudi_bert.tasks.models.torch_folder import TorchFolder

    return TorchFolder(path)


def open_task_folder(path: Path, engine: EngineChoice = "auto") -> TaskFolder:
    """A model with the head of a task."""
    if _is_bert(path):
        from gaudi_bert.tasks.models.bert_folder import BertTaskFolder

        return BertTaskFolder(path, load_engine(choose_engine(engine, key="--engine").name))
    choose_engine(engine, is_bert=False, key="--engine")
    from gaudi_bert.tasks.models.torch_folder import TorchTaskFolder

    return TorchTaskFolder(path)


def _is_bert(path: Path) -> bool:
    """Whether it is a BERT; another model is refused where there is no `transformers` to run it."""
    check_model(path)
    config = path / "config.json"
    content = read_json(config) if config.is_file() else {}
    kind = content.get("model_type", "bert") if isinstance(content, dict) else "bert"
    if kind != "bert" and importlib.util.find_spec("transformers") is None:
        raise InputError(f"{path}: is a model of type {kind}, which needs transformers; run: {install_command('pytorch')}")
    return bool(kind == "bert")
