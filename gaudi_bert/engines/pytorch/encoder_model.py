"""Any encoder of `transformers` as a model of the engine: its own classes, heads and names of weights, fed packs.

`encoders/packed_model.py` has how packs go through it; here it is built, stored and trained like a BERT.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from gaudi_bert.common.arrays import BatchArrays
from gaudi_bert.common.errors import InputError
from gaudi_bert.encoders.encoder_weights import class_of, config_of, stored_buffers
from gaudi_bert.encoders.feeding_trial import feeding_of
from gaudi_bert.encoders.packed_model import PackedModel
from gaudi_bert.encoders.trial import MODEL_ERRORS, quiet_transformers, reason_of
from gaudi_bert.engines.protocol import ComputeDtype, Device, ModelSpec
from gaudi_bert.engines.pytorch.model import Tensors, TorchModel
from gaudi_bert.model.config import EncoderConfig
from gaudi_bert.model.heads import TaskHead, VectorHead


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
    config = config_of(cast(EncoderConfig, spec.config), spec.head)
    kind = class_of(config, spec.head)
    feeding = feeding_of(config, kind=kind)
    try:
        with torch.random.fork_rng(devices=[]), quiet_transformers():
            torch.manual_seed(0 if seed is None else seed)
            module = kind._from_config(config).float()  # noqa: SLF001 - how transformers makes one of a config
    except MODEL_ERRORS as error:
        problem = f"cannot be built: {reason_of(error)}; correct its config.json"
        raise InputError(f"model type {config.model_type!r}: {problem}") from error
    packed = PackedModel(module, feeding, spec.head if isinstance(spec.head, TaskHead) else None)
    packed.try_packs(training=True)
    if isinstance(spec.head, TaskHead):
        packed.try_head()
    return _TorchEncoder(spec, device, compute_dtype, packed, compiler)


class _TorchEncoder(TorchModel):
    """A model of `transformers` on packs, on its device, and compiled where that was chosen."""

    def __init__(
        self,
        spec: ModelSpec,
        device: Device | None,
        compute_dtype: ComputeDtype | None,
        packed: PackedModel,
        compiler: str | None,
    ) -> None:
        super().__init__(spec, device, compute_dtype)
        self.packed, self.module = packed, packed.module.to(self.device)
        self.parameters_by_name = dict(self.module.named_parameters())
        self._undecayed = {name for name in self.parameters_by_name if name.endswith("bias")}
        for path, inner in self.module.named_modules():
            if "Norm" in type(inner).__name__:
                self._undecayed |= {f"{path}.{name}" for name, _ in inner.named_parameters(recurse=False)}
        if self.recomputes:
            # Names of transformers of today, and before.
            names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
            try:
                next(getattr(self.module, name) for name in names if hasattr(self.module, name))({"use_reentrant": False})
            except ValueError as error:
                kind = type(self.module).__name__
                raise InputError(f"recompute = true: {kind} cannot compute its layers twice; set it to false") from error
        self._compute: Callable[[Tensors], Tensor] = self._outputs
        if compiler is not None:
            self._compute = torch.compile(self._outputs, backend=compiler, dynamic=False, fullgraph=True)

    def buffers(self) -> dict[str, Tensor]:
        """Return what the module stores in addition to its parameters: statistics of its layers, for one."""
        return stored_buffers(self.module)

    def is_decayed(self, name: str) -> bool:
        """Whether weight decay applies to a variable: not to biases, nor to the scales of norms."""
        return name not in self._undecayed and self.parameters_by_name[name].requires_grad

    def checked(self, batch: BatchArrays) -> BatchArrays:
        self.packed.check_tokens(batch)
        return batch

    def forward(self, batch: Tensors, training: bool) -> Tensor:
        """Return what the head gives: [B, S, C], [B, L, C], or scores of words [B, Q, V]; wide."""
        self.packed.train(training)
        return self._compute(batch)

    def _outputs(self, batch: Tensors) -> Tensor:
        head = self.spec.head
        return self.packed.vectors(batch, head) if isinstance(head, VectorHead) else self.packed.answers(batch)
