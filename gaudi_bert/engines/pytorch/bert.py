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
from gaudi_bert.encoders.feeding import widen
from gaudi_bert.encoders.matrix_products import is_large_product, linear
from gaudi_bert.engines.pytorch.cpu_operations import attention_in_cache, dropout
from gaudi_bert.engines.pytorch.packed_weights import pack_weights, product
from gaudi_bert.model.config import BertConfig, layer_name_prefix
from gaudi_bert.model.heads import FORBIDDEN_SCORE, check_logit_count

WORDS = "bert/embeddings/word_embeddings"
WORDS_TO_LOOK_UP = f"{WORDS}/rows"
"""The name under which the same variable is used for looking up rows, if the gradient of the rows is sparse."""
SEQUENCE_OFFSETS = "sequence_offsets"
"""The feature that `compute_sequence_offsets` adds to a batch if the device has `varlen_attention`."""
_ALL_PARTS = ("query", "key", "value")
_SOME_PARTS = (("query",), ("key", "value"))
"""The parts of self-attention that are computed together in the last layer if not every position is a query."""
_Parameters = Mapping[str, Tensor]
Attention = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
"""A function from query, key, value, attention mask and dropout rate to the context of every query, [B, N, P, D]."""
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": lambda inputs: functional.gelu(inputs, approximate="tanh"),
    "relu": functional.relu,
}


def _plain_attention(
    query_BNPD: Tensor, key_BNLD: Tensor, value_BNLD: Tensor, bias_B1PL: Tensor, dropout_rate: float
) -> Tensor:
    """Compute attention with two matrix products and a softmax. See `Attention`."""
    scores_BNPL = torch.matmul(query_BNPD * (1.0 / math.sqrt(query_BNPD.shape[-1])), key_BNLD.mT)
    shares_BNPL = torch.softmax(widen(scores_BNPL) + bias_B1PL, dim=-1).to(value_BNLD.dtype)
    if dropout_rate > 0:
        shares_BNPL = dropout(shares_BNPL, dropout_rate)
    return torch.matmul(shares_BNPL, value_BNLD)


def _fused_attention(
    query_BNPD: Tensor, key_BNLD: Tensor, value_BNLD: Tensor, bias_B1PL: Tensor, dropout_rate: float
) -> Tensor:
    """Compute attention with PyTorch's fused operation. See `Attention`.

    If the device has a kernel that supports the mask, no [P, L] matrix is stored.
    """
    bias = bias_B1PL.to(query_BNPD.dtype)
    return functional.scaled_dot_product_attention(query_BNPD, key_BNLD, value_BNLD, bias, dropout_rate)


def _attention_on_cpu(
    query_BNPD: Tensor, key_BNLD: Tensor, value_BNLD: Tensor, bias_B1PL: Tensor, dropout_rate: float
) -> Tensor:
    """Compute attention in the fastest way on a CPU. See `Attention`. PyTorch's fused operation is slow with dropout."""
    form = _fused_attention
    if dropout_rate > 0:
        form = attention_in_cache if is_large_product(query_BNPD, key_BNLD.mT) else _plain_attention
    return form(query_BNPD, key_BNLD, value_BNLD, bias_B1PL, dropout_rate)


def _gaudi_attention() -> Attention:
    """Return an attention function that uses the fused kernel of the Gaudi software.

    Raises:
        InputError: The installed software has no such kernel.
    """
    try:
        kernel = importlib.import_module("habana_frameworks.torch.hpex.kernels").FusedSDPA
    except (ImportError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"gaudi_fused_attention = true: no FusedSDPA here ({reason}); set it to false") from error

    def attention(
        query_BNPD: Tensor, key_BNLD: Tensor, value_BNLD: Tensor, bias_B1PL: Tensor, dropout_rate: float
    ) -> Tensor:
        context_BNPD: Tensor = kernel.apply(
            query_BNPD, key_BNLD, value_BNLD, bias_B1PL.to(query_BNPD.dtype), dropout_rate, False
        )
        return context_BNPD

    return attention


def has_varlen_attention(device: torch.device, head_size: int) -> bool:
    """Return whether a device has the FlashAttention kernels that compute attention sequence by sequence in bfloat16."""
    return (
        device.type == "cuda"
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and head_size % 8 == 0
        and head_size <= 256
    )


def compute_sequence_offsets(input_mask_BL: Int32Array) -> Int32Array:
    """Return where each sequence begins in the flattened batch.

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
    """Compute attention sequence by sequence with FlashAttention, which skips all scores between sequences.

    Args:
        query_TND: The queries, in bfloat16 or float16. See `has_varlen_attention` for what the device must have.
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


