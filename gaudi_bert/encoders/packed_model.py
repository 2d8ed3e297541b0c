"""Running any `transformers` model on packs: vectors of texts, or the outputs of the model's own head.

The encoder computes the hidden states of all tokens in a pack. Trials determine how it has to be fed (`feeding_trial.py`),
and which tokens of a sequence a head for texts reads: the first one, the last one or all of them. The head is then run only
on these tokens. For this purpose, the encoder in the model class is replaced by a stand-in that returns given hidden states.
A model is rejected if its outputs for packs differ from those of the original class for single sequences.

Letters in shapes: B packs, L positions, S depth, R rows, K tokens of a row, H hidden size, C values of a head, Q masked
slots, V vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from gaudi_bert.common.arrays import BatchArrays
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.encoders.encoder_weights import architecture_of, read_model, sizes_by, stored_buffers
from gaudi_bert.encoders.feeding import (
    Feeding,
    additive_masks,
    belongs,
    fed_module,
    fed_positions,
    gather,
    vectors_of_sequences,
    widen,
)
from gaudi_bert.encoders.feeding_trial import alone_bound, feeding_of, packed_batch, try_model
from gaudi_bert.encoders.matrix_products import patch_linear_layers
from gaudi_bert.encoders.trial import (
    TRIAL_SEED,
    Row,
    alone_outputs,
    full_pack,
    on_device,
    outputs_of,
    quiet_transformers,
    random_packs,
    scale_of,
    sequences_of,
    token_outputs,
    tokens_of_packs,
    trial_of,
    usual_tokens,
)
from gaudi_bert.model.config import NO_PACKS_REMEDY
from gaudi_bert.model.heads import TASK_BY_PROBLEM_TYPE, TaskHead, TaskKind, VectorHead, check_labels

Tensors = Mapping[str, Tensor]
_Reads = Literal["first", "last", "all"]
_TRIED_TOKENS = 40
_TRIED_ROW_TOKENS = 512  # tokens in the longest rows of the first trial, when the length of later rows is unknown
_GRADIENT_BOUND = 1e-3  # allowed difference, relative to the norm of the gradient
_SMALL_ANSWERS_BOUND = 1e-3  # allowed difference, relative to the largest output of the head


class PackedModel:
    """A `transformers` module that runs on packs.

    Args:
        module: An encoder, or a model with a head.
        feeding: How the encoder is fed packs.
        head: A description of the head's outputs. None if the head is not used.

    Attributes:
        tried_tokens: The number of tokens in the longest row that was tried with the current weights. 0 before the first
            trial.

    Raises:
        InputError: The head cannot be separated from the encoder, or the model cannot be trained on masked tokens in packs.
    """

    def __init__(self, module: Any, feeding: Feeding, head: TaskHead | None) -> None:
        self.module, self.feeding = module, feeding
        if feeding.unpacked_token is not None and head is not None and head.kind == "masked-language-modelling":
            raise InputError(_masked_tokens_mix(module))
        self._encoder, self._head, self.tried_tokens = fed_module(module.base_model, feeding), head, 0
        self._stand_in = None if head is None else _with_stand_in(module)
        self._reads: _Reads = self._what_it_reads() if head is not None and head.predicts_per_text else "first"

    def train(self, training: bool) -> None:
        """Set the training mode, which turns dropout on or off."""
        for module in (self.module, self._stand_in):
            if module is not None and module.training != training:
                module.train(training)

    def check_tokens(self, batch: BatchArrays) -> None:
        """Check that a batch does not contain the token that changes the other sequences of its pack.

        Raises:
            InputError: It contains the token.
        """
        token = self.feeding.unpacked_token
        if token is not None and token in batch["input_ids"]:
            raise InputError(_masked_tokens_mix(self.module))

    # --- Running packs through the encoder and the head

    def vectors(self, batch: Tensors, head: VectorHead) -> Tensor:
        """Compute a vector for each text in at least float32, [B, S, H]."""
        hidden_BLH = self._hidden(batch)
        picked = hidden_BLH if head.positions_feature is None else gather(hidden_BLH, batch[head.positions_feature])
        return vectors_of_sequences(head, widen(picked.flatten(0, 1)), batch)

    def answers(self, batch: Tensors) -> Tensor:
        """Compute the outputs of the head in at least float32.

        Returns:
            [B, S, C] if the head predicts per text, [B, L, C] if it predicts per token, or the logits of the vocabulary
            [B, Q, V] at masked slots or [B, L, V] at all tokens.
        """
        head = cast(TaskHead, self._head)
        hidden_BLH = self._hidden(batch)
        if head.positions_feature == "masked_positions":
            return widen(self._scores(gather(hidden_BLH, batch["masked_positions"])))
        if not head.needs_outputs:
            return widen(self._scores(hidden_BLH))
        with torch.autocast(hidden_BLH.device.type, enabled=False):
            if not head.predicts_per_text:
                return widen(self._scores(hidden_BLH.to(self._dtype)))
            return widen(self._answers_of_texts(hidden_BLH.to(self._dtype), batch))

    def stored_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that are stored in addition to the parameters, such as statistics of layers, by name."""
        return stored_buffers(self.module)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.module.parameters()).device

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(self.module.parameters()).dtype

    def _hidden(self, batch: Tensors) -> Tensor:
        """Compute the hidden states of all tokens, [B, L, H]."""
        feeding, numbers_BL = self.feeding, batch["input_mask"]
        # Autocast would turn the lowest float32 value into an infinity, so masks use the lowest bfloat16 value.
        lowest = torch.float16 if self._dtype == torch.float16 else torch.bfloat16
        masks = on_device(additive_masks(numbers_BL, feeding, lowest), numbers_BL.device, self._dtype)
        inputs: dict[str, Any] = {"input_ids": batch["input_ids"].long(), "attention_mask": masks}
        if feeding.positions:
            inputs["position_ids"] = fed_positions(batch["positions"].long(), feeding)
        if feeding.token_types:
            inputs["token_type_ids"] = batch["segment_ids"].long()
        patches = not torch.compiler.is_compiling()  # a compiler cannot trace the patch
        if patches and self.module.training:  # recomputed layers must not be patched in only one of the two passes
            names = ("is_activation_checkpointing", "is_gradient_checkpointing")  # in current and older transformers
            patches = not next((getattr(self.module, name) for name in names if hasattr(self.module, name)), False)
        with patch_linear_layers() if patches else nullcontext():
            return cast(Tensor, token_outputs(self._encoder(**inputs)))

    def _answers_of_texts(self, hidden_BLH: Tensor, batch: Tensors) -> Tensor:
        """Run the head on the tokens that it reads of each text, and return its outputs, [B, S, C]."""
        starts_BS, depth = batch["sequence_positions"].long(), batch["sequence_positions"].shape[1]
        if self._reads == "first":
            return self._scores(gather(hidden_BLH, starts_BS).flatten(0, 1)[:, None]).unflatten(0, starts_BS.shape)
        tokens_BS = belongs(batch["input_mask"], depth).sum(-1).clamp(min=1)
        if self._reads == "last":
            last_BSH = gather(hidden_BLH, starts_BS + tokens_BS - 1)
            return self._scores(last_BSH.flatten(0, 1)[:, None]).unflatten(0, starts_BS.shape)
        length = hidden_BLH.shape[1]
        if hidden_BLH.device.type == "cpu" and not torch.compiler.is_compiling():
            length = int(tokens_BS.max())  # other devices and compilers need static shapes
        within_K = torch.arange(length, device=starts_BS.device)
        positions_BSK = (starts_BS[..., None] + within_K).clamp(max=hidden_BLH.shape[1] - 1)
        rows_RKH = gather(hidden_BLH, positions_BSK.flatten(1)).reshape(starts_BS.numel(), length, -1)
        return self._scores(rows_RKH, (within_K < tokens_BS.reshape(-1, 1)).long()).unflatten(0, starts_BS.shape)

    def _scores(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Run the head on given hidden states. Without a mask, all tokens are valid."""
        mask = torch.ones(hidden.shape[:2], dtype=torch.int64, device=hidden.device) if mask is None else mask
        return _logits_of(cast(torch.nn.Module, self._stand_in)(inputs_embeds=hidden, attention_mask=mask))

    # --- Trials before a model is used

    def _what_it_reads(self) -> _Reads:
        """Return "first" or "last" if the head's output depends only on this token of a text, otherwise "all"."""
        size = self.module.config.get_text_config().hidden_size
        with trial_of(self.module), quiet_transformers():
            random_RKH = torch.randn((2, 7, size), generator=torch.Generator().manual_seed(TRIAL_SEED))
            hidden_RKH = on_device(random_RKH, self.device, self._dtype)
            expected = self._scores(hidden_RKH)
            bound = 1e-4 * float(expected.abs().max())
            choices: tuple[tuple[_Reads, slice], ...] = (("first", slice(0, 1)), ("last", slice(-1, None)))
            for reads, chosen in choices:
                if bound and float((self._scores(hidden_RKH[:, chosen]) - expected).abs().max()) <= bound:
                    return reads
        return "all"

    def try_rows(self, tokens: int = 0) -> None:
        """Try the current weights on packs in rows of at least `tokens` tokens, unless such rows were already tried.

        In the first trial, the head is tried too, and the rows have at least 512 tokens if the model has so many positions.

        Raises:
            InputError: Packed and single sequences have different outputs.
        """
        if self.tried_tokens and tokens <= self.tried_tokens:
            return
        if self.tried_tokens == 0 and self._head is not None:
            self.try_head()
        length = 1 << (max(tokens, _TRIED_ROW_TOKENS) - 1).bit_length()
        positions = sizes_by(self.module.config, self.feeding).positions
        self.tried_tokens, _ = self.try_packs(min(positions, length), training=False)

    def try_packs(self, row_tokens: int | None = None, *, training: bool) -> tuple[int, float]:
        """Try the encoder on packs, as described for `try_model`.

        Args:
            row_tokens: The number of tokens in the longest rows, or None for a default.
            training: Whether the encoder is also tried in training mode.

        Returns:
            The number of tokens in the longest row, and the largest difference relative to the largest output.

        Raises:
            InputError: Packed and single sequences have different outputs.
        """
        encoder, feeding = self.module.base_model, self.feeding
        return try_model(encoder, feeding, lambda rows: packed_batch(rows, feeding), row_tokens, training=training)

    def _trial_row(self) -> Row:
        """Return a short pack without padding."""
        length = min(_TRIED_TOKENS, tokens_of_packs(self.module.config, self.feeding.position_offset))
        return full_pack(self.module.config, length, self.feeding.longest_sequence, self.feeding.unpacked_token)[0][0]

    def trial_batch(self) -> dict[str, Tensor]:
        """Return a batch of one short pack, on the device of the model."""
        row = self._trial_row()
        features = {
            "input_ids": row["input_ids"],
            "input_mask": row["sequence_ids"],
            "segment_ids": row["token_type_ids"],
            "positions": row["position_ids"],
            "sequence_positions": np.cumsum(row["seq_lens"]) - row["seq_lens"],
            "masked_positions": np.arange(len(row["input_ids"])),  # a language modelling head is tried on every token
        }
        batch = {name: torch.from_numpy(values[None].astype(np.int32)) for name, values in features.items()}
        return cast(dict[str, Tensor], on_device(batch, self.device))

    def try_head(self) -> float:
        """Check that the head has the same outputs for packed and for single sequences.

        Returns:
            The largest difference, relative to the largest output or to 1, whichever is larger.

        Raises:
            InputError: The outputs differ by more than rounding.
        """
        module, feeding = self.module, self.feeding
        row, alone = self._trial_row(), []
        batch = self.trial_batch()
        names = ("input_ids", "token_type_ids") if feeding.token_types else ("input_ids",)
        with trial_of(module), quiet_transformers():
            packed = self.answers(batch)[0]
            for number in range(1, len(row["seq_lens"]) + 1):
                inputs = {name: torch.tensor(row[name][row["sequence_ids"] == number][None]) for name in names}
                alone.append(_logits_of(self.module(**on_device(inputs, self.device)))[0])
            expected = torch.cat([each if each.ndim == 2 else each[None] for each in alone]).float()
        if packed.shape != expected.shape:
            raise InputError(f"{type(module).__name__}: its head gives {expected.shape}, not {packed.shape}")
        scale, largest = scale_of([expected]), float(expected.abs().max())
        difference = float((packed - expected).abs().max()) / scale
        # The scale is at least 1, which would hide errors if all outputs are small. Therefore the bound also depends on the
        # largest output.
        bound = min(alone_bound(module), max(alone_bound(module), _SMALL_ANSWERS_BOUND) * largest / scale)
        if not difference <= bound:
            raise InputError(
                f"{type(module).__name__}: the head's outputs for packed texts differ from those for texts alone by "
                f"{difference:.1e}, but at most {bound:.1e} is allowed; compute one text per row"
            )
        return difference


def _masked_tokens_mix(model: Any) -> str:
    """Return the error message for a model in whose packs a masked token changes the other sequences."""
    setting = "token_dropout: it scales a row by its share of masked tokens; set token_dropout: false in config.json"
    remedy = setting if getattr(model.config, "token_dropout", False) else NO_PACKS_REMEDY
    return f"{type(model).__name__}: a masked token changes the other sequences of its pack ({remedy})"


class _StandIn(torch.nn.Module):
    """A module that replaces an encoder. It returns the hidden states that it is given, in the encoder's output type."""

    def __init__(self, encoder: Any, output: Any) -> None:
        super().__init__()
        self._kind: Any = BaseModelOutputWithPooling if isinstance(output, tuple) else type(output)
        self._has_pooled = any(field.name == "pooler_output" for field in dataclasses.fields(self._kind))
        self.pooler = getattr(encoder, "pooler", None)
        self._activation = getattr(encoder, "pooler_activation", None)  # set if the pooler is only a dense layer
        for name, _ in encoder.named_children():
            if name != "pooler":  # a head may call a part of the encoder directly, such as the decoder of OPT
                self.__dict__[name] = self

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        """Return the hidden states that are passed as `inputs_embeds`."""
        if not self._has_pooled:
            return self._kind(last_hidden_state=inputs_embeds)
        pooled = None if self.pooler is None else self.pooler(inputs_embeds)
        if pooled is not None and self._activation is not None:
            pooled = self._activation(pooled[:, 0])
        return self._kind(last_hidden_state=inputs_embeds, pooler_output=pooled)


def _with_stand_in(module: Any) -> torch.nn.Module:
    """Return a copy of a module that shares its weights, but whose encoder is replaced by a stand-in.

    Raises:
        InputError: The encoder is not a direct child of the module.
    """
    encoder = module.base_model
    name = next((name for name, child in module.named_children() if child is encoder), None)
    if name is None:
        raise InputError(f"{type(module).__name__}: its encoder is not separate from its head; choose another model or task")
    with trial_of(module), quiet_transformers():
        tokens = torch.tensor(usual_tokens(module.config)[None, :3], device=next(module.parameters()).device)
        output = encoder(input_ids=tokens)
    head: Any = copy.copy(module)
    head._modules = {**module._modules, name: _StandIn(encoder, output)}  # noqa: SLF001 - only the copy is changed
    head.config = copy.copy(module.config)
    if getattr(head.config, "pad_token_id", None) is None:
        head.config.pad_token_id = (
            0  # some heads reject batches without a padding id, although these rows contain no padding
        )
    return cast(torch.nn.Module, head)


def _logits_of(output: Any) -> Tensor:
    """Return the logits of a head. For a span head, stack the start and end logits along the last axis."""
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    return cast(Tensor, output.logits)


def head_of(model: Any) -> tuple[TaskHead | None, tuple[str, ...]]:
    """Return a description of a model's head, and the names of its labels.

    Returns:
        The head, or None if it is not a classification or regression head, and the labels. The labels are empty if the head
        is None.

    Raises:
        InputError: The labels are incomplete or not valid.
    """
    config, name = model.config, type(model).__name__
    if not name.endswith(("ForTokenClassification", "ForSequenceClassification")):
        return None, ()
    missing = [number for number in range(config.num_labels) if number not in config.id2label]
    if missing:
        raise InputError(f"{name}: id2label has no label {missing[0]}, and there are {config.num_labels}; name all of them")
    labels = tuple(str(config.id2label[number]) for number in range(config.num_labels))
    usual = "regression" if len(labels) == 1 else "single_label_classification"
    kind: TaskKind = TASK_BY_PROBLEM_TYPE[config.problem_type or usual]
    kind = "token-classification" if name.endswith("ForTokenClassification") else kind
    check_labels(labels, name, is_one_of_them=kind == "classification")
    return TaskHead(kind, len(labels)), labels


# --- `verify-model` for any `transformers` model
#
# With the model's own weights, the trials of `finetune` are run, and the gradients of all weights are compared as well.


def verify_folder(folder: Path, say: Callable[[str], None]) -> tuple[dict[str, float], int, int]:
    """Check the model in a folder, with its own weights and its head.

    Args:
        folder: The folder of the model.
        say: A function that shows a line to the user.

    Returns:
        A tuple of three values: the largest differences by name, the number of packs, and the number of sequences in them.
        Differences are relative to the largest output or, for "gradient", to the norm of the gradient.

    Raises:
        InputError: The model cannot be read.
        FailedError: Packed and single sequences have different outputs or gradients.
    """
    kind = getattr(transformers, architecture_of(folder), transformers.AutoModel)
    model = read_model(folder, kind)
    head, _ = head_of(model)
    say(f"verify-model: {type(model).__name__} of transformers {transformers.__version__}")
    try:
        feeding = feeding_of(model.base_model)
        packed = PackedModel(model, feeding, head)
        row_tokens, difference = packed.try_packs(training=True)
        differences = {"outputs": difference}
        if head is not None:
            differences["answers"] = packed.try_head()
        length = tokens_of_packs(model.config, feeding.position_offset)
        rows, _ = random_packs(model.config, length, feeding.longest_sequence, feeding.unpacked_token)
        differences["gradient"] = _gradient_difference(model.base_model, feeding, rows)
    except InputError as error:
        raise FailedError(f"{folder}: {error}") from error
    say(f"verify-model:   in rows of up to {row_tokens:,} tokens, and in training mode, no neighbour is seen")
    for name, difference in differences.items():
        say(f"verify-model:   {name}: packed and alone differ by {difference:.1e} of the largest value")
    return differences, len(rows), sum(len(row["seq_lens"]) for row in rows)


def _gradient_difference(encoder: Any, feeding: Feeding, rows: list[Row]) -> float:
    """Return the difference between the gradients for packed and for single sequences, relative to their norm.

    The loss is the sum of all outputs, each multiplied by a random number.

    Raises:
        InputError: The difference is larger than allowed.
    """
    model = fed_module(encoder, feeding)
    weights = [weight for weight in encoder.parameters() if weight.requires_grad]
    gradients = []
    with trial_of(encoder), torch.enable_grad():
        packed = sequences_of(outputs_of(model, packed_batch(rows, feeding)), rows)
        for outputs in (packed, alone_outputs(model, feeding, rows)):
            random = torch.Generator().manual_seed(TRIAL_SEED)
            loss = torch.stack([(each * torch.randn(each.shape, generator=random)).sum() for each in outputs]).sum()
            of_weights = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
            gradients.append(torch.cat([each.flatten().float().cpu() for each in of_weights]))
    difference = float(torch.linalg.vector_norm(gradients[0] - gradients[1]) / torch.linalg.vector_norm(gradients[1]))
    if not difference <= _GRADIENT_BOUND:
        raise InputError(f"gradients of packed sequences and of each alone differ by {difference:.1e} of their norm")
    return difference
