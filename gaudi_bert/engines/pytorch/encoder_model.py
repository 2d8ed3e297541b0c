"""Any encoder of `transformers` as a model of the engine: its own classes, heads and names of weights, fed packs.

How the encoder has to be fed is measured (`pytorch/asking.py`), and so is what its head reads: of each sequence the first
token, the last one, or all of them. The head runs on what it reads and on nothing else, through a stand-in for the encoder
that returns hidden states which are known. Before a model is used, packs of a few random tokens go through it, and each
sequence through the class of `transformers` as it is: where the outputs differ, the model is refused.

Letters: B packs, L positions, S depth, R = B * S rows, K tokens of a row, H hidden size, C values of a head.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from gaudi_bert.common.arrays import BatchArrays
from gaudi_bert.common.errors import InputError
from gaudi_bert.engines.protocol import ComputeDtype, Device, ModelSpec
from gaudi_bert.engines.pytorch.bert import belongs, widen
from gaudi_bert.engines.pytorch.model import Tensors, TorchModel, vectors_of_sequences
from gaudi_bert.model.config import EncoderConfig
from gaudi_bert.model.heads import TaskHead, VectorHead
from gaudi_bert.pytorch.asking import feeding_of, masked_tokens_mix, packed_batch, try_model
from gaudi_bert.pytorch.encoder_weights import class_of, config_of, stored_buffers
from gaudi_bert.pytorch.feeding import Feeding, additive_masks, fed_module, fed_positions
from gaudi_bert.pytorch.model_folder import quiet_transformers
from gaudi_bert.pytorch.rows import Row
from gaudi_bert.pytorch.trial import (
    MODEL_ERRORS,
    full_pack,
    on_device,
    reason_of,
    token_outputs,
    tokens_of_packs,
    trial_of,
    usual_tokens,
)

Reads = Literal["first", "last", "all"]
_TRIED_TOKENS, _TRIAL_SEED, _TRIAL_BOUND = 40, 12345, 1e-3


def build_encoder(
    spec: ModelSpec,
    device: Device | None,
    *,
    seed: int | None,
    compute_dtype: ComputeDtype | None = None,
    compiler: str | None = None,
) -> _TorchEncoder:
    """An encoder with a head; its initial values are those of `transformers`, drawn from the seed (of 0 where it is None).

    Raises:
        InputError: packs cannot be fed to such a model, or `transformers` has no such head for it.
    """
    if not isinstance(spec.config, EncoderConfig):
        raise InputError("a BERT is built by another function")
    if compute_dtype == "float64":
        raise InputError("a model of transformers is computed in float32 or bfloat16; leave float64 to BERT")
    config = config_of(spec.config, spec.head)
    kind = class_of(config, spec.head)
    feeding = feeding_of(config, kind=kind)
    model = _TorchEncoder(
        spec, device, compute_dtype, _fresh_module(kind, config, 0 if seed is None else seed), feeding, compiler
    )
    model.try_packs()
    model.to_device()
    return model


def _fresh_module(kind: Any, config: Any, seed: int) -> torch.nn.Module:
    try:
        with torch.random.fork_rng(devices=[]), quiet_transformers():
            torch.manual_seed(seed)
            module: torch.nn.Module = kind._from_config(config)  # noqa: SLF001 - how transformers makes one of a config
            return module.float()
    except MODEL_ERRORS as error:
        raise InputError(
            f"model type {config.model_type!r}: cannot be built: {reason_of(error)}; correct its config.json"
        ) from error


class _TorchEncoder(TorchModel):
    """A module of `transformers` on packs."""

    def __init__(
        self,
        spec: ModelSpec,
        device: Device | None,
        compute_dtype: ComputeDtype | None,
        module: Any,
        feeding: Feeding,
        compiler: str | None,
    ) -> None:
        super().__init__(spec, device, compute_dtype)
        self.feeding, self.module, self._encoder = feeding, module, fed_module(module.base_model, feeding)
        is_of_masks = isinstance(spec.head, TaskHead) and spec.head.kind == "masked-language-modelling"
        if feeding.unpacked_token is not None and is_of_masks:
            raise InputError(masked_tokens_mix(module))
        self.parameters_by_name = dict(module.named_parameters())
        self._undecayed = {name for name in self.parameters_by_name if name.endswith("bias")}
        for path, inner in module.named_modules():
            if "Norm" in type(inner).__name__:
                self._undecayed |= {f"{path}.{name}" for name, _ in inner.named_parameters(recurse=False)}
        self._dtype = next(module.parameters()).dtype
        self._head = _with_stand_in(module) if isinstance(spec.head, TaskHead) else None
        self._reads: Reads = "first"
        if isinstance(spec.head, TaskHead) and spec.head.is_of_text:
            self._reads = self._what_it_reads()
        self._compute: Callable[[Tensors], Tensor] = self._outputs
        self._compiler = compiler

    def to_device(self) -> None:
        """Go to the device, and be compiled, where that was chosen."""
        self.module.to(self.device)
        if self._compiler is not None:
            self._compute = torch.compile(self._outputs, backend=self._compiler, dynamic=False, fullgraph=True)

    def buffers(self) -> dict[str, Tensor]:
        """What the module stores beside its parameters: statistics of its layers, for one."""
        return stored_buffers(self.module)

    def is_decayed(self, name: str) -> bool:
        """Whether weight decay applies to a variable: not to biases, nor to the scales of norms."""
        return name not in self._undecayed and self.parameters_by_name[name].requires_grad

    def forward(self, batch: Tensors, training: bool) -> Tensor:
        """What the head gives: [B, S, C], [B, L, C], or scores of words [B, Q, V]; wide."""
        for module in (self.module, self._head):
            if module is not None and module.training != training:
                module.train(training)
        return self._compute(batch)

    def tensors(self, batch: BatchArrays) -> dict[str, Tensor]:
        """A batch on the device; one with a token that changes its neighbours is refused."""
        token = self.feeding.unpacked_token
        if token is not None and token in batch["input_ids"]:
            raise InputError(masked_tokens_mix(self.module))
        return super().tensors(batch)

    # --- packs through the encoder, and what the head reads through the head

    def _outputs(self, batch: Tensors) -> Tensor:
        hidden_BLH, head = self._encode(batch), cast(TaskHead | VectorHead, self.spec.head)
        if isinstance(head, VectorHead):
            read = head.read_positions
            first_RH = None if read is None else _gather(hidden_BLH, batch[read]).flatten(0, 1)
            return vectors_of_sequences(head, widen(hidden_BLH.flatten(0, 1) if first_RH is None else first_RH), batch)
        if head.read_positions == "masked_positions":
            return widen(self._scores(_gather(hidden_BLH, batch["masked_positions"])))
        if not head.keeps_outputs:
            return widen(self._scores(hidden_BLH))
        with torch.autocast(hidden_BLH.device.type, enabled=False):
            if not head.is_of_text:
                return self._scores(widen(hidden_BLH))
            rows_RKH, mask_RK = self._rows_of_texts(widen(hidden_BLH), batch)
            return self._scores(rows_RKH, mask_RK).unflatten(0, batch["sequence_positions"].shape)

    def _encode(self, batch: Tensors) -> Tensor:
        feeding, numbers_BL = self.feeding, batch["input_mask"]
        # The lowest number of bfloat16, in float32: autocast would make an infinity of the lowest one of float32.
        masks = on_device(additive_masks(numbers_BL, feeding, torch.bfloat16), numbers_BL.device, self._dtype)
        inputs: dict[str, Any] = {"input_ids": batch["input_ids"].long(), "attention_mask": masks}
        if feeding.positions:
            inputs["position_ids"] = fed_positions(batch["positions"].long(), feeding)
        if feeding.token_types:
            inputs["token_type_ids"] = batch["segment_ids"].long()
        return cast(Tensor, token_outputs(self._encoder(**inputs)))

    def _rows_of_texts(self, hidden_BLH: Tensor, batch: Tensors) -> tuple[Tensor, Tensor]:
        """What the head reads of each text: hidden states [R, K, H], and 1 for each token, [R, K]."""
        starts_BS, (packs, length) = batch["sequence_positions"].long(), batch["input_ids"].shape
        depth = starts_BS.shape[1]
        if self._reads == "first":
            return _gather(hidden_BLH, starts_BS).flatten(0, 1)[:, None], torch.ones_like(starts_BS).reshape(-1, 1)
        tokens_BS = belongs(batch["input_mask"], depth).sum(-1).clamp(min=1)
        if self._reads == "last":
            last_BSH = _gather(hidden_BLH, starts_BS + tokens_BS - 1)
            return last_BSH.flatten(0, 1)[:, None], torch.ones_like(starts_BS).reshape(-1, 1)
        within_L = torch.arange(length, device=starts_BS.device)
        positions_BSL = (starts_BS[..., None] + within_L).clamp(max=length - 1)
        rows_RLH = _gather(hidden_BLH, positions_BSL.flatten(1)).reshape(packs * depth, length, -1)
        return rows_RLH, (within_L < tokens_BS.reshape(-1, 1)).long()

    def _scores(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """The head's own outputs on hidden states, [.., C]."""
        head = cast(torch.nn.Module, self._head)
        output = head(inputs_embeds=hidden, attention_mask=torch.ones(hidden.shape[:2]).long() if mask is None else mask)
        return logits_of(output)

    # --- what is measured before a model is used

    def _what_it_reads(self) -> Reads:
        """Of the tokens of a text: the one whose hidden states alone give the head's answer, or all of them."""
        size = self.module.config.get_text_config().hidden_size
        with trial_of(self.module), quiet_transformers():
            hidden_RKH = torch.randn((2, 7, size), generator=torch.Generator().manual_seed(_TRIAL_SEED))
            expected = self._scores(hidden_RKH)
            bound = 1e-4 * float(expected.abs().max())
            choices: tuple[tuple[Reads, slice], ...] = (("first", slice(0, 1)), ("last", slice(-1, None)))
            for reads, chosen in choices:
                if bound and float((self._scores(hidden_RKH[:, chosen]) - expected).abs().max()) <= bound:
                    return reads
        return "all"

    def try_packs(self) -> None:
        """Refuse a model whose outputs for packed sequences are not those of each alone."""
        module, feeding = self.module, self.feeding
        try_model(module.base_model, feeding, lambda rows: packed_batch(rows, feeding), training=True)
        if isinstance(self.spec.head, VectorHead):
            return
        length = min(_TRIED_TOKENS, tokens_of_packs(module.config, feeding.position_offset))
        rows, _ = full_pack(module.config, length, _TRIAL_SEED, feeding.longest_sequence, feeding.unpacked_token)
        with trial_of(module), quiet_transformers():
            packed = self._outputs(self.tensors_of_trial(rows[0]))[0]
            alone = [self._alone(rows[0], number)[0] for number in range(1, len(rows[0]["seq_lens"]) + 1)]
            expected = torch.cat([each if each.ndim == 2 else each[None] for each in alone]).float()
        if packed.shape != expected.shape:
            raise InputError(f"{type(module).__name__}: its head gives {expected.shape}, not {packed.shape}")
        difference = float((packed - expected).abs().max())
        if not difference <= _TRIAL_BOUND * float(expected.abs().max()):
            raise InputError(
                f"{type(module).__name__}: its head gives packed texts other answers than texts alone (they differ by "
                f"{difference:.1e}); give it one text a row"
            )

    def tensors_of_trial(self, row: Row) -> dict[str, Tensor]:
        """The batch of one pack, every token of which is read by a head of words."""
        starts = np.cumsum(row["seq_lens"]) - row["seq_lens"]
        names = {"input_ids": "input_ids", "input_mask": "sequence_ids", "segment_ids": "token_type_ids"}
        names |= {"positions": "position_ids"}
        features: BatchArrays = {name: row[column][None].astype(np.int32) for name, column in names.items()}
        tokens = np.arange(len(row["input_ids"]), dtype=np.int32)[None]
        added = {"sequence_positions": starts[None].astype(np.int32), "masked_positions": tokens}
        return {name: torch.from_numpy(values) for name, values in {**features, **added}.items()}

    def _alone(self, row: Row, number: int) -> Tensor:
        chosen = row["sequence_ids"] == number
        inputs = {"input_ids": torch.tensor(row["input_ids"][chosen][None])}
        if self.feeding.token_types:
            inputs["token_type_ids"] = torch.tensor(row["token_type_ids"][chosen][None])
        return logits_of(self.module(**inputs))


