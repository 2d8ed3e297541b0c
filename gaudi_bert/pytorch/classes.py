"""Configs and classes of `transformers`: those of a model with the head of a task, by its type alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

from gaudi_bert.common.errors import InputError, shown
from gaudi_bert.model.config import EncoderConfig
from gaudi_bert.model.heads import Head, PretrainingHead, TaskHead, TaskKind, VectorHead
from gaudi_bert.pytorch.trial import MODEL_ERRORS, one_line

_OF_TEXTS = transformers.AutoModelForSequenceClassification
_AUTO: Mapping[TaskKind, Any] = {
    "classification": _OF_TEXTS,
    "multi-label": _OF_TEXTS,
    "regression": _OF_TEXTS,
    "token-classification": transformers.AutoModelForTokenClassification,
    "question-answering": transformers.AutoModelForQuestionAnswering,
    "masked-language-modelling": transformers.AutoModelForMaskedLM,
    "causal-language-modelling": transformers.AutoModelForCausalLM,
}


def config_of(config: EncoderConfig, head: Head) -> Any:
    """The config of `transformers` for a model with this head.

    Raises:
        InputError: the type is not known, or its settings are out of their ranges.
    """
    values = dict(config.values)
    kind = values.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise InputError(f"model_type {shown(kind)}: transformers does not know it; give a type that it has")
    try:
        made = transformers.CONFIG_MAPPING[kind].from_dict(values)
        if isinstance(head, TaskHead):
            if head.keeps_outputs:
                made.num_labels = head.width
            if head.is_causal:
                made.is_decoder = True
        made.use_cache = False
    except MODEL_ERRORS as error:
        raise InputError(f"model type {kind!r}: its config cannot be used: {one_line(error, 200)}; correct it") from error
    return made


def word_task_of(config: EncoderConfig) -> TaskKind:
    """What a model is trained for on texts alone: masked words where it sees both sides, else the next one.

    Raises:
        InputError: the type is not known, or has no head for words.
    """
    made = config_of(config, VectorHead("cls", normalize=False))
    tasks: tuple[TaskKind, ...] = ("masked-language-modelling", "causal-language-modelling")
    for task in tasks[::-1] if getattr(made, "is_decoder", False) else tasks:
        if type(made) in _AUTO[task]._model_mapping:  # noqa: SLF001 - which class it takes is said nowhere else
            return task
    raise InputError(f"model type {made.model_type!r}: transformers has no head of words for it; choose another model")


def known_types() -> tuple[str, ...]:
    """The types of models that `transformers` has."""
    return tuple(transformers.CONFIG_MAPPING)


def class_of(config: Any, head: Head) -> Any:
    """The class of `transformers` for a config and a head.

    Raises:
        InputError: `transformers` has none.
    """
    if isinstance(head, PretrainingHead):
        raise InputError(f"model type {config.model_type!r}: next-sentence prediction is BERT's; pack a table of texts")
    auto = transformers.AutoModel if isinstance(head, VectorHead) else _AUTO[head.kind]
    found = auto._model_mapping.get(type(config), None)  # noqa: SLF001 - which class it takes is said nowhere else
    if found is None:
        what = "no vectors of tokens" if isinstance(head, VectorHead) else f"no class for {head.kind}"
        raise InputError(f"model type {config.model_type!r}: transformers has {what}; choose another model or task")
    return found[0] if isinstance(found, tuple) else found
