"""A stand-in for the packing script that Habana published, written from the description in its article.

Like Habana's script, the stand-in makes two passes in eager TensorFlow, record by record. The first pass reads every file
with TFRecordDataset, parses each example, and sums its `input_mask`. The second pass parses the examples of each pack again,
joins their features in numpy, builds a tf.train.Example with the ten packed features, and writes it with TFRecordWriter. The
stand-in omits the time that Habana's script spends on sending records between processes and on planning, which favours
Habana's script in the comparison.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

DEPTH = 3
INT_FEATURES = ("input_ids", "input_mask", "segment_ids", "masked_lm_positions", "masked_lm_ids", "next_sentence_labels")


def read_records_by_length(tensorflow: Any, file: Path, records: int) -> dict[int, list[Any]]:
    """Read the first `records` records of `file`, and return them by length, in the form in which Habana's script holds them
    in memory.
    """
    by_length: dict[int, list[Any]] = defaultdict(list)
    for record in tensorflow.data.TFRecordDataset(str(file)).take(records):
        example = tensorflow.train.Example()
        example.ParseFromString(record.numpy())
        by_length[sum(example.features.feature["input_mask"].int64_list.value)].append(record)
    return by_length


def write_packs(
    tensorflow: Any, packs: Sequence[Sequence[Any]], out: Path, max_sequence_length: int, max_predictions: int
) -> None:
    """Join the records (EagerTensors) of each pack, and write one example per pack."""
    with tensorflow.io.TFRecordWriter(str(out)) as writer:
        for records in packs:
            features = join_features(
                [parse_record(tensorflow, record) for record in records], max_sequence_length, max_predictions
            )
            writer.write(build_example(tensorflow, features).SerializeToString())


def parse_record(tensorflow: Any, record: Any) -> dict[str, np.ndarray]:
    """Parse a record, and return its features as arrays."""
    example = tensorflow.train.Example()
    example.ParseFromString(record.numpy())
    feature = example.features.feature
    arrays = {name: np.array(feature[name].int64_list.value) for name in INT_FEATURES}
    arrays["masked_lm_weights"] = np.array(feature["masked_lm_weights"].float_list.value)
    return arrays


def join_features(
    sequences: list[dict[str, np.ndarray]], max_sequence_length: int, max_predictions: int
) -> dict[str, np.ndarray]:
    """Return the packed features of a few sequences."""
    packed = {
        name: np.zeros(max_sequence_length, np.int64) for name in ("input_ids", "input_mask", "segment_ids", "positions")
    }
    slots = max_predictions + DEPTH
    packed |= {name: np.zeros(slots, np.int64) for name in ("masked_lm_positions", "masked_lm_ids")}
    packed |= {name: np.zeros(DEPTH, np.int64) for name in ("next_sentence_positions", "next_sentence_labels")}
    packed["masked_lm_weights"] = np.zeros(slots, np.float32)
    packed["next_sentence_weights"] = np.zeros(DEPTH, np.float32)
    start = masked_start = 0
    for number, sequence in enumerate(sequences):
        length = int(sequence["input_mask"].sum())
        masked = int(sequence["masked_lm_weights"].sum())
        row, slot = slice(start, start + length), slice(masked_start, masked_start + masked)
        packed["input_ids"][row] = sequence["input_ids"][:length]
        packed["input_mask"][row] = number + 1
        packed["segment_ids"][row] = sequence["segment_ids"][:length]
        packed["positions"][row] = np.arange(length)
        packed["masked_lm_positions"][slot] = sequence["masked_lm_positions"][:masked] + start
        packed["masked_lm_ids"][slot] = sequence["masked_lm_ids"][:masked]
        packed["masked_lm_weights"][slot] = number + 1
        packed["next_sentence_positions"][number] = start
        packed["next_sentence_labels"][number] = sequence["next_sentence_labels"][0]
        packed["next_sentence_weights"][number] = 1
        start += length
        masked_start += masked
    return packed


def build_example(tensorflow: Any, features: dict[str, np.ndarray]) -> Any:
    """Return the features as a tf.train.Example."""
    train = tensorflow.train
    message = {}
    for name, values in features.items():
        if values.dtype == np.float32:
            message[name] = train.Feature(float_list=train.FloatList(value=list(values)))
        else:
            message[name] = train.Feature(int64_list=train.Int64List(value=list(values)))
    return train.Example(features=train.Features(feature=message))
