"""The stage `inspect`: one record of a TFRecord file, packed or not, shown so that a person can check it.

Records are cut into sequences by `input_mask` (in a packed one it holds the number of the sequence), and everything else is
listed under the sequence that it belongs to. What first contradicts the contract is listed under `problems`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gaudi_bert.artefacts.mirrored_folder import local_copies
from gaudi_bert.artefacts.packed import Metadata, pack_kind
from gaudi_bert.common.arrays import AnyArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.features import PackedFeature, UnpackedFeature
from gaudi_bert.common.files import read_text
from gaudi_bert.common.progress import format_count
from gaudi_bert.tfrecords.files import list_record_files
from gaudi_bert.tfrecords.wire.example import decode_example
from gaudi_bert.tfrecords.wire.framing import read_records
from gaudi_bert.tfrecords.wire.schema import (
    RecordError,
    check_features,
    check_values,
    packed_schema_of,
    unpacked_schema_of,
)

_UNPACKED_KEYS = tuple(feature.key for feature in UnpackedFeature)
_ADDED_KEYS = tuple(feature.key for feature in PackedFeature if feature.key not in _UNPACKED_KEYS)
"""What only packing adds."""


@dataclass(frozen=True)
class _MaskedPosition:
    """A masked position, counted in its sequence, and what was there; `token` where a vocabulary is given."""

    position: int
    id: int
    token: str | None = None


@dataclass(frozen=True)
class SequenceView:
    """One sequence of a record."""

    number: int  # in the record, from 1
    start: int
    length: int
    input_ids: tuple[int, ...]
    segments: tuple[tuple[int, int], ...]  # (segment, how many tokens), one after another
    masked: tuple[_MaskedPosition, ...]
    next_sentence_label: int | None  # 0 really next, 1 random; None where the record has none
    tokens: tuple[str, ...] | None = None


_NEXT_SENTENCE_LABELS: dict[int | None, str] = {0: "really next", 1: "random next"}


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

    def lines(self) -> list[str]:
        """Return a record for people: two lines for each sequence.

        A masked position shows the token in the row, an arrow, and the token it replaced: `[MASK]→house`.
        """
        kind = f"packed, {format_count(len(self.sequences), 'sequence')}" if self.packed else "unpacked"
        lines = [
            f"{self.file}, record {self.record}: {kind}, {format_count(self.tokens, 'token')} and {self.padding} of padding "
            f"in a row of {self.max_sequence_length}, {format_count(self.masked_slots, 'masked slot')}, {self.bytes} bytes"
        ]
        for sequence in self.sequences:
            label = _NEXT_SENTENCE_LABELS.get(sequence.next_sentence_label, "unknown")
            segments = " + ".join(str(length) for _, length in sequence.segments)
            length = format_count(sequence.length, "token")
            hidden = {masked.position: f"→{masked.token or masked.id}" for masked in sequence.masked}
            tokens = sequence.tokens or map(str, sequence.input_ids)
            words = [f"{token}{hidden.get(position, '')}" for position, token in enumerate(tokens)]
            text = re.sub(r" ##(?!\S*→)", "", " ".join(words))  # the pieces of a word, joined where none is masked
            head = f"{sequence.number}  {length} ({segments}) from {sequence.start}, {len(sequence.masked)} masked, {label}"
            lines += [head, f"   {text}"]
        lines += [f"also holds {key} ({format_count(size, 'value')})" for key, size in self.other_features.items()]
        return lines + [f"PROBLEM: {problem}" for problem in self.problems]


def inspect(file: str | Path, record: int = 0, vocabulary: str | Path | None = None) -> RecordView:
    """Show what record number `record` (from 0) of `file` holds.

    Args:
        file: a TFRecord file, plain, GZIP or ZLIB, of packed or unpacked examples; of a folder, the first that holds some.
        vocabulary: a vocab.txt (one token per line); with it, tokens are given next to their ids.
    """
    with local_copies((file, vocabulary)) as (path, words):
        path = path or Path(file)
        if path.is_dir():
            is_unpacked = pack_kind(path) is None
            path = next(iter(list_record_files(path))) if is_unpacked else path / Metadata.read(path).shard_table.name(0)
        return _view(path, record, words)


def _view(path: Path, record: int, vocabulary: Path | None) -> RecordView:
    payload = next(itertools.islice(read_records(path), record, None), None) if record >= 0 else None
    if payload is None:
        raise InputError(f"{path}: has no record {record}; the first is --record 0")
    words = None if vocabulary is None else read_text(vocabulary).removesuffix("\n").split("\n")
    try:
        features = decode_example(payload)
    except RecordError as error:
        raise InputError(f"{path}: record {record}: {error}; inspect shows tf.train.Example records") from error
    missing = [key for key in _UNPACKED_KEYS if key not in features]
    if missing:
        raise InputError(
            f"{path}: record {record}: has no feature {', '.join(missing)} "
            f"(it has {', '.join(sorted(features)) or 'none'}); inspect shows BERT pretraining examples, packed or unpacked"
        )
    packed = all(key in features for key in _ADDED_KEYS)
    problems: list[str] = []
    sequences: list[SequenceView] = []
    try:
        schema = packed_schema_of(features) if packed else unpacked_schema_of(features)
        check_features(features, schema)
        sequences = list(_sequences(features, words, problems))  # also of values that break the contract
        check_values(features, schema)
    except (RecordError, InputError) as error:
        problems.append(str(error))
    slots, tokens = int(features["input_ids"].size), sum(sequence.length for sequence in sequences)
    known = _UNPACKED_KEYS + (_ADDED_KEYS if packed else ())
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


def _sequences(features: Mapping[str, AnyArray], words: Sequence[str] | None, problems: list[str]) -> Iterator[SequenceView]:
    """Yield the sequences of a record whose lists have their lengths, as far as `input_mask` is 1..1 2..2 and so on.

    With a vocabulary, `words`, tokens are next to their ids; an id outside it is a problem, and shows as its number.
    """

    def token(number: int) -> str | None:
        if words is None:
            return None
        return words[number] if 0 <= number < len(words) else f"<{number}>"

    mask, labels = features["input_mask"].astype(np.int64), features["next_sentence_labels"]
    start = 0
    for number in range(1, int(mask.max(initial=0)) + 1):
        end = start + int(np.count_nonzero(mask == number))
        if end == start or np.any(mask[start:end] != number):
            return
        is_own = features["masked_lm_weights"] == number
        positions, masked_ids = (features[key][is_own].tolist() for key in ("masked_lm_positions", "masked_lm_ids"))
        ids, segments = (features[key][start:end].tolist() for key in ("input_ids", "segment_ids"))
        outside = 0 if words is None else sum(not 0 <= each < len(words) for each in (*ids, *masked_ids))
        if words is not None and outside:
            problems.append(f"sequence {number}: {outside} ids are outside the vocabulary of {len(words)} tokens")
        yield SequenceView(
            number=number,
            start=start,
            length=end - start,
            input_ids=tuple(ids),
            segments=tuple((segment, sum(1 for _ in members)) for segment, members in itertools.groupby(segments)),
            masked=tuple(map(_MaskedPosition, (at - start for at in positions), masked_ids, map(token, masked_ids))),
            next_sentence_label=int(labels[number - 1]) if number <= labels.size else None,
            tokens=None if words is None else tuple(f"{token(each)}" for each in ids),
        )
        start = end
