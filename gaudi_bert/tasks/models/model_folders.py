"""Which engine runs a model's folder; it is imported when it is known which one: each takes seconds to load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gaudi_bert.common.arrays import Float32Array
from gaudi_bert.config.sections import TaskName, TaskSettings
from gaudi_bert.config.values import Engine as EngineChoice
from gaudi_bert.config.values import Precision
from gaudi_bert.engines.choose import choose_engine, load_engine
from gaudi_bert.model.heads import Pooling
from gaudi_bert.rows.tokenizer import RowTokenizer
from gaudi_bert.rows.types import Row, Sequences
from gaudi_bert.rows.window_plan import Runner
from gaudi_bert.tasks.models.task_models import is_bert


class _Folder(Protocol):
    """A model's folder.

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


class ModelFolder(_Folder, Protocol):
    """An encoder."""

    def embedder(self, pooling: Pooling, normalize: bool, precision: Precision, longest: int) -> Runner:
        """The encoder, its outputs pooled; `longest` is the most tokens of a text."""


class TaskFolder(_Folder, Protocol):
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
    if is_bert(path):
        from gaudi_bert.tasks.models.bert_folder import BertFolder

        return BertFolder(path, load_engine(choose_engine(engine, key="--engine").name))
    chosen = choose_engine(engine, is_bert=False, key="--engine")
    from gaudi_bert.tasks.models.torch_folder import TorchFolder

    return TorchFolder(path, load_engine(chosen.name))


def open_task_folder(path: Path, engine: EngineChoice = "auto") -> TaskFolder:
    """A model with the head of a task."""
    from gaudi_bert.tasks.models.bert_folder import TaskModelFolder

    chosen = choose_engine(engine, is_bert=is_bert(path), key="--engine")
    return TaskModelFolder(path, load_engine(chosen.name))
