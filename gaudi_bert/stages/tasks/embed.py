"""Stage embed: a vector for each text, in the order of the texts.

To `.npy` (float32 [rows, hidden size]), `.parquet` (a column `embedding`), or JSON lines (`{"embedding": [...]}`), which is
also what standard output gets. Vectors for the first two are plain bytes until all are there, so that a killed run goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, get_args

import numpy as np

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import StoreSettings, TaskSettings
from gaudi_bert.stages.tasks.at_hand import at_hand
from gaudi_bert.stages.tasks.row_windows import (
    STANDARD,
    Answered,
    Destination,
    StreamResult,
    answer_stream,
    check_apart,
    reading_signature,
)

if TYPE_CHECKING:
    from gaudi_bert.artefacts.row_stream import RowStream
    from gaudi_bert.common.arrays import Float32Array
    from gaudi_bert.tasks.rows.types import Row
    from gaudi_bert.training.weights.sources import Weights

__all__ = ["EmbedOptions", "embed"]

Pooling = Literal["cls", "mean", "max"]
Precision = Literal["float32", "bfloat16"]
ENDINGS = (".npy", ".parquet", ".jsonl")


@dataclass(frozen=True)
class EmbedOptions:
    """How texts become vectors.

    Attributes:
        pooling: cls, mean or max; None for the folder's own, or the mean.
        normalize: whether vectors get the length 1; None for what the folder does, or not.
        max_sequence_length: most tokens of a text; None for the folder's own, or the model's.
        precision: of the matrix products.
        packed: False gives each text a row of its own.
    """

    pooling: Pooling | None = None
    normalize: bool | None = None
    max_sequence_length: int | None = None
    precision: Precision = "float32"
    packed: bool = True

    def __post_init__(self) -> None:
        for name, value, allowed in (("pooling", self.pooling, Pooling), ("precision", self.precision, Precision)):
            if value is not None and value not in get_args(allowed):
                raise InputError(f"--{name} {value}: choose one of {', '.join(get_args(allowed))}")


@dataclass(frozen=True)
class _Chosen:
    """The options with what the folder says where they are silent."""

    pooling: Pooling
    normalize: bool
    max_sequence_length: int
    lower_case: bool
    precision: Precision
    packed: bool


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
        model: a Hugging Face or sentence-transformers folder with its tokenizer, or its URL in an object store.
        data: a file of rows, or its URL, or `-`.
        out: `.npy`, `.parquet` or `.jsonl`, or its URL, or `-` for JSON lines on standard output.
        options: how.
        settings: names of columns, and what becomes of texts that are too long.
        reporter: where progress goes.
        overwrite: replace what other settings made.
        store: how object stores are reached.

    Raises:
        InputError: the model, a setting or a row is wrong.
    """
    with at_hand(model, data, out, store) as (folder, rows, answers):
        return _embed(folder, rows, answers, options, settings, reporter, overwrite)


def _embed(
    model: Path, data: str, out: str, options: EmbedOptions, settings: TaskSettings, reporter: Reporter, overwrite: bool
) -> StreamResult:
    from gaudi_bert.tasks.rows.reading import read_rows
    from gaudi_bert.training.weights.sources import read_weights

    ending = ".jsonl" if out == STANDARD else Path(out).suffix
    if ending not in ENDINGS:
        raise InputError(f"{out}: vectors are written as {', '.join(ENDINGS)}; give it one of these endings")
    check_apart(data, out)
    weights = read_weights(model)
    if weights.config is None:
        raise InputError(f"{model}: its config is not known; put config.json beside the weights")
    chosen = _choose(model, options, weights.config.max_position_embeddings)
    signature = reading_signature("embed", {**asdict(chosen), "ending": ending}, settings, weights, model, data)
    finish = _finisher(ending, weights.config.hidden_size)
    answer = _answers(model, weights, chosen, settings, data, as_json=ending == ".jsonl")
    destination = Destination(out, signature, finish, overwrite, from_pipe=data == STANDARD)
    return answer_stream(read_rows(data, None, settings), answer, destination, reporter)


