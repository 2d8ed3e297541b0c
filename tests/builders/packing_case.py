"""Small data sets: unpacked TFRecords that are counted, planned and packed; and the same examples as HDF5 files."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gaudi_bert.config.sections import PackingSettings
from gaudi_bert.tfrecords.plan import count_records, plan_packs
from gaudi_bert.tfrecords.write import write_packed_records
from tests.builders.reporters import a_run
from tests.oracles.wire import UNPACKED_KEYS, example, frame, packed_list, random_sequence


@dataclass(frozen=True)
class PackingCase:
    records: Path
    plan: Path
    packed: Path
    sequences: list[dict]


def make_case(
    folder: Path,
    files: int = 5,
    sequences_per_file: int = 23,
    max_sequence_length: int = 29,
    max_predictions: int = 5,
    seed: int = 3,
    encode=packed_list,
    compress=bytes,
    **settings,
) -> PackingCase:
    """Write, count, plan and pack; two files per group unless `settings` say otherwise."""
    rng = random.Random(seed)
    records = folder / "records"
    records.mkdir(parents=True)
    sequences = []
    for number in range(files):
        payloads = []
        for _ in range(sequences_per_file):
            order = list(UNPACKED_KEYS)
            rng.shuffle(order)
            sequences.append(random_sequence(rng, max_sequence_length, max_predictions))
            payloads.append(example(sequences[-1], order, encode))
        (records / f"part-{number}").write_bytes(compress(b"".join(frame(payload) for payload in payloads)))
    chosen = PackingSettings(**{"group_sequences": 2 * sequences_per_file, "shard_multiple": 4, **settings})
    count_records(records, folder / "histogram.json", a_run())
    plan_packs([folder / "histogram.json"], folder / "plan.json", chosen, a_run())
    write_packed_records(records, folder / "plan.json", folder / "packed", a_run())
    return PackingCase(records, folder / "plan.json", folder / "packed", sequences)


def sequence_key(ids: list[int], segments: list[int], masked: list[tuple[int, int]], label: int) -> tuple:
    """What makes two sequences the same, wherever they stand in a pack."""
    return (tuple(ids), tuple(segments), tuple(masked), label)


def unpacked_key(features: dict) -> tuple:
    length, masked = sum(features["input_mask"]), int(sum(features["masked_lm_weights"]))
    pairs = list(zip(features["masked_lm_positions"][:masked], features["masked_lm_ids"][:masked], strict=True))
    ids, segments = features["input_ids"][:length], features["segment_ids"][:length]
    return sequence_key(ids, segments, pairs, features["next_sentence_labels"][0])


def packed_keys(row: dict) -> list[tuple]:
    """The sequences of one pack, each feature a list."""
    keys = []
    for number in range(1, max(row["input_mask"]) + 1):
        start, length = row["input_mask"].index(number), row["input_mask"].count(number)
        assert row["next_sentence_positions"][number - 1] == start
        assert row["next_sentence_weights"][number - 1] == 1
        assert row["positions"][start : start + length] == list(range(length))
        slots = [slot for slot, weight in enumerate(row["masked_lm_weights"]) if weight == number]
        pairs = [(row["masked_lm_positions"][slot] - start, row["masked_lm_ids"][slot]) for slot in slots]
        ids, segments = (row[name][start : start + length] for name in ("input_ids", "segment_ids"))
        keys.append(sequence_key(ids, segments, pairs, row["next_sentence_labels"][number - 1]))
    return keys


# --- as NVIDIA's and Habana's PyTorch BERT take them


DATASETS = {
    "input_ids": "i4",
    "input_mask": "i1",
    "segment_ids": "i1",
    "masked_lm_positions": "i4",
    "masked_lm_ids": "i4",
    "next_sentence_labels": "i1",
}


def sequences_for_hdf5(count: int, length: int, predictions: int, seed: int) -> list[dict]:
    """Random examples that the format can hold: the first token of a sequence is never masked."""
    rng = random.Random(seed)
    sequences = []
    while len(sequences) < count:
        sequence = random_sequence(rng, length, predictions)
        if not (sequence["masked_lm_weights"][0] and sequence["masked_lm_positions"][0] == 0):
            sequences.append(sequence)
    return sequences


def columns_of(sequences: Sequence[Mapping]) -> dict[str, np.ndarray]:
    """[N, L], [N, P] and [N] by the names of the datasets."""
    columns = {name: np.array([sequence[name] for sequence in sequences], np.int64) for name in DATASETS}
    return {**columns, "next_sentence_labels": columns["next_sentence_labels"].reshape(-1)}


def write_columns(path: Path, columns: Mapping[str, np.ndarray], types: Mapping[str, str] = DATASETS, **options) -> Path:
    """Write datasets with options of h5py."""
    import h5py

    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            file.create_dataset(name, data=values, dtype=types.get(name), **options)
    return path


def write_hdf5(path: Path, sequences: Sequence[Mapping], **options) -> Path:
    """Write examples, compressed by gzip as the vendor's script does unless options say otherwise."""
    return write_columns(path, columns_of(sequences), **{"compression": "gzip", **options})


def write_tfrecord(path: Path, sequences: Sequence[Mapping]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(frame(example(sequence)) for sequence in sequences))
    return path
