"""Packs as dense arrays straight from the unpacked bytes of a group (numba kernel).

The same packs that `write.encoder` writes as records, as the matrices that a training step takes; nothing is encoded and
decoded in between. The index of the scan says where each sequence's values lie and how many bytes they take, and the scan
has checked them, so decoding cannot leave the buffer.

Letters of shapes: B packs of the batch, L max_sequence_length, Q masked_slots, S depth.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gaudi_bert.common.arrays import AnyArray, ByteArray, Float32Array, Int32Array, IntArray
from gaudi_bert.common.compiled import borrowing_kernel, inlined_kernel
from gaudi_bert.common.errors import InputError
from gaudi_bert.records.assign import Assignment
from gaudi_bert.records.read.unpacked_index import IndexedSequences
from gaudi_bert.records.schema import PackedSchema
from gaudi_bert.records.wire.memory import as_word

__all__ = ["dense_packs"]


class _DensePacks(NamedTuple):
    """The packed features under their own names."""

    input_ids: Int32Array
    input_mask: Int32Array
    masked_lm_ids: Int32Array
    masked_lm_positions: Int32Array
    masked_lm_weights: Float32Array
    next_sentence_labels: Int32Array
    next_sentence_positions: Int32Array
    next_sentence_weights: Float32Array
    positions: Int32Array
    segment_ids: Int32Array


def dense_packs(
    schema: PackedSchema, group: IndexedSequences, assignment: Assignment, packs: IntArray
) -> dict[str, AnyArray]:
    """The packed features of some packs of a group.

    Args:
        schema: of the packed examples.
        group: its sequences.
        assignment: which of them each pack holds.
        packs: int64 [B], the packs that are wanted, in this order.

    Returns:
        The ten features by name, int32 and (weights) float32: [B, L], [B, Q] or [B, S].

    Raises:
        InputError: a pack holds more sequences, tokens or masked positions than the schema has room for.
    """
    dtypes: dict[str, Any] = {"int64": np.int32, "float32": np.float32}
    out = _DensePacks(**{spec.name: np.zeros((packs.size, spec.length), dtypes[spec.kind]) for spec in schema.features})
    full = _fill(group, assignment, packs, out)
    if full >= 0:
        raise InputError(
            f"pack {packs[full]} of its group does not fit into {schema.max_sequence_length} tokens, "
            f"{schema.masked_slots} masked slots and {schema.depth} sequences; make the plan again from these records"
        )
    return out._asdict()


@borrowing_kernel
def _fill(group: IndexedSequences, assignment: Assignment, packs: IntArray, out: _DensePacks) -> int:
    """Fill the rows; the row of the first pack that does not fit, or -1."""
    for row in range(packs.size):
        members = assignment.members[assignment.starts[packs[row]] : assignment.starts[packs[row] + 1]]
        if not _fill_row(group, members, out, row):
            return row
    return -1


@inlined_kernel
def _fill_row(group: IndexedSequences, members: Int32Array, out: _DensePacks, row: int) -> bool:
    """Fill one row with the sequences of a pack, one after the other; False where they do not fit."""
    length, slots, depth = out.input_ids.shape[1], out.masked_lm_ids.shape[1], out.next_sentence_labels.shape[1]
    if members.size > depth:
        return False
    token, slot = 0, 0
    for place in range(members.size):
        sequence = group.rows[members[place]]
        payload = group.offsets[members[place]]
        end, slot_end = token + sequence.length, slot + sequence.masked
        if end > length or slot_end > slots:
            return False
        out.next_sentence_positions[row, place] = token
        out.next_sentence_labels[row, place] = sequence.label
        out.next_sentence_weights[row, place] = 1
        out.input_mask[row, token:end] = place + 1
        segments, positions = out.segment_ids[row, token:end], out.positions[row, token:end]
        first_segment = payload + sequence.segments
        for step in range(segments.size):
            segments[step] = group.buffer[first_segment + step]
            positions[step] = step
        _decode(group.buffer, payload + sequence.ids, out.input_ids[row, token:end], 0)
        _decode(group.buffer, payload + sequence.positions, out.masked_lm_positions[row, slot:slot_end], token)
        _decode(group.buffer, payload + sequence.masked_ids, out.masked_lm_ids[row, slot:slot_end], 0)
        out.masked_lm_weights[row, slot:slot_end] = place + 1
        token, slot = end, slot_end
    return True


@borrowing_kernel
def _decode(buffer: ByteArray, place: int, values: Int32Array, added: int) -> None:
    """Fill `values` with varints of at most three bytes from `place` on, each plus `added`."""
    for step in range(values.size):
        value = as_word(buffer[place])
        place += 1
        if value >= 128:
            byte = as_word(buffer[place])
            place += 1
            value = (value & 127) | (byte & 127) << 7
            if byte >= 128:
                value |= as_word(buffer[place]) << 14
                place += 1
        values[step] = value + added
