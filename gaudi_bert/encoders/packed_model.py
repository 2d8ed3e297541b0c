"""Run any `transformers` model on packs, to compute vectors of texts or the outputs of the model's own head.

The encoder computes the hidden states of all tokens in a pack. Trials determine its inputs (`pack_inputs_trial.py`), and
whether a head for texts reads the first, the last or all tokens of a sequence. The head is then run only on these tokens.
For this purpose, the encoder in the model class is replaced by a stand-in that returns given hidden states. A model is
rejected if its outputs for packs differ from those of the original class for single sequences.

Letters in shapes: B packs, L positions, S depth, R rows, K tokens of a row, H hidden size, C values of a head, Q masked
slots, V vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from gaudi_bert.common.arrays import BatchArrays
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.encoders.encoder_weights import read_architecture, read_model, read_model_sizes
from gaudi_bert.encoders.matrix_products import FastLinearLayers
from gaudi_bert.encoders.pack_inputs import (
    PackInputs,
    build_additive_masks,
    build_membership_mask,
    gather_positions,
    pool_sequences,
    shift_position_ids_for_model,
    upcast_to_float32,
    wrap_model_for_packs,
)
from gaudi_bert.encoders.pack_inputs_trial import (
    PackCheck,
    build_packed_batch,
    check_packed_outputs,
    determine_inputs_for_packs,
    find_output_tolerance,
)
from gaudi_bert.encoders.trial import (
    TRIAL_SEED,
    Pack,
    build_trial_packs,
    choose_trial_length,
    compute_max_abs_output_or_one,
    compute_outputs_without_packing,
    compute_token_outputs,
    extract_logits_or_hidden_states,
    find_ordinary_tokens,
    move_to_device,
    quiet_transformers,
    split_by_sequence,
    temporary_evaluation_mode,
)
from gaudi_bert.model.config import NO_PACKS_REMEDY
from gaudi_bert.model.heads import TASK_BY_PROBLEM_TYPE, TaskHead, TaskKind, VectorHead, check_labels

Tensors = Mapping[str, Tensor]
_TokensUsed = Literal["first", "last", "all"]
_TRIAL_PACK_TOKENS = 40
_MIN_TRIAL_ROW_TOKENS = 512  # tokens in the longest rows of the first trial, when the length of later rows is unknown
_ALLOWED_GRADIENT_DIFFERENCE = 1e-3  # allowed difference, relative to the norm of the gradient
_ALLOWED_SMALL_DIFFERENCE = 1e-3  # allowed difference, relative to the largest output of the head


class PackedModel:
    """Runs a `transformers` model on packs, with or without its head.

    Args:
        module: An encoder, or a model with a head.
        pack_inputs: The inputs that the encoder needs for packs.
        head: A description of the head's outputs. None if the head is not used.

    Attributes:
        tried_tokens: The number of tokens in the longest row that was tried with the current weights. 0 before the first
            trial.

    Raises:
        InputError: The head cannot be separated from the encoder, or the model cannot be trained on masked tokens in packs.
    """

    def __init__(self, module: Any, pack_inputs: PackInputs, head: TaskHead | None) -> None:
        self.module, self.pack_inputs = module, pack_inputs
        if pack_inputs.unpacked_token is not None and head is not None and head.kind == "masked-language-modelling":
            raise InputError(_format_mask_token_error(module))
        self._encoder, self._head, self.tried_tokens = wrap_model_for_packs(module.base_model, pack_inputs), head, 0
        self._stand_in = None if head is None else _copy_with_encoder_replaced(module)
        self._tokens_read: _TokensUsed = (
            self._find_tokens_used_by_head() if head is not None and head.predicts_per_text else "first"
        )

    def train(self, training: bool) -> None:
        """Turn training mode on or off. Models use dropout only in training mode."""
        for module in (self.module, self._stand_in):
            if module is not None and module.training != training:
                module.train(training)

    def check_no_forbidden_token(self, batch: BatchArrays) -> None:
        """Raise an InputError if a batch contains a mask token, and the model is one of those, such as ESM, in which a mask
        token affects the other sequences of its pack.

        Raises:
            InputError: The batch contains the token.
        """
        token = self.pack_inputs.unpacked_token
        if token is not None and token in batch["input_ids"]:
            raise InputError(_format_mask_token_error(self.module))

    # --- Running packs through the encoder and the head

    def compute_vectors(self, batch: Tensors, head: VectorHead) -> Tensor:
        """Run the encoder on a batch of packs, and return one vector per text, [B, S, H], with at least float32
        precision.
        """
        hidden_BLH = self._compute_hidden_states(batch)
        picked = (
            hidden_BLH
            if head.positions_feature_name is None
            else gather_positions(hidden_BLH, batch[head.positions_feature_name])
        )
        return pool_sequences(head, upcast_to_float32(picked.flatten(0, 1)), batch)

    def compute_head_outputs(self, batch: Tensors) -> Tensor:
        """Run the encoder and the head on a batch of packs, and return the outputs of the head with at least float32
        precision.

        Returns:
            [B, S, C] if the head predicts per text, [B, L, C] if it predicts per token, or the logits of the vocabulary
            [B, Q, V] at masked slots or [B, L, V] at all tokens.
        """
        head = cast(TaskHead, self._head)
        hidden_BLH = self._compute_hidden_states(batch)
        if head.positions_feature_name == "masked_positions":
            return upcast_to_float32(self._run_head(gather_positions(hidden_BLH, batch["masked_positions"])))
        if not head.metrics_need_outputs:
            return upcast_to_float32(self._run_head(hidden_BLH))
        with torch.autocast(hidden_BLH.device.type, enabled=False):
            if not head.predicts_per_text:
                return upcast_to_float32(self._run_head(hidden_BLH.to(self._dtype)))
            return upcast_to_float32(self._compute_outputs_per_text(hidden_BLH.to(self._dtype), batch))

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.module.parameters()).device

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(self.module.parameters()).dtype

    def _compute_hidden_states(self, batch: Tensors) -> Tensor:
        """Run the encoder on a batch of packs, and return the hidden states of all tokens, [B, L, H]."""
        pack_inputs, numbers_BL = self.pack_inputs, batch["input_mask"]
        # Where attention is forbidden, the mask contains the lowest value of a dtype. Autocast would convert the lowest
        # float32 value to an infinity, so use the lowest value of a 16-bit dtype.
        lowest = torch.float16 if self._dtype == torch.float16 else torch.bfloat16
        masks = move_to_device(build_additive_masks(numbers_BL, pack_inputs, lowest), numbers_BL.device, self._dtype)
        inputs: dict[str, Any] = {"input_ids": batch["input_ids"].long(), "attention_mask": masks}
        if pack_inputs.takes_positions:
            inputs["position_ids"] = shift_position_ids_for_model(batch["positions"].long(), pack_inputs)
        if pack_inputs.takes_token_types:
            inputs["token_type_ids"] = batch["segment_ids"].long()
        patches = not torch.compiler.is_compiling()  # a compiler cannot trace the patch
        if patches and self.module.training:  # recomputed layers must not be patched in only one of the two passes
            names = ("is_activation_checkpointing", "is_gradient_checkpointing")  # in current and older transformers
            patches = not next((getattr(self.module, name) for name in names if hasattr(self.module, name)), False)
        with FastLinearLayers() if patches else nullcontext():
            return cast(Tensor, extract_logits_or_hidden_states(self._encoder(**inputs)))

    def _compute_outputs_per_text(self, hidden_BLH: Tensor, batch: Tensors) -> Tensor:
        """Run the head on the hidden states of each text, and return the outputs, [B, S, C]. The head receives only the
        tokens that affect its outputs.
        """
        starts_BS, depth = batch["sequence_positions"].long(), batch["sequence_positions"].shape[1]
        if self._tokens_read == "first":
            return self._run_head(gather_positions(hidden_BLH, starts_BS).flatten(0, 1)[:, None]).unflatten(
                0, starts_BS.shape
            )
        tokens_BS = build_membership_mask(batch["input_mask"], depth).sum(-1).clamp(min=1)
        if self._tokens_read == "last":
            last_BSH = gather_positions(hidden_BLH, starts_BS + tokens_BS - 1)
            return self._run_head(last_BSH.flatten(0, 1)[:, None]).unflatten(0, starts_BS.shape)
        length = hidden_BLH.shape[1]
        if hidden_BLH.device.type == "cpu" and not torch.compiler.is_compiling():
            length = int(tokens_BS.max())  # other devices and compilers need static shapes
        within_K = torch.arange(length, device=starts_BS.device)
        positions_BSK = (starts_BS[..., None] + within_K).clamp(max=hidden_BLH.shape[1] - 1)
        rows_RKH = gather_positions(hidden_BLH, positions_BSK.flatten(1)).reshape(starts_BS.numel(), length, -1)
        return self._run_head(rows_RKH, (within_K < tokens_BS.reshape(-1, 1)).long()).unflatten(0, starts_BS.shape)

    def _run_head(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Run only the head on the given hidden states, and return its logits. If no mask is given, no token counts as
        padding.
        """
        mask = torch.ones(hidden.shape[:2], dtype=torch.int64, device=hidden.device) if mask is None else mask
        return _extract_logits(cast(torch.nn.Module, self._stand_in)(inputs_embeds=hidden, attention_mask=mask))

    # --- Trials before a model is used

    def _find_tokens_used_by_head(self) -> _TokensUsed:
        """Determine which tokens of a text affect the output of the head: "first", "last" or "all"."""
        size = self.module.config.get_text_config().hidden_size
        with temporary_evaluation_mode(self.module), quiet_transformers():
            random_RKH = torch.randn((2, 7, size), generator=torch.Generator().manual_seed(TRIAL_SEED))
            hidden_RKH = move_to_device(random_RKH, self.device, self._dtype)
            expected = self._run_head(hidden_RKH)
            bound = 1e-4 * float(expected.abs().max())
            choices: tuple[tuple[_TokensUsed, slice], ...] = (("first", slice(0, 1)), ("last", slice(-1, None)))
            for reads, chosen in choices:
                if bound and float((self._run_head(hidden_RKH[:, chosen]) - expected).abs().max()) <= bound:
                    return reads
        return "all"

    def check_packs_if_untried(self, min_row_tokens: int = 0) -> None:
        """Check the outputs for packs of at least `min_row_tokens` tokens per row, unless rows of this length were already
        checked with the current weights.

        The first check of the current weights also includes the head. Rows have at least 512 tokens, or as many as the model
        has positions.

        Raises:
            InputError: Packed and single sequences have different outputs.
        """
        if self.tried_tokens and min_row_tokens <= self.tried_tokens:
            return
        if self.tried_tokens == 0 and self._head is not None:
            self.validate_head_and_measure_difference()
        length = 1 << (max(min_row_tokens, _MIN_TRIAL_ROW_TOKENS) - 1).bit_length()
        positions = read_model_sizes(self.module.config, self.pack_inputs).positions
        self.tried_tokens, _ = self.check_packed_equals_single(min(positions, length), training=False)

    def check_packed_equals_single(self, row_tokens: int | None = None, *, training: bool) -> PackCheck:
        """Check that the encoder, with its current weights, computes the same outputs for packed and single sequences.

        Args:
            row_tokens: The number of tokens in the longest rows, or None for a default.
            training: Whether the encoder is also tried in training mode.

        Returns:
            The number of tokens in the longest row, and the largest difference relative to the largest output.

        Raises:
            InputError: Packed and single sequences have different outputs.
        """
        encoder, pack_inputs = self.module.base_model, self.pack_inputs
        return check_packed_outputs(
            encoder, pack_inputs, lambda rows: build_packed_batch(rows, pack_inputs), row_tokens, training=training
        )

    def _build_trial_pack(self) -> Pack:
        """Return a short pack of random tokens without padding."""
        length = min(_TRIAL_PACK_TOKENS, choose_trial_length(self.module.config, self.pack_inputs.position_offset))
        longest, excluded_token = self.pack_inputs.longest_sequence, self.pack_inputs.unpacked_token
        return build_trial_packs(self.module.config, length, longest, excluded_token, padded=False).packs[0]

    def build_trial_batch(self) -> dict[str, Tensor]:
        """Return a batch of one short pack of random tokens, on the device of the model."""
        row = self._build_trial_pack()
        features = {
            "input_ids": row["input_ids"],
            "input_mask": row["sequence_ids"],
            "segment_ids": row["token_type_ids"],
            "positions": row["position_ids"],
            "sequence_positions": np.cumsum(row["seq_lens"]) - row["seq_lens"],
            "masked_positions": np.arange(len(row["input_ids"])),  # a language modelling head is tried on every token
        }
        batch = {name: torch.from_numpy(values[None].astype(np.int32)) for name, values in features.items()}
        return cast(dict[str, Tensor], move_to_device(batch, self.device))

    def validate_head_and_measure_difference(self) -> float:
        """Check that the head computes the same outputs for packed and single sequences.

        Returns:
            The largest difference, relative to the largest output or to 1, whichever is larger.

        Raises:
            InputError: The outputs differ by more than rounding.
        """
        module, pack_inputs = self.module, self.pack_inputs
        row, alone = self._build_trial_pack(), []
        batch = self.build_trial_batch()
        names = ("input_ids", "token_type_ids") if pack_inputs.takes_token_types else ("input_ids",)
        with temporary_evaluation_mode(module), quiet_transformers():
            packed = self.compute_head_outputs(batch)[0]
            for number in range(1, len(row["seq_lens"]) + 1):
                inputs = {name: torch.tensor(row[name][row["sequence_ids"] == number][None]) for name in names}
                alone.append(_extract_logits(self.module(**move_to_device(inputs, self.device)))[0])
            expected = torch.cat([each if each.ndim == 2 else each[None] for each in alone]).float()
        if packed.shape != expected.shape:
            raise InputError(
                f"{type(module).__name__}: the head returns outputs of shape {tuple(packed.shape)} for packed sequences, "
                f"but {tuple(expected.shape)} for the same sequences alone; choose another model"
            )
        scale, largest = compute_max_abs_output_or_one([expected]), float(expected.abs().max())
        difference = float((packed - expected).abs().max()) / scale
        # `difference` is relative to the largest output only if that output exceeds 1. For smaller outputs it is an absolute
        # difference, and the usual limit on the difference would hide errors. Therefore lower this limit.
        bound = min(
            find_output_tolerance(module),
            max(find_output_tolerance(module), _ALLOWED_SMALL_DIFFERENCE) * largest / scale,
        )
        if not difference <= bound:
            raise InputError(
                f"{type(module).__name__}: the head's outputs for packed and single texts differ by "
                f"{difference:.1e}, but at most {bound:.1e} is allowed; compute one text per row"
            )
        return difference


