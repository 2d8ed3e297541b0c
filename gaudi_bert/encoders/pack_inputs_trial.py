"""Determine by trials which inputs (masks, positions, ...) a model needs to process packs.

There is no list of model types. Instead, a small copy of the model is built from its config, with the same kinds of layers,
random weights and short windows. Running it on single sequences shows whether it is causal, how it numbers positions, and
which inputs it takes. Then packs are run with every kind of mask that may be right: one mask for all layers or one per kind
of layer, and windows that include the token itself or not. The right kind is the one with which packed sequences have the
same outputs as single ones. If there is none, the model is rejected.

Finally, `check_packed_outputs` checks the model as it will be used, with its head, its weights, its software and its
batches.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from gaudi_bert.common.arrays import NOT_PREDICTED
from gaudi_bert.common.errors import InputError
from gaudi_bert.encoders.pack_inputs import (
    PackInputs,
    build_mask_for_collator_target,
    shift_position_ids_for_model,
    wrap_model_for_packs,
)
from gaudi_bert.encoders.trial import (
    ALLOWED_DIFFERENCE,
    MODEL_ERRORS,
    TRIAL_SEED,
    Pack,
    build_small_copy,
    build_trial_packs,
    choose_trial_length,
    compute_largest_neighbour_change,
    compute_max_abs_output_or_one,
    compute_outputs_without_packing,
    compute_token_outputs,
    extract_logits_or_hidden_states,
    find_max_positions,
    find_ordinary_tokens,
    largest_difference,
    make_computation_reproducible,
    split_by_sequence,
    temporary_evaluation_mode,
)
from gaudi_bert.model.config import NO_PACKS_REMEDY

_ALLOWED_16_BIT_DIFFERENCE = 0.05  # allowed difference relative to the largest output, for 16-bit weights
_EXACT_DTYPES = (torch.float32, torch.float64)
_DEFAULT_ROW_TOKENS, _MIN_POSITIONS, _MAX_POSITIONS = (512, 1024), 16, 1 << 22
ONE_OUTPUT_PER_ROW = (
    "the head returns one output per row, but a packed row contains several sequences; "
    "use PackedBertForSequenceClassification and PackCollator(sequence_labels=COLUMN)"
)
_STATEFUL_LAYER_KINDS = ("linear_attention", "conv", "hybrid", "mamba", "recurrent")


class PackCheck(NamedTuple):
    """The result of a successful check that a model computes the same outputs for packs as for single sequences.

    Attributes:
        row_tokens: The number of tokens in the longest row that was tried.
        largest_difference: The largest difference between the outputs of packed and single sequences, relative to the
            largest output.
    """

    row_tokens: int
    largest_difference: float


def determine_inputs_for_packs(
    model: Any, collator_target: str = "transformers-5", model_class: type[Any] | None = None
) -> PackInputs:
    """Determine which inputs, such as masks and positions, a model needs to process packs correctly. Packs are tried on a
    small copy of the model.

    Args:
        model: A model or a config of `transformers`. A `PackInputs` is returned unchanged.
        collator_target: The target of `PackCollator` whose kind of mask is tried.
        model_class: For a config, the `transformers` class of the model. None for the encoder class.

    Raises:
        InputError: The model cannot process packs, or its head gives one output per row.
    """
    if isinstance(model, PackInputs):
        return model
    if isinstance(model, transformers.PretrainedConfig):
        tags = any(name.endswith("ForTokenClassification") for name in model.architectures or ())
        return replace(_determine_inputs_with_small_copy(model, model_class, collator_target), labels_own_token=tags)
    if not hasattr(model, "config") or not hasattr(model, "base_model"):
        raise InputError(
            f"{type(model).__name__}: expected a transformers model; pass a model, its config or its model_type"
        )
    pack_inputs = _determine_inputs_with_small_copy(model.config, type(model), collator_target)
    check_output_per_token(model)
    with temporary_evaluation_mode(model):
        causal = _is_causal(model.base_model)
        labels_own_token = causal and _predicts_label_at_own_token(model)
    if causal != pack_inputs.is_causal:
        attention = "causal" if pack_inputs.is_causal else "bidirectional"
        raise InputError(
            f"{type(model).__name__}: the config describes a {attention} model, but the model is not {attention}; "
            f"{NO_PACKS_REMEDY}"
        )
    return replace(pack_inputs, labels_own_token=labels_own_token)


def _predicts_label_at_own_token(model: transformers.PreTrainedModel) -> bool:
    """Return whether a causal model predicts the label of a token from the output of that token, and not of the token before
    it.

    If labels are predicted from the token before, the label of the first token does not change the loss. The function
    measures whether it does.
    """
    if getattr(model, "gathers", False):
        return False
    weights = next(model.parameters())
    ids = torch.tensor(find_ordinary_tokens(model.config)[np.newaxis, :3], device=weights.device)
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


def check_packed_outputs(
    model: transformers.PreTrainedModel,
    pack_inputs: PackInputs,
    build_batch: Callable[[list[Pack]], dict[str, Any]],
    row_tokens: int | None = None,
    *,
    training: bool,
) -> PackCheck:
    """Check that a model computes the same outputs for packed sequences as for single sequences.

    In training mode, dropout would hide small differences. Therefore check that changing a sequence does not change the
    other sequences of its pack.

    Args:
        model: The model, which may be a small copy. It is tried with its head, unless the head gathers the outputs of
            sequences itself.
        pack_inputs: The inputs that the model needs for packs.
        build_batch: A function that turns packs into the arguments of the model.
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
    tried = wrap_model_for_packs(model.base_model if getattr(model, "gathers", False) else model, pack_inputs)
    positions = choose_trial_length(model.config, pack_inputs.position_offset, _MAX_POSITIONS)
    longest = min(positions, pack_inputs.longest_sequence or positions)
    if row_tokens is None:
        usual = int(np.clip(positions, *_DEFAULT_ROW_TOKENS))
        row_tokens = (
            usual if pack_inputs.takes_positions else min(usual, positions)
        )  # without position ids, a row cannot be longer than the positions
    excluded_token = pack_inputs.unpacked_token
    short, _ = build_trial_packs(model.config, min(longest, 144), longest, excluded_token)
    full, changed = build_trial_packs(model.config, row_tokens, longest, excluded_token, padded=False)
    largest, bound = 0.0, find_output_tolerance(model)

    def check_difference(rows: list[Pack], description: str, difference: float) -> None:
        """Raise an InputError if `difference` exceeds the tolerance of the model. `difference` compares two computations of
        the outputs for `rows`, and `description` tells the user what was compared.
        """
        if not difference <= bound:
            raise InputError(
                f"{type(model).__name__}: the model computes wrong outputs for packs of {len(rows[0]['input_ids'])} tokens "
                f"({description} by {difference:.1e} of the largest output, but at most {bound:g} is allowed); "
                f"{NO_PACKS_REMEDY}"
            )

    for rows in (short[:2], full):
        with temporary_evaluation_mode(model):
            packed = split_by_sequence(compute_token_outputs(tried, build_batch(rows)), rows)
            alone = compute_outputs_without_packing(tried, pack_inputs, rows)
        difference = largest_difference(packed, alone) / compute_max_abs_output_or_one(alone)
        check_difference(rows, "packed and single sequences differ", difference)
        largest = max(largest, difference)
    if training:
        change, outputs, device = 0.0, [], next(model.parameters()).device
        with temporary_evaluation_mode(model), suppress(*MODEL_ERRORS):
            model.train()
            for rows in (full, changed):
                with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                    torch.manual_seed(TRIAL_SEED)  # the same dropout for both
                    outputs.append(split_by_sequence(compute_token_outputs(tried, build_batch(rows)), rows))
            change = compute_largest_neighbour_change(outputs[0], outputs[1], full) / compute_max_abs_output_or_one(
                outputs[0]
            )
        check_difference(full, "in training mode, sequences change their neighbours", change)
    return PackCheck(row_tokens, largest)


