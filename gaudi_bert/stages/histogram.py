"""The stage `histogram`: one pass over RECORDS that checks every byte and counts the sequences of each
length, file by file.

Every record is held to the contract here (both CRCs, features, sizes, masks, positions), so that bad input is
refused before anything is planned or written. Files are read by several threads, each in constant memory; the
result does not depend on how many.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gaudi_bert.artefacts.completion import Signature, begin_artefact
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import read_json, write_text
from gaudi_bert.common.progress import Reporter

if TYPE_CHECKING:
    from gaudi_bert.records.files import RecordFile
    from gaudi_bert.records.schema import UnpackedSchema

__all__ = ["histogram"]

FORMAT_VERSION = 1
_MERGE_EVERY = 1 << 16  # sequences whose (length, masked) pairs are kept before they are merged into counts


def histogram(
    records: str | Path,
    out: Path,
    *,
    shard: tuple[int, int] | None = None,
    reporter: Reporter,
    overwrite: bool = False,
    vocabulary: Path | None = None,
    workers: int | None = None,
) -> dict[str, Any]:
    """Check RECORDS and count their sequences.

    Args:
        records: a folder, a file or a glob of unpacked TFRecords.
        out: the histogram.json to write.
        shard: (K, N): only files K, K + N, ... of the sorted list; `plan` merges the parts.
        reporter: where progress goes.
        overwrite: replace a histogram of other records.
        vocabulary: a vocab.txt; by default `vocab.txt` beside the folder of RECORDS, if there is one.
        workers: threads; None for all cores.

    Returns:
        sequences, tokens, files, bytes, max_sequence_length, max_predictions, mean_length.

    Raises:
        InputError: bad input, with file, record and offset; or `out` was made from something else.
    """
    from gaudi_bert.records.files import find_vocabulary, list_record_files
    from gaudi_bert.records.read.threads import map_files

    files = list_record_files(records)
    if shard is not None:
        files = files[shard[0] :: shard[1]]
        if not files:
            raise InputError(f"{records}: shard {shard[0]}/{shard[1]} has no files, there are fewer than {shard[1]}")
    info = _vocabulary_info(vocabulary if vocabulary is not None else find_vocabulary(records))
    signature = Signature(
        "histogram",
        {"shard": None if shard is None else list(shard)},
        {"files": {file.name: file.bytes for file in files}, "vocabulary": info},
    )
    if begin_artefact(out, out, signature, overwrite):
        reporter.say(f"{out}: already there, nothing to do")
        return {**_summary(read_json(out)), "skipped": True}
    schema = _common_schema(files, reporter)
    with reporter.task("histogram", sum(file.bytes for file in files), "bytes") as task:
        entries = map_files(lambda file, buffer: _count_file(file, schema, buffer, task.advance), files, workers)
    content = _content(schema, entries, info)
    write_text(out, _as_text(content))
    return _summary(content)


def _vocabulary_info(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    import hashlib

    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot read the vocabulary: {error.strerror}; check the path") from error
    # One token a line, and only a newline ends it: tokens may hold other characters that Unicode counts as line breaks.
    return {"size": len(data.removesuffix(b"\n").split(b"\n")), "sha256": hashlib.sha256(data).hexdigest()}


def _common_schema(files: list[RecordFile], reporter: Reporter) -> UnpackedSchema:
    """The sizes of the first record; every other record is then held to them."""
    from gaudi_bert.records.read.scan import unpacked_schema

    schema, others = unpacked_schema(files[0].path)
    if others:
        names = ", ".join(f"`{name}`" for name in others)
        reporter.say(f"{files[0].path}: also has {names}, which packed records do not carry")
    return schema


def _count_file(file: RecordFile, schema: UnpackedSchema, buffer: np.ndarray, progress: Any) -> dict[str, Any]:
    """The entry of one file in histogram.json."""
    from gaudi_bert.records.read.scan import RecordScan, UnpackedFormat
    from gaudi_bert.records.read.unpacked_index import LENGTH, MASKED

    form = UnpackedFormat.for_pieces(schema)
    scan = RecordScan(file.path, form, buffer, progress=progress)
    totals: dict[int, int] = {}
    waiting: list[np.ndarray] = []
    for _ in scan.pieces():
        rows = form.index[: form.rows]
        waiting.append(rows[:, LENGTH] * np.int32(schema.max_predictions + 1) + rows[:, MASKED])
        if sum(keys.size for keys in waiting) >= _MERGE_EVERY:
            _merge(totals, waiting)
    _merge(totals, waiting)
    counts = [(*divmod(key, schema.max_predictions + 1), count) for key, count in sorted(totals.items())]
    return {
        "name": file.name,
        "bytes": scan.file_bytes,
        "crc32c": scan.file_crc32c,
        "sequences": form.records,
        "tokens": sum(length * count for length, _, count in counts),
        "counts": counts,
    }


def _merge(totals: dict[int, int], waiting: list[np.ndarray]) -> None:
    """Add the keys that wait to the totals."""
    if waiting:
        keys, counts = np.unique(np.concatenate(waiting), return_counts=True)
        for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
            totals[key] = totals.get(key, 0) + count
        waiting.clear()


def _content(schema: UnpackedSchema, entries: list[dict[str, Any]], info: dict[str, Any] | None) -> dict[str, Any]:
    counts = [0] * schema.max_sequence_length
    for entry in entries:
        for length, _, count in entry["counts"]:
            counts[length - 1] += count
    return {
        "format_version": FORMAT_VERSION,
        "max_sequence_length": schema.max_sequence_length,
        "max_predictions": schema.max_predictions,
        "sequences": sum(entry["sequences"] for entry in entries),
        "tokens": sum(entry["tokens"] for entry in entries),
        "vocabulary": info,
        "counts": counts,
        "files": entries,
    }


def _summary(content: dict[str, Any]) -> dict[str, Any]:
    return {
        "sequences": content["sequences"],
        "tokens": content["tokens"],
        "files": len(content["files"]),
        "bytes": sum(entry["bytes"] for entry in content["files"]),
        "max_sequence_length": content["max_sequence_length"],
        "max_predictions": content["max_predictions"],
        "mean_length": content["tokens"] / content["sequences"],
    }


def _as_text(content: dict[str, Any]) -> str:
    """JSON with one line a key and one a file."""
    lines = []
    for key, value in content.items():
        if key == "files":
            items = ",\n  ".join(json.dumps(entry, ensure_ascii=False) for entry in value)
            lines.append(f' "files": [\n  {items}\n ]')
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
