"""Question answering: find where the answer to a question begins and ends in a context (SQuAD 1.1 and 2.0).

If a context is too long for a row, it is read in windows that share `stride` tokens. The head is a dense layer with two
values per token: the logits that the answer begins there and that it ends there (Devlin et al., 2019, section 4.2). In a
pack, the softmax of a sequence covers only its own tokens. The logits of all other tokens are lowered by 10^9, so that their
probability is exactly 0. Setting these logits to 0 instead would change the loss. The target of a window without the answer
is its [CLS].

The loss is the mean over windows of the negative log likelihoods of begin and end, halved. The metrics are the same as in
SQuAD (Rajpurkar et al., 2016, section 6.1, and 2018 for questions without an answer).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np

from gaudi_bert.common.arrays import BatchArrays, Float32Array, Int32Array
from gaudi_bert.rows.packs import PackBatch
from gaudi_bert.rows.types import QuestionRow, Row, Sequences
from gaudi_bert.tasks.task import MaskKey, Task

# A long context is split into windows. In each window, only the 20 most likely first tokens and the 20 most likely last
# tokens of an answer are considered. Probabilities are computed over the 20 best answers. BERT's own script for SQuAD uses
# the same number.
_CANDIDATES = 20

_ARTICLES = re.compile(r"\b(a|an|the)\b", re.UNICODE)
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class QuestionAnswering(Task):
    """The task of finding the answer to a question as a span of its context."""

    name = "question-answering"
    architecture = "BertForQuestionAnswering"
    best_metric = "f1"
    metric_names = ("loss", "exact_match", "f1")

    @property
    def output_width(self) -> int:
        """The number of logits that the head returns for each token. There are two, for the beginning and the end of the
        answer.
        """
        return 2

    def make_targets_and_weights(self, batch: PackBatch, mask_key: MaskKey) -> BatchArrays:
        """Return the targets of the loss and their weights for a batch, as arrays by name.

        `targets`, int32 [B, S, 2], are the first and last token of the answer as positions in the pack. `target_weights`,
        [B, S], are 1 for each sequence.
        """
        weights = batch.scatter_sequence_values(np.ones(len(batch.members), np.float32))
        if batch.source.target is None:
            return {"target_weights": weights}
        positions = batch.source.target[batch.members] + batch.starts[:, np.newaxis]
        return {"targets": batch.scatter_sequence_values(positions.astype(np.int32)), "target_weights": weights}

    def compute_metrics(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> dict[str, float]:
        """Return SQuAD's metrics exact_match and f1, each from 0 to 100."""
        given = [answer["answers"][0]["text"] for answer in self.make_predictions(logits, sequences, rows)]
        return _compute_squad_metrics(given, [[text for text, _ in cast(QuestionRow, row).answers or ()] for row in rows])

    def make_predictions(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
        """Yield the answers to each question, best first, as `{"answers": [{"text", "start", "end", "score"}]}`.

        An empty text means that the context does not contain an answer.
        """
        firsts = np.searchsorted(sequences.row, np.arange(len(rows) + 1))
        for number, row in enumerate(rows):
            windows = range(firsts[number], firsts[number + 1])
            spans, nothing = [], np.inf
            for window in windows:
                span = slice(int(sequences.offsets[window]), int(sequences.offsets[window + 1]))
                logits_L2, characters_L2 = logits[span], cast(Int32Array, sequences.characters)[span]
                # Consider only spans that lie within the context, do not end before they begin, and are not too long.
                allowed = np.flatnonzero(characters_L2[:, 0] >= 0)
                begins, ends = (allowed[np.argsort(-logits_L2[allowed, i], kind="stable")[:_CANDIDATES]] for i in (0, 1))
                lengths = ends[np.newaxis, :] - begins[:, np.newaxis] + 1
                for i, j in np.argwhere((lengths >= 1) & (lengths <= self.settings.max_answer_tokens)):
                    score = float(logits_L2[begins[i], 0] + logits_L2[ends[j], 1])
                    spans.append((-score, int(characters_L2[begins[i], 0]), int(characters_L2[ends[j], 1])))
                nothing = min(nothing, float(logits_L2[0].sum()))
            yield {"answers": self._rank_answers(spans, nothing, cast(QuestionRow, row).context)}

    def _rank_answers(self, spans: list[tuple[float, int, int]], empty_score: float, context: str) -> list[dict[str, Any]]:
        """Rank the candidate spans from all windows of a question's context, and return the best answers. Each span is
        listed only once.

        The empty answer is listed too if `null_score_threshold` is set or if no span is possible. It comes first if its
        score exceeds that of the best span by more than the threshold.

        Args:
            spans: Tuples of (negative score, first character, end).
            empty_score: The score of the empty answer.
            context: The context of the question.
        """
        by_span: dict[tuple[int, int], float] = {}
        for negative, begin, end in sorted(spans):
            by_span.setdefault((begin, end), -negative)
        best = [(context[start:end], start, end, score) for (start, end), score in list(by_span.items())[:_CANDIDATES]]
        threshold = self.settings.null_score_threshold
        if threshold is not None or not best:
            empty = ("", 0, 0, empty_score)
            is_first = not best or (threshold is not None and empty_score - best[0][3] > threshold)
            best = [empty, *best] if is_first else [best[0], *sorted([*best[1:], empty], key=lambda each: -each[3])]
        scores = np.array([score for *_, score in best], np.float64)
        likely = np.exp(scores - scores.max())
        likely /= likely.sum()
        return [
            {"text": text, "start": start, "end": end, "score": float(share)}
            for (text, start, end, _), share in zip(best[: self.settings.n_best], likely, strict=False)
        ]


def _compute_squad_metrics(predicted_texts: Sequence[str], correct_texts: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return SQuAD's metrics exact_match and f1 as means over all questions, from 0 to 100.

    Texts are compared in lower case, without punctuation, articles and extra spaces. An exact match equals one of the
    correct answers. F1 compares the words with each correct answer and takes the best value. A question without an answer
    counts as correct only if the prediction is the empty text.

    Args:
        predicted_texts: The predicted text of each question.
        correct_texts: The correct answers of each question. Empty if the question has no answer.
    """
    pairs = [
        ([_normalize_answer(text) for text in texts] or [""], _normalize_answer(answer))
        for answer, texts in zip(predicted_texts, correct_texts, strict=True)
    ]
    count = max(1, len(pairs))
    return {
        "exact_match": 100.0 * sum(answer in texts for texts, answer in pairs) / count,
        "f1": 100.0 * sum(max(_compute_word_f1(answer, text) for text in texts) for texts, answer in pairs) / count,
    }


def _normalize_answer(text: str) -> str:
    """Normalize an answer for comparison, as SQuAD does. Convert it to lower case, and remove punctuation, articles and
    extra spaces.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _compute_word_f1(predicted_answer: str, correct_answer: str) -> float:
    """Compare the words of a predicted and a correct answer, and return their F1 score from 0 to 1. Both answers must be
    normalized.
    """
    given, right = predicted_answer.split(), correct_answer.split()
    if not given or not right:
        return float(given == right)
    common = sum((Counter(given) & Counter(right)).values())
    return 2.0 * common / (len(given) + len(right))
