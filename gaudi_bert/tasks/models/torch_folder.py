"""The folder of any encoder of `transformers`, in PyTorch: its vectors, and its answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gaudi_bert.common.arrays import Float32Array
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.config.values import Precision
from gaudi_bert.model.heads import Pooling
from gaudi_bert.pytorch.encoder import PackedEncoder
from gaudi_bert.pytorch.model_folder import open_encoder
from gaudi_bert.rows.tokenizer import RowTokenizer, open_tokenizer
from gaudi_bert.rows.types import Row, Sequences
from gaudi_bert.rows.window_plan import Runner
from gaudi_bert.tasks.task_rows import file_identity
from gaudi_bert.training.weights.model_files import tokenizer_length


class TorchFolder:
    """An encoder; its head, if it has one, is not used."""

    with_head = False

    def __init__(self, path: Path) -> None:
        self._path, self._tokenizer = path, open_tokenizer(path)
        self._encoder = self._opened("float32")
        self.hidden_size, self.positions = self._encoder.hidden_size, self._encoder.positions
        self.usual_length = min(self.positions, tokenizer_length(path) or self.positions)
        files = sorted(
            file for file in path.iterdir() if file.suffix in (".safetensors", ".bin") or file.name == "config.json"
        )
        self.identity = " ".join(map(file_identity, files))

    def _opened(self, precision: Precision) -> PackedEncoder:
        return open_encoder(self._path, self._tokenizer, with_head=self.with_head, precision=precision)

    def _encoder_of(self, precision: Precision) -> PackedEncoder:
        return self._encoder if precision == "float32" else self._opened(precision)

    def check_fits(self, tokenizer: RowTokenizer) -> None:
        """It was seen to fit when the encoder was opened."""

    def embedder(self, pooling: Pooling, normalize: bool, precision: Precision, longest: int) -> Runner:
        """The encoder, its outputs pooled."""
        encoder = self._encoder_of(precision)
        return Runner(encoder.plan, lambda sequences, plan: encoder.vectors(sequences, plan, pooling, normalize))


class TorchTaskFolder(TorchFolder):
    """A model with a head for texts or for tokens."""

    with_head = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        encoder = self._encoder
        if encoder.task is None:
            name = type(encoder.model).__name__
            raise InputError(
                f"{path}: {name} has no head that is answered here; give a ...ForSequenceClassification or a "
                "...ForTokenClassification, or embed its texts"
            )
        self.task = encoder.task
        regression = self.task == "regression"
        self.labels: tuple[str, ...] = () if regression else encoder.labels
        self.settings = TaskSettings(name=self.task)

    def answerer(self, settings: TaskSettings, precision: Precision, longest: int) -> Runner:
        """The model."""
        encoder = self._encoder_of(precision)
        return Runner(encoder.plan, encoder.logits)

    def answers(
        self, settings: TaskSettings, values: Float32Array, sequences: Sequences, rows: Sequence[Row]
    ) -> Iterable[Mapping[str, Any]]:
        """The model's outputs as one JSON object for each row."""
        return self._encoder.answers(values, sequences, rows)
