"""The stage `import`: tables of token ids (Parquet, Arrow, JSON lines, Hugging Face datasets) to unpacked TFRecords of
the contract.

One table file becomes one TFRecord file of the same stem, so files can be shared out (`shard=(K, N)` takes
files K, K + N, ...) and everything after it (histogram, plan, write, verify) sees ordinary records. The
folder is whole when `examples.json` is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gaudi_bert.artefacts.completion import Signature, begin_artefact
from gaudi_bert.artefacts.examples import (
    ImportedExamples,
    ImportedTable,
    read_imported_examples,
    read_imported_table,
    write_examples,
    write_imported_table,
)
from gaudi_bert.artefacts.names import EXAMPLES_NAME
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import atomic_file
from gaudi_bert.common.progress import Reporter

if TYPE_CHECKING:
    from gaudi_bert.records.tables.token_tables import KeptBatch

    _Kept = dict[Path, Sequence[KeptBatch]]

__all__ = ["ImportedTables", "import_tables"]


@dataclass(frozen=True)
class ImportedTables:
    """What an import has made so far, of all its shards; `skipped`: it was there already."""

    sequences: int
    files: int
    max_sequence_length: int
    max_predictions: int
    ignored_columns: tuple[str, ...]
    skipped: bool = False


def import_tables(
    source: str | Path,
    out: Path,
    *,
    max_sequence_length: int | None = None,
    max_predictions: int | None = None,
    shard: tuple[int, int] | None = None,
    reporter: Reporter,
    overwrite: bool = False,
) -> ImportedTables:
    """Write the sequences of `source` to `out` as unpacked examples.

    Args:
        source: a .parquet, .arrow or .jsonl[.gz] file, a folder or a glob of them, or a split of a saved `Dataset`.
        out: the folder for the TFRecord files.
        max_sequence_length: L; the longest row when None (what does not fit into memory is read once more to find it).
        max_predictions: P; the most masked positions of a row when None, and 1 where nothing is masked.
        shard: (K, N): only files K, K + N, ...; the sizes must then be given, so that all shards agree.
        reporter: where progress goes.
        overwrite: replace what other settings made.

    Raises:
        InputError: no tables, no column `input_ids`, or a row that does not fit (file, row and reason are named).
        FailedError: the files cannot be written.
    """
    from gaudi_bert.records.tables.arrow import require_pyarrow
    from gaudi_bert.records.tables.sources import file_identity, table_files

    require_pyarrow()
    tables = table_files(source)
    if tables.left_out:
        reporter.say(f"{source}: state.json does not name {', '.join(tables.left_out)}; left out, as of an earlier save")
    if shard is not None and (max_sequence_length is None or max_predictions is None):
        raise InputError(
            "--shard needs --max-sequence-length and --max-predictions, so that all shards write the same sizes"
        )
    targets = [out / name for name in _record_names(tables.files)]
    settings = {"max_sequence_length": max_sequence_length, "max_predictions": max_predictions}
    inputs = {path.name: file_identity(path) for path in tables.files}
    finished = out / EXAMPLES_NAME
    if begin_artefact(out, finished, Signature("import", settings, inputs), overwrite):
        reporter.say(f"{out}: already there, nothing to do")
        return _result(read_imported_examples(out))
    sizes, kept = _sizes(tables.files, max_sequence_length, max_predictions)
    _import_files(list(zip(tables.files, targets, strict=True)), sizes, kept, shard or (0, 1), reporter)
    counted = [read_imported_table(_count_path(target)) for target in targets if _count_path(target).exists()]
    result = replace(sizes, sequences=sum(table.sequences for table in counted), files=len(counted))
    if len(counted) == len(targets):
        write_examples(out, _content(result))
    if result.ignored_columns:
        reporter.say(f"columns that are not used: {', '.join(result.ignored_columns)}")
    return result


def _content(result: ImportedTables) -> ImportedExamples:
    """examples.json of an import that is whole."""
    return ImportedExamples(
        sequences=result.sequences,
        files=result.files,
        max_sequence_length=result.max_sequence_length,
        max_predictions=result.max_predictions,
        ignored_columns=result.ignored_columns,
    )


def _result(content: ImportedExamples) -> ImportedTables:
    """The result of an import that was whole already."""
    return ImportedTables(
        content.sequences,
        content.files,
        content.max_sequence_length,
        content.max_predictions,
        content.ignored_columns,
        skipped=True,
    )


def _sizes(
    files: Sequence[Path], max_sequence_length: int | None, max_predictions: int | None
) -> tuple[ImportedTables, _Kept]:
    """The sizes of the examples, measured where they are not given; nothing is counted yet. And what measuring has kept."""
    from gaudi_bert.records.schema import UnpackedSchema
    from gaudi_bert.records.tables.token_tables import measure_tables

    ignored: tuple[str, ...] = ()
    kept: _Kept = {}
    if max_sequence_length is None or max_predictions is None:
        measured = measure_tables(files)
        ignored, kept = measured.ignored_columns, dict(measured.kept)
        max_sequence_length = max_sequence_length or measured.max_sequence_length
        max_predictions = max_predictions or measured.max_predictions
    UnpackedSchema(max_sequence_length, max_predictions)  # refuses sizes that no record may have
    return ImportedTables(0, 0, max_sequence_length, max_predictions, ignored), kept


def _import_files(
    tables: Sequence[tuple[Path, Path]], sizes: ImportedTables, kept: _Kept, shard: tuple[int, int], reporter: Reporter
) -> None:
    """Convert this shard's share of `tables`, pairs of a table and its record file; what was kept is let go of."""
    share = tables[shard[0] :: shard[1]]
    with reporter.task("import", sum(table.stat().st_size for table, _ in share), "bytes") as task:
        for table, target in share:
            _import_file(table, target, sizes, kept.pop(table, None))
            task.advance(table.stat().st_size)


def _record_names(files: Sequence[Path]) -> list[str]:
    """The names of the TFRecord files: the stems of the tables, which must differ."""
    names = [f"{path.name.removesuffix('.gz').rpartition('.')[0]}.tfrecord" for path in files]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"{files[0].parent}: several tables would become {twice[0]}; give them different names")
    return names


def _import_file(table: Path, target: Path, sizes: ImportedTables, kept: Sequence[KeptBatch] | None) -> None:
    """Convert one table, unless it is done already; the count beside it is written after it."""
    from gaudi_bert.records.schema import UnpackedSchema
    from gaudi_bert.records.tables.token_tables import read_sequences
    from gaudi_bert.records.write.unpacked import UnpackedEncoder

    if target.exists() and _count_path(target).exists():
        return
    count = 0
    encoder = UnpackedEncoder(UnpackedSchema(sizes.max_sequence_length, sizes.max_predictions))
    with atomic_file(target) as handle:
        for sequences in read_sequences(table, sizes.max_sequence_length, sizes.max_predictions, kept):
            following = 0
            while following < sequences.lengths.size:
                data, following = encoder.encode(sequences, following)
                handle.write(data)
            count += sequences.lengths.size
    write_imported_table(_count_path(target), ImportedTable(sequences=count))


def _count_path(target: Path) -> Path:
    return target.with_suffix(".json")
