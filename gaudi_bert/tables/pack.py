"""The stage `pack` for a table: pack rows of Parquet, Arrow or JSON lines into packs in Parquet, group by group.

If `tokenize` stored a tokenizer with the table, it is copied to the packs, because models that are trained on them need it.
`artefacts.completion` describes how kills and concurrent writers are handled, and `groups` describes what a group is. A
table in an object store is first copied completely to a local folder. If the packs go to an object store, each shard is
uploaded as soon as it is written. If an input is invalid, all packs are removed, because packs that were written before the
invalid row do not belong to the corrected table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np

from gaudi_bert import __version__
from gaudi_bert.artefacts.base import NOTES_NAME
from gaudi_bert.artefacts.completion import GroupedOutput, Signature
from gaudi_bert.artefacts.mirrored_folder import mirror_folder, open_local_copy, remove_local_copies
from gaudi_bert.artefacts.packed import PackedTotals, RowLengthTables, TableManifest, TableMetadata, row_table_path
from gaudi_bert.artefacts.results import PackResult, PlainResult, ResultsByRowLength, StageRun, require_complete
from gaudi_bert.artefacts.shards import Shard, compute_file_identity, count_shards, divide_packs, shard_name
from gaudi_bert.common.arrays import ByteArray
from gaudi_bert.common.arrow import explain_arrow_cast_errors, require_pyarrow
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import check_path_to_write, resolve_links
from gaudi_bert.common.processor import map_in_threads
from gaudi_bert.common.progress import Reporter, Task
from gaudi_bert.common.sampling import sample_packs
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.config.sections import TableSettings
from gaudi_bert.packing.algorithms import pack_histogram
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.row_lengths import USUAL_HIDDEN_SIZE, choose_row_lengths, estimate_row_cost
from gaudi_bert.packing.strategies import Packing
from gaudi_bert.packs.write import GroupFilesAndSize, PackingJob, write_packs
from gaudi_bert.rows.tokenizer import open_tokenizer, save_tokenizer
from gaudi_bert.rows.tokenizer_files import TOKENIZER_NAME
from gaudi_bert.tables.groups import (
    GroupedTable,
    GroupRows,
    PackSequences,
    RowSequences,
    build_manifest_fields,
    build_table_metadata,
    open_table,
    read_sequences,
)
from gaudi_bert.tables.packed_files import PackLayout, write_table_shard
from gaudi_bert.tables.sources import list_table_files
from gaudi_bert.tables.verify import verify_single_table

_PackedTable: TypeAlias = PackResult | PlainResult

# Many shards with few packs would only slow reading down. Therefore, if a group has few packs, it is divided into the
# smallest number of shards that divides `shard_multiple` and leaves at most this many packs in a shard. Any number of
# processes can still read the shards, because processes divide packs among themselves and not shards.
_PACKS_OF_A_SHARD = 1024


def pack_table(
    source: str | Path, out: Path, settings: TableSettings, run: StageRun, *, verify: bool = False
) -> _PackedTable | ResultsByRowLength[_PackedTable]:
    """Pack the rows of a table, and write the packs to a folder.

    Args:
        source: A .parquet, .arrow or .jsonl[.gz] file, a folder or a glob of such files, or a folder that
            `Dataset.save_to_disk` wrote.
        out: The folder of the packs.
        settings: The settings. With `row_lengths`, rows of several lengths are written, or of one length if several save
            little.
        run: How the stage runs: its part, its workers, and what is reported.
        verify: Whether the packs are verified afterwards: every row must be in them, value for value.

    Returns:
        The metadata of the packs, or the totals of the groups if only a part of them was packed. With several row lengths,
        one result per length.

    Raises:
        InputError: The table or a row is invalid.
        FailedError: The verification found a difference.
    """
    if settings.row_lengths is None:
        return _pack_table_to_one_length(source, out, settings, run, verify)
    return _pack_table_to_several_lengths(source, out, settings, run, verify)


# --- rows of one length


def _pack_table_to_one_length(
    source: str | Path, out: Path, settings: TableSettings, run: StageRun, verify: bool
) -> _PackedTable:
    """Pack the rows of a table into packs of one length."""
    with _open_locally(source, out, run.store) as (table, folder):
        files = list_table_files(table)
        _check_output_folder(folder, files)
        # The packs depend only on the settings, and on the name, size and CRC-32C of every input file.
        signature = _build_signature(files, settings, "pack-table")
        written = write_packs(_TablePacking(folder, run, signature, table, settings))
        if isinstance(written, PlainResult):
            return written
        proof = (
            require_complete(verify_single_table(table, out, replace(run, overwrite=False, finish=False)))
            if verify
            else None
        )
    return PackResult(written, verified=proof)


@dataclass(frozen=True)
class _TablePacking(PackingJob[GroupedTable]):
    """The job that packs the rows of one table into packs of one length, group by group.

    Attributes:
        table: The table on this machine: a file, a folder or a glob.
        settings: The settings.
    """

    table: str | Path
    settings: TableSettings

    metadata_type = TableMetadata
    command = "gaudi-bert pack"
    unit = "rows"
    removes_packs_of_bad_input = True

    @property
    def source_sha256(self) -> str:
        """The SHA-256 of the settings and the input files, which together determine the packs."""
        return self.signature.sha256

    def open_inputs(self) -> nullcontext[GroupedTable]:
        """Open the table, and return a context manager that yields it."""
        return nullcontext(open_table(self.table, self.settings, self.run.reporter))

    def count_groups(self, inputs: GroupedTable) -> int:
        """Return the number of groups that the rows of the table are divided into."""
        return len(inputs.groups)

    def check_and_list_group_files(self, inputs: GroupedTable, group_numbers: Sequence[int]) -> GroupFilesAndSize:
        """Return the total number of rows in the given groups. For each group, also return an empty list of files to fetch,
        because the files of a table are already on this machine.
        """
        return GroupFilesAndSize(
            [()] * len(group_numbers), sum(part.rows for number in group_numbers for part in inputs.groups[number])
        )

    def write_group(self, inputs: GroupedTable, group_number: int, task: Task) -> TableManifest:
        """Read the rows of one group, pack them, write the packs as shards, and return the manifest of the group.

        The packs depend only on the rows of the group and the settings.
        """
        rows, sequences, too_long = read_sequences(inputs, group_number, self.settings, threads=self.run.workers != 1)
        task.advance(rows.lengths.size / 2)
        packs, packing = _pack_group(sequences, self.settings, group_number)
        with explain_arrow_cast_errors(inputs.files[0]):
            shards = self._write_shards(PackLayout.from_settings(inputs.columns, self.settings), group_number, rows, packs)
        remove_local_copies(*(self.folder / shard.name for shard in shards))
        task.advance(rows.lengths.size / 2)
        return TableManifest(
            **build_manifest_fields(rows, sequences, too_long, self.settings.max_sequence_length),
            source_sha256=self.source_sha256,
            group=group_number,
            packs=packs.pack_count,
            lower_bound=packing.lower_bound,
            deepest_pack=int(np.diff(packs.offsets).max(initial=0)),
            algorithm_used=packing.algorithm_used,
            shards=tuple(shards),
        )

    def _write_shards(self, layout: PackLayout, number: int, rows: GroupRows, packs: PackSequences) -> Sequence[Shard]:
        """Write the packs of a group as shards on several threads, and return one manifest entry per shard."""
        settings = self.settings
        size = packs.pack_count * layout.estimated_pack_bytes + (0 if rows.scalars is None else rows.scalars.nbytes)
        shards = count_shards(
            packs.pack_count, size, settings.shard_multiple, settings.shard_bytes, small_shard_packs=_PACKS_OF_A_SHARD
        )
        bounds = divide_packs(packs.pack_count, shards, 0).tolist()
        scalars = rows.scalars.take(packs.rows) if layout.columns.scalars else None

        def write_shard(shard: int, _: ByteArray) -> Shard:
            """Write one shard of the group, and return its manifest entry."""
            path = self.folder / shard_name(number, shard, TableMetadata.shard_ending)
            return write_table_shard(path, layout, rows, packs, scalars, (bounds[shard], bounds[shard + 1]))

        return list(map_in_threads(write_shard, range(shards), self.run.workers, lambda: np.zeros(0, np.uint8)))

    def build_metadata(self, inputs: GroupedTable, totals: PackedTotals) -> TableMetadata:
        """Check that the packs contain as many rows as the table, copy the tokenizer of the table, and return the metadata
        of the packs.

        Raises:
            FailedError: The groups have more or fewer rows than the table.
            InputError: Every row is too long, so there are no packs.
        """
        if totals.rows != inputs.rows:
            raise FailedError(
                f"{self.folder}: the groups contain {totals.rows} rows, but the table has {inputs.rows}; pack the table "
                "again with --overwrite"
            )
        if not totals.packs:
            raise InputError(
                f"{inputs.files[0].parent}: every row is longer than {self.settings.max_sequence_length} tokens, so there "
                "is nothing to pack; increase --max-sequence-length"
            )
        notes = inputs.files[0].parent / NOTES_NAME
        if (notes / TOKENIZER_NAME).is_file():
            save_tokenizer(open_tokenizer(notes), TableMetadata.json_path_in(self.folder).parent)
        return build_table_metadata(inputs, self.settings, totals, self.signature.inputs, __version__)


def _pack_group(sequences: RowSequences, settings: TableSettings, group_number: int) -> tuple[PackSequences, Packing]:
    """Pack the sequences from one group of table rows.

    Return the sequences in the order of the packs that contain them, and the packing with its lower bound.
    """
    slots = settings.max_sequence_length
    packing = pack_histogram(
        Histogram(slots, np.bincount(sequences.lengths, minlength=slots + 1)[1:]),
        settings.algorithm,
        settings.depth,
        seed=settings.seed,
        effort=settings.effort,
        quick_bound=settings.depth == "max",  # without a depth limit, the bound from the token count is nearly as good
    )
    dealt = sample_packs(sequences.lengths, list(packing.strategy_counts.items()), settings.seed, group_number)
    order = dealt.members.astype(np.int64)
    return PackSequences(dealt.starts, sequences.rows[order], sequences.starts[order], sequences.lengths[order]), packing


@contextmanager
def _open_locally(source: str | Path, out: Path, store: StoreSettings | None) -> Iterator[tuple[str | Path, Path]]:
    """Open a context that provides a local copy of a table and a local folder for its packs.

    Yields:
        (the table, the folder of the packs). Files that are completed in the folder are uploaded if `out` is a URL.
    """
    require_pyarrow()
    check_path_to_write(out)
    with open_local_copy(source, store) as table, mirror_folder(out, store) as folder:
        yield table, folder


def _check_output_folder(folder: Path, table_files: Sequence[Path]) -> None:
    """Raise an InputError if the packs would be written into the folder of the table."""
    if resolve_links(folder) in {resolve_links(file).parent for file in table_files}:
        raise InputError(f"{folder}: the output folder must not be the folder of the table; choose another one")


def _build_signature(files: Sequence[Path], settings: TableSettings, stage: str) -> Signature:
    """Return a signature of the settings and of all input files, which together determine the packs."""
    return Signature(
        stage, settings.model_dump(mode="json"), {file.name: compute_file_identity(file).size_and_crc32c for file in files}
    )


# --- rows of several lengths: one packed table per length, with the sequences that do not fit into shorter rows


def _pack_table_to_several_lengths(
    source: str | Path, out: Path, settings: TableSettings, run: StageRun, verify: bool
) -> _PackedTable | ResultsByRowLength[_PackedTable]:
    """Pack the rows of a table into packs of several lengths, or of a single length if several lengths would save little."""
    with _open_locally(source, out, run.store) as (table, folder):
        lengths = _choose_row_lengths(table, settings, run.reporter)
        if len(lengths) == 1:
            one = settings.model_copy(update={"row_lengths": None, "max_sequence_length": lengths[0]})
            return _pack_table_to_one_length(table, folder, one, run, verify)
        chosen = settings.model_copy(update={"row_lengths": lengths, "max_sequence_length": lengths[-1]})
        files, final = list_table_files(table), RowLengthTables.json_path_in(folder)
        _check_output_folder(folder, files)
        output: GroupedOutput[int, TableMetadata] = GroupedOutput(  # row_lengths.json is written after all packed tables
            folder,
            final,
            _build_signature(files, chosen, "pack-rows"),
            TableMetadata,
            lambda length: TableMetadata.json_path_in(row_table_path(folder, length)),
            run.reporter,
        )
        output.begin_unless_finished(run.overwrite)
        of_each = replace(run, overwrite=False)  # packs with other settings were already removed together with the folder
        with output.remove_files_on_bad_input():
            each = {length: chosen.model_copy(update={"max_sequence_length": length}) for length in lengths}
            packed = {
                length: _pack_table_to_one_length(table, row_table_path(folder, length), own, of_each, verify)
                for length, own in each.items()
            }
        if run.part is None:
            output.write_final_file(RowLengthTables(format_version=1, format="row_lengths", row_lengths=lengths))
        return ResultsByRowLength(packed)


def _choose_row_lengths(table: str | Path, settings: TableSettings, reporter: Reporter) -> tuple[int, ...]:
    """Choose one or several row lengths for the packs of a table, and return them.

    If lengths are given, these are the given lengths that some sequence needs. Otherwise, they are the lengths that cost
    least.

    Raises:
        InputError: Every row is too long.
    """
    opened, most = open_table(table, settings, reporter), settings.longest_row_length
    counts = np.zeros(most, np.int64)
    whole = settings.model_copy(update={"row_lengths": None, "max_sequence_length": most})
    for group in range(len(opened.groups)):
        _, sequences, _ = read_sequences(opened, group, whole, lengths_only=True)
        counts += np.bincount(sequences.lengths, minlength=most + 1)[1:]
    if not counts.any():
        raise InputError(
            f"{table}: every row is longer than {most} tokens, so there is nothing to pack; pass longer --row-lengths"
        )
    chosen = choose_row_lengths(
        counts,
        partial(estimate_row_cost, hidden_size=USUAL_HIDDEN_SIZE),
        row_lengths=settings.explicit_row_lengths or None,
        max_row_length=most,
        depth=settings.depth,
        algorithm=settings.algorithm,
    )
    reporter.say(f"pack: {chosen.format_row_cost_comparison()}")
    return chosen.lengths
