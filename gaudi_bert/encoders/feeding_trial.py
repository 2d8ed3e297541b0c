"""Determining by trials how a model has to be fed packs.

There is no list of model types. Instead, a small copy of the model is built from its config, with the same kinds of layers,
random weights and short windows. Running it on single sequences shows whether it is causal, how it numbers positions, and
which inputs it takes. Then packs are run with every kind of mask that may be right: one mask for all layers or one per kind
of layer, and windows that include the token itself or not. The right kind is the one with which packed sequences have the
same outputs as single ones. If there is none, the model is rejected.

Finally, `try_model` checks the model as it will be used, with its head, its weights, its software and its batches.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers

from gaudi_bert.common.arrays import NOT_PREDICTED
from gaudi_bert.common.errors import InputError
from gaudi_bert.encoders.feeding import Feeding, fed_module, fed_positions, target_mask
from gaudi_bert.encoders.trial import (
    ALONE_BOUND,
    MODEL_ERRORS,
    TRIAL_SEED,
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
from gaudi_bert.model.config import NO_PACKS_REMEDY

_HALF_BOUND = 0.05  # allowed difference relative to the largest output, for 16-bit weights
_EXACT = (torch.float32, torch.float64)
_USUAL_ROWS, _FEWEST_POSITIONS, _MOST_POSITIONS = (512, 1024), 16, 1 << 22
ONE_FOR_A_ROW = (
    "its head gives one output for a row, and a row of packs holds several sequences; "
    "use PackedBertForSequenceClassification and PackCollator(sequence_labels=COLUMN)"
)
_STATEFUL = ("linear_attention", "conv", "hybrid", "mamba", "recurrent")


def feeding_of(model: Any, target: str = "transformers-5", kind: Any = None) -> Feeding:
    """Determine how a model has to be fed packs.

    Args:
        model: A model or a config of `transformers`. A `Feeding` is returned unchanged.
        target: The target of `PackCollator` for which masks are made.
        kind: For a config, the `transformers` class of the model. None for the encoder class.

    Raises:
        InputError: The model cannot be fed packs, or its head gives one output per row.
    """
    if isinstance(model, Feeding):
        return model
    if isinstance(model, transformers.PretrainedConfig):
        tags = any(name.endswith("ForTokenClassification") for name in model.architectures or ())
        return replace(_ask(model, kind, target), labels_own_token=tags)
    if not hasattr(model, "config") or not hasattr(model, "base_model"):
        raise InputError(f"{type(model).__name__}: is not a transformers model; pass a model, its config or its model_type")
    feeding = _ask(model.config, type(model), target)
    check_head(model)
    with trial_of(model):
        causal = _is_causal(model.base_model)
        own = causal and _labels_own_token(model)
    if causal != feeding.causal:
        attention = "causal" if feeding.causal else "bidirectional"
        raise InputError(
            f"{type(model).__name__}: its config describes a {attention} model, and it is not; {NO_PACKS_REMEDY}"
        )
    return replace(feeding, labels_own_token=own)


def _labels_own_token(model: Any) -> bool:
    """Return whether the label of a token refers to the token itself.

    If labels refer to the next token, the label of the first token does not change the loss, so this is measured.
    """
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
    except MODEL_ERRORS:  # the model takes no labels
        return False
    return with_first is not None and not torch.equal(with_first, without)


# --- Trying a model as it will be used


def try_model(
    model: Any,
    feeding: Feeding,
    batch_of: Callable[[list[Row]], dict[str, Any]],
    row_tokens: int | None = None,
    *,
    training: bool,
) -> tuple[int, float]:
    """Check that a model computes the same outputs for packed sequences as for single ones.

    In training mode, whose dropout would hide small differences, check instead that changing a sequence does not change the
    other sequences of its pack.

    Args:
        model: The model, which may be a small copy. It is tried with its head, unless the head gathers the outputs of
            sequences itself.
        feeding: The feeding of the model.
        batch_of: A function that turns packs into the arguments of the model.
        row_tokens: The number of tokens in the longest rows. By default, it is the number of positions of the model, but at
            least 512 and at most 1,024.
        training: Whether the model is also tried in training mode. Exceptions in training mode are ignored, because packing
            does not cause them.

    Returns:
        The number of tokens in the longest row that was tried, and the largest difference between packed and single
        sequences, relative to the largest output.

    Raises:
        InputError: The outputs differ by more than rounding, or the model fails.
    """
    tried = fed_module(model.base_model if getattr(model, "gathers", False) else model, feeding)
    positions = tokens_of_packs(model.config, feeding.position_offset, _MOST_POSITIONS)
    longest = min(positions, feeding.longest_sequence or positions)
    if row_tokens is None:
        usual = int(np.clip(positions, *_USUAL_ROWS))
        row_tokens = (
            usual if feeding.positions else min(usual, positions)
        )  # without position ids, a row cannot be longer than the positions
    without = feeding.unpacked_token
    short, _ = random_packs(model.config, min(longest, 144), longest, without)
    full, changed = full_pack(model.config, row_tokens, longest, without)
    largest, bound = 0.0, alone_bound(model)

    def check(rows: list[Row], what: str, difference: float) -> None:
        """Raise an error if a difference is larger than allowed."""
        if not difference <= bound:
            raise InputError(
                f"{type(model).__name__}: computes wrong outputs for packs of {len(rows[0]['input_ids'])} tokens "
                f"({what} by {difference:.1e} of the largest output, and {bound:g} is allowed); {NO_PACKS_REMEDY}"
            )

    for rows in (short[:2], full):
        with trial_of(model):
            packed = sequences_of(outputs_of(tried, batch_of(rows)), rows)
            alone = alone_outputs(tried, feeding, rows)
        difference = largest_difference(packed, alone) / scale_of(alone)
        check(rows, "packed and alone differ", difference)
        largest = max(largest, difference)
    if training:
        moved, outputs, device = 0.0, [], next(model.parameters()).device
        with trial_of(model), suppress(*MODEL_ERRORS):
            model.train()
            for rows in (full, changed):
                with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                    torch.manual_seed(TRIAL_SEED)  # the same dropout for both
                    outputs.append(sequences_of(outputs_of(tried, batch_of(rows)), rows))
            moved = moved_neighbours(outputs[0], outputs[1], full) / scale_of(outputs[0])
        check(full, "in training, sequences change their neighbours", moved)
    return row_tokens, largest


def alone_bound(model: Any) -> float:
    """Return the allowed difference between packed and single sequences, which depends on the dtype of the weights.

    It is relative to the largest output or to 1, whichever is larger.
    """
    return ALONE_BOUND if next(model.parameters()).dtype in _EXACT else _HALF_BOUND


def check_head(model: Any) -> None:
    """Check that a model has an output for every token, or a head that gathers the outputs of sequences itself (`gathers`).

    Raises:
        InputError: The head has one output per row, which is wrong for a row with several sequences.
    """
    if getattr(model, "gathers", False):
        return
    ids = torch.tensor(usual_tokens(model.config)[np.newaxis, :3])
    with trial_of(model):
        output = token_outputs(model(input_ids=ids.to(next(model.parameters()).device)))
    if output.ndim != 3 or output.shape[:2] != ids.shape:
        raise InputError(f"{type(model).__name__}: {ONE_FOR_A_ROW}")


# --- Measurements on the small copy


def _ask(config: Any, kind: Any, target: str) -> Feeding:
    """Find the feeding with which a small copy has the same outputs for packed and for single sequences.

    Raises:
        InputError: There is no such feeding, or the model cannot be tried.
    """
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
            right, difference = _right_form(model, config, feeding, target)
    except MODEL_ERRORS as error:
        reason = str(error) if isinstance(error, InputError) else "it fails on a few tokens"
        raise InputError(_refusal(config, reason)) from error
    if right is None:
        lacks = "" if feeding.positions else "it takes no position_ids, and "
        if target in ("transformers-4", "optimum-habana"):
            raise InputError(
                f"target = {target!r}: its mask is not right for model type {config.model_type!r} with transformers "
                f"{transformers.__version__} ({difference}); use target transformers-5"
            )
        raise InputError(_refusal(config, f"{lacks}no mask is right for it ({difference})"))
    return right


def _refusal(config: Any, reason: str) -> str:
    """Return the error message for a model type that cannot be fed packs."""
    name = f"model type {config.model_type!r}: "
    return f"{name}{reason.removeprefix(name)}; {NO_PACKS_REMEDY}"


def _is_causal(model: Any) -> bool:
    """Return whether later tokens do not affect earlier outputs.

    In a model with random weights, tokens hardly affect each other's outputs. Therefore the effect of later tokens on
    earlier outputs is compared with the opposite effect, and not with a fixed bound.

    Raises:
        InputError: The outputs are not finite, or attention has no measurable effect.
    """
    tokens, length = usual_tokens(model.config), tokens_of_packs(model.config, 2)
    half = length // 2
    numbers = np.random.default_rng(TRIAL_SEED).integers(0, len(tokens), length)
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
    """Return the position id that the model gives to the first token of a sequence.

    Raises:
        InputError: None of the usual position ids reproduces the outputs without position ids.
    """
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
    """Return the maximum number of tokens in a sequence that does not change the other sequences of its batch.

    A long sequence is simulated by large position ids. No short sequences are used, because some models permanently change
    their state when they process one.

    Returns:
        The number, or None if there is no limit.
    """
    length = tokens_of_packs(model.config, feeding.position_offset)
    positions = positions_of(model.config)
    most = _MOST_POSITIONS if positions is None else min(4 * positions, _MOST_POSITIONS)
    tokens = usual_tokens(model.config)
    ids = torch.tensor(np.stack([tokens[np.arange(first, first + length) % len(tokens)] for first in (0, 3)]))

    def outputs_next_to(last: int) -> torch.Tensor:
        """Return the outputs of a sequence next to another one whose positions end before `last`."""
        counted = torch.stack([torch.arange(length), torch.arange(last - length, last)])
        return outputs_of(model, {"input_ids": ids, "position_ids": counted + feeding.position_offset})[:1]

    def moves(last: int) -> bool:
        """Return whether a sequence whose positions end before `last` changes the outputs of another sequence."""
        usual = outputs_next_to(length)  # computed each time, because a long sequence changes RoPE until the next short one
        return largest_difference([outputs_next_to(last)], [usual]) > ALONE_BOUND * scale_of([usual])

    try:
        if not feeding.positions or not moves(most):
            return None
    except MODEL_ERRORS:  # the model has a table of position embeddings, whose size already limits a sequence
        return None
    longest = bisect_left(range(most), True, length, key=moves) - 1
    outputs_next_to(length)
    return longest


def _right_form(model: Any, config: Any, feeding: Feeding, target: str) -> tuple[Feeding | None, str]:
    """Find the first form of masks with which packed and single sequences have the same outputs.

    All packs are run before the single sequences, because some models permanently change their state when they process a
    short sequence.

    Args:
        model: The small copy.
        config: The config of the original model, from which the windows in the result are taken.
        feeding: The feeding, without masks.
        target: The target of `PackCollator`.

    Returns:
        The feeding with the right masks, or None if no form is right, and a description of what went wrong with the last
        form.

    Raises:
        InputError: The window of the small copy is too large to have an effect.
    """
    length, longest = tokens_of_packs(model.config, feeding.position_offset), feeding.longest_sequence
    if (_window(model.config) or 0) >= length:
        raise InputError(f"its window of {_window(model.config)} tokens has no effect in a copy of {length} positions")
    packed, last = [], ""
    for form in _forms(model, feeding):
        formed = form(model.config)
        rows, _ = random_packs(model.config, length, longest, formed.unpacked_token)
        try:
            outputs = outputs_of(fed_module(model, formed), packed_batch(rows, formed, target))
            packed.append((form, rows, sequences_of(outputs, rows)))
        except MODEL_ERRORS as error:
            last = str(error)
    for form, rows, sequences in packed:
        alone = alone_outputs(model, feeding, rows)
        difference = largest_difference(sequences, alone)
        if difference <= ALONE_BOUND * scale_of(alone):
            return form(config), ""
        last = f"packed and alone differ by {difference:.1e}"
    return None, last


def _forms(model: Any, feeding: Feeding) -> Iterator[Callable[[Any], Feeding]]:
    """Yield the possible forms of masks, as functions that return the feeding for a config.

    The last forms compute the embeddings first, and the very last one also excludes masked tokens from packs.
    """

    def masked(config: Any, by_layer: bool, itself: bool | None = None) -> Feeding:
        """Return the feeding for a config, with one mask for all layers or one per kind of layer."""
        window = None if itself is None else _window(config)
        reach = None if window is None else window - bool(itself)
        kinds = dict.fromkeys(("full_attention", *_kinds(config), "sliding_attention")) if by_layer else {}
        layers = {kind: reach if "sliding" in kind else None for kind in kinds}
        return replace(feeding, layers=layers, window=None if by_layer else reach)

    if _window(model.config) is not None:
        for by_layer in (True, False) if _kinds(model.config) else (False,):
            for itself in (feeding.causal, not feeding.causal):
                yield partial(masked, by_layer=by_layer, itself=itself)
    yield partial(masked, by_layer=False)
    if _kinds(model.config):
        yield partial(masked, by_layer=True)
    if hasattr(model, "embeddings"):
        first = replace(feeding, embeds_first=True)
        yield lambda config: first
        yield lambda config: replace(first, unpacked_token=getattr(config, "mask_token_id", None))


def _kinds(config: Any) -> list[str]:
    """Return the distinct kinds of layers of a config. Empty if the config does not distinguish kinds."""
    return list(dict.fromkeys(getattr(config.get_text_config(), "layer_types", None) or ()))


def _window(config: Any) -> int | None:
    """Return the size of the attention window of a config, or None if it has no window."""
    text = config.get_text_config()
    for name in ("sliding_window", "window_size", "attention_chunk_size"):
        value = getattr(text, name, None)
        if type(value) is int and value > 0:
            return value
    return None


def packed_batch(rows: list[Row], feeding: Feeding, target: str = "transformers-5") -> dict[str, Any]:
    """Turn packs into the arguments of a model.

    The targets "flash" and "flex" need special software, so they are tried with the masks of "transformers-5".
    """
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
