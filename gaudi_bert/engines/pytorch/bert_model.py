"""Our own BERT (`bert.py`) with any head, as `engines/protocol.Model`.

Letters in shapes: B packs, Q masked slots, S depth, T tokens, R needed positions, P rows of logits, H hidden size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from gaudi_bert.common.arrays import BatchArrays
from gaudi_bert.encoders.matrix_products import is_plain_cpu_tensor
from gaudi_bert.encoders.pack_inputs import pool_sequences, upcast_to_float32
from gaudi_bert.engines.protocol import ComputeDtype, Device, LossesAndGradients, ModelSpec
from gaudi_bert.engines.pytorch.bert import (
    SEQUENCE_OFFSETS,
    WORDS,
    WORDS_TO_LOOK_UP,
    Network,
    apply_pooler,
    compute_masked_lm_logits,
    compute_pretraining_logits,
    compute_sequence_offsets,
    convert_parameters_for_inference,
    encode_packs,
    select_attention_function,
    supports_varlen_attention,
)
from gaudi_bert.engines.pytorch.cpu_operations import DuplicateTiedEmbedding
from gaudi_bert.engines.pytorch.model import Tensors, TorchModel, compute_pretraining_loss_and_metric_sums, to_numpy
from gaudi_bert.model.config import BertConfig, draw_initial_value, has_weight_decay
from gaudi_bert.model.heads import Loss, PretrainingHead, VectorHead, check_logit_count, parameter_specs_with_head


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
        self.attention = select_attention_function(self.device.type, device is not None and device.fuses_attention)
        self._uses_varlen_attention = (
            self.compute_dtype == "bfloat16"
            and not self.is_compiled  # because the number of sequences varies, and compiled shapes are static
            and supports_varlen_attention(self.device, self.config.head_size)
        )
        self.frozen: dict[str, Tensor] | None = None
        self._compute: Callable[..., Any] = self._run_network
        if compiler is not None:
            self._compute = torch.compile(self._run_network, backend=compiler, dynamic=False, fullgraph=True)

    def has_weight_decay(self, name: str) -> bool:
        """Return whether weight decay applies to a variable."""
        return has_weight_decay(name)

    @property
    def computes_batches_in_parallel(self) -> bool:
        """Whether several threads may call `compute_outputs` at once. True on a CPU, unless the model is compiled."""
        return self.device.type == "cpu" and not self.is_compiled

    def validate_and_extend_batch(self, batch: BatchArrays) -> BatchArrays:
        """Add the sequence offsets to a batch if the model uses `varlen_attention`, and return the batch."""
        if not self._uses_varlen_attention or "input_mask" not in batch:
            return batch
        return {**batch, SEQUENCE_OFFSETS: compute_sequence_offsets(np.asarray(batch["input_mask"], np.int32))}

    def forward(self, batch: Tensors, training: bool) -> Any:
        """Run the model on a batch, and return the outputs of its head. For a pretraining head, return the logits of both
        tasks.
        """
        return self._compute(self._collect_forward_pass_parameters(), batch, training)

    def compute_losses_and_gradients(self, batch: BatchArrays, loss: Loss) -> LossesAndGradients:
        """Run a forward and a backward pass of a pretraining model without dropout, and return its outputs, losses and
        gradients.
        """
        tensors, network = self.copy_to_device(batch), self._build_network(self._collect_forward_pass_parameters())
        with torch.no_grad(), self.autocast_context():
            hidden_TH = encode_packs(network, tensors)
        with self.autocast_context():
            words_BQV, sentences_BS2 = compute_pretraining_logits(network, tensors)
        sums = compute_pretraining_loss_and_metric_sums(words_BQV, sentences_BS2, tensors, loss)
        masked_lm_loss, next_sentence_loss = sums[0] / sums[1], sums[2] / sums[3]
        leaves = self.parameters_by_name
        gradients = torch.autograd.grad(masked_lm_loss + next_sentence_loss, list(leaves.values()), allow_unused=True)
        return LossesAndGradients(
            {
                "hidden_states": to_numpy(upcast_to_float32(hidden_TH)).reshape(*batch["input_ids"].shape, -1),
                "masked_lm_logits": to_numpy(words_BQV),
                "next_sentence_logits": to_numpy(sentences_BS2),
            },
            {"masked_lm_loss": masked_lm_loss.item(), "next_sentence_loss": next_sentence_loss.item()},
            {
                name: np.zeros(leaf.shape, np.float32) if gradient is None else to_numpy(gradient)
                for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)
            },
        )

    def convert_weights_for_inference(self, dtype: torch.dtype) -> None:
        """Convert the weights of all encoder layers for inference, and concatenate the attention kernels of each layer."""
        at_few_positions = isinstance(self.spec.head, PretrainingHead) or self.spec.head.positions_feature_name is not None
        self.frozen = convert_parameters_for_inference(
            self.parameters_by_name, self.config, dtype, separate_query_in_last_layer=at_few_positions
        )
        self.parameters_by_name = {}

    def call_between_layers(self, callback: Callable[[], None]) -> None:
        """Register a callback that all later passes call before the attention of each layer."""
        attend = self.attention

        def attend_after_callback(*inputs: Tensor) -> Tensor:
            callback()
            return attend(*inputs)

        self.attention = attend_after_callback

    def _collect_forward_pass_parameters(self) -> dict[str, Tensor]:
        """Return the variables by name, in the form that a forward pass requires.

        After `freeze`, they are in the layout for inference. With float64, they are converted. Otherwise, on a CPU, they
        contain the word embeddings twice (see `DuplicateTiedEmbedding`).
        """
        if self.frozen is not None:
            return self.frozen
        if self.compute_dtype == "float64":
            return {name: parameter.double() for name, parameter in self.parameters_by_name.items()}
        parameters: dict[str, Tensor] = dict(self.parameters_by_name)
        if is_plain_cpu_tensor(parameters[WORDS]) and not self.is_compiled:
            parameters[WORDS_TO_LOOK_UP], parameters[WORDS] = DuplicateTiedEmbedding.apply(parameters[WORDS])
        return parameters

    def _build_network(self, parameters: Tensors, training: bool = False) -> Network:
        """Return the config, the variables and the options that all layers need for a forward pass."""
        recomputes, restricts_last_layer = training and self.recomputes, self.frozen is not None
        return Network(self.config, parameters, training, self.attention, recomputes, restricts_last_layer)

    def _run_network(self, parameters: Tensors, batch: Tensors, training: bool) -> Any:
        """Run the encoder and the head, and return the outputs of the head. `torch.compile` compiles this method."""
        network, head = self._build_network(parameters, training), self.spec.head
        if isinstance(head, PretrainingHead):
            return compute_pretraining_logits(network, batch)
        hidden_RH = encode_packs(
            network, batch, None if head.positions_feature_name is None else batch[head.positions_feature_name]
        )
        if isinstance(head, VectorHead):
            return pool_sequences(head, upcast_to_float32(hidden_RH), batch)
        packs, length = batch["input_ids"].shape
        if not head.metrics_need_outputs:
            check_logit_count(packs, length, self.config.vocab_size)
            return compute_masked_lm_logits(network, hidden_RH)
        inputs_PH = apply_pooler(network, hidden_RH) if head.predicts_per_text else upcast_to_float32(hidden_RH)
        if head.kind != "question-answering":  # BERT's span head has no dropout
            inputs_PH = network.apply_dropout(inputs_PH)
        with torch.autocast(self.device.type, enabled=False):
            return network.apply_dense(inputs_PH, head.dense_name_prefix).reshape(
                packs, -1 if head.predicts_per_text else length, head.width
            )
