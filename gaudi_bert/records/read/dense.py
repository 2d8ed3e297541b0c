"""Packs as dense arrays straight from the unpacked bytes of a group (numba kernel).

The same packs that `pack.PackEncoder` writes as records, as the matrices that a training step takes; nothing
is encoded and decoded in between. The index of the scan says where each sequence's values lie and how many
bytes they take, and the scan has checked them, so decoding cannot leave the buffer.

Letters of shapes: B packs of the batch, L max_sequence_length, Q masked_slots, S depth.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from gaudi_bert.common.errors import InputError
from gaudi_bert.records.read.unpacked_index import IDS, LABEL, LENGTH, MASKED, MASKED_IDS, POSITIONS, SEGMENTS
from gaudi_bert.records.schema import PackedSchema

__all__ = ["dense_packs"]


def dense_packs(
    schema: PackedSchema,
    buffer: np.ndarray,
    offsets: np.ndarray,
    index: np.ndarray,
    starts: np.ndarray,
    members: np.ndarray,
    packs: np.ndarray,
) -> dict[str, np.ndarray]:
    """The packed features of some packs of a group.

    Args:
        schema: of the packed examples.
        buffer: uint8, the group's bytes.
        offsets: int64 [sequences], where each payload starts in the buffer.
        index: int32 [sequences, INDEX_COLUMNS], from the scan.
        starts, members: pack p holds the sequences `members[starts[p] : starts[p + 1]]`.
        packs: int64 [B], the packs that are wanted, in this order.

    Returns:
        The ten features, int32 and (weights) float32: [B, L], [B, Q] or [B, S].

    Raises:
        InputError: a pack holds more sequences, tokens or masked positions than the schema has room for.
    """
    features = {spec.name: np.zeros((packs.size, spec.length), _dtype(spec.kind)) for spec in schema.features}
    full = _fill(
        buffer,
        offsets,
        index,
        starts,
        members,
        packs,
        features["input_ids"],
        features["input_mask"],
        features["segment_ids"],
        features["positions"],
        features["masked_lm_positions"],
        features["masked_lm_ids"],
        features["masked_lm_weights"],
        features["next_sentence_positions"],
        features["next_sentence_labels"],
        features["next_sentence_weights"],
    )
    if full >= 0:
        raise InputError(
            f"pack {packs[full]} of its group does not fit into {schema.max_sequence_length} tokens, "
            f"{schema.masked_slots} masked slots and {schema.depth} sequences; make the plan again from these records"
        )
    return features


def _dtype(kind: str) -> type[np.generic]:
    return np.float32 if kind == "float32" else np.int32


@njit(nogil=True, cache=True)
def _fill(
    buffer: np.ndarray,
    offsets: np.ndarray,
    index: np.ndarray,
    starts: np.ndarray,
    members: np.ndarray,
    packs: np.ndarray,
    input_ids_BL: np.ndarray,
    input_mask_BL: np.ndarray,
    segment_ids_BL: np.ndarray,
    positions_BL: np.ndarray,
    masked_positions_BQ: np.ndarray,
    masked_ids_BQ: np.ndarray,
    masked_weights_BQ: np.ndarray,
    starts_BS: np.ndarray,
    labels_BS: np.ndarray,
    weights_BS: np.ndarray,
) -> int:
    """Fill the rows; the row of the first pack that does not fit, or -1."""
    length, slots, depth = input_ids_BL.shape[1], masked_ids_BQ.shape[1], labels_BS.shape[1]
    for row in range(packs.size):
        mine = members[starts[packs[row]] : starts[packs[row] + 1]]
        token, slot = 0, 0
        if mine.size > depth:
            return row
        for place in range(mine.size):
            entry = index[mine[place]]
            payload = offsets[mine[place]]
            real, masked = entry[LENGTH], entry[MASKED]
            if token + real > length or slot + masked > slots:
                return row
            starts_BS[row, place] = token
            labels_BS[row, place] = entry[LABEL]
            weights_BS[row, place] = 1
            input_mask_BL[row, token : token + real] = place + 1
            for step in range(real):
                segment_ids_BL[row, token + step] = buffer[payload + entry[SEGMENTS] + step]
                positions_BL[row, token + step] = step
            _decode(buffer, payload + entry[IDS], input_ids_BL[row, token : token + real], 0)
            _decode(buffer, payload + entry[POSITIONS], masked_positions_BQ[row, slot : slot + masked], token)
            _decode(buffer, payload + entry[MASKED_IDS], masked_ids_BQ[row, slot : slot + masked], 0)
            masked_weights_BQ[row, slot : slot + masked] = place + 1
            token += real
            slot += masked
    return -1


@njit(nogil=True, cache=True)
def _decode(buffer: np.ndarray, place: int, values: np.ndarray, added: int) -> None:
    """Fill `values` with varints of at most three bytes from `place` on, each plus `added`."""
    for step in range(values.size):
        value = np.int64(buffer[place])
        place += 1
        if value >= 128:
            byte = np.int64(buffer[place])
            place += 1
            value = (value & 127) | (byte & 127) << 7
            if byte >= 128:
                value |= np.int64(buffer[place]) << 14
                place += 1
        values[step] = value + added
