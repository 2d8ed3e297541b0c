"""How a model has to be fed packs, measured on the model and its software: no type of model is known here.

A small copy of its config has the same kinds of layers, random weights and short windows. What does it do with a sequence by
itself: does a later token change earlier outputs, which positions does it count, which inputs does its `forward` take? Then
packs are fed in every form that fits (one mask, or one for each kind of layer; windows that count the token itself, or not).
The form whose outputs equal those of the sequences alone is right. Where none is, the model is refused.

Of a model, its own class is copied, and the model itself must agree: it decides whether it is causal. Then it is tried as
it will be used (`try_model`): with its head, its weights, its software and its batches.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from gaudi_bert.common.arrays import NOT_PREDICTED
from gaudi_bert.common.errors import InputError
from gaudi_bert.encoders.feeding import Feeding, fed_module, fed_positions, target_mask
from gaudi_bert.encoders.trial import (
    ALONE_BOUND,
    MODEL_ERRORS,
    Row,
    alone_outputs,
    full_pack,
    largest_difference,
    moved_neighbours,
    outputs_of,
    positions_of,
    random_packs,
    scale_of,
    sequences_of,
    small_copy,
    token_outputs,
    tokens_of_packs,
    trial_conditions,
    trial_of,
    usual_tokens,
)
from gaudi_bert.model.config import NO_PACKS

_SEED = 12345
_MODEL_BOUND, _HALF_BOUND = 1e-3, 0.05  # of a complete model's outputs: rounding in many layers; and in 16 bits
_EXACT = (torch.float32, torch.float64)
_USUAL_ROWS, _FEWEST_POSITIONS, _MOST_POSITIONS = (512, 1024), 16, 1 << 22
ONE_FOR_A_ROW = (
    "its head gives one output for a row, and a row of packs holds several sequences; "
    "use PackedBertForSequenceClassification and PackCollator(sequence_labels=COLUMN)"
)
_STATEFUL = ("linear_attention", "conv", "hybrid", "mamba", "recurrent")


def feeding_of(model: Any, target: str = "transformers-5", kind: Any = None) -> Feeding:
    """Return how to feed a model for a target: the model, or its config. A `Feeding` is returned as it is.

    `kind` is the class of `transformers` that a config is for; None for the encoder alone.
    """
    if isinstance(model, Feeding):
        return model
    if isinstance(model, torch.nn.Module):
        return _feeding_of_module(model, target)
    tags = any(name.endswith("ForTokenClassification") for name in model.architectures or ())
    return replace(_ask(model, kind, target), labels_own_token=tags)


def _feeding_of_module(model: Any, target: str) -> Feeding:
    """Measure the model's class, and compare the model itself."""
    if not hasattr(model, "config") or not hasattr(model, "base_model"):
        raise InputError(f"{type(model).__name__}: is not a transformers model; pass a model, its config or its model_type")
    feeding = _ask(model.config, type(model), target)
    check_head(model)
    with trial_of(model):
        causal = _is_causal(model.base_model)
        own = causal and _labels_own_token(model)
    if causal != feeding.causal:
        attention = "causal" if feeding.causal else "bidirectional"
        raise InputError(f"{type(model).__name__}: its config describes a {attention} model, and it is not; {NO_PACKS}")
    return replace(feeding, labels_own_token=own)


def _labels_own_token(model: Any) -> bool:
    """Whether the label of the first token changes the loss, as it does not where labels are those of the next tokens."""
    if getattr(model, "gathers", False):
        return False
    weights = next(model.parameters())
    ids = torch.tensor(usual_tokens(model.config)[np.newaxis, :3], device=weights.device)
    labels = torch.zeros_like(ids)
    try:
        with_first, without = (
            model(input_ids=ids, labels=labels.index_fill(1, torch.tensor([0], device=weights.device), first)).loss
            for first in (0, NOT_PREDICTED)
        )
    except MODEL_ERRORS:  # it takes no labels
        return False
    return with_first is not None and not torch.equal(with_first, without)


