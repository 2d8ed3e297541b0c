"""Rows of packs with the names of packed tables, kept as columns of many packs.

    input_ids, token_type_ids, position_ids, sequence_ids, labels  [L]
    seq_lens, next_sentence_labels                                 [k], one value for each sequence of the pack

Positions of trailing pads count from 0, as if they were one more sequence; labels are -100 where no token was masked.

A row is a mapping of names to views of the columns of its block, made when they are asked for; rows that lie side by side in
one block become a batch without being looked at one by one.

Letters: B packs, L positions, S depth, k sequences of one pack.
"""

from __future__ import annotations

from collections.abc import Iterator, KeysView, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gaudi_bert.common.arrays import AnyArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.records.read.pack_rows import NOT_PREDICTED, pack_rows

__all__ = ["NOT_PREDICTED", "Row", "rows_of_packs", "sequence_counts", "sequence_matrix", "token_matrix"]

Row = Mapping[str, AnyArray]
"""One pack."""


class _Block(NamedTuple):
    """Packs as columns: of a value a token [B, L], of a value a sequence [B, S], and how many sequences each has.

    `names` are the keys of both.
    """

    of_tokens: dict[str, AnyArray]
    of_sequences: dict[str, AnyArray]
    counts: AnyArray
    names: dict[str, None]


class _PackRow(Mapping[str, AnyArray]):
    """One pack of a block."""

    __slots__ = ("block", "place")

    def __init__(self, block: _Block, place: int) -> None:
        self.block, self.place = block, place

    def __getitem__(self, name: str) -> AnyArray:
        block, place = self.block, self.place
        if name in block.of_tokens:
            return block.of_tokens[name][place]
        return block.of_sequences[name][place, : block.counts[place]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.block.names)

    def keys(self) -> KeysView[str]:
        """The names of the columns, as a dictionary has them: `dict(row)` asks for them."""
        return self.block.names.keys()

    def __len__(self) -> int:
        return len(self.block.names)

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process goes the row alone."""
        return dict, (dict(self),)

    def __repr__(self) -> str:
        return repr(dict(self))


def rows_of_packs(packs: Mapping[str, AnyArray]) -> list[Row]:
    """Rows of the ten packed features of B packs, int32 and float32 matrices, which are not to be used any more.

    Raises:
        InputError: a pack is not one.
    """
    made = pack_rows(packs)
    of_tokens = {
        "input_ids": packs["input_ids"],
        "token_type_ids": packs["segment_ids"],
        "position_ids": made.position_ids,
        "sequence_ids": packs["input_mask"],
        "labels": made.labels,
    }
    of_sequences = {"seq_lens": made.seq_lens, "next_sentence_labels": packs["next_sentence_labels"]}
    block = _Block(of_tokens, of_sequences, made.sequences, dict.fromkeys((*of_tokens, *of_sequences)))
    return [_PackRow(block, place) for place in range(len(made.sequences))]


def _side_by_side(rows: Sequence[Row]) -> tuple[_Block, slice] | None:
    """The block that holds exactly these rows in their order, and where; None where there is none."""
    first = rows[0]
    if not isinstance(first, _PackRow):
        return None
    for number, row in enumerate(rows):
        if not (isinstance(row, _PackRow) and row.block is first.block and row.place == first.place + number):
            return None
    return first.block, slice(first.place, first.place + len(rows))


def token_matrix(rows: Sequence[Row], name: str) -> AnyArray:
    """A column of a value a token, [B, L]; perhaps a view.

    Raises:
        InputError: the rows have unequal lengths.
    """
    found = _side_by_side(rows)
    if found is not None:
        return found[0].of_tokens[name][found[1]]
    if len({len(row[name]) for row in rows}) != 1:
        raise InputError("rows of unequal lengths in one batch: all packs of a batch have the same length")
    return np.stack([row[name] for row in rows])


def sequence_counts(rows: Sequence[Row], name: str) -> AnyArray:
    """How many values a column of a value a sequence has in each row, [B]."""
    found = _side_by_side(rows)
    return np.array([len(row[name]) for row in rows]) if found is None else found[0].counts[found[1]]


def sequence_matrix(rows: Sequence[Row], name: str, depth: int, empty: int) -> AnyArray:
    """A column of a value a sequence, int64 [B, depth], `empty` behind the last of a row. No row has more than `depth`."""
    values = np.full((len(rows), depth), empty, np.int64)
    found = _side_by_side(rows)
    if found is None:
        for to, row in zip(values, rows, strict=True):
            to[: len(row[name])] = row[name]
        return values
    block, place = found
    given = block.of_sequences[name][place, :depth]
    np.copyto(values[:, : given.shape[1]], given, where=np.arange(given.shape[1]) < block.counts[place, np.newaxis])
    return values
