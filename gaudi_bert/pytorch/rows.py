"""Rows of packs with the names of packed tables, and columns of a batch from rows.

    input_ids, token_type_ids, position_ids, sequence_ids, labels  [L]
    seq_lens, next_sentence_labels                                 [k], one value for each sequence of the pack

Positions of trailing pads count from 0, as if they were one more sequence; labels are -100 where no token was masked.

Letters: B packs, L positions, S depth, k sequences of one pack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gaudi_bert.common.arrays import MOST_TOKEN_ID, AnyArray, first_not_whole
from gaudi_bert.common.errors import InputError
from gaudi_bert.encoders.trial import Row
from gaudi_bert.tfrecords.arrays import pack_rows


def rows_of_packs(packs: Mapping[str, AnyArray]) -> list[Row]:
    """Rows, views of the ten packed features of B packs, int32 and float32 matrices."""
    columns = pack_rows(packs)
    of_tokens = {
        "input_ids": packs["input_ids"],
        "token_type_ids": packs["segment_ids"],
        "position_ids": columns["position_ids"],
        "sequence_ids": packs["input_mask"],
        "labels": columns["labels"],
    }
    of_sequences = {"seq_lens": columns["seq_lens"], "next_sentence_labels": packs["next_sentence_labels"]}
    return [
        {
            **{name: values[number] for name, values in of_tokens.items()},
            **{name: values[number, :count] for name, values in of_sequences.items()},
        }
        for number, count in enumerate(columns["sequences"].tolist())
    ]


def token_matrix(rows: Sequence[Row], name: str) -> AnyArray:
    """A column with a value per token, int64 [B, L]."""
    if len({len(row[name]) for row in rows}) != 1:
        raise InputError("rows of unequal lengths in one batch: all packs of a batch have the same length")
    matrix = np.stack([np.asarray(row[name]) for row in rows])
    _check_whole(matrix.reshape(-1), name)
    return matrix.astype(np.int64)


def _check_whole(values: AnyArray, name: str) -> None:
    """The user's own numbers must be integers of 32 bits, before they become int64."""
    wrong = first_not_whole(values, -MOST_TOKEN_ID - 1, MOST_TOKEN_ID)
    if wrong >= 0:
        raise InputError(f"{name}: a row holds {values[wrong]}; it must hold integers that fit into 32 bits")


def sequence_matrix(rows: Sequence[Row], name: str, depth: int, empty: int) -> AnyArray:
    """A column with a value per sequence, int64 [B, depth], then `empty`; no row has more values than `depth`."""
    values = np.full((len(rows), depth), empty, np.int64)
    for to, row in zip(values, rows, strict=True):
        _check_whole(np.asarray(row[name]), name)
        to[: len(row[name])] = row[name]
    return values
