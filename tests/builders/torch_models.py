"""Small random models of `transformers`: some with windows of local attention, and one of every type."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from gaudi_bert.common.errors import InputError
from gaudi_bert.pytorch import PackCollator, probe_model
from gaudi_bert.pytorch.trial import MODEL_ERRORS, reason_of, small_copy, spread_weights

VOCABULARY, POSITIONS = 211, 256
SPREAD = 0.15  # of weights: wide enough for attention to matter
_ANY = {"vocab_size": VOCABULARY, "initializer_range": SPREAD}
_SIZES = {**_ANY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
_DISTIL = {**_ANY, "dim": 32, "n_layers": 3, "n_heads": 2, "hidden_dim": 48}
_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
_GPT2 = {**_ANY, "n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": POSITIONS, "bos_token_id": 1, "eos_token_id": 2}
_LONG = {"max_position_embeddings": POSITIONS}
MODELS: dict[str, tuple[Any, Any]] = {
    "bert": (transformers.BertModel, partial(transformers.BertConfig, **_SIZES, **_LONG)),
    "roberta": (
        transformers.RobertaModel,
        partial(transformers.RobertaConfig, **_SIZES, max_position_embeddings=POSITIONS + 2),
    ),
    "distilbert": (transformers.DistilBertModel, partial(transformers.DistilBertConfig, **_DISTIL, **_LONG)),
    "modernbert": (transformers.ModernBertModel, partial(transformers.ModernBertConfig, **_SIZES, **_LONG, **_ENDS)),
    "gpt2": (transformers.GPT2LMHeadModel, partial(transformers.GPT2Config, **_GPT2)),
}


def small_model(name: str, attention: str) -> Any:
    """A model of a type, with seeded random weights, that computes attention as `attention` says."""
    torch.manual_seed(7)
    kind, config = MODELS[name]
    model = kind(config()).eval()
    model.set_attn_implementation(attention)
    return model


# --- one of every type, and whether packs are fed to it correctly


WINDOW = 24  # other than the one that the answer was found with
_CLASSES = {
    "next token": dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "masked tokens": dict(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "none": dict(modeling_auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES),
}


class NotBuiltError(Exception):
    """No small random model of a type can be built here."""


def filled_config(kind: str, class_of_type: Any, *, causal: bool) -> Any:
    """The usual config of a type for a class, with the settings that `transformers` leaves open filled in."""
    config = transformers.AutoConfig.for_model(kind)
    if not isinstance(config, class_of_type.config_class):  # a model of text and images, of which this head takes the text
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
        if causal and hasattr(each, "is_decoder"):
            each.is_decoder = True
    return config


def small_random_model(kind: str, head: str) -> Any:
    """A model with random weights."""
    name = _CLASSES[head][kind]
    try:
        class_of_type = getattr(transformers, name)
        config = filled_config(kind, class_of_type, causal=head == "next token")
        small = small_copy(config, class_of_type, WINDOW).config
        model = class_of_type._from_config(small).eval()  # noqa: SLF001 - how transformers makes one of a config
    except MODEL_ERRORS as error:
        raise NotBuiltError(reason_of(error)) from error
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
