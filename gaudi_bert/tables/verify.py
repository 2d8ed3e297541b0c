"""The stage `verify` for a packed table: prove that every row of the table is in the packs once, value for value.

Group by group, the rows of the table are read again and compared with the shards of the packs. The code that writes shards
is not used. `packs.verify` contains the steps that are common to all formats.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gaudi_bert.artefacts.base import manifest_path
from gaudi_bert.artefacts.completion import Signature, read_signature, settings_path
from gaudi_bert.artefacts.mirrored_folder import (
    download_missing_files,
    file_exists,
    list_names,
    mirror_folder,
    open_local_copy,
)
from gaudi_bert.artefacts.packed import (
    PackedTotals,
    RowLengthTables,
    TableManifest,
    TableMetadata,
    Verification,
    row_table_path,
)
from gaudi_bert.artefacts.results import PlainResult, ResultsByRowLength, StageOutput, StageRun
from gaudi_bert.artefacts.shards import Shard, compute_file_identity
from gaudi_bert.common.arrays import AnyArray, BoolArray, Int32Array, IntArray
from gaudi_bert.common.arrow import explain_arrow_errors, require_pyarrow, require_utf8_column_names, validate_arrow_buffers
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import check_regular_file, format_location, is_in_store
from gaudi_bert.config.pipeline import section_from_mapping
from gaudi_bert.config.sections import TableSettings
from gaudi_bert.packing.algorithms import resolve_depth
from gaudi_bert.packs.verify import (
    PackedFolder,
    VerifiedGroup,
    check_inputs_unchanged,
    check_lower_bound,
    check_same_content,
    verify_packs,
)
from gaudi_bert.tables.groups import (
    GroupedTable,
    GroupRows,
    RowSequences,
    build_manifest_fields,
    build_table_metadata,
    convert_lists_to_numpy,
    open_table,
    read_sequences,
)
from gaudi_bert.tables.packed_files import PackLayout, padding_value
from gaudi_bert.tables.sources import is_same_type, list_table_files

_VerifiedTable: TypeAlias = StageOutput[Verification] | PlainResult


def verify_table(source: str | Path, packed: Path, run: StageRun) -> _VerifiedTable | ResultsByRowLength[_VerifiedTable]:
    """Compare a packed table with the original table, value by value.

    Args:
        source: The table: a file, a folder, a glob or a URL.
        packed: The folder of the packs, or its URL.
        run: How the stage runs: its part, its workers, and what is reported.

    Returns:
        The result of the verification. For packs with several row lengths, one result per length.

    Raises:
        FailedError: The packs differ from the table.
    """
    if file_exists(RowLengthTables.json_path_in(packed), run.store):
        # This folder contains a separate packed table for each row length. Every sequence length belongs to exactly one of
        # these tables, so verifying each table covers all sequences.
        with open_local_copy(source, run.store) as table, mirror_folder(packed, run.store) as folder:
            lengths = _read_row_lengths(folder)
            return ResultsByRowLength(
                {length: verify_single_table(table, row_table_path(folder, length), run) for length in lengths}
            )
    return verify_single_table(source, packed, run)


def verify_single_table(source: str | Path, packed: Path, run: StageRun) -> _VerifiedTable:
    """Compare a packed table of a single row length with the original table.

    Args:
        source: The table: a file, a folder, a glob or a URL.
        packed: The folder of the packs, or its URL.
        run: How the stage runs: its part, its workers, and what is reported.

    Returns:
        The result of the verification, or the totals if only a part was verified.

    Raises:
        FailedError: The packs differ from the table.
        InputError: Only a part is to be verified, and the table or the packs are in an object store.
    """
    if not run.runs_whole_stage:
        for side in (source, packed):
            if is_in_store(side):
                raise InputError(
                    f"{format_location(side)}: --shard is not supported for tables in an object store, because each part "
                    "would copy the complete table; verify all parts at once, without --shard and --finish"
                )
    with open_local_copy(source, run.store) as table, mirror_folder(packed, run.store) as here:
        download_missing_files(*(here / name for name in list_names(here)))
        return verify_packs(_TableVerifier(table, PackedFolder(here, TableMetadata.read(here), TableManifest), run), run)


def _read_row_lengths(folder: Path) -> tuple[int, ...]:
    """Read the row lengths of a folder that contains one packed table per row length.

    Check that all of these tables were packed together, and that the folder contains no other packed table.

    Raises:
        FailedError: A packed table was written with other settings or inputs, or does not belong there.
    """
    path = RowLengthTables.json_path_in(folder)
    packing = settings_path(folder, path)
    download_missing_files(path, packing, *(folder / name for name in list_names(folder)))
    lengths, common = RowLengthTables.read(folder).row_lengths, read_signature(packing)
    known = {row_table_path(folder, length): length for length in lengths}
    settings = {**common.settings, "row_lengths": lengths, "max_sequence_length": max(lengths)}
    check_same_content(packing, common, Signature("pack-rows", settings, common.inputs), RowLengthTables.remedy, str(path))
    foreign = {folder / name.split("/")[0] for name in list_names(folder) if name.startswith("rows-")} - known.keys()
    if foreign:
        raise FailedError(f"{min(foreign)}: the folder is not listed in {path}; remove it, or {RowLengthTables.remedy}")
    for table, length in known.items():
        right = Signature("pack-table", {**settings, "max_sequence_length": length}, common.inputs)
        own = settings_path(table, TableMetadata.json_path_in(table))
        check_same_content(own, read_signature(own), right, RowLengthTables.remedy, str(packing))
    return lengths


@dataclass(frozen=True)
class _TableVerifier:
    """Compares the shards of a packed table with the rows of the original table. Implements `GroupVerifier`.

    Attributes:
        source: The table.
        folder: The folder of the packs.
        run: How the stage runs.
    """

    source: str | Path
    folder: PackedFolder[TableMetadata, TableManifest]
    run: StageRun

    @cached_property
    def _stored_settings_and_inputs(self) -> Signature:
        """The settings and inputs that were used to pack the table. The inputs must be unchanged."""
        packed, metadata, signature = self.folder.path, self.folder.metadata, read_signature(self._settings_path)
        present = [compute_file_identity(file) for file in list_table_files(self.source)]
        check_inputs_unchanged(packed, metadata.inputs, present, metadata.remedy)
        if signature.inputs != {file.name: file.size_and_crc32c for file in present}:
            raise FailedError(f"{self._settings_path}: the inputs differ from those in metadata.json; {metadata.remedy}")
        return signature

    @property
    def _settings_path(self) -> Path:
        """The path of the settings.json that was written when the table was packed."""
        return settings_path(self.folder.path, TableMetadata.json_path_in(self.folder.path))

    @cached_property
    def _settings(self) -> TableSettings:
        """The settings that were used to pack the table."""
        return section_from_mapping(TableSettings, self._stored_settings_and_inputs.settings, str(self._settings_path))

    @cached_property
    def _table(self) -> GroupedTable:
        """The opened table. Its number of groups must equal the number of packed groups."""
        table, groups = open_table(self.source, self._settings, self.run.reporter), len(self.folder.group_numbers)
        if groups != len(table.groups):
            raise FailedError(
                f"{self.folder.path}: expected {len(table.groups)} groups, found {groups}; {self.folder.metadata.remedy}"
            )
        return table

    def verify_groups(self, manifests: Iterable[TableManifest]) -> Iterator[VerifiedGroup[TableManifest]]:
        """Compare each packed group with the rows of the table, and yield the results in the order of the manifests."""
        rows = sum(part.rows for group in self.run.select_items_of_this_run(self._table.groups) for part in group)
        with self.run.reporter.task("verify", rows, "rows") as task:
            for stored in manifests:
                expected = self._verify_group(stored)
                yield VerifiedGroup(stored, expected, expected.lower_bound)
                task.advance(expected.rows)

    def build_expected_metadata(self, totals: PackedTotals) -> TableMetadata:
        """Return the expected contents of metadata.json, computed from the manifests of all groups."""
        inputs, version = self._stored_settings_and_inputs.inputs, self.folder.metadata.tool_version
        return build_table_metadata(self._table, self._settings, totals, inputs, version)

    def _verify_group(self, stored_manifest: TableManifest) -> TableManifest:
        """Compare the shards of a group with the rows of the table, and return the expected manifest of the group.

        Each shard is read, and its CRC-32C is compared with the manifest. Every slot is compared with the row that it comes
        from, according to the shard. Every sequence must occur exactly once. The name of the algorithm and the lower bound
        are copied from the stored manifest, after the bound was checked.

        Args:
            stored_manifest: The stored manifest.

        Raises:
            FailedError: The shards differ from the rows.
        """
        settings, group = self._settings, stored_manifest.group
        layout = PackLayout.from_settings(self._table.columns, settings)
        rows, sequences, too_long = read_sequences(self._table, group, settings, threads=self.run.workers != 1)
        is_there = np.zeros(sequences.rows.size, np.bool_)
        shards, deepest = [], 0
        for path in self.folder.list_shards(group):
            packs, identity = 0, compute_file_identity(path).size_and_crc32c
            claims = [shard for shard in stored_manifest.shards if shard.name == path.name]
            if claims and claims[0].crc32c != identity["crc32c"]:
                raise FailedError(
                    f"{path}: the CRC-32C of the file differs from the manifest of its group; {TableMetadata.remedy}"
                )
            for stored in _read_row_groups(path, layout):
                members = _match_packed_sequences(stored, rows, sequences, is_there)
                is_there[members] = True
                packs += stored.offsets.size - 1
                deepest = max(deepest, int(np.diff(stored.offsets).max(initial=0)))
                if settings.depth != "max" and deepest > settings.depth:
                    raise FailedError(
                        f"{stored.location}: a pack contains {deepest} sequences, but the depth is {settings.depth}; pack "
                        "the table again"
                    )
                _check_tokens(stored, layout, rows, sequences.rows[members])
                _check_scalar_columns(stored, layout, rows, sequences.rows[members])
            shards.append(Shard(name=path.name, packs=packs, **identity))
        if not is_there.all():
            row = int(rows.numbers[sequences.rows[np.argmin(is_there)]])
            raise FailedError(f"{self.folder.path}: no pack contains row {row} of the table; pack the table again")
        length, packs = settings.max_sequence_length, sum(shard.packs for shard in shards)
        counts = np.bincount(sequences.lengths, minlength=length + 1)[1:]
        path, depth = manifest_path(self.folder.json_folder, group), resolve_depth(settings.depth, length)
        check_lower_bound(path, stored_manifest.lower_bound, packs, lambda: [counts], depth, TableMetadata.remedy)
        return TableManifest(
            **build_manifest_fields(rows, sequences, too_long, length),
            source_sha256=self._stored_settings_and_inputs.sha256,
            group=group,
            packs=packs,
            lower_bound=stored_manifest.lower_bound,
            deepest_pack=deepest,
            algorithm_used=stored_manifest.algorithm_used,  # the shards do not contain it
            shards=tuple(shards),
        )


# --- comparing a row group of a shard with the rows of the table


def _match_packed_sequences(
    stored: _PackedRowGroup, rows: GroupRows, sequences: RowSequences, was_found: BoolArray
) -> IntArray:
    """Return the numbers of the sequences that the packs of one row group contain, int64 [sequences].

    Check that the group contains each of these sequences, and that no other pack contains it.

    Raises:
        FailedError: A sequence differs from the table, or occurs twice.
    """
    of_row = np.searchsorted(rows.numbers, stored.indices)
    known = rows.numbers[np.minimum(of_row, rows.numbers.size - 1)] == stored.indices
    begins, stored_begins = (
        row << 32 | start for row, start in ((sequences.rows, sequences.starts), (of_row, stored.starts))
    )
    members = np.searchsorted(begins, stored_begins)
    right = known & (members < begins.size)
    inside = members[right]
    right[right] = (begins[inside] == stored_begins[right]) & (sequences.lengths[inside] == stored.lengths[right])
    if not right.all():
        raise FailedError(
            f"{stored.location}: row {stored.indices[int(np.argmin(right))]} differs from the table; pack the table again"
        )
    if was_found[members].any() or np.unique(members).size < members.size:
        raise FailedError(f"{stored.location}: a sequence occurs in two packs; pack the table again")
    return members


class _PackedRowGroup(NamedTuple):
    """A row group in a shard of a packed table, which contains consecutive packs.

    Attributes:
        path: The shard.
        first: The number of its first pack in the shard.
        offsets: int64 [packs + 1], as in `PackSequences`.
        indices: int64 [sequences], the row of the table that each sequence comes from.
        starts: int32 [sequences], the first token of each sequence in that row.
        lengths: int32 [sequences], the number of tokens in each sequence.
        table: All columns, as a pyarrow Table.
    """

    path: Path
    first: int
    offsets: IntArray
    indices: IntArray
    starts: Int32Array
    lengths: Int32Array
    table: Any

    @property
    def location(self) -> str:
        """The name of the file and the number of the first pack in the row group, as text for messages."""
        return f"{self.path}: from pack {self.first} on"


def _read_row_groups(path: Path, layout: PackLayout) -> Iterator[_PackedRowGroup]:
    """Yield the row groups of a shard, after checking their columns and types.

    Raises:
        FailedError: A column is missing or invalid, or a pack has too many tokens.
    """
    from pyarrow import parquet

    try:
        with explain_arrow_errors(path):
            shard = parquet.ParquetFile(check_regular_file(path))
        empty = io.BytesIO()  # write and read the schema, because Parquet changes some types, such as seconds
        parquet.ParquetWriter(empty, layout.build_schema()).close()
        stored, expected = require_utf8_column_names(path, shard.schema_arrow), parquet.read_schema(empty)
        if stored.names != expected.names or not all(map(is_same_type, stored.types, expected.types)):
            raise FailedError(
                f"{path}: expected the columns {', '.join(expected.names)} with their types, found "
                f"{', '.join(stored.names)}; pack the table again"
            )
        first = 0
        with shard:
            for number in range(shard.num_row_groups):
                with explain_arrow_errors(path):
                    table = shard.read_row_group(number)
                yield _validate_and_extract_packs(path, layout, first, validate_arrow_buffers(path, table))
                first += table.num_rows
    except InputError as error:
        raise FailedError(str(error)) from error


def _validate_and_extract_packs(path: Path, layout: PackLayout, first_pack: int, arrow_table: Any) -> _PackedRowGroup:
    """Check the packs of a row group, and return them.

    Each sequence must have one length and one index, and no pack may have too many tokens.
    """
    lengths, offsets = convert_lists_to_numpy(path, first_pack, "seq_lens", arrow_table.column("seq_lens"))
    indices, others = convert_lists_to_numpy(path, first_pack, "indices", arrow_table.column("indices"))
    starts = np.zeros(lengths.size, np.int32)
    if layout.with_starts:
        starts, more = convert_lists_to_numpy(path, first_pack, "starts", arrow_table.column("starts"))
        if not np.array_equal(more, others):
            raise FailedError(
                f"{path}: from pack {first_pack} on: starts and indices have different lengths; pack the table again"
            )
    packs = _PackedRowGroup(path, first_pack, offsets.astype(np.int64), indices, starts, lengths, arrow_table)
    if not np.array_equal(offsets, others) or (np.diff(offsets) < 1).any() or (lengths < 1).any():
        raise FailedError(f"{packs.location}: seq_lens and indices contradict each other; pack the table again")
    used = np.add.reduceat(lengths.astype(np.int64), offsets[:-1]) if lengths.size else lengths
    if (used > layout.max_sequence_length).any():
        pack = first_pack + int(np.argmax(used > layout.max_sequence_length))
        raise FailedError(
            f"{path}: pack {pack}: the pack contains more than {layout.max_sequence_length} tokens; pack the table again"
        )
    return packs


def _check_tokens(packs: _PackedRowGroup, layout: PackLayout, rows: GroupRows, row_of_sequence: IntArray) -> None:
    """Check every slot of the columns that have one value per token, by comparing it with the rows of the table.

    Args:
        packs: The packs.
        layout: The columns and sizes.
        rows: The rows of the group.
        row_of_sequence: int64, the row of each sequence.

    Raises:
        FailedError: A slot differs from the row, or padding is not the padding value.
    """
    slots, lengths = layout.max_sequence_length, packs.lengths
    used = np.add.reduceat(lengths.astype(np.int64), packs.offsets[:-1])[:, None]
    is_token = np.arange(slots) < used
    ends = np.cumsum(lengths, dtype=np.int64)
    positions = np.arange(slots) - used  # the positions in the padding, which count from 0
    positions[is_token] = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    numbers = np.zeros(positions.shape, np.int64)
    in_pack = np.arange(lengths.size) - np.repeat(packs.offsets[:-1], np.diff(packs.offsets))
    numbers[is_token] = np.repeat(in_pack + 1, lengths)
    for name, expected in (("position_ids", positions), ("sequence_ids", numbers)):
        _raise_for_first_wrong_slot(packs, name, _read_token_column(packs, name, *positions.shape) != expected)
    tokens = rows.find_token_positions(row_of_sequence, packs.starts, lengths)
    for name in layout.columns.aligned:
        stored, right = _read_token_column(packs, name, *positions.shape), rows.values[name][tokens]
        _raise_for_first_wrong_slot(packs, name, ~is_token & (stored != padding_value(name)))
        of_bits = np.dtype(f"u{right.itemsize}")  # compare the bits, because NaN does not equal NaN
        different = stored[is_token].view(of_bits) != right.view(of_bits)
        if different.any():
            sequence = int(np.searchsorted(ends, np.argmax(different), side="right"))
            pack = packs.first + int(np.searchsorted(packs.offsets, sequence, side="right")) - 1
            raise FailedError(
                f"{packs.path}: pack {pack}: {name} differs from row {packs.indices[sequence]} of the table; pack the table "
                "again"
            )


def _read_token_column(packs: _PackedRowGroup, column: str, pack_count: int, slots: int) -> AnyArray:
    """Return a column with one value per slot as an array [packs, slots], after checking the number of values in each
    pack.
    """
    values, offsets = convert_lists_to_numpy(packs.path, packs.first, column, packs.table.column(column))
    if not (np.diff(offsets) == slots).all():
        raise FailedError(f"{packs.location}: {column} must have {slots} values per pack; pack the table again")
    return values[offsets[0] : offsets[-1]].reshape(pack_count, slots)


def _raise_for_first_wrong_slot(packs: _PackedRowGroup, column: str, is_wrong: AnyArray) -> None:
    """Raise a FailedError that names the first slot for which `is_wrong` is true. Do nothing if no slot is wrong."""
    if is_wrong.any():
        pack, slot = np.unravel_index(int(np.argmax(is_wrong)), is_wrong.shape)
        raise FailedError(
            f"{packs.path}: pack {packs.first + pack}: {column} has a wrong value at slot {slot}; pack the table again"
        )


def _check_scalar_columns(packs: _PackedRowGroup, layout: PackLayout, rows: GroupRows, row_of_sequence: IntArray) -> None:
    """Check the scalar columns of packs. Each sequence must have the values of the table row that it comes from."""
    pyarrow = require_pyarrow()
    for name in layout.columns.scalars:
        column = packs.table.column(name).combine_chunks()
        stored = column.chunk(0) if isinstance(column, pyarrow.ChunkedArray) else column
        if stored.null_count or not np.array_equal(np.diff(stored.offsets.to_numpy()), np.diff(packs.offsets)):
            raise FailedError(f"{packs.location}: {name} does not have one value per sequence; pack the table again")
        values, expected, first = stored.flatten(), rows.scalars.column(name).take(pyarrow.array(row_of_sequence)), 0
        for chunk in expected.chunks:
            held = values.slice(first, len(chunk))
            try:
                right = chunk.cast(held.type)  # convert to the type that Parquet stores
            except pyarrow.ArrowException:  # the stored type cannot represent a value
                right = None
            # NaN does not equal NaN, so `equals` fails if a column contains NaN. Compare the values as text as well.
            if right is None or not (held.equals(right) or repr(held.to_pylist()) == repr(right.to_pylist())):
                raise FailedError(f"{packs.location}: {name} differs from the rows of the table; pack the table again")
            first += len(chunk)
