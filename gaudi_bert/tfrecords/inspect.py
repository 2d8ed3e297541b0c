"""The stage `inspect`, which shows one packed or unpacked record of a TFRecord file so that a person can check it.

The record is split into sequences by its `input_mask`, which contains the sequence number of each token. All other values
are shown with the sequence to which they belong. If the record violates the contract of pretraining examples, the first
violation is listed in `problems`. Nothing is repaired or written.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gaudi_bert.artefacts.mirrored_folder import open_local_copies
from gaudi_bert.artefacts.packed import RecordMetadata, detect_pack_format
from gaudi_bert.common.arrays import AnyArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.features import PackedFeature, UnpackedFeature
from gaudi_bert.common.files import read_text
from gaudi_bert.common.progress import format_count
from gaudi_bert.tfrecords.scan import list_record_files
from gaudi_bert.tfrecords.wire.example import decode_example
from gaudi_bert.tfrecords.wire.framing import read_records
from gaudi_bert.tfrecords.wire.schema import (
    RecordError,
    check_features,
    check_values,
    infer_packed_schema,
    infer_unpacked_schema,
)

_UNPACKED_KEYS = tuple(feature.key for feature in UnpackedFeature)
# The keys of features that packed records contain, but unpacked records do not.
_ADDED_KEYS = tuple(feature.key for feature in PackedFeature if feature.key not in _UNPACKED_KEYS)


@dataclass(frozen=True)
class _MaskedPosition:
    """A masked position and the token that was there before masking.

    Attributes:
        position: The position in the sequence, from 0.
        id: The original token id.
        token: The original token, or None without a vocabulary.
    """

    position: int
    id: int
    token: str | None = None


@dataclass(frozen=True)
class SequenceView:
    """One sequence of a record, as `inspect` shows it to the user.

    Attributes:
        number: The number of the sequence in the record, from 1.
        start: The position of its first token in the row.
        length: The number of its tokens.
        input_ids: Its token ids.
        segments: Pairs (segment id, number of tokens) in the order of the tokens.
        masked: Its masked positions.
        next_sentence_label: 0 if the second sentence follows the first in the corpus, 1 if it is random, or None if the
            record has no label for this sequence.
        tokens: Its tokens, or None without a vocabulary.
    """

    number: int
    start: int
    length: int
    input_ids: tuple[int, ...]
    segments: tuple[tuple[int, int], ...]
    masked: tuple[_MaskedPosition, ...]
    next_sentence_label: int | None
    tokens: tuple[str, ...] | None = None


_NEXT_SENTENCE_LABELS: dict[int | None, str] = {0: "really next", 1: "random next"}


@dataclass(frozen=True)
class RecordView:
    """One record and its sequences, as `inspect` shows them to the user.

    Attributes:
        file: The name of the file.
        record: The number of the record in the file, from 0.
        bytes: The size of the record's payload.
        packed: Whether the record has the features of a pack.
        max_sequence_length: The number of tokens in the row, including padding.
        masked_slots: The number of masked slots, used or not.
        tokens: The number of non-padding tokens.
        padding: The number of padding tokens.
        sequences: The sequences, as far as the record can be split into them.
        problems: Violations of the contract, and token ids outside the vocabulary.
        other_features: The number of values in each feature that packing does not use.
    """

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

    def format_lines(self) -> list[str]:
        """Format the record as lines of text. The first line describes the record, and each sequence has two lines.

        Further lines list features that packing does not use, and problems. At a masked position, the text shows the token
        in the row, an arrow and the original token, such as `[MASK]→house`.
        """
        kind = f"packed, {format_count(len(self.sequences), 'sequence')}" if self.packed else "unpacked"
        lines = [
            f"{self.file}, record {self.record}: {kind}, {format_count(self.tokens, 'token')} and {self.padding} padding "
            f"in a row of {self.max_sequence_length}, {format_count(self.masked_slots, 'masked slot')}, {self.bytes} bytes"
        ]
        for sequence in self.sequences:
            label = _NEXT_SENTENCE_LABELS.get(sequence.next_sentence_label, "unknown")
            segments = " + ".join(str(length) for _, length in sequence.segments)
            length = format_count(sequence.length, "token")
            hidden = {masked.position: f"→{masked.token or masked.id}" for masked in sequence.masked}
            tokens = sequence.tokens or map(str, sequence.input_ids)
            words = [f"{token}{hidden.get(position, '')}" for position, token in enumerate(tokens)]
            text = re.sub(r" ##(?!\S*→)", "", " ".join(words))  # join a piece to its word unless the piece is masked
            head = f"{sequence.number}  {length} ({segments}) from {sequence.start}, {len(sequence.masked)} masked, {label}"
            lines += [head, f"   {text}"]
        lines += [f"also contains {key} ({format_count(size, 'value')})" for key, size in self.other_features.items()]
        return lines + [f"PROBLEM: {problem}" for problem in self.problems]


def inspect_record(file: str | Path, record: int = 0, vocabulary: str | Path | None = None) -> RecordView:
    """Read one record of a file, and return its contents in a form that a person can check.

    Args:
        file: A TFRecord file of packed or unpacked examples, plain or compressed with GZIP or ZLIB, or an HDF5 file. For a
            folder, its first file is read.
        record: The number of the record in the file, from 0.
        vocabulary: A `vocab.txt` with one token per line. With a vocabulary, the view also contains tokens.

    Raises:
        InputError: The file cannot be read, or the record does not exist or is not a BERT pretraining example.
    """
    with open_local_copies((file, vocabulary)) as (path, vocabulary_path):
        path = path or Path(file)
        if path.is_dir():
            if detect_pack_format(path) is None:
                path = next(iter(list_record_files(path)))
            else:
                path /= RecordMetadata.read(path).shard_table.file_name(0)
        return _read_record_view(path, record, vocabulary_path)


def _read_record_view(path: Path, record: int, vocabulary: Path | None) -> RecordView:
    """Read one record of a local file, and return its contents as `inspect` prints them."""
    payload = next(itertools.islice(read_records(path), record, None), None) if record >= 0 else None
    if payload is None:
        raise InputError(f"{path}: the file does not contain record {record}; pass --record 0 for the first record")
    vocabulary_tokens = None if vocabulary is None else read_text(vocabulary).removesuffix("\n").split("\n")
    try:
        features = decode_example(payload)
    except RecordError as error:
        raise InputError(f"{path}: record {record}: {error}; pass a file of BERT pretraining examples") from error
    missing = [key for key in _UNPACKED_KEYS if key not in features]
    if missing:
        raise InputError(
            f"{path}: record {record}: expected the features {', '.join(missing)},"
            f" found {', '.join(sorted(features)) or 'none'}; pass a file of BERT pretraining examples, packed or unpacked"
        )
    packed = all(key in features for key in _ADDED_KEYS)
    problems: list[str] = []
    sequences: list[SequenceView] = []
    try:
        schema = infer_packed_schema(features) if packed else infer_unpacked_schema(features)
        check_features(features, schema)
        sequences = list(
            _split_into_sequences(features, vocabulary_tokens, problems)
        )  # before the values are checked, to show invalid ones too
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


def _split_into_sequences(
    features: Mapping[str, AnyArray], vocabulary_tokens: Sequence[str] | None, problems: list[str]
) -> Iterator[SequenceView]:
    """Split a record into its sequences, and yield a `SequenceView` for each of them.

    The feature `input_mask` contains the sequence number of each token. The values need not be valid, but the features must
    have the correct lengths. The iteration stops at the first sequence whose number is missing or not contiguous in
    `input_mask`.

    Args:
        features: The decoded features of the record.
        vocabulary_tokens: The tokens of the vocabulary, or None. An id outside the vocabulary is shown as `<id>`.
        problems: Receives a message for each sequence that has ids outside the vocabulary.
    """

    def find_token(token_id: int) -> str | None:
        """Return the token with the id `token_id`, or None if there is no vocabulary."""
        if vocabulary_tokens is None:
            return None
        return vocabulary_tokens[token_id] if 0 <= token_id < len(vocabulary_tokens) else f"<{token_id}>"

    mask, labels = features["input_mask"].astype(np.int64), features["next_sentence_labels"]
    start = 0
    for number in range(1, int(mask.max(initial=0)) + 1):
        end = start + int(np.count_nonzero(mask == number))
        if end == start or np.any(mask[start:end] != number):
            return
        is_own = features["masked_lm_weights"] == number
        positions, masked_ids = (features[key][is_own].tolist() for key in ("masked_lm_positions", "masked_lm_ids"))
        ids, segments = (features[key][start:end].tolist() for key in ("input_ids", "segment_ids"))
        outside = (
            0 if vocabulary_tokens is None else sum(not 0 <= each < len(vocabulary_tokens) for each in (*ids, *masked_ids))
        )
        if vocabulary_tokens is not None and outside:
            problems.append(
                f"sequence {number}: {outside} ids are not in the vocabulary, which has {len(vocabulary_tokens)} tokens"
            )
        yield SequenceView(
            number=number,
            start=start,
            length=end - start,
            input_ids=tuple(ids),
            segments=tuple((segment, sum(1 for _ in members)) for segment, members in itertools.groupby(segments)),
            masked=tuple(map(_MaskedPosition, (at - start for at in positions), masked_ids, map(find_token, masked_ids))),
            next_sentence_label=int(labels[number - 1]) if number <= labels.size else None,
            tokens=None if vocabulary_tokens is None else tuple(f"{find_token(each)}" for each in ids),
        )
        start = end