def find_output_tolerance(model: transformers.PreTrainedModel) -> float:
    """Return how much the outputs of packed and single sequences may differ, depending on the dtype of the weights.

    The difference is relative to the largest output or to 1, whichever is larger.
    """
    return ALLOWED_DIFFERENCE if next(model.parameters()).dtype in _EXACT_DTYPES else _ALLOWED_16_BIT_DIFFERENCE


def check_output_per_token(model: transformers.PreTrainedModel) -> None:
    """Raise an InputError if the head of a model returns only one output for a row of tokens, because a packed row contains
    several sequences, and each needs an output of its own.

    Models with the attribute `gathers`, such as `PackedBertForSequenceClassification`, are not checked, because their heads
    find the sequences in a row and return one output for each.

    Raises:
        InputError: The head returns one output per row.
    """
    if getattr(model, "gathers", False):
        return
    ids = torch.tensor(find_ordinary_tokens(model.config)[np.newaxis, :3])
    with temporary_evaluation_mode(model):
        output = extract_logits_or_hidden_states(model(input_ids=ids.to(next(model.parameters()).device)))
    if output.ndim != 3 or output.shape[:2] != ids.shape:
        raise InputError(f"{type(model).__name__}: {ONE_OUTPUT_PER_ROW}")


# --- Measurements on the small copy


