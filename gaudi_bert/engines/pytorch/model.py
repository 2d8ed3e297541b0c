"""The base class of models in PyTorch, as `engines/protocol.Model`, and what it computes for all heads: losses and metrics.

`bert_model.py` contains our own BERT, and `encoder_model.py` any other encoder.

Letters in shapes: B packs, L positions, Q masked slots, S depth, P rows of logits, C outputs or classes of a head,
V vocabulary, K sums of a head.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gaudi_bert.common.arrays import BatchArrays, Float32Array, Int32Array, WeightArrays
from gaudi_bert.encoders.pack_inputs import build_membership_mask, upcast_to_float32
from gaudi_bert.engines.protocol import BatchEvaluation, ComputeDtype, Device, ModelSpec, check_weights
from gaudi_bert.engines.pytorch.cpu_operations import cross_entropy
from gaudi_bert.model.heads import OTHER_SEQUENCE, Loss, PretrainingHead, TaskHead, VectorHead

Tensors = Mapping[str, Tensor]
_TIMING_SEED = np.array([1, 2], np.int32)


class TorchModel(ABC):
    """The base class of the PyTorch engine's models. It implements what BERT and other encoders have in common.

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
        """Run the model on a batch, with dropout if `training` is true, and return the outputs of its head."""

    @abstractmethod
    def has_weight_decay(self, name: str) -> bool:
        """Return whether weight decay applies to a variable."""

    @abstractmethod
    def convert_weights_for_inference(self, dtype: torch.dtype) -> None:
        """Convert the weights for inference. Their new dtype and memory layout speed up matrix products on a CPU."""

    @property
    def computes_batches_in_parallel(self) -> bool:
        """Whether several threads may call `compute_outputs` at the same time, each with a batch of its own."""
        return False

    # --- The methods of `engines/protocol.Model`

    def persistent_buffers(self) -> dict[str, Tensor]:
        """Return the variables that have no gradient, by name. Checkpoints contain them in addition to the parameters."""
        return {}

    def variable_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the variables by name."""
        return {name: tuple(variable.shape) for name, variable in self._variables_by_name().items()}

    def copy_variables(self) -> dict[str, Float32Array]:
        """Return a copy of the variables by name."""
        return {name: to_numpy(variable).copy() for name, variable in self._variables_by_name().items()}

    def load_variables(self, values: WeightArrays) -> None:
        """Set variables to the given values. Variables that are not in `values` keep their current values."""
        check_weights(self.variable_shapes(), values)
        variables = self._variables_by_name()
        with torch.no_grad():
            for name, value in values.items():
                variables[name].copy_(torch.from_numpy(np.array(value)))

    def _variables_by_name(self) -> dict[str, Tensor]:
        """Return the parameters and the buffers by name."""
        return {**self.parameters_by_name, **self.persistent_buffers()}

    def compute_outputs(self, batch: BatchArrays) -> Float32Array:
        """Run the model on a batch without dropout, and return the outputs of its head as float32."""
        with torch.inference_mode(), self.autocast_context():
            return to_numpy(upcast_to_float32(self.forward(self.copy_to_device(batch), False)).float())

    def evaluate_batch(self, batch: BatchArrays) -> BatchEvaluation:
        """Run the model on a batch without dropout. Return the head's outputs, and the sums over the batch that give the
        loss and the metrics.
        """
        tensors, head = self.copy_to_device(batch), self.spec.head
        with torch.inference_mode():
            with self.autocast_context():
                outputs = self.forward(tensors, False)
            sums = self.compute_loss_and_metric_sums(outputs, tensors)
        return BatchEvaluation(to_numpy(outputs.float()) if head.metrics_need_outputs else None, to_numpy(sums.float()))

    def run_training_pass(self, batch: BatchArrays) -> float:
        """Run a forward and a backward pass with dropout, to measure how long they take. The weights do not change.

        Return a number that depends on all gradients, so that none of them can be skipped.
        """
        loss, _ = self.compute_loss(self.copy_to_device(batch), _TIMING_SEED, torch.ones(2, device=self.device))
        trained = [parameter for parameter in self.parameters_by_name.values() if parameter.requires_grad]
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        return float(sum(gradient.sum() for gradient in gradients if gradient is not None))

    def freeze(self) -> None:
        """Prepare the model for inference. Afterwards, only `compute_outputs` and `evaluate_batch` may be called.

        On a CPU, the weights are stored only once, in the dtype and layout of the matrix products.
        """
        for parameter in self.parameters_by_name.values():
            parameter.requires_grad_(False)
        if self.device.type == "cpu" and not self.is_compiled and self.compute_dtype != "float64":
            self.convert_weights_for_inference(torch.bfloat16 if self.compute_dtype == "bfloat16" else torch.float32)
            release_freed_memory()

    @abstractmethod
    def call_between_layers(self, callback: Callable[[], None]) -> None:
        """Register a callback that all later passes call before each layer. The model must not be compiled."""

    # --- Methods for `updates.py`

    def compute_loss(self, batch: Tensors, dropout_seed: Int32Array, loss_factors_2: Tensor) -> tuple[Tensor, Tensor]:
        """Run the model on a batch with dropout. Return the loss to differentiate, and the sums over the batch that give the
        reported loss and metrics.

        Args:
            batch: The features on the device.
            dropout_seed: int32 [2].
            loss_factors_2: The factors by which the two loss sums are multiplied.

        Returns:
            The loss, and the K sums without gradients.
        """
        sums = self.compute_loss_and_metric_sums(self.compute_training_outputs(batch, dropout_seed), batch)
        if isinstance(self.spec.head, PretrainingHead):
            return sums[0] * loss_factors_2[0] + sums[2] * loss_factors_2[1], sums.detach()
        return sums[0] * loss_factors_2[0], sums.detach()

    def compute_training_outputs(self, batch: Tensors, dropout_seed: Int32Array) -> Any:
        """Run the model on a batch with dropout, and return the outputs of its head. The dropout masks depend only on the
        seed.

        The seed is int32 [2].
        """
        number = int(np.ascontiguousarray(dropout_seed).view(np.uint64)[0] & np.uint64((1 << 63) - 1))
        torch.manual_seed(number)
        if self.device.type != "cpu":
            getattr(torch, self.device.type).manual_seed(number)
        with self.autocast_context():
            return self.forward(batch, True)

    def compute_loss_and_metric_sums(self, outputs: Any, batch: Tensors) -> Tensor:
        """Compute, from the outputs of the head, the sums over a batch that give the loss and the metrics. `model/heads.py`
        lists these sums.
        """
        head = self.spec.head
        if isinstance(head, PretrainingHead):
            words_BQV, sentences_BS2 = outputs
            return compute_pretraining_loss_and_metric_sums(words_BQV, sentences_BS2, batch, head.loss)
        if isinstance(head, VectorHead):
            return torch.zeros(0)
        return compute_task_loss_and_metric_sums(head, upcast_to_float32(outputs), batch)

    def copy_to_device(self, batch: BatchArrays) -> dict[str, Tensor]:
        """Prepare a batch with `validate_and_extend_batch`, and copy it to the device."""
        return _copy_to_device(self.validate_and_extend_batch(batch), self.device)

    def validate_and_extend_batch(self, batch: BatchArrays) -> BatchArrays:
        """Check a batch, and return it in the form that the model requires. This base class returns the batch unchanged."""
        return batch

    def autocast_context(self) -> AbstractContextManager[Any]:
        """Return a context manager that computes matrix products in bfloat16. It has no effect unless bfloat16 is the
        compute dtype.
        """
        if self.compute_dtype != "bfloat16":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


# --- Copying to and from the device


def _copy_to_device(batch: BatchArrays, device: torch.device) -> dict[str, Tensor]:
    """Copy a batch to a device. For a GPU, copy it from pinned memory, so that the CPU does not wait for the copy."""
    tensors = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in batch.items()}
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in tensors.items()}
    return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in tensors.items()}


def prefetch_to_device(batches: Iterable[BatchArrays], device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Yield batches after copying them to the device. On a GPU, copy each batch while the previous one is being computed."""
    if device.type != "cuda":
        yield from (_copy_to_device(batch, device) for batch in batches)
        return
    copies, computes = torch.cuda.Stream(device), torch.cuda.current_stream(device)

    def copied(batch: BatchArrays) -> dict[str, Tensor]:
        with torch.cuda.stream(copies):
            return _copy_to_device(batch, device)

    remaining = iter(batches)
    following = next((copied(batch) for batch in remaining), None)
    while following is not None:
        batch, copied_until = following, copies.record_event()
        following = next((copied(each) for each in remaining), None)
        computes.wait_event(copied_until)
        for tensor in batch.values():
            tensor.record_stream(computes)  # otherwise its memory could be reused before the pass has finished
        yield batch