# --- the model as it will be used


class TriedModel(NamedTuple):
    """The tokens of the longest row that was tried, and how far packed and alone differ, of the largest output."""

    row_tokens: int
    difference: float


def try_model(
    model: Any,
    feeding: Feeding,
    batch_of: Callable[[list[Row]], dict[str, Any]],
    row_tokens: int | None = None,
    *,
    training: bool,
) -> TriedModel:
    """Refuse a model whose packed sequences are not what each is alone, or which change with their neighbours in training.

    Args:
        model: it may be a small copy; with its head, unless that gathers.
        batch_of: what it is given for rows.
        row_tokens: of the longest rows; as many as the model has positions when None, but 512 to 1,024.
        training: try it in training mode too, with its dropout; an error there is not one of packs.

    It computes 576 tokens and two of the longest rows, and two more in training mode.
    """
    tried = fed_module(model.base_model if getattr(model, "gathers", False) else model, feeding)
    positions = tokens_of_packs(model.config, feeding.position_offset, _MOST_POSITIONS)
    longest = min(positions, feeding.longest_sequence or positions)
    if row_tokens is None:
        usual = int(np.clip(positions, *_USUAL_ROWS))
        row_tokens = usual if feeding.positions else min(usual, positions)  # which else count on from row to row
    without = feeding.unpacked_token
    short, _ = random_packs(model.config, min(longest, 144), _SEED, longest, without)
    full, changed = full_pack(model.config, row_tokens, _SEED, longest, without)
    largest = 0.0
    for rows in (short[:2], full):
        with trial_of(model):
            packed = sequences_of(outputs_of(tried, batch_of(rows)), rows)
            alone = alone_outputs(tried, feeding, rows)
        difference = largest_difference(packed, alone) / scale_of(alone)
        _check_trial(model, rows, "packed and alone differ", difference, _MODEL_BOUND)
        largest = max(largest, difference)
    if training:
        moved = 0.0
        with trial_of(model), suppress(*MODEL_ERRORS):
            model.train()
            moved = _moved(tried, batch_of, full, changed)
        _check_trial(model, full, "in training, sequences change their neighbours", moved, ALONE_BOUND)
    return TriedModel(row_tokens, largest)


def _check_trial(model: Any, rows: list[Row], what: str, difference: float, bound: float) -> None:
    if not difference <= (bound if next(model.parameters()).dtype in _EXACT else _HALF_BOUND):
        raise InputError(
            f"{type(model).__name__}: computes wrong outputs for packs of {len(rows[0]['input_ids'])} tokens "
            f"({what} by {difference:.1e} of the largest output); {NO_PACKS}"
        )


def _moved(model: Any, batch_of: Callable[[list[Row]], dict[str, Any]], rows: list[Row], changed: list[Row]) -> float:
    """Measure how far a changed sequence moves the others of its pack, as a part of the largest output; dropout is the
    same.
    """
    device, outputs = next(model.parameters()).device, []
    for each in (rows, changed):
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(_SEED)
            outputs.append(sequences_of(outputs_of(model, batch_of(each)), each))
    before, after = outputs
    return moved_neighbours(before, after, rows) / scale_of(before)


def check_head(model: Any) -> None:
    """Refuse a model with one output for a row, unless its head gathers (`gathers`)."""
    if getattr(model, "gathers", False):
        return
    ids = torch.tensor(usual_tokens(model.config)[np.newaxis, :3])
    with trial_of(model):
        output = token_outputs(model(input_ids=ids.to(next(model.parameters()).device)))
    if output.ndim != 3 or output.shape[:2] != ids.shape:
        raise InputError(f"{type(model).__name__}: {ONE_FOR_A_ROW}")


# --- what is measured on the small copy


@dataclass(frozen=True)
class _Form:
    """One way to make masks: for each kind of layer or one for all, with a window or not, which counts the token itself;
    and whether embeddings are computed first, in rows that may hold masked tokens or not.
    """

    by_layer: bool
    window: bool
    counts_itself: bool
    embeds_first: bool = False
    masked_tokens: bool = True


