"""BERT for packed sequences in PyTorch: embeddings, encoder, pooler, and the logits of pretraining.

The variables, layouts and computations are the same as in `engines/tensorflow/bert.py`. Positions restart in every sequence
of a pack, a token attends only to tokens of the same sequence (Krell et al., 2021, section 3.2), and the last layer is
computed only at the positions that a head needs. Autocast chooses the dtype of matrix products. Layer normalization,
softmax, heads and losses are computed in at least float32.

Letters in shapes: B packs, L positions, T = B * L tokens, P needed positions of a pack (at most L), R = B * P, N heads,
D head size, H = N * D hidden size, I intermediate size, O outputs of a product, Q masked slots, S depth, V vocabulary.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gaudi_bert.common.arrays import Int32Array
from gaudi_bert.common.errors import InputError
from gaudi_bert.encoders.matrix_products import convert_to_onednn_layout, is_large_product, linear, multiply
from gaudi_bert.encoders.pack_inputs import upcast_to_float32
from gaudi_bert.engines.pytorch.cpu_operations import dropout, tiled_attention
from gaudi_bert.model.config import BertConfig, layer_name_prefix
from gaudi_bert.model.heads import FORBIDDEN_SCORE, check_logit_count

WORDS = "bert/embeddings/word_embeddings"
# BERT uses its word embeddings twice, to look up the input tokens and as the output matrix. If the gradient of the look-up
# is sparse, the embeddings for the look-up have this separate name.
WORDS_TO_LOOK_UP = f"{WORDS}/rows"
# If a model uses `varlen_attention`, `TorchBert.validate_and_extend_batch` adds the offsets of the sequences to each batch
# under this name.
SEQUENCE_OFFSETS = "sequence_offsets"
_QUERY_KEY_VALUE = ("query", "key", "value")
# In the last layer, queries may be needed at fewer positions than keys and values. Therefore the query is projected
# separately.
_QUERY_AND_KEY_VALUE = (("query",), ("key", "value"))
_Parameters = Mapping[str, Tensor]
# The type of attention functions. The arguments are query, key, value, attention mask and dropout rate. The result is the
# context of every query, [B, N, P, D].
Attention = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": lambda inputs: functional.gelu(inputs, approximate="tanh"),
    "relu": functional.relu,
}


def _plain_attention(
    query_BNPD: Tensor, key_BNLD: Tensor, value_BNLD: Tensor, bias_B1PL: Tensor, dropout_rate: float
) -> Tensor:
    """Compute attention with two matrix products and a softmax. See `Attention` for the parameters."""
    scores_BNPL = torch.matmul(query_BNPD * (1.0 / math.sqrt(query_BNPD.shape[-1])), key_BNLD.mT)
    probabilities_BNPL = torch.softmax(upcast_to_float32(scores_BNPL) + bias_B1PL, dim=-1).to(value_BNLD.dtype)
    if dropout_rate > 0:
        probabilities_BNPL = dropout(probabilities_BNPL, dropout_rate)
    return torch.matmul(probabilities_BNPL, value_BNLD)


def _fused_attention(
    query_BNPD: Tensor, key_BNLD: Tensor, value_BNLD: Tensor, bias_B1PL: Tensor, dropout_rate: float
) -> Tensor:
    """Compute attention with PyTorch's fused operation. See `Attention` for the parameters.

    If the device has a kernel that supports the mask, no [P, L] matrix is stored.
    """
    bias = bias_B1PL.to(query_BNPD.dtype)
    return functional.scaled_dot_product_attention(query_BNPD, key_BNLD, value_BNLD, bias, dropout_rate)


def _cpu_attention(
    query_BNPD: Tensor, key_BNLD: Tensor, value_BNLD: Tensor, bias_B1PL: Tensor, dropout_rate: float
) -> Tensor:
    """Compute attention with the fastest implementation for a CPU. See `Attention` for the parameters.

    With dropout, PyTorch's fused operation is slow, so other implementations are used.
    """
    form = _fused_attention
    if dropout_rate > 0:
        form = tiled_attention if is_large_product(query_BNPD, key_BNLD.mT) else _plain_attention
    return form(query_BNPD, key_BNLD, value_BNLD, bias_B1PL, dropout_rate)


def _load_gaudi_attention() -> Attention:
    """Return an `Attention` function that uses the fused kernel of the Gaudi software.

    Raises:
        InputError: The installed software has no such kernel.
    """
    try:
        kernel = importlib.import_module("habana_frameworks.torch.hpex.kernels").FusedSDPA
    except (ImportError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"gaudi_fused_attention = true: the installed software does not contain FusedSDPA ({reason}); set it to false"
        ) from error

    def attention(
        query_BNPD: Tensor, key_BNLD: Tensor, value_BNLD: Tensor, bias_B1PL: Tensor, dropout_rate: float
    ) -> Tensor:
        context_BNPD: Tensor = kernel.apply(
            query_BNPD, key_BNLD, value_BNLD, bias_B1PL.to(query_BNPD.dtype), dropout_rate, False
        )
        return context_BNPD

    return attention


def supports_varlen_attention(device: torch.device, head_size: int) -> bool:
    """Return whether a device supports `varlen_attention` in bfloat16."""
    return (
        device.type == "cuda"
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and head_size % 8 == 0
        and head_size <= 256
    )


def compute_sequence_offsets(input_mask_BL: Int32Array) -> Int32Array:
    """Return the index of the first token of each sequence in the flattened batch.

    The padding at the end of a pack counts as a sequence, and a pack does not continue the sequence of the pack before it.

    Args:
        input_mask_BL: The number of each token's sequence within its pack, and 0 for padding.

    Returns:
        int32 [sequences + 1]: the index of the first token of each sequence, in ascending order, followed by B * L.
    """
    is_first_BL = np.ones(input_mask_BL.shape, bool)
    is_first_BL[:, 1:] = input_mask_BL[:, 1:] != input_mask_BL[:, :-1]
    return np.append(np.flatnonzero(is_first_BL), is_first_BL.size).astype(np.int32)


def varlen_attention(
    query_TND: Tensor,
    key_TND: Tensor,
    value_TND: Tensor,
    sequence_offsets: Tensor,
    max_sequence_length: int,
    dropout_rate: float,
    is_causal: bool,
) -> Tensor:
    """Compute attention within each sequence with FlashAttention, which skips the scores between different sequences.

    Args:
        query_TND: The queries, in bfloat16 or float16. See `supports_varlen_attention` for what the device must have.
        key_TND: The keys.
        value_TND: The values.
        sequence_offsets: See `compute_sequence_offsets`.
        max_sequence_length: A length that no sequence exceeds.
        dropout_rate: The dropout rate of the attention probabilities.
        is_causal: Whether a token attends only to itself and earlier tokens of its sequence.

    Returns:
        The context of every query, [T, N, D].
    """
    context_TND: Tensor = torch.ops.aten._flash_attention_forward(  # noqa: SLF001 - the public functions have no dropout
        query_TND,
        key_TND,
        value_TND,
        sequence_offsets,
        sequence_offsets,
        max_sequence_length,
        max_sequence_length,
        dropout_rate,
        is_causal,
        False,
    )[0]
    return context_TND


def select_attention_function(device: str, use_gaudi_kernel: bool) -> Attention:
    """Return the attention function for a kind of device.

    Args:
        device: The kind of device: "cpu", "cuda" or "hpu".
        use_gaudi_kernel: Whether the fused kernel of the Gaudi software is used on a Gaudi card.

    Raises:
        InputError: The fused kernel is requested but missing.
    """
    if device == "hpu":  # it is not documented how PyTorch's fused operation computes on Gaudi
        return _load_gaudi_attention() if use_gaudi_kernel else _plain_attention
    return _cpu_attention if device == "cpu" else _fused_attention


@dataclass(frozen=True)
class Network:
    """The config, the variables and the options that all layers of a BERT need for one forward pass.

    Attributes:
        config: The sizes of the model.
        parameters: The variables by name.
        training: Whether dropout is applied.
        attention: The attention function.
        recomputes: Whether layers are computed again in the backward pass, which saves memory.
        restricts_last_layer: Whether the last layer computes only the needed positions even if they are not fewer than all
            positions.
        sequence_offsets: Where each sequence of the batch begins, if layers compute attention with `varlen_attention`.
            Otherwise None, and layers use `attention`.
    """

    config: BertConfig
    parameters: _Parameters
    training: bool = False
    attention: Attention = _plain_attention
    recomputes: bool = False
    restricts_last_layer: bool = False
    sequence_offsets: Tensor | None = None

    def apply_dropout(self, inputs: Tensor) -> Tensor:
        """Apply dropout to hidden states in a training pass. In any other pass, return them unchanged."""
        rate = self.config.hidden_dropout_prob
        return dropout(inputs, rate) if self.training and rate > 0 else inputs

    def apply_dense(self, inputs: Tensor, name_prefix: str) -> Tensor:
        """Apply the dense layer whose variable names begin with `name_prefix` to inputs [rows, features]."""
        return multiply(inputs, self.parameters[f"{name_prefix}/kernel"], self.parameters[f"{name_prefix}/bias"])

    def apply_layer_norm(self, inputs: Tensor, name_prefix: str) -> Tensor:
        """Apply the layer normalization whose variable names begin with `name_prefix` over the last axis.

        The result is computed in at least float32, and has the dtype of the inputs.
        """
        gamma_H, beta_H = self.parameters[f"{name_prefix}/gamma"], self.parameters[f"{name_prefix}/beta"]
        normal = functional.layer_norm(upcast_to_float32(inputs), gamma_H.shape, gamma_H, beta_H, self.config.layer_norm_eps)
        return normal.to(inputs.dtype)

    def apply_activation(self, inputs: Tensor) -> Tensor:
        """Apply the activation that the config specifies."""
        return _ACTIVATIONS[self.config.hidden_act](inputs)


def _apply_linear_in_float32(inputs: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
    """Compute `inputs @ weights + bias` in float32 or float64, even under autocast."""
    with torch.autocast(inputs.device.type, enabled=False):
        return torch.addmm(bias, upcast_to_float32(inputs), weights)


def _make_additive_attention_mask(input_mask_BL: Tensor, is_causal: bool, dtype: torch.dtype) -> Tensor:
    """Return the attention mask that is added to the scores. It is 0 where attention is allowed, and -10,000 elsewhere.

    The mask has the shape [B, 1, L, L].
    """
    allowed_BLL = input_mask_BL[:, :, None] == input_mask_BL[:, None, :]
    if is_causal:
        order_L = torch.arange(input_mask_BL.shape[1], device=input_mask_BL.device)
        allowed_BLL = allowed_BLL & (order_L[:, None] >= order_L[None, :])
    return ((1.0 - allowed_BLL.to(dtype)) * FORBIDDEN_SCORE)[:, None]


def gather_tokens(hidden_TX: Tensor, positions_BP: Tensor, pack_length: int) -> Tensor:
    """Return the rows of `hidden_TX` at the given positions of each pack.

    The result is flattened to [B * P, X].

    Args:
        hidden_TX: A row for each token.
        positions_BP: Positions within the packs.
        pack_length: The number of positions of a pack.
    """
    starts_B1 = torch.arange(0, len(positions_BP) * pack_length, pack_length, device=positions_BP.device)[:, None]
    return hidden_TX.index_select(0, (positions_BP + starts_B1).reshape(-1))


def encode_packs(network: Network, batch: Mapping[str, Tensor], positions_BP: Tensor | None = None) -> Tensor:
    """Run the embeddings and all encoder layers, and return the last layer's hidden states at the positions that the head
    needs.

    Args:
        network: The model.
        batch: The features of the batch.
        positions_BP: The needed positions of each pack. None for all positions.

    Returns:
        [B * P, H], or [B * L, H] for all positions.
    """
    config, (packs, length) = network.config, batch["input_ids"].shape
    network = replace(network, sequence_offsets=batch.get(SEQUENCE_OFFSETS))
    hidden_TH = _embed_tokens(network, batch)
    bias_B1LL = _make_additive_attention_mask(batch["input_mask"], config.attention == "causal", hidden_TH.dtype)
    restricts_last_layer = positions_BP is not None and (network.restricts_last_layer or positions_BP.shape[1] < length)
    for layer in range(config.num_hidden_layers):
        query_RH, bias_B1PL = hidden_TH, bias_B1LL
        if positions_BP is not None and restricts_last_layer and layer == config.num_hidden_layers - 1:
            query_RH = gather_tokens(hidden_TH, positions_BP, length)
            bias_RL = gather_tokens(bias_B1LL.reshape(packs * length, length), positions_BP, length)
            bias_B1PL = bias_RL.reshape(packs, 1, -1, length)
        inputs = (network, layer_name_prefix(layer), query_RH, hidden_TH, bias_B1PL)
        if network.recomputes:  # `checkpoint` restores the random numbers of the first pass
            hidden_TH = checkpoint(_run_encoder_layer, *inputs, use_reentrant=False)
        else:
            hidden_TH = _run_encoder_layer(*inputs)
    if positions_BP is not None and not restricts_last_layer:
        return gather_tokens(hidden_TH, positions_BP, length)
    return hidden_TH


def _embed_tokens(network: Network, batch: Mapping[str, Tensor]) -> Tensor:
    """Compute the input of the first encoder layer for all tokens, in at least float32.

    The input, [T, H], is the sum of the word, position and type embeddings, after layer normalization and dropout.
    """
    name_prefix, parameters = "bert/embeddings", network.parameters
    words, sparse = parameters.get(WORDS_TO_LOOK_UP, parameters[WORDS]), WORDS_TO_LOOK_UP in parameters
    words_TH = functional.embedding(batch["input_ids"].reshape(-1), words, sparse=sparse)
    positions_TH = functional.embedding(batch["positions"].reshape(-1), parameters[f"{name_prefix}/position_embeddings"])
    types_TH = functional.embedding(batch["segment_ids"].reshape(-1), parameters[f"{name_prefix}/token_type_embeddings"])
    return network.apply_dropout(network.apply_layer_norm(words_TH + positions_TH + types_TH, f"{name_prefix}/LayerNorm"))


def _run_encoder_layer(network: Network, name_prefix: str, query_RH: Tensor, hidden_TH: Tensor, bias_B1PL: Tensor) -> Tensor:
    """Compute one encoder layer, with layer normalization after each residual sum (Vaswani et al., 2017; Devlin et al.,
    2019).

    Args:
        network: The model.
        name_prefix: The name prefix of the layer's variables.
        query_RH: The input at the positions to compute.
        hidden_TH: The input at all positions.
        bias_B1PL: The attention mask, in which P are the positions to compute.

    Returns:
        [R, H].
    """
    context_RH = _run_self_attention(network, f"{name_prefix}/attention/self", query_RH, hidden_TH, bias_B1PL)
    output_RH = network.apply_dropout(network.apply_dense(context_RH, f"{name_prefix}/attention/output/dense"))
    attended_RH = network.apply_layer_norm(output_RH + query_RH, f"{name_prefix}/attention/output/LayerNorm")
    inner_RI = network.apply_activation(network.apply_dense(attended_RH, f"{name_prefix}/intermediate/dense"))
    output_RH = network.apply_dropout(network.apply_dense(inner_RI, f"{name_prefix}/output/dense"))
    return network.apply_layer_norm(output_RH + attended_RH, f"{name_prefix}/output/LayerNorm")


def _concatenate_projections(parameters: _Parameters, name_prefix: str, parts: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Concatenate the kernels and the biases of several projections, so that one matrix product computes them all.

    The results have the shapes [H, O] and [O].

    `parts` contains some of "query", "key" and "value".
    """
    name = f"{name_prefix}/{'+'.join(parts)}"
    if f"{name}/kernel" in parameters:
        return parameters[f"{name}/kernel"], parameters[f"{name}/bias"]
    biases = {part: parameters[f"{name_prefix}/{part}/bias"] for part in parts}
    if "key" in biases:  # the key bias does not affect the softmax, and its gradient would only be rounding noise
        biases["key"] = biases["key"].detach()
    return torch.cat([parameters[f"{name_prefix}/{part}/kernel"] for part in parts], dim=1), torch.cat(list(biases.values()))