def _format_mask_token_error(model: transformers.PreTrainedModel) -> str:
    """Return the error message for a model in which a mask token affects the other sequences of its pack."""
    problem = f"{type(model).__name__}: a masked token changes the other sequences of its pack"
    if getattr(model.config, "token_dropout", False):
        problem += ", because token_dropout scales a row by its fraction of masked tokens"
        return f"{problem}; set token_dropout: false in config.json"
    return f"{problem}; {NO_PACKS_REMEDY}"


class _EncoderReplacement(torch.nn.Module):
    """A replacement for the encoder in a model with a head. It returns given hidden states instead of computing them, so
    that only the head is run.
    """

    def __init__(self, encoder: transformers.PreTrainedModel, output: Any) -> None:
        super().__init__()
        self._kind: Any = BaseModelOutputWithPooling if isinstance(output, tuple) else type(output)
        self._has_pooled = any(field.name == "pooler_output" for field in dataclasses.fields(self._kind))
        self.pooler = getattr(encoder, "pooler", None)
        self._activation = getattr(encoder, "pooler_activation", None)  # set if the pooler is only a dense layer
        for name, _ in encoder.named_children():
            if name != "pooler":  # a head may call a part of the encoder directly, such as the decoder of OPT
                self.__dict__[name] = self

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        """Return an output object of the same type as the encoder's. Its hidden states are the given `inputs_embeds`."""
        if not self._has_pooled:
            return self._kind(last_hidden_state=inputs_embeds)
        pooled = None if self.pooler is None else self.pooler(inputs_embeds)
        if pooled is not None and self._activation is not None:
            pooled = self._activation(pooled[:, 0])
        return self._kind(last_hidden_state=inputs_embeds, pooler_output=pooled)


