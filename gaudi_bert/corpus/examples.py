"""Unpacked pretraining examples of one block of documents: [CLS] A [SEP] B [SEP], masked, as framed tf.train.Examples.

A block is the unit of work and of randomness: all that is random in it is a function of (seed, split, block, duplicate), so
neither the number of workers nor the machine that makes a block changes a byte.

Masked-LM targets are chosen as in BERT's `create_pretraining_data.py`. Of a sequence of n tokens,
min(P, max(1, round(0.15 n))) are predicted, chosen among all but [CLS] and [SEP]. A chosen token is replaced by [MASK]
(80 %) or by a random token of the vocabulary (10 %), or does not change (10 %). With masking by words, words (a token
and the `##` continuations behind it) are taken in random order as long as they fit. Every position gets a random
64-bit key, and the smallest keys are chosen.

Letters of shapes: N sequences, L slots, P masked positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.common.arrays import BoolArray, Int32Array, IntArray, philox
from gaudi_bert.config.sections import PrepareSettings
from gaudi_bert.corpus.vocabulary import TokenBlock, Vocabulary, tokenize_documents
from gaudi_bert.tfrecords.wire.example import UnpackedRows, encode_rows

Keys: TypeAlias = NDArray[np.uint64]

_NEVER = np.uint64(2**64 - 1)
_MASK_SHARE, _KEEP_SHARE = 0.8, 0.1


@dataclass(frozen=True)
class BlockExamples:
    """The records of one block, framed, one after the other, and the bytes of each, int64 [records].

    `counts` are those of `PreparedSection`, by name.
    """

    frames: bytes
    lengths: IntArray
    counts: Counter[str]


@dataclass(frozen=True)
class BlockJob:
    """The work of one block: its documents (lists of sentences) and what makes its random numbers its own."""

    documents: Sequence[Sequence[str]]
    split: str
    block_number: int
    vocabulary: Vocabulary
    settings: PrepareSettings


def make_examples(job: BlockJob) -> BlockExamples:
    """All examples, every duplicate, of one block."""
    settings = job.settings
    block = tokenize_documents(job.documents, job.vocabulary, settings.lower_case)
    unknown = int(np.count_nonzero(block.tokens == job.vocabulary.number("[UNK]")))
    counts = Counter(
        text_documents=block.documents,
        text_sentences=block.sentences,
        text_tokens=len(block.tokens),
        unknown_tokens=unknown,
        **dict.fromkeys(("sequences", "tokens", "random_next", "masked"), 0),
    )
    frames = [np.zeros(0, dtype=np.uint8)]
    lengths = [np.zeros(0, dtype=np.int64)]
    for duplicate in range(settings.duplicates if block.documents else 0):
        records, record_lengths, duplicate_counts = _examples_of_duplicate(block, job, duplicate)
        frames.append(records)
        lengths.append(record_lengths)
        counts.update(duplicate_counts)
    return BlockExamples(np.concatenate(frames).tobytes(), np.concatenate(lengths), counts)


def _examples_of_duplicate(
    block: TokenBlock, job: BlockJob, duplicate: int
) -> tuple[NDArray[np.uint8], IntArray, dict[str, int]]:
    settings, indices = job.settings, (job.block_number, duplicate)
    random = _RandomStream(settings.seed, f"pairs of {job.split}", *indices)
    pairs = _choose_pairs(block, settings.max_sequence_length, settings.short_sequence_probability, random)
    first_start, first_stop, second_start, second_stop, labels = pairs
    first_lengths = first_stop - first_start
    lengths = first_lengths + (second_stop - second_start) + _SPECIAL_TOKENS_IN_PAIR
    masks = philox(settings.seed, f"masks of {job.split}", *indices)
    input_ids, positions, ids, masked = _mask_pairs(block, pairs, lengths, job, masks)
    slots = np.arange(settings.max_sequence_length)
    frames, frame_lengths = encode_rows(
        UnpackedRows(
            lengths.astype(np.int64),
            masked.astype(np.int64),
            input_ids.astype(np.int64),
            (slots >= (first_lengths + 2)[:, None]).astype(np.int64),
            positions.astype(np.int64),
            ids.astype(np.int64),
            labels.astype(np.int64),
        )
    )
    sums = {"tokens": lengths, "random_next": labels, "masked": masked}
    return frames, frame_lengths, {"sequences": len(labels), **{name: int(each.sum()) for name, each in sums.items()}}


def _mask_pairs(block: TokenBlock, pairs: _Pairs, lengths: IntArray, job: BlockJob, generator: np.random.Philox) -> _Masked:
    vocabulary, settings = job.vocabulary, job.settings
    first_start, first_stop, second_start, second_stop, _ = pairs
    first_lengths, second_lengths = first_stop - first_start, second_stop - second_start
    rows = np.arange(len(lengths))
    input_ids_NL = np.full((len(lengths), settings.max_sequence_length), vocabulary.number("[PAD]"), dtype=np.int32)
    candidates_NL = np.zeros(input_ids_NL.shape, dtype=bool)
    _copy_runs(block.tokens, first_start, first_lengths, input_ids_NL, candidates_NL, np.ones_like(rows))
    _copy_runs(block.tokens, second_start, second_lengths, input_ids_NL, candidates_NL, first_lengths + 2)
    input_ids_NL[rows, 0] = vocabulary.number("[CLS]")
    input_ids_NL[rows, first_lengths + 1] = input_ids_NL[rows, lengths - 1] = vocabulary.number("[SEP]")
    word_starts_NL = None
    if settings.whole_word_masking:
        word_starts_NL = ~vocabulary.continuations()[input_ids_NL]
        word_starts_NL[rows, 1] = word_starts_NL[rows, first_lengths + 2] = True
    # Halves are rounded to even, as in Python.
    expected = np.rint(lengths * settings.masked_lm_probability).astype(np.int64)
    return _mask_sequences(
        input_ids_NL,
        candidates_NL,
        np.minimum(np.clip(expected, 1, settings.max_predictions), lengths - _SPECIAL_TOKENS_IN_PAIR),
        settings.max_predictions,
        vocabulary.number("[MASK]"),
        len(vocabulary),
        generator,
        word_starts_NL,
    )


def _copy_runs(
    tokens: Int32Array,
    starts: IntArray,
    lengths: IntArray,
    input_ids_NL: Int32Array,
    candidates_NL: BoolArray,
    columns: IntArray,
) -> None:
    """Copy `tokens[starts[n] : starts[n] + lengths[n]]` into row n from `columns[n]` on."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    slots = columns[rows] + within
    input_ids_NL[rows, slots] = tokens[starts[rows] + within]
    candidates_NL[rows, slots] = True


