"""Rows of packs with the names of packed tables, stored as columns of many packs.

    input_ids, token_type_ids, position_ids, sequence_ids, labels  [L]
    seq_lens, next_sentence_labels                                 [k], one value for each sequence of the pack

Positions of trailing pads count from 0, as if they were one more sequence; labels are -100 where no token was masked.

A row is a mapping of names to views of the columns of its block, created on access; adjacent rows of one block become
a batch without a copy.

Letters: B packs, L positions, S depth, k sequences of one pack.
"""

from __future__ import annotations

from collections.abc import Iterator, KeysView, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gaudi_bert.common.arrays import MOST_TOKEN_ID, AnyArray, first_not_whole
from gaudi_bert.common.errors import InputError
from gaudi_bert.encoders.trial import Row
from gaudi_bert.tfrecords.arrays import pack_rows


class _Block(NamedTuple):
    """Packs as columns: with a value per token [B, L], with a value per sequence [B, S], and the sequences of each pack.

    `names` are the keys of both.
    """

    of_tokens: dict[str, AnyArray]
    of_sequences: dict[str, AnyArray]
    counts: AnyArray
    names: dict[str, None]


class _PackRow(Mapping[str, AnyArray]):
    """One pack of a block."""

    __slots__ = ("block", "position")

    def __init__(self, block: _Block, position: int) -> None:
        self.block, self.position = block, position

    def __getitem__(self, name: str) -> AnyArray:
        block, position = self.block, self.position
        if name in block.of_tokens:
            return block.of_tokens[name][position]
        return block.of_sequences[name][position, : block.counts[position]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.block.names)

    def keys(self) -> KeysView[str]:
        """The names of the columns, as of a dictionary: `dict(row)` needs them."""
        return self.block.names.keys()

    def __len__(self) -> int:
        return len(self.block.names)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the row alone, not its block."""
        return dict, (dict(self),)

    def __repr__(self) -> str:
        return repr(dict(self))


def rows_of_packs(packs: Mapping[str, AnyArray]) -> list[Row]:
    """Rows of the ten packed features of B packs, int32 and float32 matrices, which the rows then own."""
    columns = pack_rows(packs)
    of_tokens = {
        "input_ids": packs["input_ids"],
        "token_type_ids": packs["segment_ids"],
        "position_ids": columns["position_ids"],
        "sequence_ids": packs["input_mask"],
        "labels": columns["labels"],
    }
    of_sequences = {"seq_lens": columns["seq_lens"], "next_sentence_labels": packs["next_sentence_labels"]}
    block = _Block(of_tokens, of_sequences, columns["sequences"], dict.fromkeys((*of_tokens, *of_sequences)))
    return [_PackRow(block, position) for position in range(len(columns["sequences"]))]


def _common_block(rows: Sequence[Row]) -> tuple[_Block, slice] | None:
    """The block of which these rows are a slice, and the slice; None where there is none."""
    first = rows[0]
    if not isinstance(first, _PackRow):
        return None
    for number, row in enumerate(rows):
        if not (isinstance(row, _PackRow) and row.block is first.block and row.position == first.position + number):
            return None
    return first.block, slice(first.position, first.position + len(rows))


def token_matrix(rows: Sequence[Row], name: str) -> AnyArray:
    """A column with a value per token, [B, L]; perhaps a view."""
    block = _common_block(rows)
    if block is not None:
        return block[0].of_tokens[name][block[1]]
    if len({len(row[name]) for row in rows}) != 1:
        raise InputError("rows of unequal lengths in one batch: all packs of a batch have the same length")
    matrix = np.stack([np.asarray(row[name]) for row in rows])
    _check_whole(matrix.reshape(-1), name)
    return matrix


def _check_whole(values: AnyArray, name: str) -> None:
    """The user's own numbers must be integers of 32 bits, before they become int64."""
    wrong = first_not_whole(values, -MOST_TOKEN_ID - 1, MOST_TOKEN_ID)
    if wrong >= 0:
        raise InputError(f"{name}: a row holds {values[wrong]}; it must hold integers that fit into 32 bits")


def sequence_counts(rows: Sequence[Row], name: str) -> AnyArray:
    """Return how many values a column with a value per sequence has in each row, [B]."""
    block = _common_block(rows)
    return np.array([len(row[name]) for row in rows]) if block is None else block[0].counts[block[1]]


def sequence_matrix(rows: Sequence[Row], name: str, depth: int, empty: int) -> AnyArray:
    """A column with a value per sequence, int64 [B, depth], then `empty`; no row has more values than `depth`."""
    values = np.full((len(rows), depth), empty, np.int64)
    common = _common_block(rows)
    if common is None:
        for to, row in zip(values, rows, strict=True):
            _check_whole(np.asarray(row[name]), name)
            to[: len(row[name])] = row[name]
        return values
    block, positions = common
    given = block.of_sequences[name][positions, :depth]
    np.copyto(values[:, : given.shape[1]], given, where=np.arange(given.shape[1]) < block.counts[positions, np.newaxis])
    return values
