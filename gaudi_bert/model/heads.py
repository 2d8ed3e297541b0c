"""The heads on top of an encoder: for pretraining, for a task, or for text vectors.

A head states which hidden states it reads, which variables it has, and what its outputs and sums are. The engines
(`engines/`) compute them. Sums of losses are divided by sums of weights only at the end, so that the sums of micro-batches
and processes can be added up.

Letters of shapes: B packs, L positions, Q masked-LM slots, S depth, C outputs of a head, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gaudi_bert.common.errors import InputError, short_repr
from gaudi_bert.model.config import BertConfig, ParameterSpec, parameter_specs

# How the masked-LM loss is averaged. With `token`, every masked token has the same weight. With `sequence`, every sequence
# has the same weight.
Loss = Literal["token", "sequence"]

# How the vector of a text is computed from the vectors of its tokens. `cls` and `last` take the vector of the first or the
# last token. `mean` and `max` take the mean or the maximum of all vectors.
Pooling = Literal["cls", "mean", "max", "last"]

# The function that converts the logit of a text pair to its score, by its PyTorch name. Each of these functions preserves
# the order, so a higher logit never gives a lower score.
Activation = Literal["Sigmoid", "Identity", "Tanh"]

# The tasks that a head can be trained for.
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


# A config.json of `transformers` may state the task of its model as `problem_type`. These are our names for those tasks.
TASK_BY_PROBLEM_TYPE: dict[str, TaskKind] = {
    "single_label_classification": "classification",
    "multi_label_classification": "multi-label",
    "regression": "regression",
}


# This value is added to the attention scores of tokens that must not attend to each other. Every token may attend to at
# least one token, so the probability of the others is less than exp(-9000). In float32, this is exactly 0. Therefore the
# outputs of a sequence stay identical in every bit if its neighbours change.
FORBIDDEN_SCORE = -10000.0
# In a pack, the answer to a question must be inside its own sequence. Therefore this value is added to the span logits of
# tokens in other sequences, so that their probability is exactly 0.
OTHER_SEQUENCE = -1e9
# Max pooling returns this value for the sequence slots of a pack that are not used. It is lower than any hidden state.
LOWEST_HIDDEN = -3.0e38


@dataclass(frozen=True)
class PretrainingHead:
    """The masked-LM head and the next-sentence head of BERT.

    Its sums are float32 [8]: masked-LM loss and weight, next-sentence loss and weight, correct masked-LM predictions and
    their count, correct next-sentence predictions and their count. Depending on `loss`, a masked slot has the weight 1, or
    1 / (masked slots of its sequence).
    """

    loss: Loss = "token"
    sums: int = 8
    metrics_need_outputs: bool = False


@dataclass(frozen=True)
class TaskHead:
    """A head for a task such as classification. `width` (C) is the number of classes or values that it predicts.

    A batch contains these features in addition to those of the encoder, with float32 weights and int32 positions and
    classes:

    - classification, multi-label, regression and reranking: BERT's pooler at `sequence_positions` [B, S], dropout and a
      dense layer. Outputs [B, S, C]; `targets` [B, S] or [B, S, C]; `target_weights` [B, S]. The losses are the negative log
      likelihood, the binary cross-entropy averaged over classes, the squared error, and the binary cross-entropy of the
      single value.
    - token-classification: dropout and a dense layer on every token. Outputs [B, L, C]; `targets` and `target_weights` [B,
      L].
    - question-answering: a dense layer without dropout. Outputs [B, L, 2]; `targets` [B, S, 2] are positions in the pack;
      `target_weights` [B, S]. The answer is among the sequence's own tokens. The loss is half the sum of both negative log
      likelihoods.
    - masked-language-modelling: the masked-LM head at `masked_positions` [B, Q]; `targets` and `target_weights` [B, Q].
    - causal-language-modelling: the masked-LM head at every token; `targets` and `target_weights` [B, L].

    The sums of all task heads are float32 [3]: losses, weights, correct predictions.
    """

    kind: TaskKind
    width: int = 0
    sums: int = 3

    @property
    def predicts_per_text(self) -> bool:
        """Whether the head makes one prediction for each text or pair of texts."""
        return self.kind in ("classification", "multi-label", "regression", "reranking")

    @property
    def predicts_per_token(self) -> bool:
        """Whether the head makes a prediction for each token."""
        return self.kind in ("token-classification", "question-answering")

    @property
    def metrics_need_outputs(self) -> bool:
        """Whether predictions and metrics need the outputs of the head. Language modelling needs only the sums of losses,
        weights and correct predictions.
        """
        return not self.kind.endswith("language-modelling")

    @property
    def positions_feature_name(self) -> str | None:
        """The name of the batch array with the positions of the hidden states that this head reads. It is None if the head
        reads all of them.
        """
        if self.predicts_per_text:
            return "sequence_positions"
        return "masked_positions" if self.kind == "masked-language-modelling" else None

    @property
    def is_causal(self) -> bool:
        """Whether a token attends only to itself and to earlier tokens."""
        return self.kind == "causal-language-modelling"

    @property
    def dense_name_prefix(self) -> str:
        """The prefix of the variable names in the head's dense layer. `transformers` uses the same prefix."""
        return "qa_outputs" if self.kind == "question-answering" else "classifier"