def convert_parameters_for_inference(
    parameters: _Parameters, config: BertConfig, dtype: torch.dtype, *, separate_query_in_last_layer: bool
) -> dict[str, Tensor]:
    """Convert the variables of a BERT for inference, and return them by name. The results have no gradients.

    The kernels of query, key and value are concatenated, and all kernels of the encoder layers get the layout of
    `convert_to_onednn_layout`. All other variables are returned without copying.

    Args:
        parameters: All variables by name.
        config: The config of the model.
        dtype: The dtype of the matrix products, float32 or bfloat16.
        separate_query_in_last_layer: Whether the kernel of the query in the last layer is not concatenated with the others.
            A network needs this if `restricts_last_layer` is true, because it projects fewer queries than keys and values.

    Returns:
        The converted variables by name.
    """
    packed = dict(parameters)
    for layer in range(config.num_hidden_layers):
        name_prefix, is_last = layer_name_prefix(layer), layer == config.num_hidden_layers - 1
        attention = f"{name_prefix}/attention/self"
        for parts in _QUERY_AND_KEY_VALUE if is_last and separate_query_in_last_layer else (_QUERY_KEY_VALUE,):
            kernel_HO, bias_O = _concatenate_projections(parameters, attention, parts)
            name = f"{attention}/{'+'.join(parts)}"
            packed |= {f"{name}/kernel": convert_to_onednn_layout(kernel_HO, dtype), f"{name}/bias": bias_O.to(dtype)}
            if len(parts) > 1:
                for part in parts:
                    del packed[f"{attention}/{part}/kernel"], packed[f"{attention}/{part}/bias"]
        for name in ("attention/output/dense", "intermediate/dense", "output/dense"):
            packed[f"{name_prefix}/{name}/kernel"] = convert_to_onednn_layout(
                parameters[f"{name_prefix}/{name}/kernel"], dtype
            )
            packed[f"{name_prefix}/{name}/bias"] = parameters[f"{name_prefix}/{name}/bias"].to(dtype)
    return packed


