"""Naive twins: of packing, which follows the contract's words and nothing else; and of the vendor's reader of HDF5 packs.

Lists in, lists out, one value at a time.
"""

from __future__ import annotations

from pathlib import Path


def restored_ids(example: dict) -> list[int]:
    """The token ids of an unpacked example before masking, with padding."""
    ids = list(example["input_ids"])
    slots = zip(example["masked_lm_positions"], example["masked_lm_ids"], example["masked_lm_weights"], strict=True)
    for position, token, weight in slots:
        ids[position] = token if weight == 1 else ids[position]
    return [int(each) for each in ids]


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
        size = {"masked": masked_slots, "next": depth}.get(name.partition("_")[0], max_sequence_length)
        if len(values) > size:
            raise ValueError(f"{name} has {len(values)} values, room for {size}")
        values.extend([0] * (size - len(values)))
    return packed


# --- the vendor's reader, written from the description of the format

TYPES = {
    "input_ids": "int32",
    "input_mask": "int32",
    "segment_ids": "int8",
    "positions": "int32",
    "masked_lm_positions": "int32",
    "masked_lm_ids": "int32",
    "next_sentence_positions": "int32",
    "next_sentence_labels": "int8",
    "next_sentence_weights": "int32",
}


def read_packs(folder: Path, length: int, predictions: int) -> list[dict]:
    """The packs of all files of a folder, as dictionaries of lists; `predictions` is P of the sequences."""
    import h5py

    packs = []
    for path in sorted(folder.iterdir()):
        with h5py.File(path) as file:
            assert {name: file[name].dtype.name for name in file} == TYPES
            assert all(file[name].compression == "gzip" for name in file)
            columns = {name: file[name][:].tolist() for name in file}
        for row in zip(*columns.values(), strict=True):
            pack = dict(zip(columns, row, strict=True))
            assert len(pack["input_ids"]) == len(pack["positions"]) == len(pack["input_mask"]) == length
            assert len(pack["next_sentence_weights"]) == 3
            assert len(pack["masked_lm_ids"]) >= predictions + 3
            packs.append(pack)
    return packs


def sequences_of(pack: dict) -> list[tuple]:
    """(ids, segments, [(position, id)] counted in the sequence, label) of each sequence of a pack."""
    masked = []
    for position, token in zip(pack["masked_lm_positions"], pack["masked_lm_ids"], strict=True):
        if position == 0:  # here the vendor's reader stops
            break
        masked.append((position, token))
    assert not any(pack["masked_lm_positions"][len(masked) :] + pack["masked_lm_ids"][len(masked) :])
    found, count = [], sum(pack["next_sentence_weights"])
    assert pack["next_sentence_weights"] == [1] * count + [0] * (3 - count)
    for number in range(1, count + 1):
        slots = [slot for slot, owner in enumerate(pack["input_mask"]) if owner == number]
        first, last = slots[0], slots[-1]
        assert slots == list(range(first, last + 1))
        assert pack["next_sentence_positions"][number - 1] == first
        assert [pack["positions"][slot] for slot in slots] == list(range(len(slots)))
        inside = tuple((position - first, token) for position, token in masked if first <= position <= last)
        ids = tuple(pack["input_ids"][slot] for slot in slots)
        segments = tuple(pack["segment_ids"][slot] for slot in slots)
        found.append((ids, segments, inside, pack["next_sentence_labels"][number - 1]))
    padding = [slot for slot, owner in enumerate(pack["input_mask"]) if owner == 0]
    assert not any(pack[name][slot] for name in ("input_ids", "segment_ids", "positions") for slot in padding)
    return found