@dataclass(frozen=True)
class VectorHead:
    """A head that computes one vector per text.

    The outputs have the shape [B, S, H]. If `normalize` is set, each vector has length 1. The head has no sums.
    """

    pooling: Pooling
    normalize: bool
    sums: int = 0
    metrics_need_outputs: bool = True
    predicts_per_token: bool = False
    is_causal: bool = False

    @property
    def positions_feature_name(self) -> str | None:
        """The name of the batch array with the positions of the hidden states that this head reads. It is None if the head
        reads all of them.
        """
        return {"cls": "sequence_positions", "last": "last_positions"}.get(self.pooling)


Head: TypeAlias = PretrainingHead | TaskHead | VectorHead


def parameter_specs_with_head(config: BertConfig, head: Head) -> dict[str, ParameterSpec]:
    """Return the shape and the initialization of every variable of a BERT with this head, by variable name.

    The variables are those of the class with the same architecture in `transformers`, so the pooler is included only if the
    head uses it.
    """
    specs = parameter_specs(config)
    if isinstance(head, PretrainingHead):
        return specs
    has_pooler = isinstance(head, TaskHead) and head.predicts_per_text
    encoder = {
        name: spec
        for name, spec in specs.items()
        if name.startswith("bert/") and (has_pooler or not name.startswith("bert/pooler/"))
    }
    if isinstance(head, VectorHead):
        return encoder
    if not head.metrics_need_outputs:
        return {**encoder, **{name: spec for name, spec in specs.items() if name.startswith("cls/predictions/")}}
    return {
        **encoder,
        f"{head.dense_name_prefix}/kernel": ParameterSpec((config.hidden_size, head.width), "normal"),
        f"{head.dense_name_prefix}/bias": ParameterSpec((head.width,), "zeros"),
    }


def check_labels(labels: Sequence[str], source: str, *, has_exactly_one: bool) -> None:
    """Check that the labels of a model have different names. If each text has exactly one label, also check that there is
    more than one label to choose from.

    Args:
        labels: The name of each label.
        source: The file that contains the labels, for the message.
        has_exactly_one: Whether each text has exactly one of the labels.

    Raises:
        InputError: Two labels have the same name, or there is only one label and every text has it.
    """
    numbers: dict[str, int] = {}
    for number, name in enumerate(labels):
        if numbers.setdefault(name, number) != number:
            raise InputError(
                f"{source}: labels {numbers[name]} and {number} are both called {short_repr(name)}, so their "
                "predictions cannot be told apart; rename one in id2label"
            )
    if has_exactly_one and len(labels) == 1:
        raise InputError(
            f"{source}: single_label_classification with one label predicts {short_repr(labels[0])} for every text; "
            "set problem_type to multi_label_classification for a probability, or to regression for a number"
        )


# A batch may have at most this many logits, because int32 cannot index more elements.
_MAX_LOGITS = 2**31 - 1


def check_logit_count(packs: int, slots: int, vocabulary_size: int) -> None:
    """Check that a batch does not have more logits than int32 can index.

    Args:
        packs: The number of packs in a micro-batch.
        slots: The number of slots of a pack for which logits are computed.
        vocabulary_size: The number of tokens in the vocabulary.

    Raises:
        InputError: There are too many logits.
    """
    logits = packs * slots * vocabulary_size
    if logits > _MAX_LOGITS:
        raise InputError(
            f"batch: {packs} packs x {slots} slots x {vocabulary_size} words are {logits:,} logits, but the maximum "
            f"is {_MAX_LOGITS:,}; use smaller micro-batches (training.micro_batch_packs, finetune.micro_batch_packs)"
        )