def attention_on(device: str, by_vendor: bool) -> Attention:
    """Return the attention function for a device.

    Args:
        device: The kind of device: "cpu", "cuda" or "hpu".
        by_vendor: Whether the fused kernel of the Gaudi software is used on a Gaudi card.

    Raises:
        InputError: The fused kernel is requested but missing.
    """
    if device == "hpu":  # how PyTorch's fused operation computes on Gaudi is not documented, so it is not used
        return _gaudi_attention() if by_vendor else _plain_attention
    return _attention_on_cpu if device == "cpu" else _fused_attention


@dataclass(frozen=True)
class Network:
    """What all layers need for a forward pass.

    Attributes:
        config: The sizes of the model.
        parameters: The variables by name.
        training: Whether dropout is applied.
        attention: The attention function.
        recomputes: Whether layers are computed again in the backward pass, which saves memory.
        reads_few: Whether the last layer computes only the needed positions even if they are not fewer than all positions.
        sequence_offsets: Where each sequence of the batch begins, if layers compute attention with `varlen_attention`.
            Otherwise None, and layers use `attention`.
    """

    config: BertConfig
    parameters: _Parameters
    training: bool = False
    attention: Attention = _plain_attention
    recomputes: bool = False
    reads_few: bool = False
    sequence_offsets: Tensor | None = None

    def drop(self, inputs: Tensor) -> Tensor:
        """Apply hidden-state dropout, in training only."""
        rate = self.config.hidden_dropout_prob
        return dropout(inputs, rate) if self.training and rate > 0 else inputs

    def dense(self, inputs: Tensor, scope: str) -> Tensor:
        """Apply the dense layer `scope` to inputs [rows, features]."""
        return product(inputs, self.parameters[f"{scope}/kernel"], self.parameters[f"{scope}/bias"])

    def layer_norm(self, inputs: Tensor, scope: str) -> Tensor:
        """Apply the layer normalization `scope` over the last axis.

        It is computed in at least float32, and returned in the dtype of the inputs.
        """
        gamma_H, beta_H = self.parameters[f"{scope}/gamma"], self.parameters[f"{scope}/beta"]
        normal = functional.layer_norm(widen(inputs), gamma_H.shape, gamma_H, beta_H, self.config.layer_norm_eps)
        return normal.to(inputs.dtype)

    def activate(self, inputs: Tensor) -> Tensor:
        """Apply the activation that the config specifies."""
        return _ACTIVATIONS[self.config.hidden_act](inputs)