def release_freed_memory() -> None:
    """Return freed memory to the operating system. After `open_device`, glibc no longer does this by itself."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def to_numpy(tensor: Tensor) -> Float32Array:
    """Return a tensor as a numpy array, which may share memory with the tensor."""
    array: Float32Array = tensor.detach().cpu().numpy()
    return array


# --- The loss sums and metric sums of all heads, in at least float32. `model/heads.py` lists them.


def compute_pretraining_loss_and_metric_sums(
    masked_lm_logits_BQV: Tensor, next_sentence_logits_BS2: Tensor, batch: Mapping[str, Tensor], loss: Loss
) -> Tensor:
    """Compute the sums over a pretraining batch that give the loss and the metrics.

    Returns:
        The masked-LM loss and its weight, the next-sentence loss and its weight, and then for each of the two tasks the
        total weight of the correct predictions and of all predictions.
    """
    weights_BQ, masked_weight = _compute_masked_slot_weights(batch, loss, masked_lm_logits_BQV.dtype)
    masked_sum, masked_correct = _sum_losses_and_correct_predictions(
        masked_lm_logits_BQV, batch["masked_lm_ids"], weights_BQ
    )
    sentence_weights_BS = batch["next_sentence_weights"].to(masked_lm_logits_BQV.dtype)
    sentence_sum, sentence_correct = _sum_losses_and_correct_predictions(
        next_sentence_logits_BS2, batch["next_sentence_labels"], sentence_weights_BS
    )
    sentence_weight = sentence_weights_BS.sum()
    correct = (masked_correct, masked_weight, sentence_correct, sentence_weight)
    return torch.stack([masked_sum, masked_weight, sentence_sum, sentence_weight, *correct])


def _compute_masked_slot_weights(batch: Mapping[str, Tensor], loss: Loss, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the weight of every masked token in the loss, and the sum of these weights.

    The weights have the shape [B, Q]. Unused slots have the weight 0. A masked token has the weight 1 or, for the loss per
    sequence, 1 / (number of masked tokens of its sequence).
    """
    numbers_BQ = batch["masked_lm_weights"]
    if loss == "token":
        used_BQ = (numbers_BQ > 0).to(dtype)
        return used_BQ, used_BQ.sum()
    belongs_BSQ = build_membership_mask(numbers_BQ, batch["next_sentence_positions"].shape[1]).to(dtype)
    slots_BS1 = belongs_BSQ.sum(-1, keepdim=True)
    return (belongs_BSQ / slots_BS1.clamp(min=1.0)).sum(1), slots_BS1.clamp(max=1.0).sum()