def _determine_inputs_with_small_copy(
    config: transformers.PretrainedConfig, model_class: type[Any] | None, collator_target: str
) -> PackInputs:
    """Build a small copy of a model, and determine with which inputs the copy computes the same outputs for packed as for
    single sequences.

    Raises:
        InputError: No inputs give the same outputs, or the model cannot be tried.
    """
    stateful = sorted(
        model_class for model_class in _list_layer_kinds(config) if model_class.startswith(_STATEFUL_LAYER_KINDS)
    )
    if stateful:
        reason = f"layers of kind {', '.join(stateful)} carry a state from one sequence of a pack into the next"
        raise InputError(_format_rejection(config, reason))
    try:
        model = build_small_copy(config, model_class)
        with make_computation_reproducible():
            taken = inspect.signature(model.forward).parameters
            if "decoder_input_ids" in taken:
                raise InputError("encoder-decoder models are not supported")
            has_types = (getattr(model.config, "type_vocab_size", None) or 0) > 1
            takes_positions = "position_ids" in taken
            pack_inputs = PackInputs(
                takes_positions=takes_positions,
                takes_token_types="token_type_ids" in taken and has_types,
                is_causal=_is_causal(model),
                position_offset=_find_position_offset(model) if takes_positions else 0,
            )
            pack_inputs = replace(pack_inputs, longest_sequence=_find_max_sequence_length(model, pack_inputs))
            right, difference = _find_working_mask_format(model, config, pack_inputs, collator_target)
    except MODEL_ERRORS as error:
        reason = str(error) if isinstance(error, InputError) else "the model raises an error for a short input"
        raise InputError(_format_rejection(config, reason)) from error
    if right is None:
        lacks = "" if pack_inputs.takes_positions else "the model accepts no position_ids, and "
        if collator_target in ("transformers-4", "optimum-habana"):
            raise InputError(
                f"target = {collator_target!r}: the masks of this target are wrong for model type {config.model_type!r} "
                f"with transformers {transformers.__version__} ({difference}); use target transformers-5"
            )
        raise InputError(_format_rejection(config, f"{lacks}no mask keeps its sequences separate ({difference})"))
    return right


def _format_rejection(config: transformers.PretrainedConfig, reason: str) -> str:
    """Return the error message for a model type that is rejected because it cannot process packs."""
    name = f"model type {config.model_type!r}: "
    return f"{name}{reason.removeprefix(name)}; {NO_PACKS_REMEDY}"


def _is_causal(model: transformers.PreTrainedModel) -> bool:
    """Return whether the output of a token is independent of all later tokens.

    In a model with random weights, tokens hardly affect each other's outputs. Therefore the effect of later tokens on
    earlier outputs is compared with the opposite effect, and not with a fixed bound.

    Raises:
        InputError: The outputs are not finite, or attention has no measurable effect.
    """
    tokens, length = find_ordinary_tokens(model.config), choose_trial_length(model.config, 2)
    half = length // 2
    numbers = np.random.default_rng(TRIAL_SEED).integers(0, len(tokens), length)
    later, earlier = (np.where((np.arange(length) < half) == first, numbers + 1, numbers) for first in (False, True))
    usual, with_later, with_earlier = (
        compute_token_outputs(model, {"input_ids": torch.tensor(tokens[each % len(tokens)][None])})[0]
        for each in (numbers, later, earlier)
    )
    if not bool(torch.isfinite(usual).all()):
        raise InputError("the outputs contain NaN or infinite values")
    seen, foreseen = (usual - with_earlier)[half:].abs().max(), (usual - with_later)[:half].abs().max()
    if float(seen) <= ALLOWED_DIFFERENCE * compute_max_abs_output_or_one([usual]):
        raise InputError("attention has no measurable effect on the outputs")
    return float(foreseen) <= 0.05 * float(seen)