# --- pairs of segments for the next-sentence task, as BERT's `create_pretraining_data.py` chooses them (Devlin et al., 2019)
#
# A document is walked from its first sentence. Sentences are gathered until they hold the target length: the longest pair,
# L - 3 tokens, or for one document in ten a random shorter one. A random cut makes the first of them segment A. With
# probability 1/2 (and always where one sentence was gathered) segment B comes from a random position in another document,
# label 1, and the sentences behind the cut are put back to be gathered again; otherwise they are segment B, label 0. A pair
# that is too long loses tokens from its longer segment (B where they are equal), each from the front or the back at random.
#
# A segment is a run of tokens of the block, so a pair is four numbers. Which tokens the one-by-one truncation keeps needs
# no loop: with m = L - 3 tokens to keep, B keeps min(|B|, max(floor(m/2), m - |A|)) and A the rest, and how many of the
# lost ones were in front is a sum of fair coins.

_SPECIAL_TOKENS_IN_PAIR = 3
_SHORTEST_PAIR = 2
_RANDOM_NEXT_PROBABILITY = 0.5
_WORDS_AT_ONCE = 1024


class _RandomStream:
    """Random numbers for loops that draw one at a time, fixed for ever by `seed`, `purpose` and `indices`.

    The words are the raw 64-bit outputs of Philox (see `gaudi_bert.common.arrays`). From a word w, an integer below n
    is floor(w n / 2^64) (biased by less than n / 2^64) and a real number in [0, 1) is its upper 53 bits. Nothing here
    depends on the version of Python or numpy.
    """

    def __init__(self, seed: int, purpose: str, *indices: int) -> None:
        self._generator = philox(seed, purpose, *indices)
        self._words: list[int] = []

    def word(self) -> int:
        """The next 64 random bits."""
        if not self._words:
            self._words = self._generator.random_raw(_WORDS_AT_ONCE).tolist()
            self._words.reverse()
        return self._words.pop()

    def below(self, bound: int) -> int:
        """An integer in [0, bound)."""
        return (self.word() * bound) >> 64

    def between(self, lowest: int, highest: int) -> int:
        """An integer in [lowest, highest], both included."""
        return lowest + self.below(highest - lowest + 1)

    def chance(self, probability: float) -> bool:
        """True with `probability`."""
        return (self.word() >> 11) * 2.0**-53 < probability

    def heads(self, tosses: int) -> int:
        """Draw how many of `tosses` fair coins show heads."""
        count = 0
        while tosses > 0:
            used = min(tosses, 64)
            count += (self.word() >> (64 - used)).bit_count()
            tosses -= used
        return count