def _compute_losses_and_correctness(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the negative log-likelihood of each label. Also return 1 for each label with the largest logit, and 0 for all
    others.

    Logits have the shape [..., C]. Both results are flattened, [P].
    """
    logits_PC, labels_P = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).long()
    losses_P = cross_entropy(logits_PC, labels_P)
    return losses_P, (logits_PC.detach().argmax(-1) == labels_P).to(logits.dtype)


def _sum_losses_and_correct_predictions(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the negative log-likelihoods of all labels, and the weighted sum of the correct
    predictions.
    """
    losses_P, correct_P = _compute_losses_and_correctness(logits, labels)
    weights_P = weights.reshape(-1)
    return (losses_P * weights_P).sum(), (correct_P * weights_P).sum()


def compute_task_loss_and_metric_sums(head: TaskHead, logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of the weighted losses of a task, the sum of the weights, and the weighted sum of the correct
    predictions.
    """
    weights = batch["target_weights"].to(logits.dtype)
    if head.kind in ("multi-label", "reranking"):
        targets_BSC = batch["targets"].to(logits.dtype).reshape(logits.shape)
        losses = functional.binary_cross_entropy_with_logits(logits, targets_BSC, reduction="none").mean(-1)
        correct = ((logits >= 0) == (targets_BSC > 0.5)).all(-1).to(logits.dtype)
    elif head.kind == "regression":
        losses = (logits.squeeze(-1) - batch["targets"].to(logits.dtype)).square()
        correct = torch.zeros_like(losses)
    elif head.kind == "question-answering":
        losses, correct = _compute_span_losses_and_correctness(logits, batch)
    else:
        losses, correct = _compute_losses_and_correctness(logits, batch["targets"])
    weights = weights.reshape(losses.shape)
    return torch.stack([(losses * weights).sum(), weights.sum(), (correct * weights).sum()])


def _compute_span_losses_and_correctness(logits_BL2: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the loss of each answer span, and whether both its start and its end are predicted correctly.

    Both results have the shape [B, S]. The loss is the mean of the negative log-likelihoods of start and end. The logits of
    tokens in other sequences are lowered, so that they do not contribute to the softmax.
    """
    packs, depth = batch["target_weights"].shape
    membership_BSL = build_membership_mask(batch["input_mask"], depth).to(logits_BL2.dtype)
    logits_BS2L = logits_BL2.transpose(1, 2)[:, None] + ((1.0 - membership_BSL) * OTHER_SEQUENCE)[:, :, None, :]
    losses_P, correct_P = _compute_losses_and_correctness(logits_BS2L, batch["targets"])
    return losses_P.reshape(packs, depth, 2).mean(-1), correct_P.reshape(packs, depth, 2).amin(-1)