def _choose(model: Path, options: EmbedOptions, positions: int) -> _Chosen:
    from gaudi_bert.training.weights.sentence_folder import read_sentence_folder

    own = read_sentence_folder(model) if options.pooling is None else None
    asked = options.max_sequence_length
    length = asked or (own.max_sequence_length if own is not None else None) or positions
    if asked is not None and not 3 <= asked <= positions:
        raise InputError(f"--max-sequence-length {asked}: the model has {positions} positions; give 3 to {positions}")
    return _Chosen(
        pooling=options.pooling or (own.pooling if own is not None else "mean"),
        normalize=options.normalize if options.normalize is not None else own is not None and own.normalize,
        max_sequence_length=min(length, positions),
        lower_case=own is not None and own.lower_case,
        precision=options.precision,
        packed=options.packed,
    )


def _answers(
    model: Path, weights: Weights, chosen: _Chosen, settings: TaskSettings, data: str, *, as_json: bool
) -> Callable[[list[Row]], Answered]:
    """What turns a window of rows into the bytes of their vectors."""
    from gaudi_bert.model.config import BertConfig
    from gaudi_bert.tasks.rows.tokenizer import open_tokenizer
    from gaudi_bert.tasks.rows.tokenizing import tokenize_rows
    from gaudi_bert.tasks.rows.types import TextRow
    from gaudi_bert.training.device import open_device
    from gaudi_bert.training.prediction.embedder import Embedder
    from gaudi_bert.training.prediction.runner import PackRunner
    from gaudi_bert.training.prediction.shapes import plan_window

    tokenizer = open_tokenizer(model)
    device = open_device("auto", chosen.precision)
    config: BertConfig = weights.config or BertConfig()
    embedder = Embedder(
        config,
        weights.variables,
        pooling=chosen.pooling,
        normalize=chosen.normalize,
        compute_dtype=device.compute_dtype,
    )
    one_shape = device.kind == "hpu"
    runner = PackRunner(embedder, per="sequence", width=config.hidden_size, device=device.name, one_shape=one_shape)

    def answer(rows: list[Row]) -> Answered:
        if chosen.lower_case:
            rows = [row._replace(text=row.text.lower()) if isinstance(row, TextRow) else row for row in rows]
        sequences = tokenize_rows(
            rows,
            tokenizer,
            task=None,
            settings=settings,
            max_sequence_length=chosen.max_sequence_length,
            file=data,
        )
        plan = plan_window(
            sequences.lengths,
            hidden_size=config.hidden_size,
            packed=chosen.packed,
            one_length=chosen.max_sequence_length if one_shape else None,
        )
        vectors = runner.run(sequences, plan)
        content = _json_lines(vectors) if as_json else vectors.tobytes()
        return Answered(content, sequences.cut_rows, plan.tokens, plan.slots, plan.gain)

    return answer


def _json_lines(vectors: Float32Array) -> bytes:
    """One object a line; nine digits tell every float32 from its neighbours."""
    lines = (json.dumps({"embedding": [float(f"{value:.9g}") for value in vector]}) for vector in vectors.tolist())
    return "".join(f"{line}\n" for line in lines).encode()


def _finisher(ending: str, width: int) -> Callable[[RowStream], None]:
    if ending == ".jsonl":
        return lambda stream: stream.finish()
    write = _write_npy if ending == ".npy" else _write_parquet
    return lambda stream: stream.finish_as(lambda partial, handle: write(partial, handle, width))


def _blocks(partial: Path, width: int) -> Any:
    """The vectors as a map of the file, [rows, width]."""
    return np.memmap(partial, np.float32, "r").reshape(-1, width)


def _write_npy(partial: Path, handle: BinaryIO, width: int) -> None:
    vectors = _blocks(partial, width)
    header = {"descr": "<f4", "fortran_order": False, "shape": vectors.shape}
    np.lib.format.write_array_header_1_0(handle, header)
    for first in range(0, len(vectors), 8192):
        handle.write(vectors[first : first + 8192].tobytes())


def _write_parquet(partial: Path, handle: BinaryIO, width: int) -> None:
    from gaudi_bert.records.tables.vectors import write_vectors

    write_vectors(handle, _blocks(partial, width))
