"""Packed folders as Parquet, so that trainers without TFRecord (PyTorch, Hugging Face, JAX) can use the packing.

One Parquet file per shard, one row per pack, with the names that Hugging Face models know:

    input_ids, token_type_ids, position_ids [L]   as in the packed record; positions restart at 0 in each sequence
    sequence_ids [L]                              1..1 2..2 .. 0..0: two tokens may attend to each other where it is equal
    labels [L]                                    the id that was masked, -100 elsewhere
    sequence_starts, seq_lens                     one for each sequence of the pack
    next_sentence_labels                          one for each sequence of the pack

The decoding is `decode_columns`; a few thousand packs are held at a time. pyarrow is imported inside.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gaudi_bert.artefacts.metadata import Metadata
from gaudi_bert.common.arrays import AnyArray
from gaudi_bert.common.files import atomic_file
from gaudi_bert.common.progress import Reporter
from gaudi_bert.records.packed_folder import read_metadata
from gaudi_bert.records.read.columns import decode_columns
from gaudi_bert.records.schema import PackedSchema
from gaudi_bert.records.tables.arrow import require_pyarrow
from gaudi_bert.records.tables.token_check import NOT_PREDICTED
from gaudi_bert.records.wire.framing import read_records

__all__ = ["PARQUET_FOLDER", "write_packed_parquet"]

PARQUET_FOLDER = "parquet"
PACKS_PER_ROW_GROUP = 2048


def write_packed_parquet(packed: Path, out: Path | None = None, *, reporter: Reporter) -> dict[str, Any]:
    """Write the packs of a finished packed folder as Parquet. Files that are there already are kept.

    Args:
        packed: a folder with its metadata.json.
        out: the folder for the Parquet files; `<packed>/parquet` when None.
        reporter: where progress goes.

    Returns:
        `folder`, `files`, `packs`.

    Raises:
        InputError: the folder is not finished, a shard is damaged, or pyarrow is missing.
        FailedError: the files cannot be written.
    """
    require_pyarrow()
    metadata = read_metadata(packed)
    out = packed / PARQUET_FOLDER if out is None else out
    with reporter.task("parquet", metadata.packs, "packs") as task:
        for shard in metadata.shards:
            target = out / f"{Path(shard.name).stem}.parquet"
            if not target.exists():
                _write_shard(packed / shard.name, target, metadata)
            task.advance(shard.packs)
    return {"folder": str(out), "files": len(metadata.shards), "packs": metadata.packs}


def _write_shard(shard: Path, target: Path, metadata: Metadata) -> None:
    from pyarrow import parquet

    schema, packed_schema = _table_schema(metadata), PackedSchema.of(metadata)
    with atomic_file(target) as handle, parquet.ParquetWriter(handle, schema, compression="zstd") as writer:
        for columns in () if shard.stat().st_size == 0 else packed_batches(shard, packed_schema, PACKS_PER_ROW_GROUP):
            writer.write_table(_table(columns, schema))


def packed_batches(shard: Path, schema: PackedSchema, packs: int) -> Iterator[dict[str, AnyArray]]:
    """The packed features of a shard, `packs` rows at a time (fewer at the end): int32 and float32 matrices.

    Raises:
        InputError: the file is damaged, or its records have other sizes.
    """
    records = read_records(shard)
    while payloads := list(itertools.islice(records, packs)):
        lengths = np.array([len(payload) for payload in payloads], np.int64)
        buffer = np.frombuffer(b"".join(payloads), np.uint8)
        yield decode_columns(buffer, np.cumsum(lengths) - lengths, lengths, schema.features, str(shard))


def _table_schema(metadata: Metadata) -> Any:
    pyarrow = require_pyarrow()
    row = metadata.max_sequence_length
    sizes = {"max_sequence_length": row, "depth": metadata.depth, "max_predictions": metadata.max_predictions}
    fields = {
        "input_ids": pyarrow.list_(pyarrow.int32(), row),
        "token_type_ids": pyarrow.list_(pyarrow.int8(), row),
        "position_ids": pyarrow.list_(pyarrow.int16(), row),
        "sequence_ids": pyarrow.list_(pyarrow.int16(), row),
        "labels": pyarrow.list_(pyarrow.int32(), row),
        "sequence_starts": pyarrow.list_(pyarrow.int16()),
        "seq_lens": pyarrow.list_(pyarrow.int16()),
        "next_sentence_labels": pyarrow.list_(pyarrow.int8()),
    }
    return pyarrow.schema(list(fields.items()), metadata={"gaudi_bert": json.dumps(sizes)})


def _table(columns: dict[str, AnyArray], schema: Any) -> Any:
    """A table of `schema` from the packed features of n packs."""
    pyarrow = require_pyarrow()
    count, row = columns["input_ids"].shape
    used = columns["masked_lm_weights"] > 0
    packs, slots = np.nonzero(used)
    labels = np.full((count, row), NOT_PREDICTED, np.int32)
    labels[packs, columns["masked_lm_positions"][packs, slots]] = columns["masked_lm_ids"][packs, slots]
    real = columns["next_sentence_weights"] > 0
    sequences = real.sum(axis=1)
    starts = columns["next_sentence_positions"]
    tokens = np.count_nonzero(columns["input_mask"], axis=1)
    ends = np.concatenate([starts[:, 1:], np.zeros((count, 1), np.int32)], axis=1)
    ends[np.arange(count), sequences - 1] = tokens
    offsets = np.concatenate([[0], np.cumsum(sequences)]).astype(np.int32)
    values = {
        "input_ids": columns["input_ids"],
        "token_type_ids": columns["segment_ids"],
        "position_ids": columns["positions"],
        "sequence_ids": columns["input_mask"],
        "labels": labels,
        "sequence_starts": starts[real],
        "seq_lens": (ends - starts)[real],
        "next_sentence_labels": columns["next_sentence_labels"][real],
    }
    arrays = []
    for field in schema:
        flat = pyarrow.array(values[field.name].reshape(-1), type=field.type.value_type)
        if pyarrow.types.is_fixed_size_list(field.type):
            arrays.append(pyarrow.FixedSizeListArray.from_arrays(flat, type=field.type))
        else:
            arrays.append(pyarrow.ListArray.from_arrays(pyarrow.array(offsets), flat, type=field.type))
    return pyarrow.table(arrays, schema=schema)