def _ask(config: Any, kind: Any, target: str) -> Feeding:
    """The feeding under which a small copy treats packed sequences as if they stood alone."""
    stateful = sorted(kind for kind in _kinds(config) if kind.startswith(_STATEFUL))
    if stateful:
        reason = f"its layers of {', '.join(stateful)} carry a state from one sequence of a pack into the next"
        raise InputError(_refusal(config, reason))
    try:
        model = small_copy(config, kind)
        with trial_conditions():
            taken = inspect.signature(model.forward).parameters
            if "decoder_input_ids" in taken:
                raise InputError("it is an encoder with a decoder, which reads another text")
            has_types = (getattr(model.config, "type_vocab_size", None) or 0) > 1
            feeding = Feeding(positions="position_ids" in taken, token_types="token_type_ids" in taken and has_types)
            feeding = replace(feeding, causal=_is_causal(model))
            feeding = replace(feeding, position_offset=_offset(model) if feeding.positions else 0)
            feeding = replace(feeding, longest_sequence=_longest_sequence(model, feeding))
            form, difference = _right_form(model, feeding, target)
    except MODEL_ERRORS as error:
        reason = str(error) if isinstance(error, InputError) else "it fails on a few tokens"
        raise InputError(_refusal(config, reason)) from error
    if form is None:
        lacks = "" if feeding.positions else "it takes no position_ids, and "
        if target in ("transformers-4", "optimum-habana"):
            raise InputError(
                f"target = {target!r}: its mask is not right for model type {config.model_type!r} with transformers "
                f"{transformers.__version__} ({difference}); use target transformers-5"
            )
        raise InputError(_refusal(config, f"{lacks}no mask is right for it ({difference})"))
    return _formed(config, feeding, form)


def _refusal(config: Any, reason: str) -> str:
    name = f"model type {config.model_type!r}: "
    return f"{name}{reason.removeprefix(name)}; {NO_PACKS}"