def _wide_product(inputs: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
    """Compute `inputs @ weights + bias` in at least float32, even under autocast."""
    with torch.autocast(inputs.device.type, enabled=False):
        return torch.addmm(bias, widen(inputs), weights)


def _attention_bias(input_mask_BL: Tensor, causal: bool, dtype: torch.dtype) -> Tensor:
    """Return the mask that is added to attention scores, [B, 1, L, L]: 0 if attention is allowed, otherwise -10,000."""
    allowed_BLL = input_mask_BL[:, :, None] == input_mask_BL[:, None, :]
    if causal:
        order_L = torch.arange(input_mask_BL.shape[1], device=input_mask_BL.device)
        allowed_BLL = allowed_BLL & (order_L[:, None] >= order_L[None, :])
    return ((1.0 - allowed_BLL.to(dtype)) * FORBIDDEN_SCORE)[:, None]


def pick_tokens(hidden_TX: Tensor, positions_BP: Tensor, length: int) -> Tensor:
    """Select the rows at P positions of each pack, flattened, [B * P, X].

    Args:
        hidden_TX: A row for each token.
        positions_BP: Positions within the packs.
        length: The number of positions of a pack.
    """
    starts_B1 = torch.arange(0, len(positions_BP) * length, length, device=positions_BP.device)[:, None]
    return hidden_TX.index_select(0, (positions_BP + starts_B1).reshape(-1))


def encode_packs(network: Network, batch: Mapping[str, Tensor], positions_BP: Tensor | None = None) -> Tensor:
    """Compute the hidden states of the last layer.

    Args:
        network: The model.
        batch: The features of the batch.
        positions_BP: The needed positions of each pack. None for all positions.

    Returns:
        [B * P, H], or [B * L, H] for all positions.
    """
    config, (packs, length) = network.config, batch["input_ids"].shape
    network = replace(network, sequence_offsets=batch.get(SEQUENCE_OFFSETS))
    hidden_TH = _embed(network, batch)
    bias_B1LL = _attention_bias(batch["input_mask"], config.attention == "causal", hidden_TH.dtype)
    reads_few = positions_BP is not None and (network.reads_few or positions_BP.shape[1] < length)
    for layer in range(config.num_hidden_layers):
        query_RH, bias_B1PL = hidden_TH, bias_B1LL
        if positions_BP is not None and reads_few and layer == config.num_hidden_layers - 1:
            query_RH = pick_tokens(hidden_TH, positions_BP, length)
            bias_RL = pick_tokens(bias_B1LL.reshape(packs * length, length), positions_BP, length)
            bias_B1PL = bias_RL.reshape(packs, 1, -1, length)
        inputs = (network, layer_name_prefix(layer), query_RH, hidden_TH, bias_B1PL)
        if network.recomputes:  # `checkpoint` restores the random numbers of the first pass
            hidden_TH = checkpoint(_encoder_layer, *inputs, use_reentrant=False)
        else:
            hidden_TH = _encoder_layer(*inputs)
    if positions_BP is not None and not reads_few:
        return pick_tokens(hidden_TH, positions_BP, length)
    return hidden_TH


def _embed(network: Network, batch: Mapping[str, Tensor]) -> Tensor:
    """Compute the input of the encoder, [T, H], in at least float32."""
    scope, parameters = "bert/embeddings", network.parameters
    words, sparse = parameters.get(WORDS_TO_LOOK_UP, parameters[WORDS]), WORDS_TO_LOOK_UP in parameters
    words_TH = functional.embedding(batch["input_ids"].reshape(-1), words, sparse=sparse)
    positions_TH = functional.embedding(batch["positions"].reshape(-1), parameters[f"{scope}/position_embeddings"])
    types_TH = functional.embedding(batch["segment_ids"].reshape(-1), parameters[f"{scope}/token_type_embeddings"])
    return network.drop(network.layer_norm(words_TH + positions_TH + types_TH, f"{scope}/LayerNorm"))


def _encoder_layer(network: Network, scope: str, query_RH: Tensor, hidden_TH: Tensor, bias_B1PL: Tensor) -> Tensor:
    """Compute a layer, with layer normalization after each residual sum (Vaswani et al., 2017; Devlin et al., 2019).

    Args:
        network: The model.
        scope: The name prefix of the layer's variables.
        query_RH: The input at the positions to compute.
        hidden_TH: The input at all positions.
        bias_B1PL: The attention mask, in which P are the positions to compute.

    Returns:
        [R, H].
    """
    context_RH = _self_attention(network, f"{scope}/attention/self", query_RH, hidden_TH, bias_B1PL)
    output_RH = network.drop(network.dense(context_RH, f"{scope}/attention/output/dense"))
    attended_RH = network.layer_norm(output_RH + query_RH, f"{scope}/attention/output/LayerNorm")
    inner_RI = network.activate(network.dense(attended_RH, f"{scope}/intermediate/dense"))
    output_RH = network.drop(network.dense(inner_RI, f"{scope}/output/dense"))
    return network.layer_norm(output_RH + attended_RH, f"{scope}/output/LayerNorm")


def _joined(parameters: _Parameters, scope: str, parts: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Concatenate the kernels of parts of self-attention, [H, O], and their biases, [O]."""
    name = f"{scope}/{'+'.join(parts)}"
    if f"{name}/kernel" in parameters:
        return parameters[f"{name}/kernel"], parameters[f"{name}/bias"]
    biases = {part: parameters[f"{scope}/{part}/bias"] for part in parts}
    if "key" in biases:  # the key bias does not affect the softmax, and its gradient would only be rounding noise
        biases["key"] = biases["key"].detach()
    return torch.cat([parameters[f"{scope}/{part}/kernel"] for part in parts], dim=1), torch.cat(list(biases.values()))


def packed_parameters(
    parameters: _Parameters, config: BertConfig, dtype: torch.dtype, *, reads_few: bool
) -> dict[str, Tensor]:
    """Convert variables for inference, without gradients.

    The kernels of query, key and value are concatenated, and all kernels of the encoder layers get the layout of
    `pack_weights`. All other variables are returned without copying.

    Args:
        parameters: All variables by name.
        config: The config of the model.
        dtype: The dtype of the matrix products, float32 or bfloat16.
        reads_few: See `Network`.

    Returns:
        The converted variables by name.
    """
    packed = dict(parameters)
    for layer in range(config.num_hidden_layers):
        scope, is_last = layer_name_prefix(layer), layer == config.num_hidden_layers - 1
        attention = f"{scope}/attention/self"
        for parts in _SOME_PARTS if is_last and reads_few else (_ALL_PARTS,):
            kernel_HO, bias_O = _joined(parameters, attention, parts)
            name = f"{attention}/{'+'.join(parts)}"
            packed |= {f"{name}/kernel": pack_weights(kernel_HO, dtype), f"{name}/bias": bias_O.to(dtype)}
            if len(parts) > 1:
                for part in parts:
                    del packed[f"{attention}/{part}/kernel"], packed[f"{attention}/{part}/bias"]
        for name in ("attention/output/dense", "intermediate/dense", "output/dense"):
            packed[f"{scope}/{name}/kernel"] = pack_weights(parameters[f"{scope}/{name}/kernel"], dtype)
            packed[f"{scope}/{name}/bias"] = parameters[f"{scope}/{name}/bias"].to(dtype)
    return packed


def _self_attention(network: Network, scope: str, query_RH: Tensor, hidden_TH: Tensor, bias_B1PL: Tensor) -> Tensor:
    """Compute the context of every query, [R, H], before the output projection."""
    config, (packs, _, queries, length) = network.config, bias_B1PL.shape
    heads, size = config.num_attention_heads, config.head_size

    def project(inputs: Tensor, positions: int, parts: tuple[str, ...]) -> tuple[Tensor, ...]:
        """Project the inputs to query, key or value, [B, N, positions, D], with one matrix product for all `parts`."""
        fused = product(inputs, *_joined(network.parameters, scope, parts))
        return tuple(part.transpose(1, 2) for part in fused.reshape(packs, positions, len(parts), heads, size).unbind(2))

    rate = config.attention_probs_dropout_prob if network.training else 0.0
    if network.sequence_offsets is not None and query_RH is hidden_TH:
        fused = product(hidden_TH, *_joined(network.parameters, scope, _ALL_PARTS))
        query_TND, key_TND, value_TND = fused.reshape(packs * length, len(_ALL_PARTS), heads, size).unbind(1)
        is_causal = config.attention == "causal"
        context_TND = varlen_attention(query_TND, key_TND, value_TND, network.sequence_offsets, length, rate, is_causal)
        return context_TND.reshape(-1, heads * size)
    if query_RH is hidden_TH:
        query_BNPD, key_BNLD, value_BNLD = project(hidden_TH, length, _ALL_PARTS)
    else:
        (query_BNPD,) = project(query_RH, queries, _SOME_PARTS[0])
        key_BNLD, value_BNLD = project(hidden_TH, length, _SOME_PARTS[1])
    context_BNPD = network.attention(query_BNPD, key_BNLD, value_BNLD, bias_B1PL, rate)
    return context_BNPD.transpose(1, 2).reshape(packs * queries, heads * size)


# --- Layers after the encoder


def pool(network: Network, first_PH: Tensor) -> Tensor:
    """Apply BERT's pooler, a dense layer and tanh, to the hidden states of [CLS] tokens.

    Returns:
        [sequences, H], in at least float32.
    """
    scope, parameters = "bert/pooler/dense", network.parameters
    return torch.tanh(_wide_product(first_PH, parameters[f"{scope}/kernel"], parameters[f"{scope}/bias"]))


def word_scores(network: Network, picked_PH: Tensor) -> Tensor:
    """Compute the masked-LM logits of hidden states, [P, V], in at least float32.

    The output matrix is tied to the word embeddings.
    """
    scope = "cls/predictions/transform"
    changed_PH = network.layer_norm(network.activate(network.dense(picked_PH, f"{scope}/dense")), f"{scope}/LayerNorm")
    return widen(linear(changed_PH, network.parameters[WORDS])).add_(network.parameters["cls/predictions/output_bias"])


def pretraining_outputs(network: Network, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Compute the masked-LM logits, [B, Q, V], and the next-sentence logits, [B, S, 2], in at least float32."""
    positions_BP = torch.cat([batch["next_sentence_positions"], batch["masked_lm_positions"]], dim=1)
    packs, depth = batch["next_sentence_positions"].shape
    check_logit_count(packs, batch["masked_lm_positions"].shape[1], network.config.vocab_size)
    read_BPH = encode_packs(network, batch, positions_BP).reshape(packs, positions_BP.shape[1], -1)
    first_PH, masked_PH = read_BPH[:, :depth].flatten(0, 1), read_BPH[:, depth:].flatten(0, 1)
    words_BQV = word_scores(network, masked_PH).reshape(packs, -1, network.config.vocab_size)
    # Next-sentence class 0 means that the second text follows the first, and class 1 that it was chosen at random.
    weights_2H, bias_2 = (network.parameters[f"cls/seq_relationship/output_{name}"] for name in ("weights", "bias"))
    sentences_P2 = _wide_product(pool(network, first_PH), weights_2H.t(), bias_2)
    return words_BQV, sentences_P2.reshape(packs, -1, 2)
