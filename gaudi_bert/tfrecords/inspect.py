"""The stage `inspect`: one record of a TFRecord file, shown so that a person can check it.

A record is packed when it has the features that only packing adds (`positions`, `next_sentence_positions`);
otherwise it is one unpacked example. Both are cut into sequences by `input_mask` (in a packed record it holds
the number of the sequence, in an unpacked one it is the number 1 throughout), and everything else is listed
under the sequence that it belongs to. What contradicts the contract is listed under `problems`: this is the tool
for looking at files that are wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.artefacts.pack_kinds import pack_kind
from gaudi_bert.artefacts.store.mirrored_folder import local_copies
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.features import PackedFeature, UnpackedFeature
from gaudi_bert.common.files import read_text
from gaudi_bert.tfrecords.files import list_record_files
from gaudi_bert.tfrecords.packed_folder import read_metadata
from gaudi_bert.tfrecords.wire.example import decode_example
from gaudi_bert.tfrecords.wire.framing import read_records
from gaudi_bert.tfrecords.wire.schema import RecordError

UNPACKED_KEYS = tuple(feature.key for feature in UnpackedFeature)
_ADDED_KEYS = tuple(feature.key for feature in PackedFeature if feature.key not in UNPACKED_KEYS)
"""What only packing adds."""


Features = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True)
class _MaskedPosition:
    """A masked position, counted in its sequence, and what was there; `token` where a vocabulary is given."""

    position: int
    id: int
    token: str | None = None


@dataclass(frozen=True)
class SequenceView:
    """One sequence of a record.

    Attributes:
        number: in the record, from 1.
        segments: (segment, how many tokens), one after another.
        next_sentence_label: 0 really next, 1 random; None where the record has none.
    """

    number: int
    start: int
    length: int
    input_ids: tuple[int, ...]
    segments: tuple[tuple[int, int], ...]
    masked: tuple[_MaskedPosition, ...]
    next_sentence_label: int | None
    tokens: tuple[str, ...] | None = None


@dataclass(frozen=True)
class RecordView:
    """One record; its problems are what contradicts the contract, its other features those that packing does not use."""

    file: str
    record: int
    bytes: int
    packed: bool
    max_sequence_length: int
    masked_slots: int
    tokens: int
    padding: int
    sequences: tuple[SequenceView, ...]
    problems: tuple[str, ...]
    other_features: Mapping[str, int]


def inspect(file: str | Path, record: int = 0, vocabulary: str | Path | None = None) -> RecordView:
    """Show what record number `record` (from 0) of `file` holds.

    Args:
        file: a TFRecord file, plain, GZIP or ZLIB, of packed or unpacked examples; of a folder, the first that holds some.
        vocabulary: a vocab.txt (one token per line); with it, tokens are given next to their ids.
    """
    with local_copies((file, vocabulary)) as (path, words):
        path = path or Path(file)
        return _view(_first_file(path) if path.is_dir() else path, record, words)


def _first_file(folder: Path) -> Path:
    if pack_kind(folder) is None:
        return next(iter(list_record_files(folder)))
    return folder / read_metadata(folder).shard_table.name(0)


def _view(path: Path, record: int, vocabulary: Path | None) -> RecordView:
    payload = _payload(path, record)
    features = _features(path, record, payload)
    packed = all(key in features for key in _ADDED_KEYS)
    problems = _size_problems(features, packed)
    sequences = [] if problems else _sequences(features, packed, problems)
    if vocabulary is not None:
        sequences = _with_tokens(sequences, vocabulary, problems)
    slots, tokens = int(features["input_ids"].size), sum(sequence.length for sequence in sequences)
    known = UNPACKED_KEYS + (_ADDED_KEYS if packed else ())
    return RecordView(
        file=path.name,
        record=record,
        bytes=len(payload),
        packed=packed,
        max_sequence_length=slots,
        masked_slots=int(features["masked_lm_ids"].size),
        tokens=tokens,
        padding=slots - tokens,
        sequences=tuple(sequences),
        problems=tuple(problems),
        other_features={key: int(value.size) for key, value in sorted(features.items()) if key not in known},
    )


def _features(path: Path, record: int, payload: bytes) -> Features:
    try:
        features = decode_example(payload)
    except RecordError as error:
        raise InputError(f"{path}: record {record}: {error}; inspect shows tf.train.Example records") from error
    missing = [key for key in UNPACKED_KEYS if key not in features]
    if missing:
        raise InputError(
            f"{path}: record {record}: has no feature {', '.join(missing)} "
            f"(it has {', '.join(sorted(features)) or 'none'}); inspect shows BERT pretraining examples, packed or unpacked"
        )
    return features


def _payload(path: Path, record: int) -> bytes:
    if record < 0:
        raise InputError(f"{path}: record {record}: records are numbered from 0; pass --record 0 or more")
    count = 0
    for payload in itertools.islice(read_records(path), record + 1):
        if count == record:
            return payload
        count += 1
    raise InputError(f"{path}: has {count} records, record {record} does not exist; the first is --record 0")


def _size_problems(features: Features, packed: bool) -> list[str]:
    """Lists that must be of one length and are not; such a record is not checked further."""
    kind = PackedFeature if packed else UnpackedFeature
    alike = [[feature.key for feature in kind if feature.axis == axis] for axis in ("tokens", "masked", "sequences")]
    return [
        f"{key} has {features[key].size} values, {first} has {features[first].size}"
        for first, *others in alike
        for key in others
        if features[key].size != features[first].size
    ]


def _sequences(features: Features, packed: bool, problems: list[str]) -> list[SequenceView]:
    mask = features["input_mask"].astype(np.int64)
    count = int(mask.max(initial=0))
    sequences, start = [], 0
    for number in range(1, count + 1):
        slots = np.flatnonzero(mask == number)
        if slots.size == 0 or slots[0] != start or slots[-1] - slots[0] + 1 != slots.size:
            problems.append(f"input_mask is not 1..1 2..2 ... 0..0 (at sequence {number})")
            break
        end = start + slots.size
        sequences.append(_sequence(features, packed, number, start, end, problems))
        start = end
    if count < 1 or np.any(mask < 0):
        problems.append("input_mask holds no sequence" if count < 1 else "input_mask holds negative numbers")
    if np.any(features["input_ids"][start:] != 0):
        problems.append("input_ids are not 0 in the padding")
    return sequences


def _sequence(features: Features, packed: bool, number: int, start: int, end: int, problems: list[str]) -> SequenceView:
    """Sequence `number` at start .. end - 1 of the row."""
    masked = []
    slots = np.flatnonzero(features["masked_lm_weights"] == number)
    for slot in slots:
        position = int(features["masked_lm_positions"][slot])
        if not start <= position < end:
            problems.append(f"sequence {number}: masked position {position} is outside {start} .. {end - 1}")
        masked.append(_MaskedPosition(position - start, int(features["masked_lm_ids"][slot])))
    label_slot = number - 1
    labels = features["next_sentence_labels"]
    if packed:
        if not np.array_equal(features["positions"][start:end], np.arange(end - start)):
            problems.append(f"sequence {number}: positions do not count from 0")
        if label_slot >= labels.size or features["next_sentence_weights"][label_slot] != 1:
            problems.append(f"sequence {number}: has no next_sentence_weights of 1")
        elif features["next_sentence_positions"][label_slot] != start:
            problems.append(f"sequence {number}: next_sentence_positions is not its start, {start}")
    segments = itertools.groupby(features["segment_ids"][start:end].tolist())
    return SequenceView(
        number=number,
        start=start,
        length=end - start,
        input_ids=tuple(features["input_ids"][start:end].tolist()),
        segments=tuple((segment, sum(1 for _ in members)) for segment, members in segments),
        masked=tuple(masked),
        next_sentence_label=int(labels[label_slot]) if label_slot < labels.size else None,
    )


def _with_tokens(sequences: list[SequenceView], vocabulary: Path, problems: list[str]) -> list[SequenceView]:
    """With the tokens next to the ids; an id outside the vocabulary is a problem and shows as its number."""
    try:
        tokens = read_text(vocabulary).removesuffix("\n").split("\n")
    except OSError as error:
        raise InputError(f"{vocabulary}: cannot read the vocabulary: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{vocabulary}: is not UTF-8 text ({error}); pass a vocab.txt, one token per line") from error

    def token(number: int) -> str:
        return tokens[number] if 0 <= number < len(tokens) else f"<{number}>"

    named = []
    for sequence in sequences:
        ids = [*sequence.input_ids, *(masked.id for masked in sequence.masked)]
        outside = sum(1 for number in ids if not 0 <= number < len(tokens))
        if outside:
            problems.append(f"sequence {sequence.number}: {outside} ids are outside the vocabulary of {len(tokens)} tokens")
        masked = tuple(replace(masked, token=token(masked.id)) for masked in sequence.masked)
        named.append(replace(sequence, tokens=tuple(map(token, sequence.input_ids)), masked=masked))
    return named
