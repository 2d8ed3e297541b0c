"""The model that is served: opened once from a folder, as `embed` and `predict` open it; texts in, answers out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.common.arrays import BatchArrays, Float32Array, Int32Array
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TaskSettings, TrainingSettings
from gaudi_bert.engines.choose import choose_engine, load_engine
from gaudi_bert.engines.protocol import Device, ModelSpec
from gaudi_bert.model.heads import Head, VectorHead
from gaudi_bert.rows.tokenizer import RowTokenizer, open_tokenizer
from gaudi_bert.rows.tokenizing import tokenize_rows
from gaudi_bert.rows.types import Row, Sequences, TextRow
from gaudi_bert.serving.settings import ServeSettings
from gaudi_bert.tasks.kinds.task import Task
from gaudi_bert.tasks.models.task_models import encoder_weights, is_bert, read_task_folder, start_weights
from gaudi_bert.training.model_files import SentenceFolder, TaskConfig, read_sentence_folder, tokenizer_length

if TYPE_CHECKING:  # it loads torch
    from gaudi_bert.engines.pytorch.model import TorchModel

Kind = Literal["embedding", "reranker", "classifier", "tagger"]

_KINDS: dict[str, Kind] = {"reranking": "reranker", "token-classification": "tagger"}
_WITH_ANSWERS = ("ForSequenceClassification", "ForTokenClassification")


@dataclass(frozen=True)
class ServedModel:
    """A model on a device, with all that turns texts into its answers.

    Attributes:
        kind: what it answers.
        task: that of its head; None for an embedding model.
        model_type: of config.json.
        folder: how an embedding model's folder makes vectors.
        longest: most tokens of a text.
        positions: most slots of a row.
        width: values of an output.
    """

    kind: Kind
    task: Task | None
    model_type: str
    model: TorchModel
    device: Device
    tokenizer: RowTokenizer
    folder: SentenceFolder
    longest: int
    positions: int
    width: int

    @property
    def is_per_token(self) -> bool:
        """Whether there is an output for each token, not for each text."""
        return self.kind == "tagger"

    def outputs(self, batch: BatchArrays) -> Float32Array:
        """Compute the outputs of one batch."""
        return self.model.outputs(batch)

    def tokenized(self, rows: Sequence[Row], prompt: str = "", *, cuts_left: bool = False) -> Sequences:
        """Return the sequences of texts, cut to the most tokens; those of a tagger are taken in windows.

        Raises:
            InputError: a text holds a token that changes the other texts of its row.
        """
        if self.task is None:
            rows = [self._prepared(row, prompt) for row in rows if isinstance(row, TextRow)]
        name = None if self.task is None else self.task.settings.name
        too_long: Literal["window", "truncate"] = "window" if self.kind == "tagger" else "truncate"
        settings = (TaskSettings() if self.task is None else self.task.settings).model_copy(update={"too_long": too_long})
        if cuts_left and self.kind != "tagger":
            sequences = self._ends([row for row in rows if isinstance(row, TextRow)])
        else:
            sequences = tokenize_rows(rows, self.tokenizer, task=name, settings=settings, max_sequence_length=self.longest)
        return self._checked(sequences)

    def _prepared(self, row: TextRow, prompt: str) -> TextRow:
        text = prompt + row.text
        return row._replace(text=text.lower() if self.folder.lower_case else text)

    def _ends(self, rows: Sequence[TextRow]) -> Sequences:
        """The sequences of texts of which the end stays, if they are too long."""
        library = self.tokenizer.tokenizer
        library.enable_truncation(self.longest, direction="left")
        try:
            encodings = library.encode_batch([row.input for row in rows])
        finally:
            library.no_truncation()
        segments = [
            np.zeros(len(encoding.ids), np.int8) if row.text_pair is None else np.array(encoding.type_ids, np.int8)
            for row, encoding in zip(rows, encodings, strict=True)
        ]
        cut = sum(bool(encoding.overflowing) for encoding in encodings)
        return _joined([np.array(encoding.ids, np.int32) for encoding in encodings], segments, cut)

    def of_ids(self, texts: Sequence[Sequence[int]], *, cuts_left: bool = False) -> Sequences:
        """Return the sequences of texts that are tokenized already, with the special tokens around them that they lack."""
        self._check_ids(texts)
        before, after = self.tokenizer.frame()
        room, cut, parts = self.longest - len(before) - len(after), 0, []
        for ids in texts:
            is_framed = len(ids) >= len(before) + len(after)
            is_framed = is_framed and [*ids[: len(before)], *ids[len(ids) - len(after) :]] == [*before, *after]
            inner = ids[len(before) : len(ids) - len(after)] if is_framed else ids
            cut += len(inner) > room
            kept = inner[max(0, len(inner) - room) :] if cuts_left else inner[:room]
            parts.append(np.array([*before, *kept, *after], np.int32))
        return self._checked(_joined(parts, [np.zeros(len(part), np.int8) for part in parts], cut))

    def _checked(self, sequences: Sequences) -> Sequences:
        self.model.checked({"input_ids": sequences.input_ids})
        return sequences

    def tokens(self, texts: Sequence[str], special: bool) -> list[list[dict[str, Any]]]:
        """Return the tokens of texts, with their places in them."""
        encodings = self.tokenizer.tokenizer.encode_batch(list(texts), add_special_tokens=special)
        return [
            [
                {"id": number, "text": text, "special": bool(is_special), "start": None if is_special else start}
                | {"stop": None if is_special else stop}
                for number, text, is_special, (start, stop) in zip(
                    each.ids, each.tokens, each.special_tokens_mask, each.offsets, strict=True
                )
            ]
            for each in encodings
        ]

    def decoded(self, texts: Sequence[Sequence[int]], skip_special: bool) -> list[str]:
        """Return texts of token ids."""
        self._check_ids(texts)
        return list(self.tokenizer.tokenizer.decode_batch([list(ids) for ids in texts], skip_special_tokens=skip_special))

    def _check_ids(self, texts: Sequence[Sequence[int]]) -> None:
        largest = self.tokenizer.vocabulary_size - 1
        if any(not 0 <= min(ids) <= max(ids) <= largest for ids in texts):
            raise InputError(f"a token id is not one of 0 to {largest:,}")

    def prompt(self, name: str | None) -> str:
        """Return what precedes each text, by its name in the folder, or by default."""
        prompt = self.folder.prompt(name)
        if prompt and not self.folder.pools_prompt:
            raise InputError("the model leaves its prompt out of the mean, which cannot be done here; send none")
        return prompt

    def vectors(self, outputs: Float32Array, normalize: bool | None, dimensions: int | None) -> Float32Array:
        """Return vectors as `embed` writes them, or as a request wants them: cut first, then of length 1."""
        vectors = outputs[:, :dimensions]
        if not (self.folder.normalize if normalize is None else normalize):
            return vectors
        lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
        normal: Float32Array = (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
        return normal

    def answers(self, outputs: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Return what `predict` writes for each text."""
        return [] if self.task is None else list(self.task.answers(outputs, sequences, rows))


