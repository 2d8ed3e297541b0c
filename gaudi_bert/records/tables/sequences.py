"""Sequences: what becomes of the rows of a group under a policy for too long ones, and which of them stay together.

A sequence is a run of tokens of one row. Rows of at most L tokens are one sequence each; a longer one is refused, cut to its
first L tokens, split into pieces of L (the last is shorter), or dropped. An *atom* is what the packer deals: a sequence, or
all sequences of rows that stay together, in their order; its length is their sum.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from gaudi_bert.common.arrays import Int32Array, IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.records.tables.arrow import require_pyarrow

__all__ = ["Atoms", "PolicyEffect", "RowSequences", "TooLong", "atoms_of_values", "cut_rows", "plain_atoms"]

TooLong = Literal["error", "truncate", "split", "drop"]


class PolicyEffect(NamedTuple):
    """What the policy has done to rows that were too long.

    Attributes:
        rows: how many were.
        dropped_rows: how many of them are in no pack.
        dropped_tokens: tokens that are in no pack.
        added_sequences: sequences beyond one a row, from splitting.
    """

    rows: int
    dropped_rows: int
    dropped_tokens: int
    added_sequences: int


class RowSequences(NamedTuple):
    """Runs of tokens, in the order of their rows.

    Attributes:
        rows: int64 [sequences], the row of the group that each is of.
        starts: int32 [sequences], its first token in the row.
        lengths: int32 [sequences], 1 .. L.
    """

    rows: IntArray
    starts: Int32Array
    lengths: Int32Array


class Atoms(NamedTuple):
    """What is packed as one: atom a is `members[offsets[a] : offsets[a + 1]]`.

    Attributes:
        lengths: int64 [atoms], tokens.
        offsets: int64 [atoms + 1].
        members: int64 [sequences], sequences in the order in which an atom holds them.
    """

    lengths: IntArray
    offsets: IntArray
    members: IntArray


def cut_rows(lengths: Int32Array, max_sequence_length: int, policy: TooLong) -> tuple[RowSequences, PolicyEffect]:
    """The sequences of rows of these lengths, and what the policy did.

    Args:
        lengths: int32 [rows], from 1.
        max_sequence_length: L.
        policy: what becomes of rows longer than L; under "error" there must be none.
    """
    rows = np.arange(lengths.size)
    too_long = lengths > max_sequence_length
    affected = int(np.count_nonzero(too_long))
    lost = int(lengths[too_long].sum(dtype=np.int64))
    nowhere = np.zeros(lengths.size, np.int32)
    if not affected or policy == "error":
        return RowSequences(rows, nowhere, lengths), PolicyEffect(0, 0, 0, 0)
    if policy == "truncate":
        cut = np.minimum(lengths, np.int32(max_sequence_length))
        return RowSequences(rows, nowhere, cut), PolicyEffect(affected, 0, lost - affected * max_sequence_length, 0)
    if policy == "drop":
        kept = rows[~too_long]
        return RowSequences(kept, nowhere[kept], lengths[kept]), PolicyEffect(affected, affected, lost, 0)
    pieces = -(-lengths // max_sequence_length)
    of_rows = np.repeat(rows, pieces)
    number = np.arange(of_rows.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = (number * max_sequence_length).astype(np.int32)
    left = np.minimum(lengths[of_rows] - starts, np.int32(max_sequence_length))
    return RowSequences(of_rows, starts, left), PolicyEffect(affected, 0, 0, of_rows.size - lengths.size)


def plain_atoms(sequences: RowSequences) -> Atoms:
    """Every sequence by itself."""
    count = sequences.rows.size
    return Atoms(sequences.lengths.astype(np.int64), np.arange(count + 1), np.arange(count))


def atoms_of_values(sequences: RowSequences, column: Any, name: str) -> Atoms:
    """The sequences of rows with the same value of `column` as one atom, in their order.

    Args:
        sequences: of the rows.
        column: a pyarrow column, one value a row.
        name: of the column, for errors.

    Raises:
        InputError: the column holds values that cannot be compared.
    """
    codes = value_codes(column, name)[sequences.rows]
    order = np.argsort(codes, kind="stable")
    sizes = np.bincount(codes)
    lengths = np.bincount(codes, weights=sequences.lengths).astype(np.int64)
    there = sizes > 0  # the rows of a value may all have been dropped
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes[there])])
    return Atoms(lengths[there], offsets, order)


def value_codes(column: Any, name: str) -> IntArray:
    """int64 [rows]: equal where the values are equal, numbered from 0 as they first occur.

    Raises:
        InputError: the column holds values that cannot be compared.
    """
    pyarrow = require_pyarrow()
    if isinstance(column, pyarrow.ChunkedArray):
        column = column.combine_chunks()
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        encoded = column.dictionary_encode()
    except (pyarrow.ArrowNotImplementedError, pyarrow.ArrowInvalid) as error:
        raise InputError(
            f"column {name} holds {column.type}, whose values cannot be compared; keep rows together by a column of "
            "numbers or text"
        ) from error
    codes: IntArray = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return codes
