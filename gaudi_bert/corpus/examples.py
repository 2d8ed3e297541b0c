"""Unpacked pretraining examples of one block of documents: [CLS] A [SEP] B [SEP], masked, as framed tf.train.Examples.

A block is the unit of work and of randomness: all that is random in it is a function of (seed, split, block, duplicate), so
neither the number of workers nor who makes a block changes a byte.

Letters of shapes: N sequences, L slots, P masked positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from operator import add
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.common.permutation import philox
from gaudi_bert.corpus.masking import mask_sequences, prediction_counts
from gaudi_bert.corpus.pairs import SegmentPairs, choose_pairs
from gaudi_bert.corpus.randomness import RandomStream
from gaudi_bert.corpus.tokens import TokenBlock, tokenize_documents
from gaudi_bert.corpus.vocabulary import Vocabulary
from gaudi_bert.records.write.rows import encode_rows

__all__ = [
    "BlockExamples",
    "BlockJob",
    "ExampleColumns",
    "ExampleCounts",
    "ExampleSettings",
    "assemble_columns",
    "make_examples",
]

Integers: TypeAlias = NDArray[np.int64]
Slots: TypeAlias = NDArray[np.int32]
Flags: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True)
class ExampleSettings:
    """How examples are made; see `gaudi_bert.config.PrepareSettings`."""

    vocabulary: Vocabulary
    lower_case: bool
    max_sequence_length: int
    max_predictions: int
    duplicates: int
    short_sequence_probability: float
    masked_lm_probability: float
    whole_word_masking: bool
    seed: int


@dataclass(frozen=True)
class ExampleColumns:
    """N examples as matrices: int32 [N, L] and [N, P]; lengths, counts and labels int64 [N]."""

    input_ids: Slots
    segment_ids: Slots
    lengths: Integers
    masked_lm_positions: Slots
    masked_lm_ids: Slots
    masked_counts: Integers
    next_sentence_labels: Integers


@dataclass(frozen=True)
class ExampleCounts:
    """What was counted on the way from text to examples; counts of several blocks are added with `+`."""

    text_documents: int = 0
    text_sentences: int = 0
    text_tokens: int = 0
    unknown_tokens: int = 0
    sequences: int = 0
    tokens: int = 0
    random_next: int = 0
    masked: int = 0

    def __add__(self, other: ExampleCounts) -> ExampleCounts:
        return ExampleCounts(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True)
class BlockExamples:
    """The records of one block, framed, one after the other.

    Args:
        frames: the bytes.
        lengths: int64 [records], bytes of each.
        counts: what was counted on the way.
    """

    frames: bytes
    lengths: Integers
    counts: ExampleCounts


@dataclass(frozen=True)
class BlockJob:
    """The work of one block: its documents (lists of sentences) and what makes its random numbers its own."""

    documents: Sequence[Sequence[str]]
    split: str
    block_number: int
    settings: ExampleSettings


def make_examples(job: BlockJob) -> BlockExamples:
    """All examples, every duplicate, of one block."""
    settings = job.settings
    block = tokenize_documents(job.documents, settings.vocabulary, settings.lower_case)
    unknown = int(np.count_nonzero(block.tokens == settings.vocabulary.number("[UNK]")))
    counts = ExampleCounts(block.documents, block.sentences, len(block.tokens), unknown)
    frames = [np.zeros(0, dtype=np.uint8)]
    lengths = [np.zeros(0, dtype=np.int64)]
    for duplicate in range(settings.duplicates if block.documents else 0):
        columns = _columns_of_duplicate(block, job, duplicate)
        records, record_lengths = _encode(columns)
        frames.append(records)
        lengths.append(record_lengths)
        counts += ExampleCounts(
            sequences=len(columns.lengths),
            tokens=int(columns.lengths.sum()),
            random_next=int(columns.next_sentence_labels.sum()),
            masked=int(columns.masked_counts.sum()),
        )
    return BlockExamples(np.concatenate(frames).tobytes(), np.concatenate(lengths), counts)


def _columns_of_duplicate(block: TokenBlock, job: BlockJob, duplicate: int) -> ExampleColumns:
    settings = job.settings
    random = RandomStream(settings.seed, f"pairs of {job.split}", job.block_number, duplicate)
    pairs = choose_pairs(block, settings.max_sequence_length, settings.short_sequence_probability, random)
    generator = philox(settings.seed, f"masks of {job.split}", job.block_number, duplicate)
    return assemble_columns(block, pairs, settings, generator)


def assemble_columns(
    block: TokenBlock, pairs: SegmentPairs, settings: ExampleSettings, generator: np.random.Philox
) -> ExampleColumns:
    """Put the tokens of `pairs` into rows and mask them."""
    vocabulary = settings.vocabulary
    first_lengths = pairs.first_stop - pairs.first_start
    second_lengths = pairs.second_stop - pairs.second_start
    lengths = first_lengths + second_lengths + 3
    rows = np.arange(len(pairs))
    input_ids_NL = np.zeros((len(pairs), settings.max_sequence_length), dtype=np.int32)
    input_ids_NL[:] = vocabulary.number("[PAD]")
    candidates_NL = np.zeros(input_ids_NL.shape, dtype=bool)
    _copy_runs(block.tokens, pairs.first_start, first_lengths, input_ids_NL, candidates_NL, np.ones_like(rows))
    _copy_runs(block.tokens, pairs.second_start, second_lengths, input_ids_NL, candidates_NL, first_lengths + 2)
    input_ids_NL[rows, 0] = vocabulary.number("[CLS]")
    input_ids_NL[rows, first_lengths + 1] = input_ids_NL[rows, lengths - 1] = vocabulary.number("[SEP]")
    slots = np.arange(settings.max_sequence_length)
    segment_ids_NL = (slots >= (first_lengths + 2)[:, None]) & (slots < lengths[:, None])
    word_starts_NL = None
    if settings.whole_word_masking:
        word_starts_NL = ~vocabulary.continuations()[input_ids_NL]
        word_starts_NL[rows, 1] = word_starts_NL[rows, first_lengths + 2] = True
    counts = prediction_counts(lengths, settings.masked_lm_probability, settings.max_predictions)
    masked = mask_sequences(
        input_ids_NL,
        candidates_NL,
        counts,
        settings.max_predictions,
        vocabulary.number("[MASK]"),
        len(vocabulary),
        generator,
        word_starts_NL,
    )
    return ExampleColumns(
        input_ids=masked.input_ids,
        segment_ids=segment_ids_NL.astype(np.int32),
        lengths=lengths,
        masked_lm_positions=masked.positions,
        masked_lm_ids=masked.ids,
        masked_counts=masked.counts,
        next_sentence_labels=pairs.labels,
    )


def _copy_runs(
    tokens: Slots,
    starts: Integers,
    lengths: Integers,
    input_ids_NL: Slots,
    candidates_NL: Flags,
    columns: Integers,
) -> None:
    """Copy `tokens[starts[n] : starts[n] + lengths[n]]` into row n from `columns[n]` on."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    places = columns[rows] + within
    input_ids_NL[rows, places] = tokens[starts[rows] + within]
    candidates_NL[rows, places] = True


def _encode(columns: ExampleColumns) -> tuple[NDArray[np.uint8], Integers]:
    """The framed records, and the bytes of each."""
    slots, predictions = columns.input_ids.shape[1], columns.masked_lm_ids.shape[1]
    return encode_rows(
        {
            "input_ids": columns.input_ids,
            "input_mask": np.arange(slots) < columns.lengths[:, None],
            "segment_ids": columns.segment_ids,
            "masked_lm_positions": columns.masked_lm_positions,
            "masked_lm_ids": columns.masked_lm_ids,
            "masked_lm_weights": (np.arange(predictions) < columns.masked_counts[:, None]).astype(np.float32),
            "next_sentence_labels": columns.next_sentence_labels[:, None],
        }
    )
