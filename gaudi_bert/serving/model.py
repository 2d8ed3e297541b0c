"""Open the model that is served, and convert texts to answers with it.

`open_served_model` opens a model folder in the same way as `embed` and `predict`. The `ServedModel` tokenizes texts,
computes batches, and converts their outputs to vectors, scores or labels. It does not pack texts or wait for requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from gaudi_bert.common.arrays import BatchArrays, Float32Array
from gaudi_bert.common.errors import InputError, short_repr
from gaudi_bert.common.files import check_model_exists
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.rows.cutting import LongTextTruncator
from gaudi_bert.rows.tokenizing import tokenize_rows
from gaudi_bert.rows.types import Row, Sequences, TextRow, sequences_from_ids
from gaudi_bert.serving.settings import ServeSettings
from gaudi_bert.tasks.predict import LoadedModel, load_encoder, load_task_model
from gaudi_bert.tasks.prediction_files import PredictOptions
from gaudi_bert.tasks.retrieval import apply_activation
from gaudi_bert.tasks.task import Task
from gaudi_bert.tasks.task_models import check_run_is_finished, read_task_description
from gaudi_bert.training.model_files import SentenceSettings, TaskConfig, read_sentence_settings

if TYPE_CHECKING:  # this module imports torch
    from gaudi_bert.engines.pytorch.model import TorchModel

Kind = Literal["embedding", "reranker", "classifier", "tagger"]

_KINDS_BY_TASK: dict[str, Kind] = {"reranking": "reranker", "token-classification": "tagger"}
_SOURCE = "the request"
_HEAD_ARCHITECTURES = ("ForSequenceClassification", "ForTokenClassification")


@dataclass(frozen=True)
class ServedModel:
    """A model on a device, with its tokenizer and all settings needed to answer requests.

    Attributes:
        kind: The kind of answers.
        task: The task of the model's head, or None for an embedding model.
        folder: The settings for pooling, prompts and normalization in the model folder.
        loaded: The model, its tokenizer and its lengths.
        is_eager_on_cpu: Whether the model runs on a CPU and is not compiled. Then a batch may have any shape, and another
            batch can be computed between two of its layers.
        max_single_thread_slots: Batches with at most this many slots are computed on a single CPU thread.
    """

    kind: Kind
    task: Task | None
    folder: SentenceSettings
    loaded: LoadedModel
    is_eager_on_cpu: bool = False
    max_single_thread_slots: int = 0

    @property
    def max_tokens(self) -> int:
        """The maximum number of tokens in a text. Longer texts are truncated."""
        return self.loaded.max_sequence_length

    @property
    def max_characters(self) -> int:
        """The maximum number of characters that are tokenized per text. Longer texts are cut before tokenization."""
        return self.text_truncator.max_characters

    @cached_property
    def text_truncator(self) -> LongTextTruncator:
        """Shortens long texts before tokenization. It removes only characters that truncation would remove anyway."""
        return LongTextTruncator(self.loaded.tokenizer.tokenizer, self.max_tokens)

    @property
    def output_size(self) -> int:
        """The number of values that the model computes per text, or per token if `is_per_token` is True."""
        return self.loaded.runner.width

    @property
    def torch_model(self) -> TorchModel:
        """The loaded PyTorch model."""
        return cast("TorchModel", self.loaded.model)

    @property
    def is_per_token(self) -> bool:
        """Whether the model has one output per token instead of one per text."""
        return self.kind == "tagger"

    def call_between_layers(self, callback: Callable[[], None]) -> None:
        """Make the model call a function before each layer of every batch. Do nothing if batches cannot be interrupted."""
        if self.is_eager_on_cpu:
            self.torch_model.call_between_layers(callback)

    def compute_outputs(self, batch: BatchArrays) -> Float32Array:
        """Run the model on a batch, and return its outputs. A batch with few slots is computed on a single CPU thread.

        Returns:
            float32 [rows, texts per row, C], or [rows, slots, C] if `is_per_token`. C is the `output_size`.
        """
        if batch["input_ids"].size > self.max_single_thread_slots:
            return self.torch_model.compute_outputs(batch)
        from gaudi_bert.engines.pytorch.parallel import limit_threads  # imported here, because it loads torch

        with limit_threads(1):
            return self.torch_model.compute_outputs(batch)

    def truncates_left(self, direction: str | None) -> bool:
        """Return whether texts that are too long are truncated at the beginning instead of at the end.

        Args:
            direction: The side that the request names, or None for the setting of the tokenizer.
        """
        return (direction or self.loaded.tokenizer.truncation_side).lower() == "left"

    def tokenize(self, rows: Sequence[Row], prompt: str = "", *, truncates_left: bool = False) -> Sequences:
        """Convert texts to token sequences. Texts that are too long are truncated, or split into windows if the model is a
        tagger.

        Args:
            rows: The texts.
            prompt: The prompt that precedes each text. It is used for an embedding model only. Other models use the default
                prompt of their folder.
            truncates_left: Whether texts that are too long are cut at their beginning.

        Raises:
            InputError: A text contains a token that would change the outputs of other texts in its row.
        """
        prompt = prompt if self.task is None else self.folder.find_prompt(None)
        rows = [
            self._prepend_prompt_and_truncate(row, prompt, truncates_left) if isinstance(row, TextRow) else row
            for row in rows
        ]
        name = None if self.task is None else self.task.settings.name
        too_long: Literal["window", "truncate"] = "window" if self.kind == "tagger" else "truncate"
        settings = (TaskSettings() if self.task is None else self.task.settings).model_copy(update={"too_long": too_long})
        sequences = tokenize_rows(
            rows,
            self.loaded.tokenizer,
            task=name,
            settings=settings,
            max_sequence_length=self.max_tokens,
            file=_SOURCE,
            truncation_side="left" if truncates_left else "right",
        )
        return self._check_sequences(sequences)

    def _prepend_prompt_and_truncate(self, row: TextRow, prompt: str, truncates_left: bool) -> TextRow:
        """Prepend the prompt to the text of a row, and remove characters that truncation would remove anyway."""
        if row.text_pair is not None:
            text, pair = self.text_truncator.truncate_pair(prompt + row.text, row.text_pair, from_left=truncates_left)
            return row._replace(text=text, text_pair=pair)
        # If truncation removes the beginning of a text, it removes the prompt as well. So do not add the prompt to a text
        # that is cut at the beginning.
        before = "" if truncates_left else prompt
        cut = self.text_truncator.truncate_text(row.text, before, from_left=truncates_left)
        return row._replace(text=(prompt if cut is row.text else before) + cut)

    def sequences_from_ids(self, texts: Sequence[Sequence[int]], *, truncates_left: bool = False) -> Sequences:
        """Convert lists of token ids to token sequences. Lists that are too long are truncated.

        If a text lacks the special tokens at its beginning and end, they are added.

        Args:
            texts: The token ids of each text.
            truncates_left: Whether texts that are too long are cut at their beginning.

        Raises:
            InputError: An id is not in the vocabulary, or a text contains a token that would change the outputs of other
                texts in its row.
        """
        largest = self.loaded.tokenizer.vocabulary_size - 1
        if any(not 0 <= min(ids) <= max(ids) <= largest for ids in texts):
            raise InputError(f"token ids must be between 0 and {largest:,}")
        before, after = self.loaded.tokenizer.special_tokens_around_text()
        room, cut, parts = self.max_tokens - len(before) - len(after), 0, []
        for ids in texts:
            is_framed = len(ids) >= len(before) + len(after)
            is_framed = is_framed and [*ids[: len(before)], *ids[len(ids) - len(after) :]] == [*before, *after]
            inner = ids[len(before) : len(ids) - len(after)] if is_framed else ids
            cut += len(inner) > room
            shortened = inner[max(0, len(inner) - room) :] if truncates_left else inner[:room]
            parts.append(np.array([*before, *shortened, *after], np.int32))
        return self._check_sequences(sequences_from_ids(parts, [np.zeros(len(part), np.int8) for part in parts], cut))

    def _check_sequences(self, sequences: Sequences) -> Sequences:
        """Return the sequences unchanged. Raise an error if they contain a token that the model cannot compute in packs."""
        self.torch_model.validate_and_extend_batch({"input_ids": sequences.input_ids})
        return sequences

    def encode_text(self, text: str, add_special_tokens: bool) -> Any:
        """Tokenize a text without truncation. Return an `Encoding` of the `tokenizers` library.

        Args:
            text: The text.
            add_special_tokens: Whether to add special tokens.
        """
        return self.loaded.tokenizer.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def find_prompt(self, name: str | None) -> str:
        """Return the text of a named prompt. If `name` is None, return the model's default prompt.

        Raises:
            InputError: The folder has no such prompt, or excludes prompts from mean pooling, which packed batches do not
                support.
        """
        if name is not None and name not in self.folder.prompts:
            known = ", ".join(self.folder.prompts) or "none"
            raise InputError(f"`prompt_name`: the model has no prompt {short_repr(name)}; its prompts are: {known}")
        prompt = self.folder.find_prompt(name)
        if prompt and not self.folder.pools_prompt:
            raise InputError(
                "`prompt_name`: the model excludes prompts from mean pooling, which is not supported; "
                "send texts without a prompt"
            )
        return prompt

    def make_vectors(self, outputs: Float32Array, normalize: bool | None, dimensions: int | None) -> Float32Array:
        """Convert pooled outputs to embedding vectors, in the same way as `gaudi-bert embed`.

        Args:
            outputs: float32 [N, C], the pooled outputs.
            normalize: Whether to scale vectors to length 1. None means the setting of the folder.
            dimensions: The number of values to keep. Vectors are cut before they are normalized. None means the setting of
                the folder.
        """
        is_normal = self.folder.normalize if normalize is None else normalize
        if dimensions is not None:
            return _normalize(outputs[:, :dimensions]) if is_normal else outputs[:, :dimensions]
        return self.folder.truncate_vectors(_normalize(outputs) if is_normal else outputs, renormalize=normalize is True)

    def compute_scores(self, logits: Float32Array) -> Float32Array:
        """Convert the logits of N text pairs to scores, float32 [N]."""
        return apply_activation(logits, "Sigmoid" if self.task is None else self.task.activation)

    def make_answers(self, outputs: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Return one prediction per input row, in the JSON form that `gaudi-bert predict` writes.

        Args:
            outputs: float32 [N, C], or [T, C] for a tagger.
            sequences: The sequences of the rows.
            rows: The rows.
        """
        return [] if self.task is None else list(self.task.make_predictions(outputs, sequences, rows))


