"""The stage `import`: tables of token ids (Parquet, Arrow, JSON lines, Hugging Face datasets) to unpacked TFRecords.

One table file becomes one TFRecord file of the same stem, so files can be shared out (`shard=(K, N)` takes files
K, K + N, ...) and everything after it (histogram, plan, write, verify) sees ordinary records. The folder is complete when
`examples.json` is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from gaudi_bert.artefacts.completion import Signature
from gaudi_bert.artefacts.examples import ImportedExamples, ImportedSoFar, ImportedTable
from gaudi_bert.artefacts.grouped_output import GroupedOutput
from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.artefacts.work_folder import EXAMPLES_NAME
from gaudi_bert.common.arrow import require_pyarrow
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import atomic_file
from gaudi_bert.common.progress import Reporter
from gaudi_bert.tables.sources import TOKENS_COLUMN, input_file, table_files
from gaudi_bert.tables.token_tables import CachedBatch, measure_tables, read_sequences
from gaudi_bert.tfrecords.wire.schema import UnpackedSchema
from gaudi_bert.tfrecords.wire.unpacked_encoder import UnpackedEncoder


def import_tables(
    source: str | Path,
    out: Path,
    *,
    max_sequence_length: int | None = None,
    max_predictions: int | None = None,
    shard: tuple[int, int] | None = None,
    reporter: Reporter,
    overwrite: bool = False,
    input_column: str = TOKENS_COLUMN,
) -> StageOutput[ImportedSoFar]:
    """Write the sequences of `source` to `out` as unpacked examples.

    Args:
        source: a .parquet, .arrow or .jsonl[.gz] file, a folder or a glob of them, or a split of a saved `Dataset`.
        max_sequence_length: L; the longest row when None (data that does not fit into memory is then read twice).
        max_predictions: P; the most masked positions of a row when None, and 1 where nothing is masked.
        input_column: what `input_ids` is called.
    """
    require_pyarrow()
    files = table_files(source, reporter)
    if shard is not None and (max_sequence_length is None or max_predictions is None):
        raise InputError(
            "--shard needs --max-sequence-length and --max-predictions, so that all shards write the same sizes"
        )
    targets = dict(zip((out / name for name in _record_names(files)), files, strict=True))
    settings: dict[str, object] = {"max_sequence_length": max_sequence_length, "max_predictions": max_predictions}
    if input_column != TOKENS_COLUMN:
        settings["input_column"] = input_column
    inputs = {path.name: input_file(path).identity for path in files}
    signature = Signature("import", settings, inputs)
    output: GroupedOutput[Path, ImportedTable] = GroupedOutput(
        out, out / EXAMPLES_NAME, signature, ImportedTable, lambda path: path.with_suffix(".json"), reporter
    )
    if output.begin(overwrite):
        return StageOutput(ImportedExamples.read(out), skipped=True)
    number, shards = shard or (0, 1)
    share = list(targets)[number::shards]
    with output.removed_on_bad_input() if shard is None else nullcontext():
        schema, read_before, ignored_columns = _sizes(files, max_sequence_length, max_predictions, input_column)
        with reporter.task("import", sum(targets[target].stat().st_size for target in share), "bytes") as task:
            for target in share:
                cached = read_before.pop(targets[target], None)
                _import_file(targets[target], target, schema, cached, output, input_column)
                task.advance(targets[target].stat().st_size)
    if ignored_columns:
        reporter.say(f"columns that are not used: {', '.join(ignored_columns)}")
    return StageOutput(_finish(output, list(targets), schema, ignored_columns))


def _finish(
    output: GroupedOutput[Path, ImportedTable], targets: Sequence[Path], schema: UnpackedSchema, ignored: tuple[str, ...]
) -> ImportedSoFar:
    """Write examples.json when all tables are there; the content so far."""
    complete = output.whole(targets)
    content = ImportedSoFar(
        sequences=sum(table.sequences for table in complete.values()),
        files=len(complete),
        max_sequence_length=schema.max_sequence_length,
        max_predictions=schema.max_predictions,
        ignored_columns=ignored,
    )
    if len(complete) == len(targets):
        content = ImportedExamples(**dict(content))
        content.write(output.final)
    return content


def _sizes(
    files: Sequence[Path], max_sequence_length: int | None, max_predictions: int | None, input_column: str
) -> tuple[UnpackedSchema, dict[Path, Sequence[CachedBatch]], tuple[str, ...]]:
    """The sizes of the examples, measured where they are not given; rows that were read for that; unused columns."""
    if max_sequence_length is not None and max_predictions is not None:
        return UnpackedSchema(max_sequence_length, max_predictions), {}, ()
    measured = measure_tables(files, input_column)
    schema = UnpackedSchema(max_sequence_length or measured.max_sequence_length, max_predictions or measured.max_predictions)
    return schema, dict(measured.cached), measured.ignored_columns


def _record_names(files: Sequence[Path]) -> list[str]:
    """The names of the TFRecord files: the stems of the tables, which must differ."""
    names = [f"{path.name.removesuffix('.gz').rpartition('.')[0]}.tfrecord" for path in files]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"{files[0].parent}: several tables would become {twice[0]}; give them different names")
    return names


def _import_file(
    table: Path,
    target: Path,
    schema: UnpackedSchema,
    read_before: Sequence[CachedBatch] | None,
    output: GroupedOutput[Path, ImportedTable],
    input_column: str,
) -> None:
    """Convert one table, unless it is done already; the count next to it is written after it."""
    if target.exists() and output.whole([target]):
        return
    count = 0
    encoder = UnpackedEncoder(schema)
    with atomic_file(target) as handle:
        for sequences in read_sequences(
            table, schema.max_sequence_length, schema.max_predictions, read_before, input_column
        ):
            following = 0
            while following < sequences.lengths.size:
                data, following = encoder.encode(sequences, following)
                handle.write(data)
            count += sequences.lengths.size
    ImportedTable(sequences=count).write(output.summary_path(target))
