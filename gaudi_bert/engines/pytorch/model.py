"""Models in PyTorch, as `engines/protocol.Model`: a base class, BERT, any other encoder, and the sums of the heads.

`TorchBert` is our own BERT (`bert.py`). `TorchEncoder` runs models of `transformers` on packs (`encoders/packed_model.py`).

Letters in shapes: B packs, L positions, Q masked slots, S depth, P rows of logits, C outputs or classes of a head, H hidden
size, K sums of a head, V vocabulary.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gaudi_bert.common.arrays import BatchArrays, Float32Array, Int32Array, WeightArrays
from gaudi_bert.common.errors import InputError
from gaudi_bert.encoders.cpu import TableOfRows, cross_entropy, is_eager, pack_linear_layers
from gaudi_bert.encoders.feeding import belongs, vectors_of_sequences, widen
from gaudi_bert.engines.protocol import ComputeDtype, Device, ModelSpec, Trial, check_weights
from gaudi_bert.engines.pytorch.bert import (
    WORDS,
    WORDS_TO_LOOK_UP,
    Network,
    attention_on,
    encode_packs,
    packed_parameters,
    pool,
    pretraining_outputs,
    word_scores,
)
from gaudi_bert.model.config import BertConfig, EncoderConfig, draw_initial_value, has_weight_decay
from gaudi_bert.model.heads import (
    OTHER_SEQUENCE,
    Loss,
    PretrainingHead,
    TaskHead,
    VectorHead,
    check_logit_count,
    parameter_specs_with_head,
)

if TYPE_CHECKING:
    from gaudi_bert.encoders.packed_model import PackedModel

Tensors = Mapping[str, Tensor]
_WORK_SEED = np.array([1, 2], np.int32)


class TorchModel(ABC):
    """A model on a device.

    Args:
        spec: The config and the head of the model.
        device: The device. None for the CPU in float32.
        compute_dtype: The dtype of the matrix products. None for that of the device.
        compiler: The backend of torch.compile, or None if the model is not compiled.

    Attributes:
        parameters_by_name: The parameters, which are float32. `updates.py` reads their gradients.
    """

    def __init__(
        self, spec: ModelSpec, device: Device | None, compute_dtype: ComputeDtype | None, compiler: str | None
    ) -> None:
        self.spec, self.is_compiled = spec, compiler is not None
        self.device = torch.device(device.name if device is not None else "cpu")
        self.compute_dtype = compute_dtype or (device.compute_dtype if device is not None else "float32")
        self.recomputes = device is not None and device.recomputes
        self.parameters_by_name: dict[str, torch.nn.Parameter] = {}

    # --- Methods that subclasses implement

    @abstractmethod
    def forward(self, batch: Tensors, training: bool) -> Tensor:
        """Compute the outputs of the head, from which losses are computed, with dropout if `training`."""

    @abstractmethod
    def has_weight_decay(self, name: str) -> bool:
        """Return whether weight decay applies to a variable."""

    @abstractmethod
    def pack(self, dtype: torch.dtype) -> None:
        """Convert the weights of matrix products to a dtype, and to the layout with which products are fastest."""

    # --- The methods of `engines/protocol.Model`

    def buffers(self) -> dict[str, Tensor]:
        """Return the variables without a gradient, which are stored in addition to the parameters, by name."""
        return {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the variables by name."""
        return {name: tuple(variable.shape) for name, variable in self._variables().items()}

    def values(self) -> dict[str, Float32Array]:
        """Return a copy of the variables by name."""
        return {name: to_numpy(variable).copy() for name, variable in self._variables().items()}

    def load_values(self, values: WeightArrays) -> None:
        """Set variables by name. Variables that are missing in `values` keep their values."""
        check_weights(self.shapes(), values)
        variables = self._variables()
        with torch.no_grad():
            for name, value in values.items():
                variables[name].copy_(torch.from_numpy(np.array(value)))

    def _variables(self) -> dict[str, Tensor]:
        """Return the parameters and the buffers by name."""
        return {**self.parameters_by_name, **self.buffers()}

    def outputs(self, batch: BatchArrays) -> Float32Array:
        """Return the outputs of the head for a batch, float32, without dropout."""
        with torch.inference_mode(), self.autocast():
            return to_numpy(widen(self.forward(self.tensors(batch), False)).float())

    def evaluate(self, batch: BatchArrays) -> tuple[Float32Array | None, Float32Array]:
        """Run the model without dropout, and return the outputs of the head (or None if it keeps none) and the K sums."""
        tensors, head = self.tensors(batch), self.spec.head
        with torch.inference_mode():
            with self.autocast():
                outputs = self.forward(tensors, False)
            sums = self.sums(outputs, tensors)
        return to_numpy(outputs.float()) if head.needs_outputs else None, to_numpy(sums.float())

    def work(self, batch: BatchArrays) -> float:
        """Do a forward and backward pass with dropout, and return a number that depends on all gradients. For timing."""
        loss, _ = self.loss(self.tensors(batch), _WORK_SEED, torch.ones(2, device=self.device))
        trained = [parameter for parameter in self.parameters_by_name.values() if parameter.requires_grad]
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        return float(sum(gradient.sum() for gradient in gradients if gradient is not None))

    def freeze(self) -> None:
        """Prepare the model for inference only. Afterwards, only `outputs` and `evaluate` may be called.

        On a CPU, the weights are stored only once, in the dtype and layout that matrix products need.
        """
        for parameter in self.parameters_by_name.values():
            parameter.requires_grad_(False)
        if self.device.type == "cpu" and not self.is_compiled and self.compute_dtype != "float64":
            self.pack(torch.bfloat16 if self.compute_dtype == "bfloat16" else torch.float32)
            return_freed_memory()

    @abstractmethod
    def call_between_layers(self, callback: Callable[[], None]) -> None:
        """Call `callback` before each layer from now on. The model must not be compiled."""

    # --- Methods for `updates.py`

    def loss(self, batch: Tensors, dropout_seed: Int32Array, factors_2: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the loss of a batch for training.

        Args:
            batch: The features on the device.
            dropout_seed: int32 [2].
            factors_2: The factors by which the two loss sums are multiplied.

        Returns:
            The loss, and the K sums without gradients.
        """
        outputs = self.training_outputs(batch, dropout_seed)
        sums = self.sums(outputs, batch)
        if isinstance(self.spec.head, PretrainingHead):
            return sums[0] * factors_2[0] + sums[2] * factors_2[1], sums.detach()
        return sums[0] * factors_2[0], sums.detach()

    def training_outputs(self, batch: Tensors, dropout_seed: Int32Array) -> Any:
        """Compute the outputs of the head with dropout from a seed, int32 [2]."""
        number = int(np.ascontiguousarray(dropout_seed).view(np.uint64)[0] & np.uint64((1 << 63) - 1))
        torch.manual_seed(number)
        if self.device.type != "cpu":
            getattr(torch, self.device.type).manual_seed(number)
        with self.autocast():
            return self.forward(batch, True)

    def sums(self, outputs: Any, batch: Tensors) -> Tensor:
        """Compute the K sums of the head from its outputs."""
        head = self.spec.head
        if isinstance(head, PretrainingHead):
            words_BQV, sentences_BS2 = outputs
            return _pretraining_sums(words_BQV, sentences_BS2, batch, head.loss)
        if isinstance(head, VectorHead):
            return torch.zeros(0)
        return _task_sums(head, widen(outputs), batch)

    def tensors(self, batch: BatchArrays) -> dict[str, Tensor]:
        """Check a batch, and copy it to the device."""
        return _on_device(self.checked(batch), self.device)

    def checked(self, batch: BatchArrays) -> BatchArrays:
        """Return a batch after checking that the model can compute it. Subclasses add checks."""
        return batch

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context in which matrix products are computed in bfloat16, if that is the compute dtype."""
        if self.compute_dtype != "bfloat16":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


class TorchBert(TorchModel):
    """A BERT with any head. The names and shapes of its variables are defined in `model/config.py`.

    Attributes:
        config: The config of the BERT.
        attention: The attention function.
        frozen: The variables in the layout for inference, after `freeze` on a CPU. None before.
    """

    def __init__(
        self,
        spec: ModelSpec,
        device: Device | None = None,
        *,
        seed: int | None,
        compute_dtype: ComputeDtype | None = None,
        compiler: str | None = None,
    ) -> None:
        super().__init__(spec, device, compute_dtype, compiler)
        self.config = cast(BertConfig, spec.config)
        for name, variable in parameter_specs_with_head(self.config, spec.head).items():
            value = torch.from_numpy(draw_initial_value(name, variable, self.config.initializer_range, seed))
            self.parameters_by_name[name] = torch.nn.Parameter(value.to(self.device))
        self.attention = attention_on(self.device.type, device is not None and device.fuses_attention)
        self.frozen: dict[str, Tensor] | None = None
        self._compute: Callable[..., Any] = self._heads
        if compiler is not None:
            self._compute = torch.compile(self._heads, backend=compiler, dynamic=False, fullgraph=True)

    def has_weight_decay(self, name: str) -> bool:
        """Return whether weight decay applies to a variable."""
        return has_weight_decay(name)

    def forward(self, batch: Tensors, training: bool) -> Any:
        """Compute the outputs of the head. For pretraining, return the logits of both tasks."""
        return self._compute(self._parameters(), batch, training)

    def trial(self, batch: BatchArrays, loss: Loss) -> Trial:
        """Compute outputs, losses and gradients of a pretraining model, without dropout."""
        tensors, network = self.tensors(batch), self._network(self._parameters())
        with torch.no_grad(), self.autocast():
            hidden_TH = encode_packs(network, tensors)
        with self.autocast():
            words_BQV, sentences_BS2 = pretraining_outputs(network, tensors)
        sums = _pretraining_sums(words_BQV, sentences_BS2, tensors, loss)
        masked_lm_loss, next_sentence_loss = sums[0] / sums[1], sums[2] / sums[3]
        leaves = self.parameters_by_name
        gradients = torch.autograd.grad(masked_lm_loss + next_sentence_loss, list(leaves.values()), allow_unused=True)
        return Trial(
            {
                "hidden_states": to_numpy(widen(hidden_TH)).reshape(*batch["input_ids"].shape, -1),
                "masked_lm_logits": to_numpy(words_BQV),
                "next_sentence_logits": to_numpy(sentences_BS2),
            },
            {"masked_lm_loss": masked_lm_loss.item(), "next_sentence_loss": next_sentence_loss.item()},
            {
                name: np.zeros(leaf.shape, np.float32) if gradient is None else to_numpy(gradient)
                for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)
            },
        )

    def pack(self, dtype: torch.dtype) -> None:
        """Concatenate the kernels of attention, and convert all kernels of the encoder layers for inference."""
        reads_few = isinstance(self.spec.head, PretrainingHead) or self.spec.head.positions_feature is not None
        self.frozen = packed_parameters(self.parameters_by_name, self.config, dtype, reads_few=reads_few)
        self.parameters_by_name = {}

    def call_between_layers(self, callback: Callable[[], None]) -> None:
        """Call `callback` before the attention of each layer from now on."""
        attend = self.attention

        def attend_after_callback(*inputs: Tensor) -> Tensor:
            callback()
            return attend(*inputs)

        self.attention = attend_after_callback

    def _parameters(self) -> dict[str, Tensor]:
        """Return the variables for a forward pass, by name."""
        if self.frozen is not None:
            return self.frozen
        if self.compute_dtype == "float64":
            return {name: parameter.double() for name, parameter in self.parameters_by_name.items()}
        parameters: dict[str, Tensor] = dict(self.parameters_by_name)
        if is_eager(parameters[WORDS]) and not self.is_compiled:
            parameters[WORDS_TO_LOOK_UP], parameters[WORDS] = TableOfRows.apply(parameters[WORDS])
        return parameters

    def _network(self, parameters: Tensors, training: bool = False) -> Network:
        """Return what the layers need for a forward pass."""
        recomputes, reads_few = training and self.recomputes, self.frozen is not None
        return Network(self.config, parameters, training, self.attention, recomputes, reads_few)

    def _heads(self, parameters: Tensors, batch: Tensors, training: bool) -> Any:
        """Compute the outputs of the head. This function is compiled."""
        network, head = self._network(parameters, training), self.spec.head
        if isinstance(head, PretrainingHead):
            return pretraining_outputs(network, batch)
        hidden_RH = encode_packs(network, batch, None if head.positions_feature is None else batch[head.positions_feature])
        if isinstance(head, VectorHead):
            return vectors_of_sequences(head, widen(hidden_RH), batch)
        packs, length = batch["input_ids"].shape
        if not head.needs_outputs:
            check_logit_count(packs, length, self.config.vocab_size)
            return word_scores(network, hidden_RH)
        inputs_PH = pool(network, hidden_RH) if head.predicts_per_text else widen(hidden_RH)
        if head.kind != "question-answering":  # BERT's span head has no dropout
            inputs_PH = network.drop(inputs_PH)
        with torch.autocast(self.device.type, enabled=False):
            return network.dense(inputs_PH, head.dense_name_prefix).reshape(
                packs, -1 if head.predicts_per_text else length, head.width
            )


