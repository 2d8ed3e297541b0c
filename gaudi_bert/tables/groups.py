"""The groups of a table: parts of its files that are read, packed and held in memory together.

As with TFRecords, a group has at most `group_sequences` rows and `group_bytes` bytes, and is a function of the files and the
settings; here it consists of the parts that the formats have (row groups, record batches, blocks of lines), dealt by a
seeded permutation, so that each group mixes all regions of the table. A larger part is a separate group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gaudi_bert.artefacts.base import InputTable, TooLongRows
from gaudi_bert.artefacts.packed import GroupManifest, PackedSums, TableMetadata, of_counts
from gaudi_bert.artefacts.shards import Shard, count_shards, shard_bounds, shard_name
from gaudi_bert.common.arrow import explained_values
from gaudi_bert.common.dealing import deal_sequences
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.common.threads import map_in_threads
from gaudi_bert.config.sections import TableSettings
from gaudi_bert.packing.algorithms import pack_histogram
from gaudi_bert.packing.histogram import Histogram, form_groups, too_large_files
from gaudi_bert.packing.mixture import Packing
from gaudi_bert.tables.parts import TablePart, list_parts
from gaudi_bert.tables.rows import GroupRows, RowSequences, cut_rows, read_rows
from gaudi_bert.tables.sources import TableColumns, check_same_columns, columns_of, table_files
from gaudi_bert.tables.write_packs import PackLayout, PackSequences, write_table_shard

_PACKS_OF_A_SHARD = 1024
"""A group that fits into fewer shards of so many packs than `shard_multiple` has as many as a divisor of that: 151 packs are
one file. Readers deal packs to processes, not shards."""


@dataclass(frozen=True)
class GroupedTable:
    """A table that is ready to be read: its files in the order of their names, and the parts of each group."""

    files: Sequence[Path]
    file_rows: Sequence[int]
    columns: TableColumns
    groups: Sequence[Sequence[TablePart]]

    @property
    def rows(self) -> int:
        """Rows of all files."""
        return sum(self.file_rows)


def open_table(source: str | Path, settings: TableSettings, reporter: Reporter) -> GroupedTable:
    """List the parts of a table and form its groups."""
    files = table_files(source, reporter)
    columns = columns_of(files[0], settings.columns, settings.input_column)
    check_same_columns(files, columns)
    columns.check_storable(files[0])
    limits = settings.group_sequences, settings.group_bytes
    parts: list[TablePart] = []
    file_rows: list[int] = []
    for file in files:
        before, of_file = sum(file_rows), list_parts(file, columns.stored_names, *limits)
        parts += [part._replace(table_row=before + part.first_row) for part in of_file]
        file_rows.append(sum(part.rows for part in of_file))
    if not parts:
        raise InputError(f"{source}: the table holds no row; there is nothing to pack")
    large = too_large_files(parts, *limits)
    if large:
        largest = max(large, key=lambda part: part.bytes)
        reporter.say(
            f"{largest.path.name}: {largest.rows:,} rows, about {largest.bytes:,} bytes, must be "
            f"read at once: larger than a group may be ({limits[0]:,} rows, {limits[1]:,} bytes), so they are a group; "
            f"there are {len(large):,} such parts"
        )
    return GroupedTable(files, file_rows, columns, form_groups(parts, *limits, settings.seed))


# --- one group: read, cut, packed, written; a pure function of its rows and the settings


def layout_of(table: GroupedTable, settings: TableSettings) -> PackLayout:
    """Return what the shards of the packed folder hold."""
    with_starts = settings.too_long == "split"
    return PackLayout(table.columns, settings.max_sequence_length, with_starts)


def write_table_group(
    out: Path,
    table: GroupedTable,
    number: int,
    settings: TableSettings,
    signature_sha256: str,
    workers: int | None,
    progress: Callable[[float], None],
) -> GroupManifest:
    """Write the shards of one group; `progress` gets half of its rows when they are read, half when they are written."""
    rows = read_rows(table.groups[number], table.columns, threads=workers != 1)
    sequences, too_long = sequences_of(table, rows, settings)
    progress(rows.lengths.size / 2)
    packs, packing = _deal(sequences, settings, number)
    with explained_values(table.files[0]):
        shards = _write_shards(out, table, number, settings, rows, packs, workers)
    progress(rows.lengths.size / 2)
    return GroupManifest(
        **row_figures(rows, sequences, too_long, settings.max_sequence_length),
        source_sha256=signature_sha256,
        group=number,
        packs=packs.packs,
        lower_bound=packing.lower_bound,
        deepest_pack=int(np.diff(packs.offsets).max(initial=0)),
        algorithm_used=packing.algorithm_used,
        shards=tuple(shards),
    )


def row_figures(rows: GroupRows, sequences: RowSequences, too_long: TooLongRows, max_sequence_length: int) -> dict[str, Any]:
    """Return what a manifest states about the rows of its group."""
    counts = np.bincount(sequences.lengths, minlength=max_sequence_length + 1)[1:].tolist()
    return {"format_version": 2, "rows": rows.lengths.size, "too_long": too_long, **of_counts(counts)}


def table_metadata(
    table: GroupedTable,
    settings: TableSettings,
    groups: PackedSums,
    inputs: Mapping[str, Mapping[str, int]],
    tool_version: str,
) -> TableMetadata:
    """The metadata of a packed table; `inputs` are bytes and CRC-32C of its files."""
    copied = ("max_sequence_length", "seed", "algorithm", "shard_multiple")
    return TableMetadata(
        **settings.model_dump(include={*copied, "group_sequences", "group_bytes"}),
        **groups.stored(settings.max_sequence_length, groups.lower_bound),
        format="table",
        tool_version=tool_version,
        depth=None if settings.depth == "max" else settings.depth,
        deepest_pack=groups.deepest_pack,
        algorithms_used=tuple(sorted(groups.algorithms)),
        aligned_columns={name: str(kind) for name, kind in table.columns.aligned.items()},
        scalar_columns={name: str(kind) for name, kind in table.columns.scalars.items()},
        rows=table.rows,
        row_lengths=settings.given_lengths,
        too_long=TooLongRows(policy=settings.too_long, **groups.too_long),
        inputs=tuple(
            InputTable(name=file.name, rows=rows, **inputs[file.name])
            for file, rows in zip(table.files, table.file_rows, strict=True)
        ),
    )


def sequences_of(table: GroupedTable, rows: GroupRows, settings: TableSettings) -> tuple[RowSequences, TooLongRows]:
    """The sequences of the rows of a group that are in these packs, and what the policy for too long rows did to all."""
    if settings.too_long == "error" and (rows.lengths > settings.most_tokens).any():
        _refuse_too_long(table, settings)
    sequences, too_long = cut_rows(rows.lengths, settings.most_tokens, settings.too_long)
    return sequences.of_lengths(settings.sequence_lengths), too_long


def _refuse_too_long(table: GroupedTable, settings: TableSettings) -> None:
    """Say how many rows of the table are too long, and which is the first."""
    columns, most, lengths = table.columns.tokens_only(), settings.most_tokens, []
    parts = sorted((part for group in table.groups for part in group), key=lambda part: part.name)
    first = ""
    for part in parts:
        lengths.append(read_rows([part], columns, keep_values=False).lengths)
        too_long = np.flatnonzero(lengths[-1] > most)
        if too_long.size and not first:
            first = f"{part.path}: row {part.first_row + too_long[0]}: has {lengths[-1][too_long[0]]} tokens"
    sizes = np.concatenate(lengths)
    raise InputError(
        f"{first}, allowed are 1 to {most}; {np.count_nonzero(sizes > most):,} of {table.rows:,} rows are longer, the "
        f"longest has {sizes.max()}: raise --max-sequence-length, or pass --too-long truncate, split or drop"
    )


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
    dealt = deal_sequences(sequences.lengths, list(packing.mixture.items()), settings.seed, group)
    order = dealt.members.astype(np.int64)
    packs = PackSequences(dealt.starts, sequences.rows[order], sequences.starts[order], sequences.lengths[order])
    return packs, packing


def _write_shards(
    out: Path,
    table: GroupedTable,
    number: int,
    settings: TableSettings,
    rows: GroupRows,
    packs: PackSequences,
    workers: int | None,
) -> Sequence[Shard]:
    layout = layout_of(table, settings)
    size = packs.packs * layout.pack_bytes + (0 if rows.scalars is None else rows.scalars.nbytes)
    shards = count_shards(
        packs.packs, size, settings.shard_multiple, settings.shard_bytes, packs_of_a_shard=_PACKS_OF_A_SHARD
    )
    bounds = shard_bounds(packs.packs, shards, 0)
    scalars = rows.scalars.take(packs.rows) if layout.columns.scalars else None
    return map_in_threads(
        lambda shard, _: write_table_shard(
            out / shard_name(number, shard, TableMetadata.shard_ending),
            layout,
            rows,
            packs,
            scalars,
            (int(bounds[shard]), int(bounds[shard + 1])),
        ),
        range(shards),
        workers,
        lambda: np.zeros(0, np.uint8),
    )