class _StandIn(torch.nn.Module):
    """In the place of an encoder: the hidden states that it gives are what it is given, in an output of its own kind."""

    def __init__(self, encoder: Any, output: Any) -> None:
        super().__init__()
        self._kind: Any = BaseModelOutputWithPooling if isinstance(output, tuple) else type(output)
        self._has_pooled = any(field.name == "pooler_output" for field in dataclasses.fields(self._kind))
        self.pooler = getattr(encoder, "pooler", None)
        self.activation = getattr(encoder, "pooler_activation", None)  # of a pooler that is a mere dense layer

        self._parts = {name for name, _ in encoder.named_children()} - {"pooler"}

    def __getattr__(self, name: str) -> Any:
        """A part of the encoder that a head calls in its place (OPT's its decoder) is this too."""
        return self if name in self.__dict__.get("_parts", ()) else super().__getattr__(name)

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        if not self._has_pooled:
            return self._kind(last_hidden_state=inputs_embeds)
        pooled = None if self.pooler is None else self.pooler(inputs_embeds)
        if pooled is not None and self.activation is not None:
            pooled = self.activation(pooled[:, 0])
        return self._kind(last_hidden_state=inputs_embeds, pooler_output=pooled)


def _with_stand_in(module: Any) -> torch.nn.Module:
    """The same module with the same weights, but for its encoder."""
    encoder = module.base_model
    name = next((name for name, child in module.named_children() if child is encoder), None)
    if name is None:
        raise InputError(f"{type(module).__name__}: its encoder is not separate from its head; choose another model or task")
    with trial_of(module), quiet_transformers():
        output = encoder(input_ids=torch.tensor(usual_tokens(module.config)[None, :3]))
    head: Any = copy.copy(module)
    head._modules = {**module._modules, name: _StandIn(encoder, output)}  # noqa: SLF001 - of the copy
    head.config = copy.copy(module.config)
    if getattr(head.config, "pad_token_id", None) is None:
        head.config.pad_token_id = 0  # some heads take no batch without one; rows hold no padding here
    return cast(torch.nn.Module, head)


def logits_of(output: Any) -> Tensor:
    """The outputs of a head; of one for spans both, side by side."""
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    return cast(Tensor, output.logits)


def _gather(hidden_BLH: Tensor, positions_BP: Tensor) -> Tensor:
    """The hidden states at P positions of each pack, [B, P, H]."""
    return hidden_BLH.gather(1, positions_BP.long()[..., None].expand(-1, -1, hidden_BLH.shape[-1]))
