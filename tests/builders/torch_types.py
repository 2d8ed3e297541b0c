"""A small random model of every type that `transformers` has, and whether packs are fed to it correctly."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from gaudi_bert.common.errors import InputError
from gaudi_bert.pytorch import PackCollator, probe_model
from gaudi_bert.pytorch.trial import MODEL_ERRORS, one_line, small_copy, spread_weights

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
    config, taken = transformers.AutoConfig.for_model(kind), getattr(transformers, _CLASSES[head][kind]).config_class
    if not isinstance(config, taken):  # a model of text and images, of which this head takes the text
        config = config.get_text_config()
    for each in {id(one): one for one in (config, config.get_text_config())}.values():
        usual = {
            "vocab_size": 211,
            "num_key_value_heads": vars(each).get("num_attention_heads"),
            "head_dim": 16,
            "num_experts_per_tok": 2,
        }
        for name, value in usual.items():
            if vars(each).get(name, value) is None:
                setattr(each, name, value)
        if head == "next token" and hasattr(each, "is_decoder"):
            each.is_decoder = True
    return config


def small_random_model(kind: str, head: str) -> Any:
    """A model with random weights."""
    name = _CLASSES[head][kind]
    try:
        class_of_type = getattr(transformers, name)
        small = small_copy(usual_config(kind, head), class_of_type, WINDOW).config
        model = class_of_type._from_config(small).eval()  # noqa: SLF001 - how transformers makes one of a config
    except MODEL_ERRORS as error:
        raise NotBuiltError(one_line(error, 160)) from error
    torch.manual_seed(11)
    spread_weights(model)
    return model


def verdict_on(model: Any) -> str:
    """`right`, `refused: REASON` (by `PackCollator`) or `WRONG: WHAT`.

    What is not right to 1e-5 is tried in float64: there rounding goes, and defects stay.
    """
    try:
        finding = probe_model(model, ["transformers-5"])[0]
        if finding.is_right:
            return "right"
        PackCollator("transformers-5", model)
        exact = probe_model(model.double(), ["transformers-5"])[0]
    except InputError as error:
        return f"refused: {error}"
    if exact.is_right and finding.alone is not None:
        return f"right: in float64; in float32 to {finding.alone / finding.scale:.0e} of the largest output"
    return f"WRONG: {exact.verdict}"