def _find_position_offset(model: transformers.PreTrainedModel) -> int:
    """Return the position id that a model assigns to the first token of a sequence.

    Raises:
        InputError: None of the usual position ids reproduces the outputs without position ids.
    """
    padding = getattr(model.config, "pad_token_id", None)
    positions = find_max_positions(model.config) or _MAX_POSITIONS
    possible = dict.fromkeys((0, (padding or 0) + 1, 1, 2))
    offsets = [each for each in possible if each + _MIN_POSITIONS <= positions] or [0]
    tokens = find_ordinary_tokens(model.config)
    ids = torch.tensor(tokens[np.arange(choose_trial_length(model.config, max(offsets))) % len(tokens)][None])
    alone = compute_token_outputs(model, {"input_ids": ids})
    for offset in offsets:
        counted = torch.arange(offset, offset + ids.shape[1])[None]
        try:
            outputs = compute_token_outputs(model, {"input_ids": ids, "position_ids": counted})
        except MODEL_ERRORS:
            continue
        if largest_difference([outputs], [alone]) <= ALLOWED_DIFFERENCE * compute_max_abs_output_or_one([alone]):
            return offset
    raise InputError("cannot determine how the model numbers the positions of a sequence")


def _find_max_sequence_length(model: transformers.PreTrainedModel, pack_inputs: PackInputs) -> int | None:
    """Find the maximum number of tokens that a sequence may have without changing the outputs of the other sequences in its
    batch.

    Some kinds of RoPE change the frequencies of the complete batch if one sequence is longer than a limit. To find the
    limit, two sequences are run in one batch, and the position ids of the second are raised until the outputs of the first
    change. Neither sequence is short, because some models permanently change their state when they process a short one.

    Returns:
        The number of tokens, or None if there is no limit.
    """
    length = choose_trial_length(model.config, pack_inputs.position_offset)
    positions = find_max_positions(model.config)
    most = _MAX_POSITIONS if positions is None else min(4 * positions, _MAX_POSITIONS)
    tokens = find_ordinary_tokens(model.config)
    ids = torch.tensor(np.stack([tokens[np.arange(first, first + length) % len(tokens)] for first in (0, 3)]))

    def compute_first_outputs(second_end: int) -> torch.Tensor:
        """Run the two sequences in one batch, and return the outputs of the first. They show whether the first sequence
        depends on the positions of the second, which end before `second_end`.
        """
        counted = torch.stack([torch.arange(length), torch.arange(second_end - length, second_end)])
        return compute_token_outputs(model, {"input_ids": ids, "position_ids": counted + pack_inputs.position_offset})[:1]

    def changes_first_outputs(second_end: int) -> bool:
        """Return whether the outputs of the first sequence change if the positions of the second end before `second_end`,
        and not before `length`.
        """
        # Compute the usual outputs each time, because a long sequence changes RoPE until the next short sequence.
        usual = compute_first_outputs(length)
        bound = ALLOWED_DIFFERENCE * compute_max_abs_output_or_one([usual])
        return largest_difference([compute_first_outputs(second_end)], [usual]) > bound

    try:
        if not pack_inputs.takes_positions or not changes_first_outputs(most):
            return None
    except MODEL_ERRORS:  # the model has a table of position embeddings, whose size already limits a sequence
        return None
    longest = bisect_left(range(most), True, length, key=changes_first_outputs) - 1
    compute_first_outputs(length)  # makes RoPE return to the frequencies for short sequences
    return longest


def _find_working_mask_format(
    model: transformers.PreTrainedModel, config: transformers.PretrainedConfig, pack_inputs: PackInputs, collator_target: str
) -> tuple[PackInputs | None, str]:
    """Try all forms of attention masks, and find a form that gives packed and single sequences the same outputs.

    All packs are run before the single sequences, because some models permanently change their state when they process a
    short sequence.

    Args:
        model: The small copy.
        config: The config of the original model, which determines the windows in the result.
        pack_inputs: The pack inputs, without windows.
        collator_target: The target of `PackCollator`.

    Returns:
        The pack inputs with the right masks, or None if no form is right, and a description of what went wrong with the last
        form.

    Raises:
        InputError: The window of the small copy is too large to have an effect.
    """
    length, longest = choose_trial_length(model.config, pack_inputs.position_offset), pack_inputs.longest_sequence
    window = _find_attention_window(model.config) or 0
    if window >= length:
        raise InputError(
            f"an attention window of {window} tokens cannot be tested, because the test uses only {length} positions"
        )
    packed, last = [], ""
    for form in _list_mask_formats(model, pack_inputs):
        formed = form(model.config)
        rows, _ = build_trial_packs(model.config, length, longest, formed.unpacked_token)
        try:
            outputs = compute_token_outputs(
                wrap_model_for_packs(model, formed), build_packed_batch(rows, formed, collator_target)
            )
            packed.append((form, rows, split_by_sequence(outputs, rows)))
        except MODEL_ERRORS as error:
            last = str(error)
    for form, rows, sequences in packed:
        alone = compute_outputs_without_packing(model, pack_inputs, rows)
        difference = largest_difference(sequences, alone)
        if difference <= ALLOWED_DIFFERENCE * compute_max_abs_output_or_one(alone):
            return form(config), ""
        last = f"packed and single sequences differ by {difference:.1e}"
    return None, last


