"""A small model with the architecture of a config: all kinds of its layers, random weights, few parameters, short windows.

How a model has to be fed is tried on it (`asking.py`): sizes do not matter there, and a window can only be seen in sequences
that are longer.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from gaudi_bert.common.errors import InputError
from gaudi_bert.pytorch.trial import MODEL_ERRORS, one_line

_SEED = 12345
_MOST_PARAMETERS = 2e8
_HEADS = 4
_WINDOW_NAME = re.compile(r"^(?!.*layer).*(window|local_attention|chunk|block_size|index_\w*topk|topk_blocks)")
_WIDTH_NAME = re.compile(r"size|dim|^d_|n_embd")
_PERIOD = re.compile(r"every_n|pattern|interval|period|freq")
"""Names of settings with the number of layers between two of another kind."""
_MOST = (
    (re.compile(r"vocab_size"), 211),
    (re.compile(r"intermediate_size|ffn|ff_dim|n_inner|mlp_dim|moe_dim|expert_(hidden|dim)"), 48),
    (re.compile(r"experts?_per_tok|top_?k(_experts|_routing)?$|selected_experts|moe_k$"), 2),
    (re.compile(r"(num|n|moe)_\w*experts?$"), 4),
    (re.compile(r"(n|topk)_group$|first_k_dense|num_dense_layers"), 1),
    (re.compile(r"lora_rank$|lora_r$"), 16),
    (re.compile(r"kv_shared_layers$"), 0),
)
"""Sizes that the copy makes smaller: how it has to be fed does not depend on them."""


def _configs(config: Any) -> Iterator[Any]:
    """A config and those within it."""
    yield config
    for value in vars(config).values():
        if isinstance(value, transformers.PretrainedConfig):
            yield from _configs(value)


def window_settings(config: Any) -> list[tuple[Any, str, Any]]:
    """What may limit how far a layer sees: configs, the names there, and the values (numbers, or lists of them)."""
    settings = []
    for each in _configs(config):
        for name, value in vars(each).items():
            numbers = value if isinstance(value, list) else [value]
            if _WINDOW_NAME.search(name) and numbers and all(type(one) is int and one > 1 for one in numbers):
                settings.append((each, name, value))
    return settings


def _shallow(config: Any, window: int) -> Any:
    """A copy with short windows, and no more layers than it takes to have every kind of them."""
    small = copy.deepcopy(config)
    for owner, name, value in window_settings(small):
        short = [min(one, window) for one in value] if isinstance(value, list) else min(value, window)
        setattr(owner, name, short)
    for each in _configs(small):
        layers = getattr(each, "num_hidden_layers", None)
        if not isinstance(layers, int):
            continue
        kinds = list(getattr(each, "layer_types", None) or [])
        periods = [value for name, value in vars(each).items() if _PERIOD.search(name) and type(value) is int]
        fewer = max([2, *(kinds.index(kind) + 1 for kind in set(kinds)), *(each for each in periods if each <= layers)])
        if fewer >= layers:
            continue
        for name, value in list(vars(each).items()):
            if isinstance(value, list | tuple) and len(value) == layers:
                vars(each)[name] = value[:fewer]
        each.num_hidden_layers = fewer
    return small


def _small(config: Any, window: int) -> Any:
    """A shallow copy whose layers are narrow too: a few heads as wide as they were."""
    small = _shallow(config, window)
    for each in _configs(small):
        heads, hidden = (getattr(each, name, None) for name in ("num_attention_heads", "hidden_size"))
        if type(heads) is int and type(hidden) is int and heads > _HEADS and hidden % heads == 0:
            width = vars(each).get("head_dim")
            for name, value in list(vars(each).items()):
                if _WIDTH_NAME.search(name) and type(value) is int and value == hidden:
                    setattr(each, name, _HEADS * (width or hidden // heads))
            each.num_attention_heads = _HEADS
            _cap(each, re.compile(r"attention_heads$|key_value_heads$"), _HEADS)
        for names, most in _MOST:
            _cap(each, names, most)
        vocabulary = getattr(each, "vocab_size", None)
        for name, value in list(vars(each).items()):
            if name.endswith("_token_id") and type(value) is int and type(vocabulary) is int and value >= vocabulary:
                setattr(each, name, value % 4)
    return small


def _cap(config: Any, names: re.Pattern[str], most: int) -> None:
    """Make every setting of such a name, a number or a list of them, at most `most`."""
    for name, value in list(vars(config).items()):
        if names.search(name) and type(value) is int and value > most:
            setattr(config, name, most)
        elif names.search(name) and isinstance(value, list) and all(type(one) is int for one in value):
            setattr(config, name, [min(one, most) for one in value])


def small_copy(config: Any, kind: Any = None, window: int = 8) -> Any:
    """A small model in evaluation mode, without its head: of the class `kind`, or the one that `transformers` has for it.

    Layers with a longer window see `window` tokens far.
    """
    reasons = []
    for shrink in (_small, _shallow):
        try:
            small = shrink(config, window)
            software = getattr(config, "_attn_implementation", None)
            small._attn_implementation = software if software in ("eager", "sdpa") else None  # noqa: SLF001 - set nowhere else
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in _built(small, kind).parameters())
            if size > _MOST_PARAMETERS:
                reasons.append(f"its smallest copy has {size:,} parameters")
                continue
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(_SEED)
                model = _built(small, kind).float().eval()
                spread_weights(model)
        except MODEL_ERRORS as error:
            reasons.append(one_line(error))
        else:
            return model
    raise InputError(f"model type {config.model_type!r}: no copy of it can be tried ({reasons[0]})")


def _built(config: Any, kind: Any) -> Any:
    if kind is not None:
        return kind._from_config(config).base_model  # noqa: SLF001 - how transformers makes one of a config
    if type(config) in transformers.MODEL_MAPPING:
        return transformers.AutoModel.from_config(config)
    return transformers.AutoModelForCausalLM.from_config(config).base_model


def spread_weights(model: Any) -> None:
    """Random weights everywhere: what begins as zeros would hide what it is multiplied with.

    They are wide enough for attention to matter, and keep the size of what they are multiplied with.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.requires_grad:  # a table of positions, not weights
                continue
            if parameter.ndim > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
