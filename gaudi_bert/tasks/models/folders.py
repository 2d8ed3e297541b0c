"""A model's folder, run by an engine: the vectors of an encoder, and the answers of any model with the head of a task.

An engine is imported when it is known which one: each takes seconds to load.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from gaudi_bert.common.arrays import Float32Array
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TaskSettings, TrainingSettings
from gaudi_bert.config.values import Precision
from gaudi_bert.engines.protocol import Engine, choose_engine, load_engine
from gaudi_bert.model.config import NO_PACKS, BertConfig
from gaudi_bert.model.heads import Pooling, TaskHead, VectorHead
from gaudi_bert.rows.tokenizer import open_tokenizer
from gaudi_bert.rows.types import Row, Sequences
from gaudi_bert.rows.window_plan import PackRunner, Runner, WindowPlan, plan_window
from gaudi_bert.tasks.models.task_models import (
    StartWeights,
    encoder_weights,
    is_bert,
    open_model,
    read_task_folder,
    start_weights,
)
from gaudi_bert.training.model_files import tokenizer_length


def _engine_of(path: Path) -> Engine:
    return load_engine(choose_engine("auto", is_bert=is_bert(path), key="--engine").name)


def _runner(
    engine: Engine, start: StartWeights, head: TaskHead | VectorHead, width: int, precision: Precision, longest: int
) -> Runner:
    """The model on a device, for sequences of at most `longest` tokens; a card that compiles gets one shape."""
    device = engine.open_device(TrainingSettings(precision=precision))
    model, sizes, one_shape = open_model(start, head, engine, device), start.sizes, device.kind == "hpu"

    def plan(sequences: Sequences, packed: bool) -> WindowPlan:
        return plan_window(
            sequences.lengths,
            hidden_size=sizes.hidden_size,
            packed=packed,
            one_length=longest if one_shape else None,
            longest_row=None if isinstance(start.config, BertConfig) else sizes.positions,
        )

    per: Literal["sequence", "token"] = "token" if head.per_token else "sequence"
    rest: Literal["smaller", "single", "filled"] = "single" if engine.NAME == "tensorflow" else "smaller"
    return Runner(plan, PackRunner(model, per, width, rest="filled" if one_shape else rest).run)


@contextmanager
def _with_a_way_on(path: Path) -> Iterator[None]:
    """What packs are not right for can still be run elsewhere, as the refusal states."""
    try:
        yield
    except InputError as error:
        reason = str(error).removesuffix(f"; {NO_PACKS}")
        if reason == str(error):
            raise
        way_on = "transformers or sentence-transformers run it, a text in each row"
        raise InputError(f"{path}: {reason}; {way_on}") from error


class TaskModel:
    """A model with the head of a task, with its weights and its tokenizer.

    Attributes:
        usual_length: most tokens of a sequence, unless it is requested otherwise.
        settings: those of the task, as it was trained.
    """

    def __init__(self, path: Path) -> None:
        self._engine = _engine_of(path)
        self._folder = folder = read_task_folder(path)
        with _with_a_way_on(path):
            self._start = start_weights(path, folder.make_task(), lacks_head=False)
        self.identity, self.positions = self._start.identity, self._start.sizes.positions
        self.usual_length = min(folder.max_sequence_length or self.positions, self.positions)
        self.task, self.labels, self.settings = folder.task, folder.labels, folder.settings
        self.tokenizer = open_tokenizer(path)
        self.tokenizer.check_fits(self._start.sizes.vocab_size, self._start.sizes.segments)

    def answerer(self, settings: TaskSettings, precision: Precision, longest: int) -> Runner:
        """The model; `longest` is the most tokens of a sequence."""
        task = self._folder.make_task(settings)
        head = task.head
        if isinstance(head, VectorHead) or not head.keeps_outputs:
            raise InputError(
                f"{self._folder.path}: {task.name} has no answers to predict; embed its texts, or fine-tune another task"
            )
        with _with_a_way_on(self._folder.path):
            return _runner(self._engine, self._start, head, task.width, precision, longest)

    def answers(
        self, settings: TaskSettings, values: Float32Array, sequences: Sequences, rows: Sequence[Row]
    ) -> Iterable[Mapping[str, Any]]:
        """The model's outputs as one JSON object for each row."""
        return self._folder.make_task(settings).answers(values, sequences, rows)


class Encoder:
    """An encoder, whatever its head, with its weights and its tokenizer; `usual_length` is as of a `TaskModel`."""

    def __init__(self, path: Path) -> None:
        self._engine, self._path = _engine_of(path), path
        with _with_a_way_on(path):
            self._start = encoder_weights(path)
        self.identity, sizes = self._start.identity, self._start.sizes
        self.hidden_size, self.positions = sizes.hidden_size, sizes.positions
        self.usual_length = min(self.positions, tokenizer_length(path if path.is_dir() else path.parent) or self.positions)
        self.tokenizer = open_tokenizer(path)
        self.tokenizer.check_fits(sizes.vocab_size, sizes.segments)

    def embedder(self, pooling: Pooling, normalize: bool, precision: Precision, longest: int) -> Runner:
        """The encoder, its outputs pooled; `longest` is the most tokens of a text."""
        with _with_a_way_on(self._path):
            head = VectorHead(pooling, normalize)
            return _runner(self._engine, self._start, head, self.hidden_size, precision, longest)
