"""What stands on top of an encoder: the heads of pretraining, the head of a task, or vectors of texts. No framework.

A head names which hidden states it reads, which variables it has, and what its outputs and sums are; each engine
(`engines/`) computes them. Sums of losses are divided by their weights outside, so that micro-batches and processes add up.

Letters: B packs, L positions, Q masked slots, S depth, C values of a head, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from gaudi_bert.common.errors import InputError
from gaudi_bert.model.config import BertConfig, ParameterSpec, parameter_specs

Loss = Literal["token", "sequence"]
"""What counts the same in the masked-LM loss: every masked token, or every sequence."""

Pooling = Literal["cls", "mean", "max", "last"]
"""How the vectors of a text's tokens become one: the first, the mean, the largest of each feature, or the last."""

TaskKind = Literal[
    "classification",
    "multi-label",
    "regression",
    "token-classification",
    "question-answering",
    "reranking",
    "masked-language-modelling",
    "causal-language-modelling",
]


TASK_OF_PROBLEM: dict[str, TaskKind] = {
    "single_label_classification": "classification",
    "multi_label_classification": "multi-label",
    "regression": "regression",
}
"""What config.json calls a task of texts (`problem_type`)."""


# The largest score of a row is an allowed one, so a forbidden share is exp(less than -9,000) = exactly 0 in float32, for
# every row: a sequence's outputs do not change by one bit when its neighbours do.
FORBIDDEN_SCORE = -10000.0
OTHER_SEQUENCE = -1e9
"""Added to what a head of spans gives for tokens of other sequences: their probability is exactly 0."""
LOWEST_HIDDEN = -3.0e38
"""Below any hidden state; a sequence that is absent has nothing else."""


@dataclass(frozen=True)
class PretrainingHead:
    """BERT's masked-LM and next-sentence heads.

    Sums, float32 [8]: masked-LM loss and weight, next-sentence loss and weight, then correct and count of both. By `loss`,
    a masked slot weighs 1, or 1 / (masked slots of its sequence).
    """

    loss: Loss = "token"
    sums: int = 8
    keeps_outputs: bool = False


@dataclass(frozen=True)
class TaskHead:
    """The head of a task; `width` is C, the classes or values it gives.

    Features of a batch beyond the encoder's, float32 weights and int32 positions and classes:

    - of a text (classification, multi-label, regression, reranking): BERT's pooler at `sequence_positions` [B, S], dropout,
      a dense layer. Outputs [B, S, C]; `targets` [B, S] or [B, S, C], `target_weights` [B, S]. Loss: negative log
      likelihood; binary cross-entropy, mean over classes; squared error; binary cross-entropy of the one value.
    - token-classification: dropout and a dense layer on every token. Outputs [B, L, C]; `targets`, `target_weights` [B, L].
    - question-answering: a dense layer without dropout. Outputs [B, L, 2]; `targets` [B, S, 2], positions in the pack;
      `target_weights` [B, S]. A sequence's answer is among its own tokens. Loss: half the sum of both likelihoods.
    - masked-language-modelling: the masked-LM head at `masked_positions` [B, Q]; `targets`, `target_weights` [B, Q].
    - causal-language-modelling: the masked-LM head at every token; `targets`, `target_weights` [B, L].

    Sums, float32 [3]: losses, weights, right answers.
    """

    kind: TaskKind
    width: int = 0
    sums: int = 3

    @property
    def is_of_text(self) -> bool:
        """Whether it gives one answer for a text or pair."""
        return self.kind in ("classification", "multi-label", "regression", "reranking")

    @property
    def per_token(self) -> bool:
        """Whether it gives an answer for each token."""
        return self.kind in ("token-classification", "question-answering")

    @property
    def keeps_outputs(self) -> bool:
        """Whether answers and metrics come from its outputs; else from sums alone."""
        return not self.kind.endswith("language-modelling")

    @property
    def read_positions(self) -> str | None:
        """The feature with the positions whose hidden states are read; None for those of all tokens."""
        if self.is_of_text:
            return "sequence_positions"
        return "masked_positions" if self.kind == "masked-language-modelling" else None

    @property
    def is_causal(self) -> bool:
        """Whether a token sees only those before it."""
        return self.kind == "causal-language-modelling"

    @property
    def scope(self) -> str:
        """Return what names of its dense layer begin with, as in `transformers`."""
        return "qa_outputs" if self.kind == "question-answering" else "classifier"


@dataclass(frozen=True)
class VectorHead:
    """One vector for each text: outputs [B, S, H], of length 1 with `normalize`. No sums."""

    pooling: Pooling
    normalize: bool
    sums: int = 0
    keeps_outputs: bool = True
    per_token: bool = False
    is_causal: bool = False

    @property
    def read_positions(self) -> str | None:
        """The feature with the positions whose hidden states are read; None for those of all tokens."""
        return {"cls": "sequence_positions", "last": "last_positions"}.get(self.pooling)


Head: TypeAlias = PretrainingHead | TaskHead | VectorHead


def variables_of(config: BertConfig, head: Head) -> dict[str, ParameterSpec]:
    """The variables of a BERT with this head, by name: no more than transformers' class of the same architecture has."""
    specs = parameter_specs(config)
    if isinstance(head, PretrainingHead):
        return specs
    pools = isinstance(head, TaskHead) and head.is_of_text
    encoder = {
        name: spec
        for name, spec in specs.items()
        if name.startswith("bert/") and (pools or not name.startswith("bert/pooler/"))
    }
    if isinstance(head, VectorHead):
        return encoder
    if not head.keeps_outputs:
        return {**encoder, **{name: spec for name, spec in specs.items() if name.startswith("cls/predictions/")}}
    return {
        **encoder,
        f"{head.scope}/kernel": ParameterSpec((config.hidden_size, head.width), "normal"),
        f"{head.scope}/bias": ParameterSpec((head.width,), "zeros"),
    }


_MOST_LOGITS = 2**31 - 1


def check_logits(packs: int, slots: int, words: int) -> None:
    """Refuse a batch that has more scores of words, one for each word in every slot of a pack, than int32 can number."""
    logits = packs * slots * words
    if logits > _MOST_LOGITS:
        raise InputError(
            f"batch: {packs} packs x {slots} slots x {words} words are {logits:,} logits, at most {_MOST_LOGITS:,} can be "
            "numbered by int32; make micro-batches smaller (training.micro_batch_packs, finetune.micro_batch_packs)"
        )
