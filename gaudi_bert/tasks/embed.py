"""Stage embed: a vector for each text, in the order of the texts.

To `.npy` (float32 [rows, hidden size]), `.parquet` (a column `embedding`), or JSON lines (`{"embedding": [...]}`), which is
also what standard output gets. Vectors for the first two are plain bytes until all are written, so a killed run is resumed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, get_args

import numpy as np

from gaudi_bert.common.arrays import Float32Array
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.model.heads import Pooling
from gaudi_bert.rows.tokenizer import open_tokenizer
from gaudi_bert.rows.tokenizing import check_policy
from gaudi_bert.rows.types import Row, Sequences
from gaudi_bert.tables.packed_parquet import write_vectors
from gaudi_bert.tasks.answer_rows import STANDARD_OUTPUT, ModelRows, PredictOptions, check_choice, local_files
from gaudi_bert.tasks.answer_stream import StreamResult, open_answers, shown_progress
from gaudi_bert.tasks.models.model_folders import open_model_folder
from gaudi_bert.tasks.predict import answer_windows
from gaudi_bert.training.model_files import SentenceFolder, read_sentence_folder

_ENDINGS = (".npy", ".parquet", ".jsonl")
_ROWS_AT_ONCE = 8192


@dataclass(frozen=True)
class EmbedOptions(PredictOptions):
    """How texts become vectors; `max_sequence_length` is None for the folder's own, or the model's.

    Attributes:
        pooling: cls, mean or max; None for the folder's own, or the mean.
        normalize: whether vectors get the length 1; None for what the folder does, or not.
        prompt: what precedes each text; None for the folder's own.
        prompt_name: one of the folder's prompts, by its name.
    """

    pooling: Pooling | None = None
    normalize: bool | None = None
    prompt: str | None = None
    prompt_name: str | None = None

    def __post_init__(self) -> None:
        if self.prompt is not None and self.prompt_name is not None:
            raise InputError("--prompt and --prompt-name exclude each other; leave one out")
        check_choice("pooling", self.pooling, get_args(Pooling))
        super().__post_init__()


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
    """Embed the texts of a file.

    Args:
        model: a Hugging Face or sentence-transformers folder with its tokenizer.
        data: a file of rows.
        out: `.npy`, `.parquet` or `.jsonl`, or `-` for JSON lines on standard output.
        options: how.
        settings: names of columns, and what becomes of texts that are too long.
        reporter, overwrite, store: as for `predict`.
    """
    ending = ".jsonl" if out == STANDARD_OUTPUT else Path(out).suffix
    if ending not in _ENDINGS:
        raise InputError(f"{out}: vectors are written as {', '.join(_ENDINGS)}; give it one of these endings")

    with (
        local_files(model, data, out, store) as (path, rows_file, answers_file),
        shown_progress("embed", rows_file, reporter) as task,
    ):
        own = read_sentence_folder(path, options.pooling) or SentenceFolder(options.pooling or "mean")
        prompt = _prompt(path, own, options)
        folder = open_model_folder(path)
        usual = min(own.max_sequence_length or folder.usual_length, folder.positions)
        length = options.sequence_length(folder.positions, usual)
        tokenizer = open_tokenizer(path)
        folder.check_fits(tokenizer)
        rows = ModelRows(
            rows_file, settings, tokenizer, length, options.on_bad_row, lower_case=own.lower_case, prompt=prompt
        )
        normalize = own.normalize if options.normalize is None else options.normalize
        chosen = {
            "pooling": own.pooling,
            "normalize": normalize,
            "max_sequence_length": length,
            "lower_case": own.lower_case,
            "precision": options.precision,
            "packed": options.packed,
            "ending": ending,
            **({"prompt": prompt} if prompt else {}),
        }
        signature = rows.signature("embed", chosen, folder.identity)
        check_policy(None, settings)
        runner = folder.embedder(own.pooling, normalize, options.precision, length)
        with open_answers(answers_file, signature, rows, reporter, overwrite=overwrite, task=task) as answers:
            if not answers.finished and ending == ".jsonl":
                answer_windows(rows, runner, answers, options.packed, _lines, _problem_line)
                answers.finish()
            elif not answers.finished:
                no_vector = np.full(folder.hidden_size, np.nan, np.float32).tobytes()  # no text has NaN
                answer_windows(rows, runner, answers, options.packed, _vectors, lambda _: no_vector)
                answers.finish(partial(_write_array, ending, folder.hidden_size))
        return answers.result()


def _prompt(path: Path, own: SentenceFolder, options: EmbedOptions) -> str:
    prompt = own.prompt(options.prompt_name) if options.prompt is None else options.prompt
    if prompt and not own.pools_prompt:
        raise InputError(f"{path}: leaves the prompt out of the mean, which cannot be done here; give --prompt '' for none")
    return prompt


def _lines(vectors: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> list[bytes]:
    """One object per line; nine digits tell every float32 from its neighbours."""
    lines = (json.dumps({"embedding": [float(f"{value:.9g}") for value in vector]}) for vector in vectors.tolist())
    return [f"{line}\n".encode() for line in lines]


def _problem_line(problem: str) -> bytes:
    return f"{json.dumps({'error': problem})}\n".encode()


def _vectors(vectors: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> list[bytes]:
    return [vector.tobytes() for vector in vectors]


def _write_array(ending: str, hidden_size: int, stored: Path, handle: BinaryIO) -> None:
    """Write plain bytes as an array or a table."""
    vectors = np.memmap(stored, np.float32, "r").reshape(-1, hidden_size)
    if ending == ".parquet":
        write_vectors(handle, vectors)
        return
    header = {"descr": "<f4", "fortran_order": False, "shape": vectors.shape}
    np.lib.format.write_array_header_1_0(handle, header)
    for first in range(0, len(vectors), _ROWS_AT_ONCE):
        handle.write(vectors[first : first + _ROWS_AT_ONCE].tobytes())