def _copy_with_encoder_replaced(module: Any) -> torch.nn.Module:
    """Copy a model with a head, and replace the encoder of the copy by a stand-in. The copy shares the weights of the head.

    Raises:
        InputError: The encoder is not a direct child of the module.
    """
    encoder = module.base_model
    name = next((name for name, child in module.named_children() if child is encoder), None)
    if name is None:
        raise InputError(f"{type(module).__name__}: the encoder is not separate from the head; choose another model or task")
    with temporary_evaluation_mode(module), quiet_transformers():
        tokens = torch.tensor(find_ordinary_tokens(module.config)[None, :3], device=next(module.parameters()).device)
        output = encoder(input_ids=tokens)
    head: Any = copy.copy(module)
    head._modules = {**module._modules, name: _EncoderReplacement(encoder, output)}  # noqa: SLF001 - only the copy is changed
    head.config = copy.copy(module.config)
    if getattr(head.config, "pad_token_id", None) is None:
        head.config.pad_token_id = (
            0  # some heads reject batches without a padding id, although these rows contain no padding
        )
    return cast(torch.nn.Module, head)


def _extract_logits(output: Any) -> Tensor:
    """Return the logits in the output of a model with a head. For a span head, stack the start and end logits along the last
    axis.
    """
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    return cast(Tensor, output.logits)


