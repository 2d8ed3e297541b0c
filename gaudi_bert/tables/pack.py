"""The stage `pack` for a table: rows of Parquet, Arrow or JSON lines to packs in Parquet, group by group.

The tokenizer that `tokenize` stored with the table is copied to the packs: what is trained on them needs it.

See `artefacts.completion` for kills and several writers; `groups` for what a group is. From an object store the complete
table is copied to scratch; to one, each shard is uploaded when it is written. After bad input everything is removed: packs
that were written before the wrong row are of no use to a corrected table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np

from gaudi_bert import __version__
from gaudi_bert.artefacts.base import NOTES_NAME, manifest_path
from gaudi_bert.artefacts.completion import GroupedOutput, Signature
from gaudi_bert.artefacts.mirrored_folder import local_copy, mirrored, release
from gaudi_bert.artefacts.packed import GroupManifest, PackedSums, RowTables, TableMetadata, row_table_path
from gaudi_bert.artefacts.results import ByRowLength, PackResult, PlainResult, StageRun, require_complete
from gaudi_bert.artefacts.shards import Shard, count_shards, shard_bounds, shard_name
from gaudi_bert.common.arrays import ByteArray
from gaudi_bert.common.arrow import explain_value_errors, require_pyarrow
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import check_file_name, resolve_links
from gaudi_bert.common.progress import Reporter, Task
from gaudi_bert.common.sampling import sample_packs
from gaudi_bert.common.threads import map_in_threads
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.config.sections import TableSettings
from gaudi_bert.packing.algorithms import pack_histogram
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.row_lengths import USUAL_HIDDEN_SIZE, choose_row_lengths, row_cost
from gaudi_bert.packing.strategies import Packing
from gaudi_bert.packs.write import PackedOutput, write_packs
from gaudi_bert.rows.tokenizer import copy_tokenizer, open_tokenizer
from gaudi_bert.rows.tokenizer_files import TOKENIZER_NAME
from gaudi_bert.tables.groups import (
    GroupedTable,
    GroupRows,
    RowSequences,
    open_table,
    read_sequences,
    row_figures,
    table_metadata,
)
from gaudi_bert.tables.packed_parquet import PackLayout, PackSequences, write_table_shard
from gaudi_bert.tables.sources import table_files
from gaudi_bert.tables.verify import verify_rows
from gaudi_bert.tfrecords.files import input_file

_PackedTable: TypeAlias = PackResult | PlainResult

_PACKS_OF_A_SHARD = 1024
"""A group that fits into fewer shards of so many packs than `shard_multiple` has as many as a divisor of that: 151 packs are
one file. Readers deal packs to processes, not shards."""


def pack_table(
    source: str | Path, out: Path, settings: TableSettings, run: StageRun, *, verified: bool = False
) -> _PackedTable | ByRowLength[_PackedTable]:
    """Pack the rows of a table; with `settings.row_lengths` into rows of several lengths, or of one where they gain little.

    `source` is a .parquet, .arrow or .jsonl[.gz] file, a folder or a glob of them, or one that `Dataset.save_to_disk` wrote.
    With `verified`, it is proven afterwards that every row is there. Of a part, the totals of its groups are returned.
    """
    if settings.row_lengths is None:
        return _pack_rows(source, out, settings, run, verified)
    return _pack_row_lengths(source, out, settings, run, verified)


# --- rows of one length


def _pack_rows(source: str | Path, out: Path, settings: TableSettings, run: StageRun, verified: bool) -> _PackedTable:
    with _opened(source, out, run.store) as (table, folder):
        files = table_files(table)
        _check_apart(folder, files)
        # The packs are a function of the settings, and of name, size and CRC-32C of every input file.
        signature = _signature(files, settings, "pack-table")
        output = PackedOutput(
            folder,
            TableMetadata.path_in(folder),
            signature,
            GroupManifest,
            lambda number: manifest_path(folder / NOTES_NAME, number),
            run.reporter,
            source_sha256=signature.sha256,
            command="gaudi-bert pack",
            metadata=TableMetadata,
            keeps_nothing_of_bad_input=True,
        )
        written = write_packs(
            output, lambda: _TableWriter(output, open_table(table, settings, run.reporter), settings, run.workers), run
        )
        if isinstance(written, PlainResult):
            return written
        proof = require_complete(verify_rows(table, out, replace(run, overwrite=False, finish=False))) if verified else None
    return PackResult(written, verified=proof)


@dataclass(frozen=True)
class _TableWriter:
    """Packs the groups of a table; a `GroupWriter`."""

    output: PackedOutput
    table: GroupedTable
    settings: TableSettings
    workers: int | None
    unit = "rows"

    @property
    def groups(self) -> int:
        """Number of groups that the table gives."""
        return len(self.table.groups)

    def check_groups(self, numbers: Sequence[int]) -> tuple[Sequence[Sequence[Path]], float]:
        """Return the rows of these groups; the files of a table are here already."""
        return [()] * len(numbers), sum(part.rows for number in numbers for part in self.table.groups[number])

    def write_group(self, number: int, task: Task) -> GroupManifest:
        """Read, pack and write one group, a pure function of its rows and the settings."""
        rows, sequences, too_long = read_sequences(self.table, number, self.settings, threads=self.workers != 1)
        task.advance(rows.lengths.size / 2)
        packs, packing = _deal(sequences, self.settings, number)
        with explain_value_errors(self.table.files[0]):
            shards = self._write_shards(number, rows, packs)
        release(*(self.output.folder / shard.name for shard in shards))
        task.advance(rows.lengths.size / 2)
        return GroupManifest(
            **row_figures(rows, sequences, too_long, self.settings.max_sequence_length),
            source_sha256=self.output.source_sha256,
            group=number,
            packs=packs.packs,
            lower_bound=packing.lower_bound,
            deepest_pack=int(np.diff(packs.offsets).max(initial=0)),
            algorithm_used=packing.algorithm_used,
            shards=tuple(shards),
        )

    def _write_shards(self, number: int, rows: GroupRows, packs: PackSequences) -> Sequence[Shard]:
        settings, layout = self.settings, PackLayout.of(self.table.columns, self.settings)
        size = packs.packs * layout.pack_bytes + (0 if rows.scalars is None else rows.scalars.nbytes)
        shards = count_shards(
            packs.packs, size, settings.shard_multiple, settings.shard_bytes, packs_of_a_shard=_PACKS_OF_A_SHARD
        )
        bounds = shard_bounds(packs.packs, shards, 0).tolist()
        scalars = rows.scalars.take(packs.rows) if layout.columns.scalars else None

        def write_shard(shard: int, _: ByteArray) -> Shard:
            path = self.output.folder / shard_name(number, shard, TableMetadata.shard_ending)
            return write_table_shard(path, layout, rows, packs, scalars, (bounds[shard], bounds[shard + 1]))

        return list(map_in_threads(write_shard, range(shards), self.workers, lambda: np.zeros(0, np.uint8)))

    def check_manifest(self, manifest: GroupManifest) -> None:
        """Nothing was planned before the rows were read."""

    def build_metadata(self, sums: PackedSums) -> TableMetadata:
        """Check that all rows are there, copy the tokenizer, and return the metadata of the folder."""
        table, settings = self.table, self.settings
        if sums.rows != table.rows:
            raise FailedError(
                f"{self.output.folder}: the groups hold {sums.rows} rows, the table has {table.rows}; pack it again with"
                " --overwrite"
            )
        if not sums.packs:
            self.output.remove_all()
            raise InputError(
                f"{table.files[0].parent}: every row is longer than {settings.max_sequence_length} tokens, so no row "
                "remains; raise --max-sequence-length"
            )
        notes = table.files[0].parent / NOTES_NAME
        if (notes / TOKENIZER_NAME).is_file():
            copy_tokenizer(open_tokenizer(notes), self.output.final.parent)
        return table_metadata(table, settings, sums, self.output.signature.inputs, __version__)


def _deal(sequences: RowSequences, settings: TableSettings, group: int) -> tuple[PackSequences, Packing]:
    """Pack the sequences, and put them in the order in which they are written."""
    slots = settings.max_sequence_length
    packing = pack_histogram(
        Histogram(slots, np.bincount(sequences.lengths, minlength=slots + 1)[1:]),
        settings.algorithm,
        settings.depth,
        seed=settings.seed,
        effort=settings.effort,
        quick_bound=settings.depth == "max",  # the tokens give nearly the complete bound
    )
    dealt = sample_packs(sequences.lengths, list(packing.strategy_counts.items()), settings.seed, group)
    order = dealt.members.astype(np.int64)
    packs = PackSequences(dealt.starts, sequences.rows[order], sequences.starts[order], sequences.lengths[order])
    return packs, packing


@contextmanager
def _opened(source: str | Path, out: Path, store: StoreSettings | None) -> Iterator[tuple[str | Path, Path]]:
    """The table on this machine, and the folder in which its packs are written."""
    require_pyarrow()
    check_file_name(out)
    with local_copy(source, store) as table, mirrored(out, store) as folder:
        yield table, folder


def _check_apart(folder: Path, files: Sequence[Path]) -> None:
    if resolve_links(folder) in {resolve_links(file).parent for file in files}:
        raise InputError(f"{folder}: the output folder is the folder of the table; choose another one")


def _signature(files: Sequence[Path], settings: TableSettings, stage: str) -> Signature:
    inputs = {file.name: input_file(file).identity for file in files}
    return Signature(stage, settings.model_dump(mode="json"), inputs)


# --- rows of several lengths: a packed table of each, of the sequences that fit no shorter row


def _pack_row_lengths(
    source: str | Path, out: Path, settings: TableSettings, run: StageRun, verified: bool
) -> _PackedTable | ByRowLength[_PackedTable]:
    with _opened(source, out, run.store) as (table, folder):
        lengths = _choose_lengths(table, settings, run.reporter)
        if len(lengths) == 1:
            one = settings.model_copy(update={"row_lengths": None, "max_sequence_length": lengths[0]})
            return _pack_rows(table, folder, one, run, verified)
        chosen = settings.model_copy(update={"row_lengths": lengths, "max_sequence_length": lengths[-1]})
        files, final = table_files(table), RowTables.path_in(folder)
        _check_apart(folder, files)
        output: GroupedOutput[int, TableMetadata] = GroupedOutput(  # complete before its last file
            folder,
            final,
            _signature(files, chosen, "pack-rows"),
            TableMetadata,
            lambda length: TableMetadata.path_in(row_table_path(folder, length)),
            run.reporter,
        )
        output.begin(run.overwrite)
        of_each = replace(run, overwrite=False)  # what is of other settings was removed with the folder
        with output.removed_on_bad_input():
            each = {length: chosen.model_copy(update={"max_sequence_length": length}) for length in lengths}
            packed = {
                length: _pack_rows(table, row_table_path(folder, length), own, of_each, verified)
                for length, own in each.items()
            }
        if run.part is None:
            output.write_final(RowTables(format_version=1, format="row_lengths", row_lengths=lengths))
        return ByRowLength(packed)


def _choose_lengths(table: str | Path, settings: TableSettings, reporter: Reporter) -> tuple[int, ...]:
    """The lengths that some sequence needs, of those that are given; or those that cost least."""
    opened, most = open_table(table, settings, reporter), settings.most_tokens
    counts = np.zeros(most, np.int64)
    whole = settings.model_copy(update={"row_lengths": None, "max_sequence_length": most})
    for group in range(len(opened.groups)):
        _, sequences, _ = read_sequences(opened, group, whole, lengths_only=True)
        counts += np.bincount(sequences.lengths, minlength=most + 1)[1:]
    if not counts.any():
        raise InputError(f"{table}: every row is longer than {most} tokens, so no row remains; give longer --row-lengths")
    chosen = choose_row_lengths(
        counts,
        partial(row_cost, hidden_size=USUAL_HIDDEN_SIZE),
        lengths=settings.given_lengths or None,
        longest=most,
        depth=settings.depth,
        algorithm=settings.algorithm,
    )
    reporter.say(f"pack: {chosen.format_cost()}")
    return chosen.lengths