def open_served_model(path: Path, settings: ServeSettings) -> ServedModel:
    """Load a model from a folder onto a device, for inference only.

    Args:
        path: A local folder with a model.
        settings: The settings of the server.

    Raises:
        InputError: The folder is damaged or incomplete, or its model cannot be served or does not support packed batches.
    """
    check_model_exists(path)
    check_run_is_finished(path)
    if not any(path.glob("*.safetensors")):
        raise InputError(
            f"{path}: the folder contains no *.safetensors file, and other weight files are not supported; "
            "save the model with save_pretrained"
        )
    config = TaskConfig.read(path / "config.json")
    architecture = (config.architectures or ["a model without a name"])[0]
    if architecture.endswith("ForQuestionAnswering"):
        raise InputError(
            f"{path}: question-answering models cannot be served; use `gaudi-bert predict` to answer questions from a file"
        )
    options = PredictOptions(
        settings.max_sequence_length,
        settings.precision,
        engine="pytorch",
        device=settings.device,
        compile=settings.compile,
    )
    if not architecture.endswith(_HEAD_ARCHITECTURES):
        folder = read_sentence_settings(path, settings.pooling) or SentenceSettings(settings.pooling or "mean")
        served = ServedModel("embedding", None, folder, load_encoder(path, folder, options, normalize=False))
    else:
        described = read_task_description(path)
        described.texts.find_prompt(None)  # rejects a default prompt that the folder does not have
        task = described.make_task()
        loaded = load_task_model(described, task, options)
        served = ServedModel(_KINDS_BY_TASK.get(task.name, "classifier"), task, described.texts, loaded)
    return replace(served, is_eager_on_cpu=served.torch_model.device.type == "cpu" and not settings.compile)


def _normalize(vectors: Float32Array) -> Float32Array:
    """Scale vectors to length 1. Zero vectors do not change."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    normal: Float32Array = (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
    return normal
