"""HDF5 files of unpacked examples, as NVIDIA's and Habana's PyTorch BERT take them; and the same examples as TFRecords."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tests.oracles.wire import example, frame, random_sequence

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
