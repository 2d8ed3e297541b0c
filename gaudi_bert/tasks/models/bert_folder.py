"""A BERT's folder, in TensorFlow: its vectors, and its answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from gaudi_bert.common.arrays import Float32Array
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.config.values import Precision
from gaudi_bert.rows.tokenizer import RowTokenizer
from gaudi_bert.rows.types import Row, Sequences
from gaudi_bert.rows.window_plan import Runner, WindowPlan, plan_window
from gaudi_bert.tasks.models.task_models import open_task_model, read_task_folder, weights_checksum
from gaudi_bert.tasks.prediction import Compute, Embedder, PackRunner
from gaudi_bert.training.tensorflow.device import Device, open_device
from gaudi_bert.training.weights.model_files import Pooling, tokenizer_length
from gaudi_bert.training.weights.sources import read_weights


class BertFolder:
    """An encoder with its weights, held once."""

    def __init__(self, path: Path) -> None:
        self.weights = read_weights(path)
        if self.weights.config is None:
            raise InputError(f"{path}: its config is not known; put config.json beside the weights")
        self.config = self.weights.config
        self.hidden_size = self.config.hidden_size
        self.positions = self.config.max_position_embeddings
        folder = path if path.is_dir() else path.parent
        self.usual_length = min(self.positions, tokenizer_length(folder) or self.positions)
        self.identity = weights_checksum(self.weights)

    def check_fits(self, tokenizer: RowTokenizer) -> None:
        """Refuse a tokenizer of another model."""
        tokenizer.check_fits(self.config.vocab_size, self.config.type_vocab_size)

    def embedder(self, pooling: Pooling, normalize: bool, precision: Precision, longest: int) -> Runner:
        """The encoder, its outputs pooled."""
        device = open_device("auto", precision)
        embedder = Embedder(
            self.config,
            self.weights.variables,
            pooling=pooling,
            normalize=normalize,
            compute_dtype=device.compute_dtype,
        )
        return _runner(embedder, "sequence", self.hidden_size, device, self.hidden_size, longest)


class BertTaskFolder(BertFolder):
    """A BERT with the head of a task."""

    def __init__(self, path: Path) -> None:
        self._folder = folder = read_task_folder(path)
        super().__init__(path)
        self.usual_length = folder.max_sequence_length
        self.task, self.labels, self.settings = folder.task, folder.labels, folder.settings

    def answerer(self, settings: TaskSettings, precision: Precision, longest: int) -> Runner:
        """The model."""
        task = self._folder.make_task(settings)
        if not task.keeps_logits:
            raise InputError(
                f"{self._folder.path}: {task.name} has no answers to predict; embed its texts, or fine-tune another task"
            )
        device = open_device("auto", precision)
        model = open_task_model(self._folder, task, compute_dtype=device.compute_dtype, weights=self.weights)
        per: Literal["sequence", "token"] = "token" if task.per_token else "sequence"
        return _runner(model, per, task.width, device, self.hidden_size, longest)

    def answers(
        self, settings: TaskSettings, values: Float32Array, sequences: Sequences, rows: Sequence[Row]
    ) -> Iterable[Mapping[str, Any]]:
        """The model's outputs as one JSON object for each row."""
        return self._folder.make_task(settings).answers(values, sequences, rows)


def _runner(
    compute: Compute, per: Literal["sequence", "token"], width: int, device: Device, hidden_size: int, longest: int
) -> Runner:
    """A model on a device; a card that compiles gets one shape."""
    one_shape = device.kind == "hpu"

    def plan(sequences: Sequences, packed: bool) -> WindowPlan:
        one_length = longest if one_shape else None
        return plan_window(sequences.lengths, hidden_size=hidden_size, packed=packed, one_length=one_length)

    return Runner(plan, PackRunner(compute, per=per, width=width, device=device.name, one_shape=one_shape).run)