def _is_causal(model: Any) -> bool:
    """Whether later tokens leave earlier outputs unchanged, compared with the effect of earlier tokens on later outputs.

    Both effects may be small: in a model with fresh weights, tokens hardly change one another's outputs.
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
        raise InputError("attention has no effect on its outputs here")
    return float(foreseen) <= 0.05 * float(seen)


def _offset(model: Any) -> int:
    """The position that the model gives the first token of a sequence."""
    padding = getattr(model.config, "pad_token_id", None)
    positions = positions_of(model.config) or _MOST_POSITIONS
    possible = dict.fromkeys((0, (padding or 0) + 1, 1, 2))
    offsets = [each for each in possible if each + _FEWEST_POSITIONS <= positions] or [0]
    tokens = usual_tokens(model.config)
    ids = torch.tensor(tokens[np.arange(tokens_of_packs(model.config, max(offsets))) % len(tokens)][None])
    alone = outputs_of(model, {"input_ids": ids})
    for offset in offsets:
        counted = torch.arange(offset, offset + ids.shape[1])[None]
        try:
            outputs = outputs_of(model, {"input_ids": ids, "position_ids": counted})
        except MODEL_ERRORS:
            continue
        if largest_difference([outputs], [alone]) <= ALONE_BOUND * scale_of([alone]):
            return offset
    raise InputError("cannot determine which positions it gives a sequence")


def _longest_sequence(model: Any, feeding: Feeding) -> int | None:
    """Most tokens of a sequence that leaves others of its batch unchanged; None where any number does.

    Positions that are far on stand for the sequence, so it need not be computed. No sequence here is short: some models
    change for good when they meet one.
    """
    length = tokens_of_packs(model.config, feeding.position_offset)
    positions = positions_of(model.config)
    most = _MOST_POSITIONS if positions is None else min(4 * positions, _MOST_POSITIONS)
    tokens = usual_tokens(model.config)
    ids = torch.tensor(np.stack([tokens[np.arange(first, first + length) % len(tokens)] for first in (0, 3)]))

    def outputs_next_to(last: int) -> torch.Tensor:
        counted = torch.stack([torch.arange(length), torch.arange(last - length, last)])
        return outputs_of(model, {"input_ids": ids, "position_ids": counted + feeding.position_offset})[:1]

    def moves(last: int) -> bool:
        usual = outputs_next_to(length)  # each time: longer sequences change RoPE until the next short one
        return largest_difference([outputs_next_to(last)], [usual]) > ALONE_BOUND * scale_of([usual])

    try:
        if not feeding.positions or not moves(most):
            return None
    except MODEL_ERRORS:  # a table of positions, which is its limit
        return None
    longest = bisect_left(range(most), True, length, key=moves) - 1
    outputs_next_to(length)
    return longest


def _right_form(model: Any, feeding: Feeding, target: str) -> tuple[_Form | None, str]:
    """The first form that is right, and what the last one did.

    Packs go first: some models change for good when they meet a short sequence.
    """
    length, longest = tokens_of_packs(model.config, feeding.position_offset), feeding.longest_sequence
    if (_window(model.config) or 0) >= length:
        raise InputError(f"its window of {_window(model.config)} tokens has no effect in a copy of {length} positions")
    packed, last = {}, ""
    for form in _forms(model, feeding.causal):
        formed = _formed(model.config, feeding, form)
        rows, _ = random_packs(model.config, length, _SEED, longest, formed.unpacked_token)
        try:
            packed[form] = (
                rows,
                sequences_of(outputs_of(fed_module(model, formed), packed_batch(rows, formed, target)), rows),
            )
        except MODEL_ERRORS as error:
            last = str(error)
    for form, (rows, outputs) in packed.items():
        alone = alone_outputs(model, feeding, rows)
        difference = largest_difference(outputs, alone)
        if difference <= ALONE_BOUND * scale_of(alone):
            return form, ""
        last = f"packed and alone differ by {difference:.1e}"
    return None, last


def _forms(model: Any, causal: bool) -> Iterator[_Form]:
    config = model.config
    if _window(config) is not None:
        for by_layer in (True, False) if _kinds(config) else (False,):
            for counts_itself in (causal, not causal):
                yield _Form(by_layer, True, counts_itself)
    yield _Form(False, False, False)
    if _kinds(config):
        yield _Form(True, False, False)
    if hasattr(model, "embeddings"):
        yield _Form(False, False, False, embeds_first=True)
        yield _Form(False, False, False, embeds_first=True, masked_tokens=False)


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
    if form.embeds_first:
        token = None if form.masked_tokens else getattr(config, "mask_token_id", None)
        return replace(feeding, embeds_first=True, unpacked_token=token)
    window = _window(config) if form.window else None
    reach = None if window is None else window - form.counts_itself
    if not form.by_layer:
        return replace(feeding, window=reach)
    kinds = dict.fromkeys(("full_attention", *_kinds(config), "sliding_attention"))
    return replace(feeding, layers={kind: reach if "sliding" in kind else None for kind in kinds})


def packed_batch(rows: list[Row], feeding: Feeding, target: str = "transformers-5") -> dict[str, Any]:
    """Rows as the model takes them; targets that need their own software (flash, flex) are tried with other masks."""
    target = "transformers-5" if target in ("flash", "flex") else target
    columns = {
        name: torch.tensor(np.stack([row[name] for row in rows]))
        for name in ("input_ids", "token_type_ids", "position_ids", "sequence_ids")
    }
    batch: dict[str, Any] = {
        "input_ids": columns["input_ids"],
        "attention_mask": target_mask(columns["sequence_ids"], feeding, target),
    }
    if feeding.positions:
        batch["position_ids"] = fed_positions(columns["position_ids"], feeding)
    if feeding.token_types:
        batch["token_type_ids"] = columns["token_type_ids"]
    return batch
