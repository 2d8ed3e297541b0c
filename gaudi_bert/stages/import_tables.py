"""The stage `import`: tables of token ids (Parquet, Arrow, Hugging Face datasets) to unpacked TFRecords of
the contract.

One table file becomes one TFRecord file of the same stem, so files can be shared out (`shard=(K, N)` takes
files K, K + N, ...) and everything after it (histogram, plan, write, verify) sees ordinary records. The
folder is whole when `examples.json` is there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gaudi_bert.artefacts.completion import Signature, begin_artefact
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import atomic_file, explained_os_errors, read_json, write_json
from gaudi_bert.common.progress import Reporter

__all__ = ["import_tables"]

PIECE_BYTES = 1 << 20


def import_tables(
    source: str | Path,
    out: Path,
    *,
    max_sequence_length: int | None = None,
    max_predictions: int | None = None,
    shard: tuple[int, int] | None = None,
    reporter: Reporter,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write the sequences of `source` to `out` as unpacked examples.

    Args:
        source: a .parquet or .arrow file, or a folder of them (a split that `Dataset.save_to_disk` wrote).
        out: the folder for the TFRecord files.
        max_sequence_length: L; the longest row when None (all tables are read once more to find it).
        max_predictions: P; the most masked positions of a row when None, and 1 where nothing is masked.
        shard: (K, N): only files K, K + N, ...; the sizes must then be given, so that all shards agree.
        reporter: where progress goes.
        overwrite: replace what other settings made.

    Returns:
        `sequences`, `files`, `max_sequence_length`, `max_predictions`, `ignored_columns`, `skipped` (True: it
            was there already).

    Raises:
        InputError: no tables, no column `input_ids`, or a row that does not fit (file, row and reason are
            named).
        FailedError: the files cannot be written.
    """
    from gaudi_bert.records.tables.arrow_files import table_files
    from gaudi_bert.records.tables.token_tables import measure_tables

    files = table_files(source)
    names = _names(files)
    if shard is not None and (max_sequence_length is None or max_predictions is None):
        raise InputError(
            "--shard needs --max-sequence-length and --max-predictions, so that all shards write the same sizes"
        )
    settings = {"max_sequence_length": max_sequence_length, "max_predictions": max_predictions}
    inputs = {path.name: _identity(path) for path in files}
    finished = out / "examples.json"
    if begin_artefact(out, finished, Signature("import", settings, inputs), overwrite):
        reporter.say(f"{out}: already there, nothing to do")
        return {**read_json(finished), "skipped": True}
    ignored: tuple[str, ...] = ()
    if max_sequence_length is None or max_predictions is None:
        sizes = measure_tables(files)
        ignored = sizes.ignored_columns
        max_sequence_length = max_sequence_length or sizes.max_sequence_length
        max_predictions = max_predictions or sizes.max_predictions
    mine = range(len(files)) if shard is None else range(shard[0], len(files), shard[1])
    with reporter.task("import", sum(files[index].stat().st_size for index in mine), "bytes") as task:
        for index in mine:
            _import_file(files[index], out / names[index], max_sequence_length, max_predictions)
            task.advance(files[index].stat().st_size)
    done = [_count_path(out / name) for name in names if _count_path(out / name).exists()]
    result = {
        "sequences": sum(read_json(path)["sequences"] for path in done),
        "files": len(done),
        "max_sequence_length": max_sequence_length,
        "max_predictions": max_predictions,
        "ignored_columns": list(ignored),
    }
    if len(done) == len(files):
        write_json(finished, result)
    if ignored:
        reporter.say(f"columns that are not used: {', '.join(ignored)}")
    return {**result, "skipped": False}


def _identity(path: Path) -> dict[str, int]:
    """Size and CRC-32C, by which an input is known wherever it lies."""
    from gaudi_bert.records.wire.crc32c import crc32c

    checksum = 0
    with explained_os_errors(path, "read"), path.open("rb") as handle:
        while piece := handle.read(PIECE_BYTES):
            checksum = crc32c(piece, checksum)
    return {"bytes": path.stat().st_size, "crc32c": checksum}


def _names(files: list[Path]) -> list[str]:
    """The names of the TFRecord files: the stems of the tables, which must differ."""
    names = [f"{path.stem}.tfrecord" for path in files]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"{files[0].parent}: several tables would become {twice[0]}; give them different names")
    return names


def _import_file(table: Path, target: Path, max_sequence_length: int, max_predictions: int) -> None:
    """Convert one table, unless it is done already; the count beside it is written after it."""
    from gaudi_bert.records.tables.token_tables import read_examples
    from gaudi_bert.records.wire.example import encode_example
    from gaudi_bert.records.wire.framing import write_record

    if target.exists() and _count_path(target).exists():
        return
    count = 0
    with atomic_file(target) as handle:
        for features in read_examples(table, max_sequence_length, max_predictions):
            write_record(handle, encode_example(features))
            count += 1
    write_json(_count_path(target), {"sequences": count})


def _count_path(target: Path) -> Path:
    return target.with_suffix(".json")
