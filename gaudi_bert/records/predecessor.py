"""Folders that the predecessor packed, and the metadata file that its trainer looks for.

The predecessor (see `artefacts.metadata`) writes one file or more per strategy, named `strategy_<lengths>_part_<n>`, and
beside the folder `<folder>_metadata.json`, which holds counts but no sizes. The sizes are therefore taken from the first
record, and the packs are counted in the files: its packer could lose records and still report them as written, so the two
numbers are compared.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gaudi_bert.artefacts.metadata import Metadata, Shard, read_own_metadata
from gaudi_bert.artefacts.model import LARGEST_COUNT
from gaudi_bert.artefacts.names import METADATA_NAME
from gaudi_bert.artefacts.plan import read_plan
from gaudi_bert.common.errors import InputError, shown
from gaudi_bert.common.files import explained_os_errors, read_json, write_json
from gaudi_bert.records.schema import PackedSchema, RecordError, check_features, packed_schema_of
from gaudi_bert.records.wire.example import decode_example
from gaudi_bert.records.wire.framing import CUT_SHORT, FRAME_BYTES, NO_RECORD, read_records, record_place

__all__ = ["PREDECESSOR_DEPTH", "predecessor_metadata_path", "read_predecessor_metadata", "write_predecessor_metadata"]

PREDECESSOR_DEPTH = 3
FILE_PATTERN = "strategy_*_part_*"
TOP_STRATEGIES = 8


def predecessor_metadata_path(folder: Path) -> Path:
    """`<folder>_metadata.json` beside `folder`."""
    folder = folder.resolve()
    return folder.with_name(f"{folder.name}_metadata.json")


def read_predecessor_metadata(folder: Path, sibling: Path) -> Metadata:
    """The metadata of a folder that the predecessor packed.

    What it did not record is given as its neutral value: no inputs, no checksums, an empty histogram, seed 0; the lower
    bound is the number of tokens divided by the length of a row.

    Args:
        folder: holds the `strategy_*_part_*` files.
        sibling: its `<folder>_metadata.json`.

    Raises:
        InputError: no such files, counts that disagree, or records that are not packed examples of depth 3.
    """
    counts = _read_counts(sibling)
    paths = sorted(path for path in folder.glob(FILE_PATTERN) if path.is_file())
    if not paths:
        raise InputError(f"{folder}: holds no {FILE_PATTERN} file, which {sibling.name} belongs to; check the path")
    shards = tuple(Shard(name=path.name, packs=_count_records(path), bytes=path.stat().st_size) for path in paths)
    found = sum(shard.packs for shard in shards)
    if found != counts.packs:
        raise InputError(
            f"{folder}: its files hold {found} packs, {sibling.name} says {counts.packs}: files are missing, or its packer "
            "lost records; pack the data again, or correct new_number_of_samples to train on what is there"
        )
    return _metadata(sibling, counts, _schema_of(paths[0]), shards)


@dataclass(frozen=True)
class _Counts:
    """What the predecessor recorded."""

    packs: int
    sequences: int
    padding_tokens: int


def _read_counts(sibling: Path) -> _Counts:
    content = read_json(sibling)
    dropped = _count(sibling, content, "sequences_dropped", 0)
    return _Counts(
        packs=_count(sibling, content, "new_number_of_samples"),
        sequences=_count(sibling, content, "original_number_of_samples") - dropped,
        padding_tokens=_count(sibling, content, "padding_tokens_packed_dataset"),
    )


def _metadata(sibling: Path, counts: _Counts, schema: PackedSchema, shards: tuple[Shard, ...]) -> Metadata:
    slots = counts.packs * schema.max_sequence_length
    tokens = slots - counts.padding_tokens
    if not 0 <= counts.padding_tokens < slots or counts.sequences < counts.packs:
        raise InputError(
            f"{sibling}: {counts.sequences} sequences and {counts.padding_tokens} padding tokens do not go with "
            f"{counts.packs} packs of {schema.max_sequence_length}; it belongs to other data"
        )
    lower_bound = -(-tokens // schema.max_sequence_length)
    return Metadata(
        tool_version="predecessor",
        max_sequence_length=schema.max_sequence_length,
        max_predictions=schema.max_predictions,
        masked_slots=schema.masked_slots,
        depth=schema.depth,
        seed=0,
        algorithm="nnls",
        sequences=counts.sequences,
        packs=counts.packs,
        tokens=tokens,
        padding_tokens=counts.padding_tokens,
        efficiency=tokens / slots,
        packing_factor=counts.sequences / counts.packs,
        lower_bound=lower_bound,
        gap=counts.packs - lower_bound,
        shard_multiple=1,
        inputs=(),
        shards=shards,
        histogram=(),
    )


def _count(sibling: Path, content: Any, key: str, default: int | None = None) -> int:
    """A count, which the predecessor writes as a float."""
    value = content.get(key, default) if isinstance(content, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST_COUNT or value % 1:
        raise InputError(
            f"{sibling}: `{key}` is {shown(value)}, a whole number is wanted; it is not the predecessor's metadata"
        )
    return int(value)


def _count_records(path: Path) -> int:
    """The records of an uncompressed TFRecord file, counted by their lengths; the payloads are not read."""
    size, offset, count = path.stat().st_size, 0, 0
    with explained_os_errors(path, "read"), path.open("rb", buffering=0) as handle:
        while offset < size:
            handle.seek(offset)
            header = handle.read(8)
            offset += FRAME_BYTES + (struct.unpack("<Q", header)[0] if len(header) == 8 else size)
            if offset > size:
                raise InputError(f"{record_place(path, count, offset)}: {CUT_SHORT}")
            count += 1
    return count


def _schema_of(path: Path) -> PackedSchema:
    """The sizes of the first record of `path`."""
    payload = next(read_records(path), None)
    if payload is None:
        raise InputError(f"{path}: {NO_RECORD}")
    features = decode_example(payload)
    try:
        schema = packed_schema_of(features)
        check_features(features, schema)
    except RecordError as error:
        raise InputError(f"{record_place(path, 0, 0)}: {error}") from error
    if schema.depth != PREDECESSOR_DEPTH:
        raise InputError(f"{path}: its packs hold {schema.depth} sequences, the predecessor's hold {PREDECESSOR_DEPTH}")
    return schema


def write_predecessor_metadata(folder: Path, plan: Path) -> Path:
    """Write the metadata that the predecessor's trainer looks for beside a folder that we packed.

    Args:
        folder: a packed folder with its metadata.json.
        plan: the plan.json it was written from, for the strategies.

    Returns:
        The file that was written. `top_8_strategies` are the lengths themselves: the predecessor's numbers point into a
        list that it does not save.

    Raises:
        InputError: its trainer could not read this folder (another depth or number of masked slots).
    """
    metadata = read_own_metadata(folder)
    path = predecessor_metadata_path(folder)
    if metadata.depth != PREDECESSOR_DEPTH or metadata.masked_slots != metadata.max_predictions + PREDECESSOR_DEPTH:
        raise InputError(
            f"{folder / METADATA_NAME}: depth {metadata.depth} and {metadata.masked_slots} masked slots; the predecessor's "
            f"trainer reads depth {PREDECESSOR_DEPTH} and {metadata.max_predictions} + {PREDECESSOR_DEPTH} slots only; "
            f"plan with --depth {PREDECESSOR_DEPTH} --masked-slots {metadata.max_predictions + PREDECESSOR_DEPTH}"
        )
    strategies = read_plan(plan).mixture
    slots = metadata.max_sequence_length
    top = sorted(strategies.items(), key=lambda item: (-item[1], item[0]))[:TOP_STRATEGIES]
    write_json(
        path,
        {
            "sequences_dropped": 0,
            "num_strategies_utilized": len(strategies),
            "new_number_of_samples": metadata.packs,
            "original_number_of_samples": metadata.sequences,
            "compression_ratio": 1 - metadata.packs / metadata.sequences,
            "expected_speedup": metadata.packing_factor,
            "theoretical_speedup": metadata.sequences * slots / metadata.tokens,
            "avg_seq_per_sample": metadata.packing_factor,
            "padding_tokens_original_dataset": metadata.sequences * slots - metadata.tokens,
            "padding_tokens_packed_dataset": metadata.padding_tokens,
            "packing_efficiency": metadata.efficiency,
            "top_8_strategies": [list(lengths) for lengths, _ in top],
        },
    )
    return path