def _run_self_attention(
    network: Network, name_prefix: str, query_RH: Tensor, hidden_TH: Tensor, bias_B1PL: Tensor
) -> Tensor:
    """Compute self-attention without the output projection, and return the context of every query.

    The result has the shape [R, H].
    """
    config, (packs, _, queries, length) = network.config, bias_B1PL.shape
    heads, size = config.num_attention_heads, config.head_size

    def project(inputs: Tensor, positions: int, projection_names: tuple[str, ...]) -> tuple[Tensor, ...]:
        """Compute the named projections of the inputs, such as ("key", "value"), with one matrix product. `positions` is the
        number of positions that the inputs contain for each pack.

        Each projection has the shape [B, N, positions, D].
        """
        fused = multiply(inputs, *_concatenate_projections(network.parameters, name_prefix, projection_names))
        projections = fused.reshape(packs, positions, len(projection_names), heads, size).unbind(2)
        return tuple(projection.transpose(1, 2) for projection in projections)

    rate = config.attention_probs_dropout_prob if network.training else 0.0
    if network.sequence_offsets is not None and query_RH is hidden_TH:
        fused = multiply(hidden_TH, *_concatenate_projections(network.parameters, name_prefix, _QUERY_KEY_VALUE))
        query_TND, key_TND, value_TND = fused.reshape(packs * length, len(_QUERY_KEY_VALUE), heads, size).unbind(1)
        is_causal = config.attention == "causal"
        context_TND = varlen_attention(query_TND, key_TND, value_TND, network.sequence_offsets, length, rate, is_causal)
        return context_TND.reshape(-1, heads * size)
    if query_RH is hidden_TH:
        query_BNPD, key_BNLD, value_BNLD = project(hidden_TH, length, _QUERY_KEY_VALUE)
    else:
        (query_BNPD,) = project(query_RH, queries, _QUERY_AND_KEY_VALUE[0])
        key_BNLD, value_BNLD = project(hidden_TH, length, _QUERY_AND_KEY_VALUE[1])
    context_BNPD = network.attention(query_BNPD, key_BNLD, value_BNLD, bias_B1PL, rate)
    return context_BNPD.transpose(1, 2).reshape(packs * queries, heads * size)