def open_served_model(path: Path, settings: ServeSettings) -> ServedModel:
    """Open the model of a folder on a device.

    Raises:
        InputError: the folder is damaged or lacks a part, or its model has nothing to serve or cannot be given packs.
    """
    is_bert(path)  # refuses what is no folder of a model
    tokenizer = open_tokenizer(path)
    task = _task_of(path)
    folder = SentenceFolder(settings.pooling or "mean")
    if task is None:
        folder = read_sentence_folder(path, settings.pooling) or folder
        head: Head = VectorHead(folder.pooling, normalize=False)
        start = encoder_weights(path)
        length, width = folder.max_sequence_length, start.sizes.hidden_size
    else:
        head, start = task.head, start_weights(path, task, lacks_head=False)
        length, width = read_task_folder(path).max_sequence_length, task.width
    tokenizer.check_fits(start.sizes.vocab_size, start.sizes.segments)
    positions = start.sizes.positions
    longest = settings.max_sequence_length or min(length or tokenizer_length(path) or positions, positions)
    if longest > positions:
        raise InputError(f"--max-sequence-length {longest}: the model has {positions} positions; give 3 to {positions}")
    engine = load_engine(choose_engine("pytorch", is_bert=is_bert(path), key="serve").name)
    device = engine.open_device(TrainingSettings(precision=settings.precision, device=settings.device))
    is_compiled = device.compiles if settings.compile is None else settings.compile
    model = cast("TorchModel", engine.build(ModelSpec(start.config, head), device, seed=None, compiled=is_compiled))
    model.load_values(start.variables)
    kind: Kind = "embedding" if task is None else _KINDS.get(task.name, "classifier")
    kind_name = str(getattr(start.config, "model_type", "bert"))
    return ServedModel(kind, task, kind_name, model, device, tokenizer, folder, longest, positions, width)


def _task_of(path: Path) -> Task | None:
    """The task of a folder's head; None for a folder whose texts are embedded."""
    config = TaskConfig.read(path / "config.json")
    architecture = (config.architectures or ["a model without a name"])[0]
    if not architecture.endswith(_WITH_ANSWERS):
        if architecture.endswith("ForQuestionAnswering"):
            raise InputError(f"{path}: a model of question-answering is not served; answer files with `gaudi-bert predict`")
        return None
    return read_task_folder(path).make_task()


def _joined(input_ids: Sequence[Int32Array], segment_ids: Sequence[NDArray[np.int8]], cut_rows: int) -> Sequences:
    return Sequences(
        row=np.arange(len(input_ids), dtype=np.int64),
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum([len(ids) for ids in input_ids], dtype=np.int64)]),
        input_ids=np.concatenate(input_ids),
        segment_ids=np.concatenate(segment_ids),
        cut_rows=cut_rows,
    )