def _list_mask_formats(
    model: transformers.PreTrainedModel, pack_inputs: PackInputs
) -> Iterator[Callable[[Any], PackInputs]]:
    """Yield all forms of attention masks that a model may need. Each form is a function that returns the pack inputs for a
    config.

    The last forms compute the embeddings first, and the very last one also excludes masked tokens from packs.
    """

    def add_windows(
        config: transformers.PretrainedConfig, mask_per_layer_kind: bool, window_counts_token: bool | None = None
    ) -> PackInputs:
        """Return `pack_inputs` with the attention windows of a config, as one window for all layers or as one window for
        each kind of layer (`mask_per_layer_kind`).

        `window_counts_token` tells whether the size of a window in the config includes the token itself. If it is None,
        attention has no window.
        """
        window = None if window_counts_token is None else _find_attention_window(config)
        reach = None if window is None else window - bool(window_counts_token)
        kinds = (
            dict.fromkeys(("full_attention", *_list_layer_kinds(config), "sliding_attention")) if mask_per_layer_kind else {}
        )
        layers = {kind: reach if "sliding" in kind else None for kind in kinds}
        return replace(pack_inputs, window_by_layer_kind=layers, window=None if mask_per_layer_kind else reach)

    if _find_attention_window(model.config) is not None:
        for per_kind in (True, False) if _list_layer_kinds(model.config) else (False,):
            for counts_token in (pack_inputs.is_causal, not pack_inputs.is_causal):
                yield partial(add_windows, mask_per_layer_kind=per_kind, window_counts_token=counts_token)
    yield partial(add_windows, mask_per_layer_kind=False)
    if _list_layer_kinds(model.config):
        yield partial(add_windows, mask_per_layer_kind=True)
    if hasattr(model, "embeddings"):
        first = replace(pack_inputs, embeds_without_mask=True)
        yield lambda config: first
        yield lambda config: replace(first, unpacked_token=getattr(config, "mask_token_id", None))


def _list_layer_kinds(config: transformers.PretrainedConfig) -> list[str]:
    """Return the distinct kinds of layers that a config lists, such as "sliding_attention". Return an empty list if it lists
    none.
    """
    return list(dict.fromkeys(getattr(config.get_text_config(), "layer_types", None) or ()))


def _find_attention_window(config: transformers.PretrainedConfig) -> int | None:
    """Return the size of the attention window in a config, or None if attention has no window."""
    text = config.get_text_config()
    for name in ("sliding_window", "window_size", "attention_chunk_size"):
        value = getattr(text, name, None)
        if type(value) is int and value > 0:
            return value
    return None


def build_packed_batch(rows: list[Pack], pack_inputs: PackInputs, collator_target: str = "transformers-5") -> dict[str, Any]:
    """Return the keyword arguments for calling a model on a batch of packs.

    The targets "flash" and "flex" need special software, so they are tried with the masks of "transformers-5".
    """
    if collator_target in ("flash", "flex"):
        collator_target = "transformers-5"
    columns = {
        name: torch.tensor(np.stack([row[name] for row in rows]))
        for name in ("input_ids", "token_type_ids", "position_ids", "sequence_ids")
    }
    batch: dict[str, Any] = {
        "input_ids": columns["input_ids"],
        "attention_mask": build_mask_for_collator_target(columns["sequence_ids"], pack_inputs, collator_target),
    }
    if pack_inputs.takes_positions:
        batch["position_ids"] = shift_position_ids_for_model(columns["position_ids"], pack_inputs)
    if pack_inputs.takes_token_types:
        batch["token_type_ids"] = columns["token_type_ids"]
    return batch
