"""The naive twin of packing: lists in, lists out, one value at a time. It follows the contract's words and nothing else."""

from __future__ import annotations


def pack_sequences(sequences: list[dict], max_sequence_length: int, masked_slots: int, depth: int) -> dict[str, list]:
    """The features of one packed example that holds `sequences` (unpacked features) in this order."""
    names = [
        *("input_ids", "input_mask", "segment_ids", "positions", "masked_lm_positions", "masked_lm_ids"),
        *("masked_lm_weights", "next_sentence_positions", "next_sentence_labels", "next_sentence_weights"),
    ]
    packed: dict[str, list] = {name: [] for name in names}
    for number, sequence in enumerate(sequences, start=1):
        start = len(packed["input_ids"])
        packed["next_sentence_positions"].append(start)
        packed["next_sentence_labels"].append(sequence["next_sentence_labels"][0])
        packed["next_sentence_weights"].append(1.0)
        for position in range(max_sequence_length):
            if sequence["input_mask"][position] == 1:
                packed["input_ids"].append(sequence["input_ids"][position])
                packed["segment_ids"].append(sequence["segment_ids"][position])
                packed["input_mask"].append(number)
                packed["positions"].append(position)
        for slot, weight in enumerate(sequence["masked_lm_weights"]):
            if weight == 1.0:
                packed["masked_lm_positions"].append(sequence["masked_lm_positions"][slot] + start)
                packed["masked_lm_ids"].append(sequence["masked_lm_ids"][slot])
                packed["masked_lm_weights"].append(float(number))
    for name, values in packed.items():
        size = max_sequence_length
        if name.startswith("masked_lm"):
            size = masked_slots
        if name.startswith("next_sentence"):
            size = depth
        if len(values) > size:
            raise ValueError(f"{name} has {len(values)} values, room for {size}")
        values.extend([0] * (size - len(values)))
    return packed