class HeadDescription(NamedTuple):
    """The task and the labels of the head of a `transformers` model.

    Attributes:
        head: The head. None if it is not a classification or regression head.
        labels: The names of the labels. Empty if `head` is None.
    """

    head: TaskHead | None
    labels: tuple[str, ...]


def describe_head(model: transformers.PreTrainedModel) -> HeadDescription:
    """Return the kind of head that a model has, and the names of its labels.

    Raises:
        InputError: The labels are incomplete or not valid.
    """
    config, name = model.config, type(model).__name__
    if not name.endswith(("ForTokenClassification", "ForSequenceClassification")):
        return HeadDescription(None, ())
    missing = [number for number in range(config.num_labels) if number not in config.id2label]
    if missing:
        raise InputError(
            f"{name}: id2label has no name for label {missing[0]}; add names for all {config.num_labels} labels"
        )
    labels = tuple(str(config.id2label[number]) for number in range(config.num_labels))
    usual = "regression" if len(labels) == 1 else "single_label_classification"
    kind: TaskKind = TASK_BY_PROBLEM_TYPE[config.problem_type or usual]
    kind = "token-classification" if name.endswith("ForTokenClassification") else kind
    check_labels(labels, name, has_exactly_one=kind == "classification")
    return HeadDescription(TaskHead(kind, len(labels)), labels)


