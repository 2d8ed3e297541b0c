"""Small packed and unpacked folders, written with TensorFlow's own writer, for the tests of training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from gaudi_bert.common.features import PackingMetrics
from gaudi_bert.training.verify_model import Sequence, collate_packs

LENGTH, PREDICTIONS, DEPTH, VOCABULARY = 23, 4, 3, 61
MASKED_SLOTS = PREDICTIONS + DEPTH
MODEL = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 20}
FLOATS = ("masked_lm_weights", "next_sentence_weights")


def make_sequence(random: np.random.Generator, length: int) -> Sequence:
    masked = int(random.integers(1, min(PREDICTIONS, max(1, length // 5)) + 1))
    return Sequence(
        input_ids=random.integers(0, VOCABULARY, length).astype(np.int32),
        segment_ids=(np.arange(length) >= length // 2).astype(np.int32),
        masked_positions=np.sort(random.choice(length, masked, replace=False)).astype(np.int32),
        masked_ids=(random.integers(0, VOCABULARY, masked) // 3).astype(np.int32),
        next_sentence_label=int(random.integers(0, 2)),
    )


def make_packs(count: int, seed: int = 3) -> list[list[Sequence]]:
    """`count` packs of one to three sequences; their masked positions fit `MASKED_SLOTS`."""
    random = np.random.default_rng(seed)
    shapes = [(23,), (11, 12), (5, 7, 11), (3, 4), (19,), (6, 6, 7), (2, 20)]
    return [[make_sequence(random, length) for length in shapes[index % len(shapes)]] for index in range(count)]


def example_bytes(features: dict[str, np.ndarray]) -> bytes:
    import tensorflow as tf

    def feature(name, values):
        if name in FLOATS:
            return tf.train.Feature(float_list=tf.train.FloatList(value=values))
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))

    entries = {name: feature(name, np.ravel(values)) for name, values in features.items()}
    return tf.train.Example(features=tf.train.Features(feature=entries)).SerializeToString(deterministic=True)


def write_records(path: Path, examples: list[bytes], compression: str = "") -> None:
    import tensorflow as tf

    with tf.io.TFRecordWriter(str(path), compression) as writer:
        for example in examples:
            writer.write(example)


def packed_features(packs: list[list[Sequence]]) -> list[dict[str, np.ndarray]]:
    batch = collate_packs(packs, LENGTH, MASKED_SLOTS, DEPTH)
    return [{name: np.asarray(values)[row] for name, values in batch.items()} for row in range(len(packs))]


def unpacked_features(sequence: Sequence) -> dict[str, np.ndarray]:
    def padded(values, size):
        return np.pad(values, (0, size - len(values)))

    return {
        "input_ids": padded(sequence.input_ids, LENGTH),
        "input_mask": padded(np.ones(sequence.length, np.int64), LENGTH),
        "segment_ids": padded(sequence.segment_ids, LENGTH),
        "masked_lm_positions": padded(sequence.masked_positions, PREDICTIONS),
        "masked_lm_ids": padded(sequence.masked_ids, PREDICTIONS),
        "masked_lm_weights": padded(np.ones(len(sequence.masked_ids), np.float32), PREDICTIONS),
        "next_sentence_labels": np.array([sequence.next_sentence_label]),
    }


def write_packed(folder: Path, packs: list[list[Sequence]], shards: int = 4, vocabulary: int | None = VOCABULARY) -> Path:
    folder.mkdir(parents=True)
    features = packed_features(packs)
    entries = []
    for shard in range(shards):
        path = folder / f"packed-00000-{shard:05d}.tfrecord"
        rows = features[shard::shards]
        write_records(path, [example_bytes(row) for row in rows])
        entries.append({"packs": len(rows), "bytes": path.stat().st_size})
    write_metadata(folder, packs, entries, vocabulary)
    return folder


def write_metadata(folder: Path, packs: list[list[Sequence]], shards: list[dict], vocabulary: int | None) -> None:
    lengths = [sequence.length for pack in packs for sequence in pack]
    metadata = {
        **PackingMetrics(len(lengths), len(packs), sum(lengths), len(packs) * LENGTH, 1).to_json_fields(),
        "format_version": 2,
        "tool_version": "0",
        "max_sequence_length": LENGTH,
        "max_predictions": PREDICTIONS,
        "masked_slots": MASKED_SLOTS,
        "depth": DEPTH,
        "seed": 1,
        "algorithm": "nnls",
        "vocabulary": {"size": vocabulary, "sha256": "0"} if vocabulary else None,
        "shard_multiple": len(shards),
        "input_files": 0,
        "groups": [{**{key: [shard[key] for shard in shards] for key in ("packs", "bytes")}, "manifest_crc32c": 1}],
        "histogram": np.bincount(lengths, minlength=LENGTH + 1)[1:].tolist(),
    }
    (folder / "metadata.json").write_text(json.dumps(metadata), encoding="utf-8")


def write_unpacked(folder: Path, packs: list[list[Sequence]], files: int = 2, compression: str = "") -> Path:
    """The same sequences, one a record, in another order than in the packs."""
    folder.mkdir(parents=True)
    sequences = [sequence for pack in packs for sequence in pack]
    for file in range(files):
        examples = [example_bytes(unpacked_features(sequence)) for sequence in sequences[file::files]]
        write_records(folder / f"part-{file:05d}", examples, compression)
    return folder
