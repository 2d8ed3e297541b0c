"""How a model has to be fed packs, asked of the model and its software: nothing is known here of any type of model.

A small copy is made of its config, with the same kinds of layers, random weights and short windows. What does it do with a
sequence by itself? Does a later token change earlier outputs, which positions does it count, which inputs does its `forward`
take? Then packs are fed in every form that fits (one mask, or one for each kind of layer; windows that count the token
itself, or not), and the form whose outputs are those of the sequences alone is right. Where none is, the model is refused.

Of a model, its own class is copied, and the model itself must agree: whether it is causal is decided on it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import transformers

from gaudi_bert.common.errors import InputError
from gaudi_bert.pytorch.feeding import Feeding, additive_masks
from gaudi_bert.pytorch.rows import Row
from gaudi_bert.pytorch.small_copy import small_copy
from gaudi_bert.pytorch.trial import (
    ALONE_BOUND,
    MODEL_ERRORS,
    alone_outputs,
    largest_difference,
    one_line,
    outputs_of,
    random_packs,
    scale_of,
    sequences_of,
    tokens_of_packs,
    trial_conditions,
    trial_of,
    usual_tokens,
)

_SEED = 12345
_MODEL_BOUND, _HALF_BOUND = 1e-3, 0.05  # of a whole model's outputs: rounding in many layers; and in 16 bits
ONE_FOR_A_ROW = (
    "its head gives one output for a row, and a row of packs holds several sequences; "
    "use PackedBertForSequenceClassification and PackCollator(sequence_labels=COLUMN)"
)
_STATEFUL = ("linear_attention", "conv", "hybrid", "mamba", "recurrent")


def feeding_of(model: Any) -> Feeding:
    """How to feed a model: the model, its config, or a `model_type` of `transformers` (then with its usual settings).

    A `Feeding` is returned as it is: for a model that is not one of `transformers`.
    """
    if isinstance(model, Feeding):
        return model
    if isinstance(model, torch.nn.Module):
        return _feeding_of_module(model)
    if isinstance(model, transformers.PretrainedConfig):
        return _ask(model, None)
    if not isinstance(model, str):
        raise InputError(f"{type(model).__name__}: is no model of transformers; give one, its config or its model_type")
    try:
        config = transformers.AutoConfig.for_model(model)
    except MODEL_ERRORS as error:
        raise InputError(f"model type {model!r}: transformers does not know it; give the model or its config") from error
    return _ask(config, None)


def _feeding_of_module(model: Any) -> Feeding:
    """Of the model's class, and held to the model itself."""
    if not hasattr(model, "config") or not hasattr(model, "base_model"):
        raise InputError(f"{type(model).__name__}: is no model of transformers; give one, its config or its model_type")
    feeding = _ask(model.config, type(model))
    check_head(model)
    inner = model.base_model
    takes_masks = model.config._attn_implementation in ("eager", "sdpa")  # noqa: SLF001 - said nowhere else
    with trial_of(model):
        causal = _is_causal(inner)
        difference = _difference(inner, feeding) if takes_masks and causal == feeding.causal else None
    if causal != feeding.causal:
        said = "causal" if feeding.causal else "bidirectional"
        raise InputError(
            f"{type(model).__name__}: its config makes a {said} model, and it is not; give it rows of one sequence"
        )
    if difference is not None and not difference <= _bound(inner):
        raise InputError(
            f"{type(model).__name__}: a copy of its config is right with packs, and the model is not (packed and alone "
            f"differ by {difference:.1e} of the largest output); give it rows of one sequence"
        )
    return feeding


def _difference(model: Any, feeding: Feeding) -> float:
    """How far packed and alone differ, as a part of the largest output (or of 1)."""
    rows, _ = random_packs(model.config, tokens_of_packs(model.config, feeding.position_offset), _SEED)
    packed = sequences_of(outputs_of(model, _batch(rows, feeding)), rows)
    alone = alone_outputs(model, feeding, rows)
    return largest_difference(packed, alone) / scale_of(alone)


def check_head(model: Any) -> None:
    """Refuse a model with one output for a row; a head that gathers says so (`gathers`)."""
    if getattr(model, "gathers", False):
        return
    ids = torch.tensor(usual_tokens(model.config)[np.newaxis, :3])
    with trial_of(model):
        output = model(input_ids=ids.to(next(model.parameters()).device))[0]
    if output.ndim != 3 or output.shape[:2] != ids.shape:
        raise InputError(f"{type(model).__name__}: {ONE_FOR_A_ROW}")


# --- questions


@dataclass(frozen=True)
class _Form:
    """One way to make masks: for each kind of layer or one for all, with a window or not, which counts the token itself."""

    by_layer: bool
    window: bool
    counts_itself: bool


def _ask(config: Any, kind: Any) -> Feeding:
    """The feeding under which a small copy treats packed sequences as if they stood alone."""
    stateful = sorted(kind for kind in _kinds(config) if kind.startswith(_STATEFUL))
    if stateful:
        reason = f"its layers of {', '.join(stateful)} carry a state from one sequence of a pack into the next"
        raise InputError(_refusal(config, reason))
    try:
        model = small_copy(config, kind)
        with trial_conditions():
            feeding = replace(_inputs(model), causal=_is_causal(model))
            feeding = replace(feeding, position_offset=_offset(model) if feeding.positions else 0)
            counted_from_padding = feeding.position_offset > 0  # RoBERTa's family, whose tokenizers make no types
            feeding = replace(feeding, token_types=feeding.token_types and not (feeding.causal or counted_from_padding))
            form, difference = _right_form(model, feeding)
    except MODEL_ERRORS as error:
        said = str(error) if isinstance(error, InputError) else one_line(error)
        raise InputError(_refusal(config, said)) from error
    if form is None:
        lacks = "" if feeding.positions else "it takes no position_ids, and "
        raise InputError(_refusal(config, f"{lacks}no mask is right for it ({difference})"))
    return _formed(config, feeding, form)