# --- Any other encoder, as its `transformers` class with its own head and variable names (`encoders/packed_model.py`)


def build_encoder(
    spec: ModelSpec,
    device: Device | None,
    *,
    seed: int | None,
    compute_dtype: ComputeDtype | None = None,
    compiler: str | None = None,
) -> TorchEncoder:
    """Build a `transformers` model with a head.

    Args:
        spec: The config and the head of the model.
        device: The device. None for the CPU in float32.
        seed: The seed with which `transformers` draws the initial values. The model is then tried on packs. None if weights
            will be loaded, after which `check_packs` tries the model.
        compute_dtype: The dtype of the matrix products. None for that of the device.
        compiler: The backend of torch.compile, or None if the model is not compiled.

    Raises:
        InputError: The model cannot be built or fed packs, or `transformers` has no such head for it.
    """
    from gaudi_bert.encoders.encoder_weights import class_of, config_of  # imported here, because it loads transformers
    from gaudi_bert.encoders.feeding_trial import feeding_of
    from gaudi_bert.encoders.packed_model import PackedModel
    from gaudi_bert.encoders.trial import MODEL_ERRORS, quiet_transformers, reason_of

    config = config_of(cast(EncoderConfig, spec.config), spec.head)
    kind = class_of(config, spec.head)
    feeding = feeding_of(config, kind=kind)
    try:
        with torch.random.fork_rng(devices=[]), quiet_transformers():
            torch.manual_seed(0 if seed is None else seed)
            module = kind._from_config(config).float()  # noqa: SLF001 - transformers has no public method for this
    except MODEL_ERRORS as error:
        problem = f"cannot be built: {reason_of(error)}; correct its config.json"
        raise InputError(f"model type {config.model_type!r}: {problem}") from error
    packed = PackedModel(module, feeding, spec.head if isinstance(spec.head, TaskHead) else None)
    if seed is not None:
        packed.try_packs(training=True)
        if isinstance(spec.head, TaskHead):
            packed.try_head()
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
            # The method has different names in current and in older transformers.
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
        """Return the buffers that are stored in addition to the parameters, by name."""
        return self.packed.stored_buffers()

    def has_weight_decay(self, name: str) -> bool:
        """Return whether weight decay applies to a variable. It does not apply to biases and to normalization layers."""
        return name not in self._undecayed and self.parameters_by_name[name].requires_grad

    def checked(self, batch: BatchArrays) -> BatchArrays:
        """Return a batch after checking its tokens.

        Raises:
            InputError: The batch contains a token that changes the other sequences of its pack.
        """
        self.packed.check_tokens(batch)
        return batch

    def check_packs(self, row_tokens: int = 0) -> None:
        """Check with the current weights that packed and single sequences have the same outputs.

        The check runs on the CPU.

        Args:
            row_tokens: The minimum number of tokens in the longest rows. See `PackedModel.try_rows`.

        Raises:
            InputError: The outputs differ by more than rounding.
        """
        self.module.to("cpu")
        try:
            self.packed.try_rows(row_tokens)
        finally:
            self.module.to(self.device)

    def outputs(self, batch: BatchArrays) -> Float32Array:
        """Return the outputs of the head, without dropout. If rows are longer than before, check them first."""
        row_tokens = batch["input_ids"].shape[1]
        if row_tokens > self.packed.tried_tokens:
            self.check_packs(row_tokens)
        return super().outputs(batch)

    def forward(self, batch: Tensors, training: bool) -> Tensor:
        """Compute the outputs of the head, with dropout if `training`."""
        self.packed.train(training)
        return self._compute(batch)

    def call_between_layers(self, callback: Callable[[], None]) -> None:
        """Call `callback` before each layer from now on. The layers are the longest module list of the model."""
        lists = [module for module in self.module.modules() if isinstance(module, torch.nn.ModuleList)]
        for layer in max(lists, key=len, default=()):
            layer.register_forward_pre_hook(lambda *_: callback())

    def pack(self, dtype: torch.dtype) -> None:
        """Convert the weights of the linear layers for inference. A trial shows which layers are called."""
        trial = self.packed.trial_batch()

        def compute() -> None:
            with torch.inference_mode(), self.autocast():
                self.forward(trial, False)

        pack_linear_layers(self.module, compute, dtype)
        self.parameters_by_name = dict(self.module.named_parameters())

    def _outputs(self, batch: Tensors) -> Tensor:
        """Compute the outputs of the head. This function is compiled."""
        head = self.spec.head
        return self.packed.vectors(batch, head) if isinstance(head, VectorHead) else self.packed.answers(batch)