_Pairs = tuple[IntArray, IntArray, IntArray, IntArray, IntArray]
"""n pairs, int64 [n] each: where segment A starts and stops in the tokens of the block, and segment B; and the labels.

A label is 0 where B really follows A, 1 where B is from another document.
"""


def _choose_pairs(
    block: TokenBlock, max_sequence_length: int, short_sequence_probability: float, random: _RandomStream
) -> _Pairs:
    """The pairs of one pass over all documents of `block`."""
    most_tokens = max_sequence_length - _SPECIAL_TOKENS_IN_PAIR
    starts = block.sentence_starts.tolist()
    documents = block.document_starts.tolist()
    rows: list[tuple[int, int, int, int, int]] = []
    for document in range(block.documents):
        target = most_tokens
        if random.chance(short_sequence_probability):
            target = random.between(_SHORTEST_PAIR, most_tokens)
        _pairs_of_document(rows, starts, documents, document, target, most_tokens, random)
    columns = np.ascontiguousarray(np.array(rows, dtype=np.int64).reshape(-1, 5).T)
    return columns[0], columns[1], columns[2], columns[3], columns[4]


def _pairs_of_document(
    rows: list[tuple[int, int, int, int, int]],
    starts: list[int],
    documents: list[int],
    document: int,
    target: int,
    most_tokens: int,
    random: _RandomStream,
) -> None:
    first, end = documents[document], documents[document + 1]
    while first < end:
        stop = first + 1
        while stop < end and starts[stop] - starts[first] < target:
            stop += 1
        cut = first + random.between(1, stop - first - 1) if stop - first >= 2 else stop
        # Is there a sentence outside the segment `first` .. `cut` - 1 that is not its own next one?
        has_random_next = len(documents) > 2 or first > documents[document] or cut + 1 < documents[document + 1]
        if not has_random_next:
            if stop - first == 1:
                first = stop  # a pair needs two
                continue
            label, following, second = 0, stop, (starts[cut], starts[stop])
        elif stop - first == 1 or random.chance(_RANDOM_NEXT_PROBABILITY):
            least_tokens = target - (starts[cut] - starts[first])
            second = _random_segment(starts, documents, document, first, cut, least_tokens, random)
            label, following = 1, cut
        else:
            second = (starts[cut], starts[stop])
            label, following = 0, stop
        first_tokens, second_tokens = starts[cut] - starts[first], second[1] - second[0]
        first_length, second_length = first_tokens, second_tokens
        if first_tokens + second_tokens > most_tokens:
            second_length = min(second_tokens, max(most_tokens // 2, most_tokens - first_tokens))
            first_length = most_tokens - second_length
        first_start = starts[first] + random.heads(first_tokens - first_length)
        second_start = second[0] + random.heads(second_tokens - second_length)
        rows.append((first_start, first_start + first_length, second_start, second_start + second_length, label))
        first = following


def _random_segment(
    starts: list[int],
    documents: list[int],
    document: int,
    first: int,
    cut: int,
    least_tokens: int,
    random: _RandomStream,
) -> tuple[int, int]:
    """From a random sentence of another document: at least one sentence, and at least `least_tokens` tokens if it has them.

    In a block of one document it is taken from that document, from before the sentences `first` .. `cut` - 1 of segment A or
    from behind the one that follows them: never what would make the pair a real one.
    """
    others = len(documents) - 2
    if others > 0:
        other = random.below(others)
        other += other >= document
        end = documents[other + 1]
        chosen = documents[other] + random.below(end - documents[other])
    else:
        before, behind = first - documents[document], max(0, documents[document + 1] - cut - 1)
        drawn = random.below(before + behind)
        chosen = documents[document] + drawn if drawn < before else cut + 1 + drawn - before
        end = first if drawn < before else documents[document + 1]
    stop = chosen + 1
    while stop < end and starts[stop] - starts[chosen] < least_tokens:
        stop += 1
    return starts[chosen], starts[stop]


# --- masking


_Masked = tuple[Int32Array, Int32Array, Int32Array, IntArray]
"""N masked sequences: their ids, int32 [N, L]; the masked positions, ascending, and the original tokens there, int32 [N, P],
0 where unused; and how many positions are used, int64 [N].
"""


def _mask_sequences(
    input_ids_NL: Int32Array,
    candidates_NL: BoolArray,
    counts: IntArray,
    max_predictions: int,
    mask_id: int,
    vocabulary_size: int,
    generator: np.random.Philox,
    word_starts_NL: BoolArray | None = None,
) -> _Masked:
    """Choose and replace tokens: `counts` (int64 [N]) of each sequence, among the candidates (bool [N, L]).

    Random replacements are uniform below `vocabulary_size`. Where words start is given for masking by words.
    """
    keys_NL = generator.random_raw(input_ids_NL.size).reshape(input_ids_NL.shape) >> np.uint64(1)
    keys_NL[~candidates_NL] = _NEVER
    if word_starts_NL is None:
        most = min(max_predictions, keys_NL.shape[1])
        smallest_NP = np.sort(np.partition(keys_NL, most - 1, axis=1)[:, :most], axis=1)
        last_N = np.take_along_axis(smallest_NP, np.maximum(counts - 1, 0)[:, None], axis=1)
        chosen_NL = (keys_NL <= last_N) & (counts > 0)[:, None] & (keys_NL != _NEVER)
    else:
        chosen_NL = _whole_words(keys_NL, word_starts_NL & candidates_NL, candidates_NL, counts)
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
    is_changed = (choice < _MASK_SHARE) | (choice >= _MASK_SHARE + _KEEP_SHARE)
    replaced = np.where(choice < _MASK_SHARE, mask_id, drawn.astype(np.int64))
    masked_NL[rows[is_changed], columns[is_changed]] = replaced[is_changed]
    return masked_NL, positions_NP, ids_NP, used


def _whole_words(keys_NL: Keys, starts_NL: BoolArray, candidates_NL: BoolArray, counts: IntArray) -> BoolArray:
    """bool [N, L]: words in the order of the keys of their first tokens; one that does not fit is passed over."""
    chosen_NL = np.zeros(keys_NL.shape, dtype=bool)
    for row in range(len(counts)):
        starts = np.flatnonzero(starts_NL[row])
        # A word ends where the next one starts, or where candidates end ([SEP], padding).
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