# --- Layers after the encoder


def apply_pooler(network: Network, cls_PH: Tensor) -> Tensor:
    """Apply BERT's pooler, a dense layer and tanh, to the hidden states of [CLS] tokens.

    Returns:
        [sequences, H], in at least float32.
    """
    name_prefix, parameters = "bert/pooler/dense", network.parameters
    return torch.tanh(
        _apply_linear_in_float32(cls_PH, parameters[f"{name_prefix}/kernel"], parameters[f"{name_prefix}/bias"])
    )


def compute_masked_lm_logits(network: Network, hidden_PH: Tensor) -> Tensor:
    """Compute the masked-LM logits of hidden states, in at least float32.

    The logits have the shape [P, V]. The output matrix is tied to the word embeddings.
    """
    name_prefix = "cls/predictions/transform"
    changed_PH = network.apply_layer_norm(
        network.apply_activation(network.apply_dense(hidden_PH, f"{name_prefix}/dense")), f"{name_prefix}/LayerNorm"
    )
    return upcast_to_float32(linear(changed_PH, network.parameters[WORDS])).add_(
        network.parameters["cls/predictions/output_bias"]
    )


def compute_pretraining_logits(network: Network, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Compute the masked-LM logits and the next-sentence logits of a batch, in at least float32.

    The results have the shapes [B, Q, V] and [B, S, 2].
    """
    positions_BP = torch.cat([batch["next_sentence_positions"], batch["masked_lm_positions"]], dim=1)
    packs, depth = batch["next_sentence_positions"].shape
    check_logit_count(packs, batch["masked_lm_positions"].shape[1], network.config.vocab_size)
    read_BPH = encode_packs(network, batch, positions_BP).reshape(packs, positions_BP.shape[1], -1)
    cls_PH, masked_PH = read_BPH[:, :depth].flatten(0, 1), read_BPH[:, depth:].flatten(0, 1)
    words_BQV = compute_masked_lm_logits(network, masked_PH).reshape(packs, -1, network.config.vocab_size)
    # Next-sentence class 0 means that the second text follows the first, and class 1 that it was chosen at random.
    weights_2H, bias_2 = (network.parameters[f"cls/seq_relationship/output_{name}"] for name in ("weights", "bias"))
    return words_BQV, _apply_linear_in_float32(apply_pooler(network, cls_PH), weights_2H.t(), bias_2).reshape(packs, -1, 2)
