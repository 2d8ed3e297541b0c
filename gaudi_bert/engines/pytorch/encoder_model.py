"""Any encoder of `transformers` except BERT, with its own head and variable names, as `engines/protocol.Model`.

`encoders/packed_model.py` runs the encoder on packs. Importing this module also imports `transformers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from gaudi_bert.common.arrays import BatchArrays, Float32Array
from gaudi_bert.common.errors import InputError
from gaudi_bert.encoders.encoder_weights import build_library_config, find_model_class, find_persistent_buffers
from gaudi_bert.encoders.matrix_products import convert_linear_layers_for_inference
from gaudi_bert.encoders.pack_inputs_trial import determine_inputs_for_packs
from gaudi_bert.encoders.packed_model import PackedModel
from gaudi_bert.encoders.trial import MODEL_ERRORS, explain_library_error, quiet_transformers
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
) -> TorchEncoder:
    """Build a `transformers` model with a head, and return it as a model that runs on packs.

    Args:
        spec: The config and the head of the model.
        device: The device. None for the CPU in float32.
        seed: The seed with which `transformers` draws the initial values. The model is then tried on packs. None if weights
            will be loaded, after which `check_packed_equals_single` tries the model.
        compute_dtype: The dtype of the matrix products. None for that of the device.
        compiler: The backend of torch.compile, or None if the model is not compiled.

    Raises:
        InputError: The model cannot be built or cannot process packs, or `transformers` has no such head for it.
    """
    config = build_library_config(cast(EncoderConfig, spec.config), spec.head)
    kind = find_model_class(config, spec.head)
    pack_inputs = determine_inputs_for_packs(config, model_class=kind)
    try:
        with torch.random.fork_rng(devices=[]), quiet_transformers():
            torch.manual_seed(0 if seed is None else seed)
            module = kind._from_config(config).float()  # noqa: SLF001 - transformers has no public method for this
    except MODEL_ERRORS as error:
        raise InputError(
            f"model type {config.model_type!r}: transformers cannot build the model: {explain_library_error(error)}; "
            "correct its config.json"
        ) from error
    packed = PackedModel(module, pack_inputs, spec.head if isinstance(spec.head, TaskHead) else None)
    if seed is not None:
        packed.check_packed_equals_single(training=True)
        if isinstance(spec.head, TaskHead):
            packed.validate_head_and_measure_difference()
    return TorchEncoder(spec, device, compute_dtype, packed, compiler)


class TorchEncoder(TorchModel):
    """A `transformers` model that runs on packs.

    Attributes:
        packed: The model on packs.
        module: The `transformers` module.
    """

    def __init__(
        self,
        spec: ModelSpec,
        device: Device | None,
        compute_dtype: ComputeDtype | None,
        packed: PackedModel,
        compiler: str | None,
    ) -> None:
        super().__init__(spec, device, compute_dtype, compiler)
        self.packed, self.module = packed, packed.module.to(self.device)
        self.parameters_by_name = dict(self.module.named_parameters())
        self._undecayed = {name for name in self.parameters_by_name if name.endswith("bias")}
        for path, inner in self.module.named_modules():
            if "Norm" in type(inner).__name__:
                self._undecayed |= {f"{path}.{name}" for name, _ in inner.named_parameters(recurse=False)}
        if self.recomputes:
            # Both methods make a model recompute its layers in the backward pass. Which of them exists depends on the
            # version of `transformers`.
            names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
            try:
                next(getattr(self.module, name) for name in names if hasattr(self.module, name))({"use_reentrant": False})
            except ValueError as error:
                raise InputError(
                    f"recompute = true: {type(self.module).__name__} cannot recompute its layers; set it to false"
                ) from error
        self._compute: Callable[[Tensors], Tensor] = self._run_encoder_and_head
        if compiler is not None:
            self._compute = torch.compile(self._run_encoder_and_head, backend=compiler, dynamic=False, fullgraph=True)

    def persistent_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that checkpoints contain in addition to the parameters, by name."""
        return find_persistent_buffers(self.module)

    def has_weight_decay(self, name: str) -> bool:
        """Return whether weight decay applies to a variable. Biases and the parameters of normalization layers have no
        weight decay.
        """
        return name not in self._undecayed and self.parameters_by_name[name].requires_grad

    def validate_and_extend_batch(self, batch: BatchArrays) -> BatchArrays:
        """Check that no token of a batch affects other sequences of its pack, and return the batch unchanged.

        Raises:
            InputError: The batch contains a token that changes the other sequences of its pack.
        """
        self.packed.check_no_forbidden_token(batch)
        return batch

    def check_packed_equals_single(self, row_tokens: int = 0) -> None:
        """Check that the model, with its current weights, computes the same outputs for packed sequences as for single ones.

        The check runs on the CPU.

        Args:
            row_tokens: The minimum number of tokens in the longest rows. See `PackedModel.check_packs_if_untried`.

        Raises:
            InputError: The outputs differ by more than rounding.
        """
        self.module.to("cpu")
        try:
            self.packed.check_packs_if_untried(row_tokens)
        finally:
            self.module.to(self.device)

    def compute_outputs(self, batch: BatchArrays) -> Float32Array:
        """Run the model on a batch without dropout, and return the outputs of its head.

        Rows that are longer than all earlier rows are preceded by a check of packs of this length.
        """
        row_tokens = batch["input_ids"].shape[1]
        if row_tokens > self.packed.tried_tokens:
            self.check_packed_equals_single(row_tokens)
        return super().compute_outputs(batch)

    def forward(self, batch: Tensors, training: bool) -> Tensor:
        """Run the model on a batch, with dropout if `training` is true, and return the outputs of its head."""
        self.packed.train(training)
        return self._compute(batch)

    def call_between_layers(self, callback: Callable[[], None]) -> None:
        """Register a callback that all later passes call before each layer.

        The elements of the longest module list in the model are taken as its layers.
        """
        lists = [module for module in self.module.modules() if isinstance(module, torch.nn.ModuleList)]
        for layer in max(lists, key=len, default=()):
            layer.register_forward_pre_hook(lambda *_: callback())

    def convert_weights_for_inference(self, dtype: torch.dtype) -> None:
        """Convert the weights of the linear layers for inference.

        A trial pass shows which layers are called.
        """
        trial = self.packed.build_trial_batch()

        def compute() -> None:
            with torch.inference_mode(), self.autocast_context():
                self.forward(trial, False)

        convert_linear_layers_for_inference(self.module, compute, dtype)
        self.parameters_by_name = dict(self.module.named_parameters())

    def _run_encoder_and_head(self, batch: Tensors) -> Tensor:
        """Run the encoder and the head, and return the outputs of the head. `torch.compile` compiles this method."""
        head = self.spec.head
        return (
            self.packed.compute_vectors(batch, head)
            if isinstance(head, VectorHead)
            else self.packed.compute_head_outputs(batch)
        )