def _refusal(config: Any, reason: str) -> str:
    """Why packs cannot be fed to such a model, in one line."""
    name = f"model type {config.model_type!r}: "
    return f"{name}{reason.removeprefix(name)}; give it rows of one sequence"


def _inputs(model: Any) -> Feeding:
    taken = inspect.signature(model.forward).parameters
    types = getattr(model.config, "type_vocab_size", None) or 0
    return Feeding(positions="position_ids" in taken, token_types="token_type_ids" in taken and types > 1)


def _bound(model: Any) -> float:
    return _MODEL_BOUND if next(model.parameters()).dtype in (torch.float32, torch.float64) else _HALF_BOUND


def _is_causal(model: Any) -> bool:
    """Whether later tokens leave earlier outputs as they are, held to what earlier tokens do to later outputs.

    Both may be little: in a model with fresh weights, tokens hardly move one another's outputs.
    """
    tokens, length = usual_tokens(model.config), tokens_of_packs(model.config, 2)
    half = length // 2
    numbers = np.random.default_rng(_SEED).integers(0, len(tokens), length)
    later, earlier = (np.where((np.arange(length) < half) == first, numbers + 1, numbers) for first in (False, True))
    usual, with_later, with_earlier = (
        outputs_of(model, {"input_ids": torch.tensor(tokens[each % len(tokens)][None])})[0]
        for each in (numbers, later, earlier)
    )
    if not bool(torch.isfinite(usual).all()):
        raise InputError("its outputs are not finite")
    seen, foreseen = (usual - with_earlier)[half:].abs().max(), (usual - with_later)[:half].abs().max()
    if float(seen) <= ALONE_BOUND * scale_of([usual]):
        raise InputError("its tokens do not see one another on this machine")
    return float(foreseen) <= 0.05 * float(seen)


def _offset(model: Any) -> int:
    """The position that the model gives the first token of a sequence."""
    padding = getattr(model.config, "pad_token_id", None)
    offsets = dict.fromkeys((0, (padding or 0) + 1, 1, 2))
    tokens = usual_tokens(model.config)
    ids = torch.tensor(tokens[np.arange(tokens_of_packs(model.config, max(offsets))) % len(tokens)][None])
    alone = outputs_of(model, {"input_ids": ids})
    for offset in offsets:
        counted = torch.arange(offset, offset + ids.shape[1])[None]
        try:
            found = outputs_of(model, {"input_ids": ids, "position_ids": counted})
        except MODEL_ERRORS:
            continue
        if largest_difference([found], [alone]) <= ALONE_BOUND * scale_of([alone]):
            return offset
    raise InputError("the positions that it gives a sequence by itself cannot be found")


def _right_form(model: Any, feeding: Feeding) -> tuple[_Form | None, str]:
    """The first form that is right, and what the last one did.

    Packs go first: some models change for good when they meet a short sequence.
    """
    length = tokens_of_packs(model.config, feeding.position_offset)
    if (_window(model.config) or 0) >= length:
        raise InputError(f"its window of {_window(model.config)} tokens cannot be seen in a copy of {length} positions")
    rows, _ = random_packs(model.config, length, _SEED)
    packed, last = {}, ""
    for form in _forms(model.config, feeding.causal):
        try:
            packed[form] = sequences_of(outputs_of(model, _batch(rows, _formed(model.config, feeding, form))), rows)
        except MODEL_ERRORS as error:
            last = one_line(error)
    alone = alone_outputs(model, feeding, rows)
    for form, outputs in packed.items():
        difference = largest_difference(outputs, alone)
        if difference <= ALONE_BOUND * scale_of(alone):
            return form, ""
        last = f"packed and alone differ by {difference:.1e}"
    return None, last


def _forms(config: Any, causal: bool) -> Iterator[_Form]:
    if _window(config) is not None:
        for by_layer in (True, False) if _kinds(config) else (False,):
            for counts_itself in (causal, not causal):
                yield _Form(by_layer, True, counts_itself)
    yield _Form(False, False, False)
    if _kinds(config):
        yield _Form(True, False, False)


def _kinds(config: Any) -> list[str]:
    return list(dict.fromkeys(getattr(config.get_text_config(), "layer_types", None) or ()))


def _window(config: Any) -> int | None:
    text = config.get_text_config()
    for name in ("sliding_window", "window_size", "attention_chunk_size"):
        value = getattr(text, name, None)
        if type(value) is int and value > 0:
            return value
    return None


def _formed(config: Any, feeding: Feeding, form: _Form) -> Feeding:
    """The feeding of a config in one form."""
    window = _window(config) if form.window else None
    reach = None if window is None else window - form.counts_itself
    if not form.by_layer:
        return replace(feeding, window=reach)
    kinds = dict.fromkeys(("full_attention", *_kinds(config), "sliding_attention"))
    return replace(feeding, layers={kind: reach if "sliding" in kind else None for kind in kinds})


def _batch(rows: list[Row], feeding: Feeding) -> dict[str, Any]:
    columns = {
        name: torch.tensor(np.stack([row[name] for row in rows]))
        for name in ("input_ids", "token_type_ids", "position_ids", "sequence_ids")
    }
    batch: dict[str, Any] = {
        "input_ids": columns["input_ids"],
        "attention_mask": additive_masks(columns["sequence_ids"], feeding),
    }
    if feeding.positions:
        batch["position_ids"] = columns["position_ids"] + feeding.position_offset
    if feeding.token_types:
        batch["token_type_ids"] = columns["token_type_ids"]
    return batch