# --- `verify-model` for any `transformers` model
#
# With the model's own weights, the trials of `finetune` are run, and the gradients of all weights are compared as well.


class FolderVerification(NamedTuple):
    """The result of `verify_model_folder`.

    Attributes:
        differences: The largest differences by name. They are relative to the largest output or, for "gradient", to the norm
            of the gradient.
        packs: The number of packs that were compared.
        sequences: The number of sequences in these packs.
    """

    differences: dict[str, float]
    packs: int
    sequences: int


def verify_model_folder(folder: Path, say: Callable[[str], None]) -> FolderVerification:
    """Check that the model in a folder computes the same outputs and gradients for packed and single sequences.

    Args:
        folder: The folder of the model.
        say: A function that shows a line to the user.

    Raises:
        InputError: The model cannot be read.
        FailedError: Packed and single sequences have different outputs or gradients.
    """
    model_class = getattr(transformers, read_architecture(folder), transformers.AutoModel)
    model = read_model(folder, model_class)
    head, _ = describe_head(model)
    say(f"verify-model: {type(model).__name__} of transformers {transformers.__version__}")
    try:
        pack_inputs = determine_inputs_for_packs(model.base_model)
        packed = PackedModel(model, pack_inputs, head)
        row_tokens, difference = packed.check_packed_equals_single(training=True)
        differences = {"outputs": difference}
        if head is not None:
            differences["answers"] = packed.validate_head_and_measure_difference()
        length = choose_trial_length(model.config, pack_inputs.position_offset)
        rows, _ = build_trial_packs(model.config, length, pack_inputs.longest_sequence, pack_inputs.unpacked_token)
        differences["gradient"] = _compare_gradients(model.base_model, pack_inputs, rows)
    except InputError as error:
        raise FailedError(f"{folder}: {error}") from error
    say(f"verify-model:   sequences do not affect each other in training mode, in rows of up to {row_tokens:,} tokens")
    for name, difference in differences.items():
        say(f"verify-model:   {name}: packed and single sequences differ by {difference:.1e} of the largest value")
    return FolderVerification(differences, len(rows), sum(len(row["seq_lens"]) for row in rows))


def _compare_gradients(encoder: transformers.PreTrainedModel, pack_inputs: PackInputs, rows: list[Pack]) -> float:
    """Return the difference between the gradients of packed and of single sequences, relative to the norm of the gradients.

    The loss is the sum of all outputs, each multiplied by a random number.

    Raises:
        InputError: The difference is larger than allowed.
    """
    model = wrap_model_for_packs(encoder, pack_inputs)
    weights = [weight for weight in encoder.parameters() if weight.requires_grad]
    gradients = []
    with temporary_evaluation_mode(encoder), torch.enable_grad():
        packed = split_by_sequence(compute_token_outputs(model, build_packed_batch(rows, pack_inputs)), rows)
        for outputs in (packed, compute_outputs_without_packing(model, pack_inputs, rows)):
            random = torch.Generator().manual_seed(TRIAL_SEED)
            loss = torch.stack([(each * torch.randn(each.shape, generator=random)).sum() for each in outputs]).sum()
            of_weights = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
            gradients.append(torch.cat([each.flatten().float().cpu() for each in of_weights]))
    difference = float(torch.linalg.vector_norm(gradients[0] - gradients[1]) / torch.linalg.vector_norm(gradients[1]))
    if not difference <= _ALLOWED_GRADIENT_DIFFERENCE:
        raise InputError(f"the gradients of packed and single sequences differ by {difference:.1e} of their norm")
    return difference