# --- Copying to and from the device


def _on_device(batch: BatchArrays, device: torch.device) -> dict[str, Tensor]:
    """Copy a batch to a device. For a GPU, copy from pinned memory, so that the host does not wait."""
    tensors = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in batch.items()}
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in tensors.items()}
    return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in tensors.items()}


def ahead_on_device(batches: Iterable[BatchArrays], device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Yield batches on the device. On a GPU, each batch is copied while the one before it is computed."""
    if device.type != "cuda":
        yield from (_on_device(batch, device) for batch in batches)
        return
    copies, computes = torch.cuda.Stream(device), torch.cuda.current_stream(device)

    def copied(batch: BatchArrays) -> dict[str, Tensor]:
        with torch.cuda.stream(copies):
            return _on_device(batch, device)

    remaining = iter(batches)
    following = next((copied(batch) for batch in remaining), None)
    while following is not None:
        batch, copied_until = following, copies.record_event()
        following = next((copied(each) for each in remaining), None)
        computes.wait_event(copied_until)
        for tensor in batch.values():
            tensor.record_stream(computes)  # otherwise its memory could be reused before the pass has finished
        yield batch


def return_freed_memory() -> None:
    """Return freed memory to the kernel. glibc does not do this by itself, because `open_device` turns it off."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def to_numpy(tensor: Tensor) -> Float32Array:
    """Return a tensor as an array on the host, which may share memory with the tensor."""
    array: Float32Array = tensor.detach().cpu().numpy()
    return array


# --- The sums of the heads, as listed in `model/heads.py`, in at least float32


def _pretraining_sums(words_BQV: Tensor, sentences_BS2: Tensor, batch: Mapping[str, Tensor], loss: Loss) -> Tensor:
    """Compute the 8 sums of pretraining, [8].

    Returns:
        The masked-LM loss and its weight, the next-sentence loss and its weight, and then for each of the two tasks the
        total weight of the correct predictions and of all predictions.
    """
    weights_BQ, masked_weight = _masked_slot_weights(batch, loss, words_BQV.dtype)
    masked_sum, masked_right = _weighed_likelihoods(words_BQV, batch["masked_lm_ids"], weights_BQ)
    sentence_weights_BS = batch["next_sentence_weights"].to(words_BQV.dtype)
    sentence_sum, sentence_right = _weighed_likelihoods(sentences_BS2, batch["next_sentence_labels"], sentence_weights_BS)
    sentence_weight = sentence_weights_BS.sum()
    correct = (masked_right, masked_weight, sentence_right, sentence_weight)
    return torch.stack([masked_sum, masked_weight, sentence_sum, sentence_weight, *correct])


def _masked_slot_weights(batch: Mapping[str, Tensor], loss: Loss, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute the weight of every masked slot, [B, Q], and the sum of these weights.

    A used slot has the weight 1 or, for the loss per sequence, 1 / (number of masked slots of its sequence).
    """
    numbers_BQ = batch["masked_lm_weights"]
    if loss == "token":
        used_BQ = (numbers_BQ > 0).to(dtype)
        return used_BQ, used_BQ.sum()
    depth = batch["next_sentence_positions"].shape[1]
    belongs_BSQ = belongs(numbers_BQ, depth).to(dtype)
    slots_BS1 = belongs_BSQ.sum(-1, keepdim=True)
    return (belongs_BSQ / slots_BS1.clamp(min=1.0)).sum(1), slots_BS1.clamp(max=1.0).sum()


def _likelihoods(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the negative log-likelihood of each label, and 1 if the label has the largest logit, otherwise 0.

    Logits have the shape [..., C]. Both results are flattened, [P].
    """
    logits_PC, labels_P = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).long()
    losses_P = cross_entropy(logits_PC, labels_P)
    return losses_P, (logits_PC.detach().argmax(-1) == labels_P).to(logits.dtype)


def _weighed_likelihoods(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the weighted sums of the negative log-likelihoods and of the correct predictions."""
    losses_P, right_P = _likelihoods(logits, labels)
    weights_P = weights.reshape(-1)
    return (losses_P * weights_P).sum(), (right_P * weights_P).sum()


def _task_sums(head: TaskHead, logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Compute the 3 sums of a task: the losses, their weights, and the correct predictions, as described in `TaskHead`."""
    weights = batch["target_weights"].to(logits.dtype)
    if head.kind in ("multi-label", "reranking"):
        targets_BSC = batch["targets"].to(logits.dtype).reshape(logits.shape)
        losses = functional.binary_cross_entropy_with_logits(logits, targets_BSC, reduction="none").mean(-1)
        right = ((logits >= 0) == (targets_BSC > 0.5)).all(-1).to(logits.dtype)
    elif head.kind == "regression":
        losses = (logits.squeeze(-1) - batch["targets"].to(logits.dtype)).square()
        right = torch.zeros_like(losses)
    elif head.kind == "question-answering":
        losses, right = _span_losses(logits, batch)
    else:
        losses, right = _likelihoods(logits, batch["targets"])
    weights = weights.reshape(losses.shape)
    return torch.stack([(losses * weights).sum(), weights.sum(), (right * weights).sum()])


def _span_losses(logits_BL2: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Compute the loss of each span, and whether its start and end are both predicted correctly, [B, S].

    The loss is the mean of the negative log-likelihoods of start and end. The logits of tokens in other sequences are
    lowered, so that they do not contribute to the softmax.
    """
    packs, depth = batch["target_weights"].shape
    own_BSL = belongs(batch["input_mask"], depth).to(logits_BL2.dtype)
    own_BS2L = logits_BL2.transpose(1, 2)[:, None] + ((1.0 - own_BSL) * OTHER_SEQUENCE)[:, :, None, :]
    losses_P, right_P = _likelihoods(own_BS2L, batch["targets"])
    return losses_P.reshape(packs, depth, 2).mean(-1), right_P.reshape(packs, depth, 2).amin(-1)
