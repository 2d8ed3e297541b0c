"""Make the pretraining examples of one block of documents.

An example is [CLS] A [SEP] B [SEP] with masked tokens, encoded as a framed `tf.train.Example`. All random choices in a block
depend only on the seed, the split, the number of the block and the number of the repetition. The number of workers and the
machine that processes a block therefore do not change a byte.

Masked-LM targets are chosen as in BERT's `create_pretraining_data.py`. In a sequence of n tokens,
min(P, max(1, round(0.15 n))) tokens are predicted, which are chosen among all tokens except [CLS] and [SEP]. A chosen token
is replaced by [MASK] (80 %) or by a random token of the vocabulary (10 %), or it does not change (10 %). Tokens are chosen
by a random 64-bit key for every position: the positions with the smallest keys are masked. With whole-word masking, words
(a token and the `##` continuations after it) are taken in random order, and a word that exceeds the number of tokens is
skipped.

Letters of shapes: N sequences, L slots, P masked positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.common.arrays import BoolArray, Int32Array, IntArray, make_bit_generator
from gaudi_bert.config.sections import PrepareSettings
from gaudi_bert.corpus.vocabulary import TokenBlock, Vocabulary, tokenize_documents
from gaudi_bert.tfrecords.wire.example import UnpackedRows, encode_unpacked_rows

Keys: TypeAlias = NDArray[np.uint64]

_NEVER = np.uint64(2**64 - 1)
_MASK_PROBABILITY, _KEEP_PROBABILITY = 0.8, 0.1


@dataclass(frozen=True)
class PretrainingExamples:
    """The pretraining examples of one block of documents, encoded as TFRecords.

    Attributes:
        frames: The framed records, one after another.
        lengths: int64 [records], the number of bytes of each framed record.
        counts: The counts of the block, by the names of the fields of `PreparedSection`.
    """

    frames: bytes
    lengths: IntArray
    counts: Counter[str]


@dataclass(frozen=True)
class DocumentBlockJob:
    """The input of `make_pretraining_examples`: the documents of a block, the vocabulary and the settings.

    Attributes:
        documents: The documents of the block, each a list of sentences.
        split: The name of the split.
        block_number: The number of the block, which determines its random choices together with the split and the seed.
        vocabulary: The vocabulary.
        settings: The settings of `prepare`.
    """

    documents: Sequence[Sequence[str]]
    split: str
    block_number: int
    vocabulary: Vocabulary
    settings: PrepareSettings


def make_pretraining_examples(job: DocumentBlockJob) -> PretrainingExamples:
    """Make the pretraining examples of one block of documents. Each document is used as often as the setting `duplicates`
    specifies.
    """
    settings = job.settings
    block = tokenize_documents(job.documents, job.vocabulary, settings.lower_case)
    unknown = int(np.count_nonzero(block.tokens == job.vocabulary.token_id("[UNK]")))
    counts = Counter(
        text_documents=block.document_count,
        text_sentences=block.sentence_count,
        text_tokens=len(block.tokens),
        unknown_tokens=unknown,
        **dict.fromkeys(("sequences", "tokens", "random_next", "masked"), 0),
    )
    repetitions = range(settings.duplicates if block.document_count else 0)
    examples = [_make_masked_examples(block, job, repetition) for repetition in repetitions]
    for part in examples:
        counts.update(part.counts)
    lengths = np.concatenate([np.zeros(0, dtype=np.int64), *(part.lengths for part in examples)])
    return PretrainingExamples(b"".join(part.frames for part in examples), lengths, counts)


def _make_masked_examples(tokens: TokenBlock, job: DocumentBlockJob, repetition: int) -> PretrainingExamples:
    """Make examples from the documents of a block once, with randomly chosen segment pairs and masked tokens.

    This function is called several times for a block. Each repetition has different pairs and masked tokens.
    """
    settings, indices = job.settings, (job.block_number, repetition)
    random = _RandomStream(settings.seed, f"pairs of {job.split}", *indices)
    pairs = _choose_segment_pairs(tokens, settings.max_sequence_length, settings.short_sequence_probability, random)
    first_lengths = pairs.first_ends - pairs.first_starts
    lengths = first_lengths + (pairs.second_ends - pairs.second_starts) + _SPECIAL_TOKENS_IN_PAIR
    masks = make_bit_generator(settings.seed, f"masks of {job.split}", *indices)
    masked = _build_and_mask_pairs(tokens, pairs, lengths, job, masks)
    slots = np.arange(settings.max_sequence_length)
    frames, frame_lengths = encode_unpacked_rows(
        UnpackedRows(
            lengths.astype(np.int64),
            masked.counts.astype(np.int64),
            masked.input_ids.astype(np.int64),
            (slots >= (first_lengths + 2)[:, None]).astype(np.int64),
            masked.positions.astype(np.int64),
            masked.original_ids.astype(np.int64),
            pairs.labels.astype(np.int64),
        )
    )
    sums = {"tokens": lengths, "random_next": pairs.labels, "masked": masked.counts}
    counts = Counter(sequences=len(lengths), **{name: int(values.sum()) for name, values in sums.items()})
    return PretrainingExamples(frames.tobytes(), frame_lengths, counts)


def _build_and_mask_pairs(
    block: TokenBlock, pairs: _SegmentPairs, lengths: IntArray, job: DocumentBlockJob, generator: np.random.Philox
) -> _MaskedSequences:
    """Build the sequence [CLS] A [SEP] B [SEP] for each of N segment pairs, and mask some of its tokens.

    Args:
        block: The tokens of the block.
        pairs: The pairs.
        lengths: int64 [N], the length of each sequence, including three special tokens.
        job: The settings and the vocabulary.
        generator: The source of random bits.
    """
    vocabulary, settings = job.vocabulary, job.settings
    first_lengths, second_lengths = pairs.first_ends - pairs.first_starts, pairs.second_ends - pairs.second_starts
    rows = np.arange(len(lengths))
    input_ids_NL = np.full((len(lengths), settings.max_sequence_length), vocabulary.token_id("[PAD]"), dtype=np.int32)
    candidates_NL = np.zeros(input_ids_NL.shape, dtype=bool)
    _copy_segments_into_rows(
        block.tokens, pairs.first_starts, first_lengths, input_ids_NL, candidates_NL, np.ones_like(rows)
    )
    _copy_segments_into_rows(
        block.tokens, pairs.second_starts, second_lengths, input_ids_NL, candidates_NL, first_lengths + 2
    )
    input_ids_NL[rows, 0] = vocabulary.token_id("[CLS]")
    input_ids_NL[rows, first_lengths + 1] = input_ids_NL[rows, lengths - 1] = vocabulary.token_id("[SEP]")
    word_starts_NL = None
    if settings.whole_word_masking:
        word_starts_NL = ~vocabulary.mark_continuations()[input_ids_NL]
        word_starts_NL[rows, 1] = word_starts_NL[rows, first_lengths + 2] = True
    # Compute the number of tokens to mask. As in BERT's script, a number such as 2.5 is rounded to the nearest even integer.
    expected = np.rint(lengths * settings.masked_lm_probability).astype(np.int64)
    return _mask_sequences(
        input_ids_NL,
        candidates_NL,
        np.minimum(np.clip(expected, 1, settings.max_predictions), lengths - _SPECIAL_TOKENS_IN_PAIR),
        settings.max_predictions,
        vocabulary.token_id("[MASK]"),
        len(vocabulary),
        generator,
        word_starts_NL,
    )


def _copy_segments_into_rows(
    tokens: Int32Array,
    starts: IntArray,
    lengths: IntArray,
    input_ids_NL: Int32Array,
    candidates_NL: BoolArray,
    columns: IntArray,
) -> None:
    """Copy one segment of tokens into each row, and mark the copied positions as candidates for masking.

    Row n gets `tokens[starts[n] : starts[n] + lengths[n]]`, beginning at column `columns[n]`.
    """
    rows = np.repeat(np.arange(len(lengths)), lengths)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    slots = columns[rows] + within
    input_ids_NL[rows, slots] = tokens[starts[rows] + within]
    candidates_NL[rows, slots] = True


# --- pairs of segments for the next-sentence task, chosen as in BERT's `create_pretraining_data.py` (Devlin et al., 2019)
#
# Sentences of a document are collected from its beginning until they reach the target length. The target is L - 3 tokens, or
# for one document in ten a random shorter length. The collected sentences are cut at a random position, and those before the
# cut are segment A. With probability 1/2, or always if only one sentence was collected, segment B is taken from a random
# position in another document (label 1), and collecting continues with the sentences after the cut. Otherwise, the sentences
# after the cut are segment B (label 0). If a pair is too long, tokens are removed one by one from its longer segment, or
# from B if both are equally long, each time from the front or the back at random.
#
# A segment is a range of tokens in the block, so a pair consists of four numbers. The result of the truncation is computed
# without a loop: if m = L - 3 tokens are kept, B keeps min(|B|, max(floor(m/2), m - |A|)) tokens and A keeps the rest. The
# number of tokens that are removed from the front is the number of heads in as many coin tosses as tokens are removed.

_SPECIAL_TOKENS_IN_PAIR = 3
_SHORTEST_PAIR = 2
_RANDOM_NEXT_PROBABILITY = 0.5
_WORDS_AT_ONCE = 1024


class _RandomStream:
    """A reproducible stream of random numbers, which depends only on a seed, a purpose and some indices.

    The numbers are computed from the raw 64-bit outputs of Philox (see `gaudi_bert.common.arrays`), so they do not depend on
    the versions of Python and numpy. From an output w, an integer below n is floor(w n / 2^64), with a bias of less than n /
    2^64. A real number in [0, 1) consists of the upper 53 bits of w.
    """

    def __init__(self, seed: int, purpose: str, *indices: int) -> None:
        self._generator = make_bit_generator(seed, purpose, *indices)
        self._words: list[int] = []

    def draw_64_bits(self) -> int:
        """Return 64 random bits as an integer."""
        if not self._words:
            self._words = self._generator.random_raw(_WORDS_AT_ONCE).tolist()
            self._words.reverse()
        return self._words.pop()

    def draw_below(self, bound: int) -> int:
        """Return a random integer in [0, bound)."""
        return (self.draw_64_bits() * bound) >> 64

    def draw_between(self, lowest: int, highest: int) -> int:
        """Return a random integer in [lowest, highest]."""
        return lowest + self.draw_below(highest - lowest + 1)

    def draw_bool(self, probability: float) -> bool:
        """Return True with the given probability, and otherwise False."""
        return (self.draw_64_bits() >> 11) * 2.0**-53 < probability

    def count_heads(self, tosses: int) -> int:
        """Toss a fair coin `tosses` times, and return the number of heads."""
        count = 0
        while tosses > 0:
            used = min(tosses, 64)
            count += (self.draw_64_bits() >> (64 - used)).bit_count()
            tosses -= used
        return count


class _SegmentPairs(NamedTuple):
    """N pairs of text segments A and B. Each segment is given by its start and its exclusive end in the tokens of the block.
    All arrays are int64 [N].

    Attributes:
        first_starts: The first token of A.
        first_ends: The token after the last one of A.
        second_starts: The first token of B.
        second_ends: The token after the last one of B.
        labels: 0 if B follows A in the text, 1 if B is random.
    """

    first_starts: IntArray
    first_ends: IntArray
    second_starts: IntArray
    second_ends: IntArray
    labels: IntArray


def _choose_segment_pairs(
    block: TokenBlock, max_sequence_length: int, short_sequence_probability: float, random: _RandomStream
) -> _SegmentPairs:
    """Choose pairs of segments for the next-sentence task from all documents of a block."""
    max_tokens = max_sequence_length - _SPECIAL_TOKENS_IN_PAIR
    starts = block.sentence_starts.tolist()
    documents = block.document_starts.tolist()
    rows: list[tuple[int, int, int, int, int]] = []
    for document in range(block.document_count):
        target = max_tokens
        if random.draw_bool(short_sequence_probability):
            target = random.draw_between(_SHORTEST_PAIR, max_tokens)
        _append_pairs_of_document(rows, starts, documents, document, target, max_tokens, random)
    return _SegmentPairs(*np.ascontiguousarray(np.array(rows, dtype=np.int64).reshape(-1, 5).T))


def _append_pairs_of_document(
    rows: list[tuple[int, int, int, int, int]],
    sentence_starts: list[int],
    document_starts: list[int],
    document_index: int,
    target_tokens: int,
    max_tokens: int,
    random: _RandomStream,
) -> None:
    """Choose pairs of segments from one document, and append them to `rows`.

    Args:
        rows: Receives (start of A, end of A, start of B, end of B, label) for each pair.
        sentence_starts: The index of the first token of each sentence.
        document_starts: The index of the first sentence of each document.
        document_index: The number of the document.
        target_tokens: The number of tokens to collect for a pair.
        max_tokens: The maximum number of tokens of a pair.
        random: The source of random numbers.
    """
    first, end = document_starts[document_index], document_starts[document_index + 1]
    while first < end:
        stop = first + 1
        while stop < end and sentence_starts[stop] - sentence_starts[first] < target_tokens:
            stop += 1
        cut = first + random.draw_between(1, stop - first - 1) if stop - first >= 2 else stop
        # A random segment B must begin at a sentence that is neither in segment A nor directly after it. Segment A consists
        # of the sentences from `first` to `cut` - 1. Check whether the block contains such a sentence.
        has_random_next = (
            len(document_starts) > 2
            or first > document_starts[document_index]
            or cut + 1 < document_starts[document_index + 1]
        )
        if not has_random_next:
            if stop - first == 1:
                first = stop  # a pair needs two sentences
                continue
            label, following, second = 0, stop, (sentence_starts[cut], sentence_starts[stop])
        elif stop - first == 1 or random.draw_bool(_RANDOM_NEXT_PROBABILITY):
            min_tokens = target_tokens - (sentence_starts[cut] - sentence_starts[first])
            second = _choose_random_segment(sentence_starts, document_starts, document_index, first, cut, min_tokens, random)
            label, following = 1, cut
        else:
            second = (sentence_starts[cut], sentence_starts[stop])
            label, following = 0, stop
        first_tokens, second_tokens = sentence_starts[cut] - sentence_starts[first], second[1] - second[0]
        first_length, second_length = first_tokens, second_tokens
        if first_tokens + second_tokens > max_tokens:
            second_length = min(second_tokens, max(max_tokens // 2, max_tokens - first_tokens))
            first_length = max_tokens - second_length
        first_start = sentence_starts[first] + random.count_heads(first_tokens - first_length)
        second_start = second[0] + random.count_heads(second_tokens - second_length)
        rows.append((first_start, first_start + first_length, second_start, second_start + second_length, label))
        first = following


def _choose_random_segment(
    sentence_starts: list[int],
    document_starts: list[int],
    document_index: int,
    first: int,
    cut: int,
    min_tokens: int,
    random: _RandomStream,
) -> tuple[int, int]:
    """Choose a random segment B from another document. Return the index of its first token, and the index after its last
    token.

    The segment begins at a random sentence and has at least one sentence. It has at least `min_tokens` tokens, unless its
    document ends before that.

    If the block has only one document, the segment is taken from this document. It then begins before segment A (the
    sentences `first` to `cut` - 1) or after the sentence that follows A, so that it cannot be the real next segment.
    """
    others = len(document_starts) - 2
    if others > 0:
        other = random.draw_below(others)
        other += other >= document_index
        end = document_starts[other + 1]
        chosen = document_starts[other] + random.draw_below(end - document_starts[other])
    else:
        before, behind = first - document_starts[document_index], max(0, document_starts[document_index + 1] - cut - 1)
        drawn = random.draw_below(before + behind)
        chosen = document_starts[document_index] + drawn if drawn < before else cut + 1 + drawn - before
        end = first if drawn < before else document_starts[document_index + 1]
    stop = chosen + 1
    while stop < end and sentence_starts[stop] - sentence_starts[chosen] < min_tokens:
        stop += 1
    return sentence_starts[chosen], sentence_starts[stop]


# --- masking


class _MaskedSequences(NamedTuple):
    """N sequences with masked tokens, and the original ids of the masked tokens.

    Attributes:
        input_ids: int32 [N, L], the token ids after masking.
        positions: int32 [N, P], the masked positions in ascending order. Unused entries are 0.
        original_ids: int32 [N, P], the token ids at these positions before masking. Unused entries are 0.
        counts: int64 [N], the number of masked positions.
    """

    input_ids: Int32Array
    positions: Int32Array
    original_ids: Int32Array
    counts: IntArray


def _mask_sequences(
    input_ids_NL: Int32Array,
    candidates_NL: BoolArray,
    counts: IntArray,
    max_predictions: int,
    mask_id: int,
    vocabulary_size: int,
    generator: np.random.Philox,
    word_starts_NL: BoolArray | None = None,
) -> _MaskedSequences:
    """Mask randomly chosen tokens in N sequences.

    Args:
        input_ids_NL: int32 [N, L], the sequences.
        candidates_NL: bool [N, L], True for the positions that may be masked.
        counts: int64 [N], the number of tokens to mask in each sequence.
        max_predictions: P, the maximum number of masked tokens.
        mask_id: The id of [MASK].
        vocabulary_size: Random tokens are drawn uniformly from all ids below this number.
        generator: The source of random bits.
        word_starts_NL: bool [N, L], True for the first token of each word, for whole-word masking. If it is None, tokens are
            masked independently.
    """
    keys_NL = generator.random_raw(input_ids_NL.size).reshape(input_ids_NL.shape) >> np.uint64(1)
    keys_NL[~candidates_NL] = _NEVER
    if word_starts_NL is None:
        most = min(max_predictions, keys_NL.shape[1])
        smallest_NP = np.sort(np.partition(keys_NL, most - 1, axis=1)[:, :most], axis=1)
        last_N = np.take_along_axis(smallest_NP, np.maximum(counts - 1, 0)[:, None], axis=1)
        chosen_NL = (keys_NL <= last_N) & (counts > 0)[:, None] & (keys_NL != _NEVER)
    else:
        chosen_NL = _choose_whole_words(keys_NL, word_starts_NL & candidates_NL, candidates_NL, counts)
    rows, columns = np.nonzero(chosen_NL)
    used = np.bincount(rows, minlength=len(counts))
    slots = np.arange(len(rows)) - np.repeat(np.cumsum(used) - used, used)
    positions_NP = np.zeros((len(counts), max_predictions), dtype=np.int32)
    ids_NP = np.zeros_like(positions_NP)
    positions_NP[rows, slots] = columns
    ids_NP[rows, slots] = input_ids_NL[rows, columns]
    masked_NL = input_ids_NL.copy()
    choice = (generator.random_raw(len(rows)) >> np.uint64(11)) * 2.0**-53
    drawn = ((generator.random_raw(len(rows)) >> np.uint64(32)) * np.uint64(vocabulary_size)) >> np.uint64(32)
    is_changed = (choice < _MASK_PROBABILITY) | (choice >= _MASK_PROBABILITY + _KEEP_PROBABILITY)
    replaced = np.where(choice < _MASK_PROBABILITY, mask_id, drawn.astype(np.int64))
    masked_NL[rows[is_changed], columns[is_changed]] = replaced[is_changed]
    return _MaskedSequences(masked_NL, positions_NP, ids_NP, used)


def _choose_whole_words(keys_NL: Keys, starts_NL: BoolArray, candidates_NL: BoolArray, counts: IntArray) -> BoolArray:
    """Choose random whole words to mask in N sequences. Words are tried in a random order, which `keys_NL` determines.

    A word is skipped if choosing it would exceed the count.

    Args:
        keys_NL: uint64 [N, L], a random key for each position.
        starts_NL: bool [N, L], True for the first token of each word.
        candidates_NL: bool [N, L], True for the positions that may be masked.
        counts: int64 [N], the maximum number of tokens to choose in each sequence.

    Returns:
        bool [N, L], True for the tokens of the chosen words.
    """
    chosen_NL = np.zeros(keys_NL.shape, dtype=bool)
    for row in range(len(counts)):
        starts = np.flatnonzero(starts_NL[row])
        # A word ends before the next word, or before a position that cannot be masked, such as [SEP] or padding.
        barriers = np.flatnonzero(starts_NL[row] | ~candidates_NL[row])
        behind = np.append(barriers, keys_NL.shape[1])[np.searchsorted(barriers, starts, side="right")]
        remaining = int(counts[row])
        order = np.argsort(keys_NL[row, starts])
        for start, stop in zip(starts[order].tolist(), behind[order].tolist(), strict=True):
            if stop - start <= remaining:
                chosen_NL[row, start:stop] = True
                remaining -= stop - start
                if remaining == 0:
                    break
    return chosen_NL
