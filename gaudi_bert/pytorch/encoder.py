"""Any encoder of `transformers` over packed texts: vectors and answers in the order of the texts, as of each text alone.

How the model has to be fed is measured on it (`asking.py`); where that fails, it is refused. A window of texts is
packed as `gaudi-bert predict` packs it, in rows of the lengths that cost least, or in batches of one static shape for a
device that compiles. A head with one output for a text runs as it is, on the encoder's outputs for each text: what it reads
(the first token, a mean) is its own affair, and it is tried on a few sequences first.

Letters: B packs of a batch, L positions, N sequences, T tokens, H hidden size, C values of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

from gaudi_bert.common.arrays import AnyArray, Float32Array
from gaudi_bert.common.errors import InputError, shown
from gaudi_bert.config.sections import TaskName, TaskSettings
from gaudi_bert.model.heads import Pooling
from gaudi_bert.pytorch.asking import check_head, feeding_of, packed_batch, try_model
from gaudi_bert.pytorch.feeding import additive_masks
from gaudi_bert.pytorch.trial import ALONE_BOUND, positions_of, scale_of, token_outputs, trial_of, usual_tokens
from gaudi_bert.rows.answers import class_answers, multi_label_answers, number_answers, tag_answers
from gaudi_bert.rows.fields import words_of_text
from gaudi_bert.rows.packs import BatchShape, Placement, lay_out_packs
from gaudi_bert.rows.tokenizer import tokenizer_of
from gaudi_bert.rows.tokenizing import tokenize_rows
from gaudi_bert.rows.types import Row, Sequences, TaggedRow, TextRow
from gaudi_bert.rows.window_plan import Part, WindowPlan, plan_window

Text = str | tuple[str, str] | list[str]
"""A text, a pair of texts, or the words of a text."""

_WINDOW_TEXTS = 8192
_TOKENS_OF_A_BATCH = 2048
_MOST_POSITIONS = 1 << 20
_MOST_SEGMENTS = 1 << 20  # a model that has fewer than a pair needs is not given any (`asking.py`)
_TRIED_TOKENS = 512  # of rows, before it is known how long they are
_HALF_BOUND = 0.05  # of outputs in 16 bits
_PROBLEMS: dict[str | None, TaskName] = {
    "single_label_classification": "classification",
    "multi_label_classification": "multi-label",
    "regression": "regression",
}


class PackedEncoder:
    """Runs an encoder over packed texts.

    Args:
        model: an `AutoModel`, `AutoModelForSequenceClassification` or `AutoModelForTokenClassification`, with `sdpa` or
            `eager` attention. It is used in evaluation mode, on its device.
        tokenizer: that of the model, of `transformers` or of `tokenizers`.
        max_sequence_length: most tokens of a text, special ones included; longer ones are cut. Default: the model's.
        static_shapes: compute batches of one shape only, as Gaudi wants it: rows of `max_sequence_length`.

    Raises:
        InputError: the model cannot be fed packs, or not in a way that is known; or the tokenizer is not the model's.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, max_sequence_length: int | None = None, static_shapes: bool = False
    ) -> None:
        self.model, self.static_shapes = model, static_shapes
        self._base = getattr(model, "base_model", model)
        software = getattr(getattr(model, "config", None), "_attn_implementation", "not known")
        if software not in ("eager", "sdpa"):
            raise InputError(f"{type(model).__name__}: its attention is {software}; open it with attn_implementation='sdpa'")
        self._feeding = feeding_of(self._base)
        if self._feeding.embeds_first:
            raise InputError(f"{type(model).__name__}: its embeddings take no mask of packs; gaudi-bert finetune feeds it")
        if self._feeding.position_offset:  # RoBERTa's family, whose tokenizers make no types
            self._feeding = replace(self._feeding, token_types=False)
        self._tokenizer = tokenizer_of(tokenizer)
        config = model.config.get_text_config()
        self._tokenizer.check_fits(config.vocab_size, _MOST_SEGMENTS)
        most = positions_of(config)
        positions = (_MOST_POSITIONS if most is None else most) - self._feeding.position_offset
        self.positions: int = min(positions, self._feeding.longest_sequence or positions)
        if max_sequence_length is not None and not 3 <= max_sequence_length <= self.positions:
            raise InputError(
                f"max_sequence_length = {max_sequence_length}: the model has {self.positions} positions; give 3 to that"
            )
        usual = min(self.positions, getattr(tokenizer, "model_max_length", self.positions))
        self.max_sequence_length: int = max_sequence_length or usual
        self.hidden_size: int = config.hidden_size
        self.task, self.labels = _task_of(model)
        if self.task == "token-classification":
            check_head(model)
        self._tried_tokens = 0
        self._try_rows(min(self.positions, _TRIED_TOKENS))
        if self.task not in (None, "token-classification"):
            self._try_head()

    def _try_rows(self, tokens: int) -> None:
        """Try what computes packs in rows of so many tokens, or of the next power of 2, if they are longer than before."""
        if tokens > self._tried_tokens:
            module = self.model if self.task == "token-classification" else self._base
            tokens = min(self.positions, 1 << (tokens - 1).bit_length())
            self._tried_tokens = try_model(
                module, self._feeding, lambda rows: packed_batch(rows, self._feeding), tokens, training=False
            )

    def embed(self, texts: Sequence[Text], pooling: Pooling = "mean", *, normalize: bool = False) -> Float32Array:
        """A vector for each text, float32 [texts, hidden size], in the order of the texts.

        `pooling` takes the first token (`cls`) or the last one, or the mean or the maximum over all tokens, special ones
        too; `normalize` gives every vector the length 1.
        """
        if pooling not in get_args(Pooling):
            raise InputError(f"pooling = {pooling!r}: one of {', '.join(get_args(Pooling))} is allowed")
        vectors = [np.zeros((0, self.hidden_size), np.float32)]
        for _, sequences, plan in self._windows(texts, None):
            vectors.append(self.vectors(sequences, plan, pooling, normalize))
        return np.concatenate(vectors)

    def predict(self, texts: Sequence[Text]) -> list[dict[str, Any]]:
        """The answer of the model's head for each text, in the order of the texts: what `gaudi-bert predict` writes."""
        if self.task is None:
            raise InputError(
                f"{type(self.model).__name__}: has no head that is known here; open it with "
                "AutoModelForSequenceClassification or AutoModelForTokenClassification, or embed the texts"
            )
        answers: list[dict[str, Any]] = []
        for rows, sequences, plan in self._windows(texts, self.task):
            answers += self.answers(self.logits(sequences, plan), sequences, rows)
        return answers

    def _windows(self, texts: Sequence[Text], task: TaskName | None) -> Iterator[tuple[list[Row], Sequences, WindowPlan]]:
        """Texts of a window as rows, as tokens, and packed."""
        if isinstance(texts, str | bytes):
            raise InputError(f"texts = {shown(texts)}: is one text; give a list of texts, [text]")
        too_long: Literal["window", "truncate"] = "window" if task == "token-classification" else "truncate"
        settings = TaskSettings(name=task or "classification", too_long=too_long)
        for first in range(0, len(texts), _WINDOW_TEXTS):
            rows = [_row(number, text, task) for number, text in enumerate(texts[first : first + _WINDOW_TEXTS], first)]
            most = self.max_sequence_length
            sequences = tokenize_rows(rows, self._tokenizer, task=task, settings=settings, max_sequence_length=most)
            yield rows, sequences, self.plan(sequences)

    def plan(self, sequences: Sequences, packed: bool = True) -> WindowPlan:
        """How the sequences of a window share rows."""
        return plan_window(
            sequences.lengths,
            hidden_size=self.hidden_size,
            packed=packed,
            one_length=self.max_sequence_length if self.static_shapes else None,
            longest_row=self.positions,
        )

    def vectors(
        self,
        sequences: Sequences,
        plan: WindowPlan,
        pooling: Pooling,
        normalize: bool,
        computed: Callable[[int], None] = lambda slots: None,
    ) -> Float32Array:
        """A vector for each sequence, [N, H]; `computed(slots)` is called after each batch."""

        def pooled(hidden_TH: torch.Tensor, placed: Placement) -> torch.Tensor:
            lengths_N = torch.from_numpy(placed.lengths).to(hidden_TH.device)
            if pooling == "cls":
                vectors_NH = hidden_TH[lengths_N.cumsum(0) - lengths_N]
            elif pooling == "last":
                vectors_NH = hidden_TH[lengths_N.cumsum(0) - 1]
            else:
                vectors_NH = torch.segment_reduce(hidden_TH, pooling, lengths=lengths_N)
            return torch.nn.functional.normalize(vectors_NH, dim=-1) if normalize else vectors_NH

        return self._run(self._base, sequences, plan, pooled, computed, per_token=False, width=self.hidden_size)

    def logits(
        self, sequences: Sequences, plan: WindowPlan, computed: Callable[[int], None] = lambda slots: None
    ) -> Float32Array:
        """The outputs of the head for each sequence, [N, C], or for each token, [T, C]; `computed` as for `vectors`."""
        width = self.model.config.num_labels
        if self.task == "token-classification":
            return self._run(
                self.model, sequences, plan, lambda logits_TC, _: logits_TC, computed, per_token=True, width=width
            )

        def of_texts(hidden_TH: torch.Tensor, placed: Placement) -> torch.Tensor:
            ids = torch.from_numpy(sequences.input_ids[placed.sources].astype(np.int64)).to(hidden_TH.device)
            return self._head(hidden_TH, ids, placed.lengths.tolist())

        return self._run(self._base, sequences, plan, of_texts, computed, per_token=False, width=width)

    def answers(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """The outputs of the head as one JSON object for each row."""
        if self.task == "token-classification":
            return list(tag_answers(logits, sequences, rows, self.labels))
        if self.task == "regression":
            return list(number_answers(logits))
        of = class_answers if self.task == "classification" else multi_label_answers
        return list(of(logits, self.labels))

    # --- packs through the model

    def _run(
        self,
        module: Any,
        sequences: Sequences,
        plan: WindowPlan,
        finish: Callable[[torch.Tensor, Placement], torch.Tensor],
        computed: Callable[[int], None],
        *,
        per_token: bool,
        width: int,
    ) -> Float32Array:
        """`finish` of a module's outputs for the tokens of each batch, put in the order of the sequences or tokens."""
        self._try_rows(max((part.length for part in plan.parts), default=0))
        out: Float32Array = np.zeros((len(sequences.input_ids) if per_token else len(sequences), width), np.float32)
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode():
                for part, chosen, shape in self._batches(plan):
                    placed = lay_out_packs(sequences, part.packs, chosen, shape)
                    output_BLC = token_outputs(module(**self._inputs(placed, sequences))).float()
                    slots = torch.from_numpy(placed.slots).to(output_BLC.device)
                    values = finish(output_BLC.flatten(0, 1)[slots], placed).cpu().numpy()
                    out[placed.sources if per_token else placed.sequences] = values
                    computed(len(chosen) * part.length)
        finally:
            self.model.train(was_training)
        return out

    def _batches(self, plan: WindowPlan) -> Iterator[tuple[Part, AnyArray, BatchShape]]:
        """The packs of each batch; what does not fill one is a smaller batch, or is filled up with empty packs."""
        for part in plan.parts:
            batch = max(1, _TOKENS_OF_A_BATCH // part.length)
            for first in range(0, len(part.packs), batch):
                chosen = np.arange(first, min(first + batch, len(part.packs)))
                yield part, chosen, BatchShape(batch if self.static_shapes else len(chosen), part.length, part.depth)

    def _inputs(self, placed: Placement, sequences: Sequences) -> dict[str, Any]:
        """What the model's `forward` takes, on its device."""
        weights = next(self.model.parameters())
        features = {name: torch.from_numpy(values) for name, values in placed.features(sequences).items()}
        numbers_BL = features["input_mask"].to(weights.device)
        inputs: dict[str, Any] = {
            "input_ids": features["input_ids"].long().to(weights.device),
            "attention_mask": additive_masks(numbers_BL, self._feeding, weights.dtype),
        }
        if self._feeding.positions:
            inputs["position_ids"] = features["positions"].long().to(weights.device) + self._feeding.position_offset
        if self._feeding.token_types:
            inputs["token_type_ids"] = features["segment_ids"].long().to(weights.device)
        return inputs

    # --- the head of a text

    def _head(self, hidden_TH: torch.Tensor, ids_T: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """The model's own head on the encoder's outputs for each text by itself, [N, C]."""
        padded_NLH = torch.nn.utils.rnn.pad_sequence(list(hidden_TH.split(lengths)), batch_first=True)
        padding = getattr(self.model.config.get_text_config(), "pad_token_id", None) or 0
        ids_NL = torch.nn.utils.rnn.pad_sequence(list(ids_T.split(lengths)), batch_first=True, padding_value=padding)
        mask_NL = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        padded_NLH = padded_NLH.to(next(self.model.parameters()).dtype)
        pooler = getattr(self._base, "pooler", None)
        pooled = None if pooler is None else pooler(padded_NLH)
        given = BaseModelOutputWithPooling(last_hidden_state=padded_NLH, pooler_output=pooled)
        self._base.forward = lambda *_, **__: given
        try:
            output: torch.Tensor = self.model(input_ids=ids_NL, attention_mask=mask_NL.long().to(ids_NL.device)).logits
        finally:
            del self._base.forward
        return output.float()

    def _try_head(self) -> None:
        """Refuse a head whose answers for packed texts differ from those for each alone."""
        tokens, random = usual_tokens(self.model.config), np.random.default_rng(12345)
        lengths = np.minimum([9, 4, 13, 1], self.positions)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        ids = tokens[random.integers(0, len(tokens), offsets[-1])].astype(np.int32)
        sequences = Sequences(np.arange(4), offsets, ids, np.zeros(len(ids), np.int8))
        weights = next(self.model.parameters())
        with trial_of(self.model):
            actual = torch.from_numpy(self.logits(sequences, self.plan(sequences)))
            each = np.split(ids.astype(np.int64), offsets[1:-1])
            alone = [self.model(input_ids=torch.tensor(own[None], device=weights.device)).logits for own in each]
        expected = torch.cat(alone).float().cpu()
        bound = ALONE_BOUND if weights.dtype == torch.float32 else _HALF_BOUND
        difference = float((actual - expected).abs().max()) / scale_of([expected])
        if not difference <= bound:
            raise InputError(
                f"{type(self.model).__name__}: its head gives packed texts other answers than texts alone (they differ by "
                f"{difference:.1e} of the largest); give it one text a row, or embed the texts"
            )


def _task_of(model: Any) -> tuple[TaskName | None, tuple[str, ...]]:
    """What the model's head answers, and the names of its labels; None for a bare encoder."""
    config, name = model.config, type(model).__name__
    if not name.endswith(("ForTokenClassification", "ForSequenceClassification")):
        return None, ()
    missing = [number for number in range(config.num_labels) if number not in config.id2label]
    if missing:
        raise InputError(f"{name}: id2label has no label {missing[0]}, and there are {config.num_labels}; name all of them")
    labels = tuple(str(config.id2label[number]) for number in range(config.num_labels))
    if name.endswith("ForTokenClassification"):
        return "token-classification", labels
    usual = "regression" if len(labels) == 1 else "single_label_classification"
    return _PROBLEMS[config.problem_type or usual], labels


def _row(number: int, text: Text, task: TaskName | None) -> Row:
    """A text as a row; texts for tags are split into words where they are not."""
    if task == "token-classification":
        if isinstance(text, str):
            return words_of_text(number, text)
        if isinstance(text, list) and all(isinstance(word, str) for word in text):
            return TaggedRow(number, tuple(text))
    elif isinstance(text, str):
        return TextRow(number, text)
    elif isinstance(text, tuple) and len(text) == 2 and all(isinstance(one, str) for one in text):
        return TextRow(number, text[0], text[1])
    raise InputError(f"texts[{number}]: is {type(text).__name__}; give a text, or a list of words for tags")
