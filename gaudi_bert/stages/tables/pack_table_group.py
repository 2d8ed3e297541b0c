"""One group of a table: read, cut, packed, written. A pure function of the group's rows and the settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gaudi_bert.artefacts.metadata import Shard
from gaudi_bert.artefacts.tables import TableGroupManifest, TooLongRows
from gaudi_bert.common.errors import InputError
from gaudi_bert.config import TableSettings
from gaudi_bert.stages.tables.table_groups import GroupedTable

if TYPE_CHECKING:
    from gaudi_bert.packing.result import Packing
    from gaudi_bert.records.tables.gather import PackSequences
    from gaudi_bert.records.tables.rows import GroupRows
    from gaudi_bert.records.tables.sequences import Atoms, PolicyEffect, RowSequences
    from gaudi_bert.records.tables.write_packs import PackLayout

__all__ = ["layout_of", "sequences_of", "write_table_group"]


class _Dealt(NamedTuple):
    """The packs of a group, and what is known of how they were made."""

    packs: PackSequences
    packing: Packing


def layout_of(table: GroupedTable, settings: TableSettings) -> PackLayout:
    """What the shards of the packed folder hold."""
    from gaudi_bert.records.tables.write_packs import PackLayout

    with_starts = settings.too_long == "split"
    return PackLayout(table.columns, settings.max_sequence_length, settings.index_only, with_starts)


def write_table_group(
    out: Path,
    table: GroupedTable,
    number: int,
    settings: TableSettings,
    signature_sha256: str,
    workers: int | None,
    progress: Callable[[float], None],
) -> TableGroupManifest:
    """Write the shards of one group.

    Args:
        out: the folder.
        table: the table and its groups.
        number: of the group.
        settings: how to pack.
        signature_sha256: of the settings and inputs, for the manifest.
        workers: threads; None for all cores.
        progress: called with the rows that are done: half of them when read, half when written.

    Raises:
        InputError: a row is at fault.
        FailedError: a file cannot be written.
    """
    from gaudi_bert.records.tables.rows import read_rows

    keep_values = not settings.index_only
    rows = read_rows(table.groups[number], table.read_columns, keep_values=keep_values, threads=workers != 1)
    sequences, effect = sequences_of(table, rows, settings)
    progress(rows.lengths.size / 2)
    atoms = _atoms(table, rows, sequences, settings)
    dealt = _deal(atoms, sequences, settings, number)
    shards = _write_shards(out, table, number, settings, rows, dealt.packs, workers)
    progress(rows.lengths.size / 2)
    return TableGroupManifest(
        signature_sha256=signature_sha256,
        group=number,
        rows=rows.lengths.size,
        sequences=sequences.rows.size,
        packs=dealt.packs.packs,
        tokens=int(sequences.lengths.sum(dtype=np.int64)),
        lower_bound=dealt.packing.lower_bound,
        deepest_pack=int(np.diff(dealt.packs.offsets).max(initial=0)),
        algorithm_used=dealt.packing.algorithm_used,
        too_long=TooLongRows(policy=settings.too_long, **effect._asdict()),
        counts=tuple(np.bincount(sequences.lengths, minlength=settings.max_sequence_length + 1)[1:].tolist()),
        shards=tuple(shards),
    )


def sequences_of(table: GroupedTable, rows: GroupRows, settings: TableSettings) -> tuple[RowSequences, PolicyEffect]:
    """The sequences of the rows of a group, as the policy for too long ones makes them.

    Raises:
        InputError: a row is too long, and the policy is "error"; those of the whole table are counted.
    """
    from gaudi_bert.records.tables.sequences import cut_rows

    if settings.too_long == "error" and (rows.lengths > settings.max_sequence_length).any():
        raise InputError(_too_long_rows(table, settings))
    return cut_rows(rows.lengths, settings.max_sequence_length, settings.too_long)


def _too_long_rows(table: GroupedTable, settings: TableSettings) -> str:
    """How many rows of the whole table are too long, and the first of them."""
    from gaudi_bert.records.tables.rows import PartShare, read_rows

    count, longest, first = 0, 0, ""
    columns = table.read_columns.tokens_only()
    whole = sorted({(share.first_row, share.part) for group in table.groups for share in group})
    for first_row, part in whole:
        lengths = read_rows([PartShare(part, first_row)], columns, keep_values=False).lengths
        too_long = np.flatnonzero(lengths > settings.max_sequence_length)
        if too_long.size and not count:
            first = f"{part.path}: row {part.first_row + too_long[0]}: has {lengths[too_long[0]]} tokens"
        count, longest = count + too_long.size, max(longest, int(lengths.max(initial=0)))
    return (
        f"{first}, allowed are 1 to {settings.max_sequence_length}; {count:,} of {table.rows:,} rows are longer, the "
        f"longest has {longest}: raise --max-sequence-length, or say --too-long truncate, split or drop"
    )


def _atoms(table: GroupedTable, rows: GroupRows, sequences: RowSequences, settings: TableSettings) -> Atoms:
    from gaudi_bert.records.tables.sequences import atoms_of_values, plain_atoms

    column = settings.keep_together
    if column is None:
        return plain_atoms(sequences)
    atoms = atoms_of_values(sequences, rows.scalars.column(column), column)
    most_tokens = settings.max_sequence_length
    most_sequences = settings.max_sequence_length if settings.depth == "max" else settings.depth
    sizes = np.diff(atoms.offsets)
    for what, counted, most, option in (
        ("tokens", atoms.lengths, most_tokens, "max-sequence-length"),
        ("sequences", sizes, most_sequences, "depth"),
    ):
        if (counted > most).any():
            worst = int(np.argmax(counted > most))
            row = int(sequences.rows[atoms.members[atoms.offsets[worst]]])
            place = _place_of(table, int(rows.numbers[row]))
            raise InputError(
                f"{place}: the {sizes[worst]} rows whose {column} is {rows.scalars.column(column)[row]} hold "
                f"{counted[worst]} {what}, a pack holds at most {most}; raise --{option}, or part these rows"
            )
    return atoms


def _place_of(table: GroupedTable, number: int) -> str:
    """How errors name a row of the whole table."""
    starts = np.concatenate([[0], np.cumsum(table.file_rows)])
    file = int(np.searchsorted(starts, number, side="right")) - 1
    return f"{table.files[file]}: row {number - starts[file]}"


def _deal(atoms: Atoms, sequences: RowSequences, settings: TableSettings, group: int) -> _Dealt:
    """Pack the atoms, and put their sequences in the order in which they are written."""
    from gaudi_bert.packing.algorithms import pack_histogram
    from gaudi_bert.packing.histogram import Histogram
    from gaudi_bert.records.assign import assign_sequences
    from gaudi_bert.records.tables.gather import PackSequences

    slots, sizes = settings.max_sequence_length, np.diff(atoms.offsets)
    counts = np.bincount(atoms.lengths, minlength=slots + 1)[1:].astype(np.int64)
    most = None
    if settings.keep_together is not None and settings.depth != "max":
        # The limit of sequences holds for atoms of several: it is a budget of which each may take what the largest does.
        most = np.zeros(slots, np.int64)
        np.maximum.at(most, atoms.lengths - 1, sizes)
    packing = pack_histogram(
        Histogram(slots, counts, most),
        settings.algorithm,
        settings.depth,
        masked_slots=None if most is None else int(settings.depth),
        seed=settings.seed,
        quick_bound=settings.depth == "max",  # the tokens say nearly all there is to say
    )
    dealt = assign_sequences(atoms.lengths.astype(np.int32), list(packing.mixture.items()), settings.seed, group)
    order, offsets = dealt.members.astype(np.int64), dealt.starts
    if settings.keep_together is not None:
        of_atoms = sizes[order]
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(of_atoms)])
        places = np.arange(ends[-1]) + np.repeat(atoms.offsets[order] - ends[:-1], of_atoms)
        order, offsets = atoms.members[places], ends[dealt.starts]
    return _Dealt(PackSequences(offsets, sequences.rows[order], sequences.starts[order], sequences.lengths[order]), packing)


def _write_shards(
    out: Path,
    table: GroupedTable,
    number: int,
    settings: TableSettings,
    rows: GroupRows,
    packs: PackSequences,
    workers: int | None,
) -> Sequence[Shard]:
    from gaudi_bert.records.assign import count_shards, shard_bounds
    from gaudi_bert.records.read.threads import map_in_threads
    from gaudi_bert.records.tables.write_packs import pack_bytes, table_shard_name, write_table_shard

    layout = layout_of(table, settings)
    size = packs.packs * pack_bytes(layout) + (0 if settings.index_only or rows.scalars is None else rows.scalars.nbytes)
    shards = count_shards(packs.packs, size, settings.shard_multiple, settings.shard_bytes)
    bounds = shard_bounds(packs.packs, shards, 0)
    scalars = rows.scalars.take(packs.rows) if layout.columns.scalars and not settings.index_only else None
    return map_in_threads(
        lambda shard, _: write_table_shard(
            out / table_shard_name(number, shard),
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
