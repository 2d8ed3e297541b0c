"""Stage embed: a vector for each text, in the order of the texts.

To `.npy` (float32 [rows, hidden size]), `.parquet` (a column `embedding`), or JSON lines (`{"embedding": [...]}`), which is
also what standard output gets. Vectors for the first two are plain bytes until all are written, so a killed run is resumed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, get_args

import numpy as np

from gaudi_bert.common.arrays import Float32Array
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.rows.types import Row, Sequences
from gaudi_bert.tables.packed_parquet import write_vectors
from gaudi_bert.tasks.answer_rows import (
    OnBadRow,
    Pooling,
    Precision,
    RowModel,
    Runner,
    answer_rows,
    check_choice,
    chosen_length,
)
from gaudi_bert.tasks.answer_stream import STANDARD_OUTPUT, RowStream, StreamResult
from gaudi_bert.tasks.models.model_folders import open_model_folder
from gaudi_bert.training.weights.model_files import SentenceFolder, read_sentence_folder

_ENDINGS = (".npy", ".parquet", ".jsonl")
_ROWS_AT_ONCE = 8192


@dataclass(frozen=True)
class EmbedOptions:
    """How texts become vectors.

    Attributes:
        pooling: cls, mean or max; None for the folder's own, or the mean.
        normalize: whether vectors get the length 1; None for what the folder does, or not.
        max_sequence_length: most tokens of a text; None for the folder's own, or the model's.
        precision: of the matrix products.
        packed: False gives each text a row of its own.
        on_bad_row: what becomes of a row that cannot be read.
        prompt: what precedes each text; None for the folder's own.
        prompt_name: one of the folder's prompts, by its name.
    """

    pooling: Pooling | None = None
    normalize: bool | None = None
    max_sequence_length: int | None = None
    precision: Precision = "float32"
    packed: bool = True
    on_bad_row: OnBadRow = "stop"
    prompt: str | None = None
    prompt_name: str | None = None

    def __post_init__(self) -> None:
        if self.prompt is not None and self.prompt_name is not None:
            raise InputError("--prompt and --prompt-name exclude each other; leave one out")
        check_choice("pooling", self.pooling, get_args(Pooling))
        check_choice("precision", self.precision, get_args(Precision))
        check_choice("on-bad-row", self.on_bad_row, get_args(OnBadRow))


def embed(
    model: Path,
    data: str,
    out: str,
    options: EmbedOptions,
    settings: TaskSettings,
    *,
    reporter: Reporter,
    overwrite: bool = False,
    store: StoreSettings | None = None,
) -> StreamResult:
    """Embed the texts of a file; see `answer_rows`.

    Args:
        model: a Hugging Face or sentence-transformers folder with its tokenizer.
        data: a file of rows.
        out: `.npy`, `.parquet` or `.jsonl`, or `-` for JSON lines on standard output.
        options: how.
        settings: names of columns, and what becomes of texts that are too long.
        reporter, overwrite, store: as everywhere.
    """
    ending = ".jsonl" if out == STANDARD_OUTPUT else Path(out).suffix
    if ending not in _ENDINGS:
        raise InputError(f"{out}: vectors are written as {', '.join(_ENDINGS)}; give it one of these endings")

    return answer_rows(
        lambda folder: _EmbeddingModel(folder, options, settings, ending),
        model,
        data,
        out,
        reporter=reporter,
        overwrite=overwrite,
        store=store,
    )


class _EmbeddingModel(RowModel):
    """An encoder whose vectors are pooled; where the options are silent, as the folder of sentence-transformers does."""

    stage = "embed"

    def __init__(self, path: Path, options: EmbedOptions, settings: TaskSettings, ending: str) -> None:
        own = read_sentence_folder(path, options.pooling) or SentenceFolder(options.pooling or "mean")
        self.prompt = own.prompt(options.prompt_name) if options.prompt is None else options.prompt
        if self.prompt and not own.pools_prompt:
            raise InputError(
                f"{path}: leaves the prompt out of the mean, which cannot be done here; give --prompt '' for none"
            )
        model = open_model_folder(path)
        usual = min(own.max_sequence_length or model.usual_length, model.positions)
        length = chosen_length(options.max_sequence_length, model.positions, usual)
        super().__init__(path, model, settings, length, options.precision, options.packed, options.on_bad_row)
        self.lower_case, self._ending, self._pooling = own.lower_case, ending, own.pooling
        self._normalize = own.normalize if options.normalize is None else options.normalize

    def options(self) -> dict[str, Any]:
        """Those of the command and of the folder, settled."""
        return {
            "pooling": self._pooling,
            "normalize": self._normalize,
            "max_sequence_length": self.max_sequence_length,
            "lower_case": self.lower_case,
            "precision": self.precision,
            "packed": self.packed,
            "ending": self._ending,
            **({"prompt": self.prompt} if self.prompt else {}),
        }

    def open(self) -> Runner:
        """The encoder with its pooling."""
        return self.model.embedder(self._pooling, self._normalize, self.precision, self.max_sequence_length)

    def encode(self, values: Float32Array, sequences: Sequences, rows: list[Row]) -> list[bytes]:
        """Plain bytes, or one object per line; nine digits tell every float32 from its neighbours."""
        if self._ending != ".jsonl":
            return [vector.tobytes() for vector in values]
        lines = (json.dumps({"embedding": [float(f"{value:.9g}") for value in vector]}) for vector in values.tolist())
        return [f"{line}\n".encode() for line in lines]

    def encode_problem(self, problem: str) -> bytes:
        """A vector of NaN, which no text has, or an object that says what is wrong with the row."""
        if self._ending != ".jsonl":
            return np.full(self.model.hidden_size, np.nan, np.float32).tobytes()
        return f"{json.dumps({'error': problem})}\n".encode()

    def finish(self, stream: RowStream) -> None:
        """JSON lines are finished as they are."""
        if self._ending == ".jsonl":
            stream.finish()
        else:
            stream.finish_as(self._write_array)

    def _write_array(self, partial: Path, handle: BinaryIO) -> None:
        vectors = np.memmap(partial, np.float32, "r").reshape(-1, self.model.hidden_size)
        if self._ending == ".parquet":
            write_vectors(handle, vectors)
            return
        header = {"descr": "<f4", "fortran_order": False, "shape": vectors.shape}
        np.lib.format.write_array_header_1_0(handle, header)
        for first in range(0, len(vectors), _ROWS_AT_ONCE):
            handle.write(vectors[first : first + _ROWS_AT_ONCE].tobytes())
