"""A small random model of every type that `transformers` has, and whether packs are fed to it correctly."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from gaudi_bert.common.errors import InputError
from gaudi_bert.pytorch import probe_model
from gaudi_bert.pytorch.small_copy import small_copy
from gaudi_bert.pytorch.trial import MODEL_ERRORS, one_line
from tests.builders.torch_models import SPREAD

WINDOW = 24  # other than the one that the answer was found with
_CLASSES = {
    "next token": dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "masked tokens": dict(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "none": dict(modeling_auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES),
}
HEADS = tuple(_CLASSES)


class NotBuiltError(Exception):
    """No small random model of a type can be built here."""


def types_of(head: str) -> list[str]:
    """The types that have such a head, in order; without a head, those that have none of the others."""
    others = set().union(*(_CLASSES[other] for other in HEADS if other != "none")) if head == "none" else set()
    return sorted(set(_CLASSES[head]) - others)


def usual_config(kind: str, head: str) -> Any:
    """The usual config of a type, with the settings that `transformers` leaves open filled in."""
    config = transformers.AutoConfig.for_model(kind)
    for each in {id(one): one for one in (config, config.get_text_config())}.values():
        heads = getattr(each, "num_attention_heads", None)
        for name, value in (("vocab_size", 211), ("num_key_value_heads", heads), ("head_dim", 16)):
            if hasattr(each, name) and getattr(each, name) is None:
                setattr(each, name, value)
        if head == "next token" and hasattr(each, "is_decoder"):
            each.is_decoder = True
    return config


def small_random_model(kind: str, head: str) -> Any:
    """A model with wide random weights."""
    name = _CLASSES[head][kind]
    try:
        class_of_type = getattr(transformers, name)
        small = small_copy(usual_config(kind, head), class_of_type, WINDOW).config
        model = class_of_type._from_config(small).eval()  # noqa: SLF001 - how transformers makes one of a config
    except MODEL_ERRORS as error:
        raise NotBuiltError(one_line(error, 160)) from error
    torch.manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.ndim > 1:
                parameter.normal_(0.0, SPREAD)
    return model


def verdict_on(model: Any) -> str:
    """`right`, `refused: REASON` (by `PackCollator`) or `WRONG: WHAT`."""
    try:
        finding = probe_model(model, ["transformers-5"])[0]
    except InputError as error:
        return f"refused: {error}"
    return "right" if finding.is_right else f"WRONG: {finding.verdict}"
