"""BERT for packed sequences in PyTorch: embeddings, encoder, pooler, and the scores of words.

The same variables, layouts and arithmetic as `engines/tensorflow/bert.py`: positions restart in every sequence of a pack, a
token attends to those of the same sequence (Krell et al., 2021, section 3.2), and the last layer is computed only where a
head reads it. Matrix products are in the type that autocast chooses; layer norm, softmax, heads and losses stay wide.

Letters: B packs, L positions, T = B * L tokens, P positions of a pack that are read (L, or fewer), R = B * P, N heads,
D head size, H = N * D, V vocabulary.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gaudi_bert.common.errors import InputError
from gaudi_bert.encoders.cpu import attention_in_cache, dropout, is_large_product, linear, pack_weights, product
from gaudi_bert.encoders.feeding import widen
from gaudi_bert.model.config import BertConfig, layer_name_prefix
from gaudi_bert.model.heads import FORBIDDEN_SCORE, check_logit_count

WORDS = "bert/embeddings/word_embeddings"
WORDS_TO_LOOK_UP = f"{WORDS}/rows"
"""The same variable where its rows are looked up, if their gradient is to be sparse."""
_ALL_PARTS = ("query", "key", "value")
_SOME_PARTS = (("query",), ("key", "value"))
"""What is computed together of self-attention in the last layer, where not every position is a query."""
_Parameters = Mapping[str, Tensor]
Attention = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
"""Query, key, value, bias and the rate of dropout to the context of every query, [B, N, P, D]."""
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": lambda inputs: functional.gelu(inputs, approximate="tanh"),
    "relu": functional.relu,
}


def _plain_attention(
    query_BNPD: Tensor, key_BNLD: Tensor, value_BNLD: Tensor, bias_B1PL: Tensor, dropout_rate: float
) -> Tensor:
    """The context of every query, [B, N, P, D], by products and a softmax."""
    scores_BNPL = torch.matmul(query_BNPD * (1.0 / math.sqrt(query_BNPD.shape[-1])), key_BNLD.mT)
    shares_BNPL = torch.softmax(widen(scores_BNPL) + bias_B1PL, dim=-1).to(value_BNLD.dtype)
    if dropout_rate > 0:
        shares_BNPL = dropout(shares_BNPL, dropout_rate)
    return torch.matmul(shares_BNPL, value_BNLD)


def _fused_attention(
    query_BNPD: Tensor, key_BNLD: Tensor, value_BNLD: Tensor, bias_B1PL: Tensor, dropout_rate: float
) -> Tensor:
    """Compute it by one operation, which keeps no [P, L] matrix where the device has a kernel that takes the bias."""
    bias = bias_B1PL.to(query_BNPD.dtype)
    return functional.scaled_dot_product_attention(query_BNPD, key_BNLD, value_BNLD, bias, dropout_rate)


def _attention_on_cpu(
    query_BNPD: Tensor, key_BNLD: Tensor, value_BNLD: Tensor, bias_B1PL: Tensor, dropout_rate: float
) -> Tensor:
    """Compute it in the form that is fastest on a CPU: the fused one has no fast dropout."""
    form = _fused_attention
    if dropout_rate > 0:
        form = attention_in_cache if is_large_product(query_BNPD, key_BNLD.mT) else _plain_attention
    return form(query_BNPD, key_BNLD, value_BNLD, bias_B1PL, dropout_rate)


def _gaudi_attention() -> Attention:
    """Compute it by the kernel of Gaudi's vendor.

    Raises:
        InputError: its software here has no such kernel.
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


def attention_on(device: str, by_vendor: bool) -> Attention:
    """The form of attention for a kind of device; `by_vendor`: on a Gaudi card by the kernel of its vendor."""
    if device == "hpu":  # what PyTorch's operation is computed by there is not documented; of products autocast decides
        return _gaudi_attention() if by_vendor else _plain_attention
    return _attention_on_cpu if device == "cpu" else _fused_attention


@dataclass(frozen=True)
class Network:
    """Inputs of every layer.

    `recomputes`: whether a layer is computed once more for the backward pass. `reads_few`: whether the last layer computes
    only the positions that are read, also where they are no fewer than the positions of a row.
    """

    config: BertConfig
    parameters: _Parameters
    training: bool = False
    attention: Attention = _plain_attention
    recomputes: bool = False
    reads_few: bool = False

    def drop(self, inputs: Tensor) -> Tensor:
        """Dropout of hidden states."""
        rate = self.config.hidden_dropout_prob
        return dropout(inputs, rate) if self.training and rate > 0 else inputs

    def dense(self, inputs: Tensor, scope: str) -> Tensor:
        """`inputs @ kernel + bias`; `inputs` are [rows, I]."""
        return product(inputs, self.parameters[f"{scope}/kernel"], self.parameters[f"{scope}/bias"])

    def layer_norm(self, inputs: Tensor, scope: str) -> Tensor:
        """Layer norm over the last axis, computed wide, in the type of `inputs`."""
        gamma_H, beta_H = self.parameters[f"{scope}/gamma"], self.parameters[f"{scope}/beta"]
        normal = functional.layer_norm(widen(inputs), gamma_H.shape, gamma_H, beta_H, self.config.layer_norm_eps)
        return normal.to(inputs.dtype)

    def activate(self, inputs: Tensor) -> Tensor:
        """The activation of `config.json`."""
        return _ACTIVATIONS[self.config.hidden_act](inputs)


def _wide_product(inputs: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
    """`inputs @ weights + bias` in at least float32, whatever autocast does elsewhere."""
    with torch.autocast(inputs.device.type, enabled=False):
        return torch.addmm(bias, widen(inputs), weights)


def _attention_bias(input_mask_BL: Tensor, causal: bool, dtype: torch.dtype) -> Tensor:
    """Return what is added to the scores, [B, 1, L, L]: 0 where a position may attend, -10,000 where not."""
    allowed_BLL = input_mask_BL[:, :, None] == input_mask_BL[:, None, :]
    if causal:
        order_L = torch.arange(input_mask_BL.shape[1], device=input_mask_BL.device)
        allowed_BLL = allowed_BLL & (order_L[:, None] >= order_L[None, :])
    return ((1.0 - allowed_BLL.to(dtype)) * FORBIDDEN_SCORE)[:, None]


def pick_tokens(hidden_TX: Tensor, positions_BP: Tensor, length: int) -> Tensor:
    """The rows at `positions_BP`, each within its pack of `length` positions, flat: [B * P, X]."""
    starts_B1 = torch.arange(0, len(positions_BP) * length, length, device=positions_BP.device)[:, None]
    return hidden_TX.index_select(0, (positions_BP + starts_B1).reshape(-1))


def encode_packs(network: Network, batch: Mapping[str, Tensor], positions_BP: Tensor | None = None) -> Tensor:
    """Hidden states, [B * P, H], or of every token [B * L, H] where `positions_BP` is None."""
    config, (packs, length) = network.config, batch["input_ids"].shape
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
        if network.recomputes:  # with the random numbers of the first time
            hidden_TH = checkpoint(_encoder_layer, *inputs, use_reentrant=False)
        else:
            hidden_TH = _encoder_layer(*inputs)
    if positions_BP is not None and not reads_few:
        return pick_tokens(hidden_TH, positions_BP, length)
    return hidden_TH


def _embed(network: Network, batch: Mapping[str, Tensor]) -> Tensor:
    """The input of the encoder, [T, H], wide."""
    scope, parameters = "bert/embeddings", network.parameters
    words, sparse = parameters.get(WORDS_TO_LOOK_UP, parameters[WORDS]), WORDS_TO_LOOK_UP in parameters
    words_TH = functional.embedding(batch["input_ids"].reshape(-1), words, sparse=sparse)
    positions_TH = functional.embedding(batch["positions"].reshape(-1), parameters[f"{scope}/position_embeddings"])
    types_TH = functional.embedding(batch["segment_ids"].reshape(-1), parameters[f"{scope}/token_type_embeddings"])
    return network.drop(network.layer_norm(words_TH + positions_TH + types_TH, f"{scope}/LayerNorm"))


def _encoder_layer(network: Network, scope: str, query_RH: Tensor, hidden_TH: Tensor, bias_B1PL: Tensor) -> Tensor:
    """A layer with layer norm after each residual sum (Vaswani et al., 2017; Devlin et al., 2019), for the rows of R."""
    context_RH = _self_attention(network, f"{scope}/attention/self", query_RH, hidden_TH, bias_B1PL)
    output_RH = network.drop(network.dense(context_RH, f"{scope}/attention/output/dense"))
    attended_RH = network.layer_norm(output_RH + query_RH, f"{scope}/attention/output/LayerNorm")
    inner_RI = network.activate(network.dense(attended_RH, f"{scope}/intermediate/dense"))
    output_RH = network.drop(network.dense(inner_RI, f"{scope}/output/dense"))
    return network.layer_norm(output_RH + attended_RH, f"{scope}/output/LayerNorm")


def _joined(parameters: _Parameters, scope: str, parts: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """The kernels of parts of self-attention side by side, [H, O], and their biases, [O]."""
    name = f"{scope}/{'+'.join(parts)}"
    if f"{name}/kernel" in parameters:
        return parameters[f"{name}/kernel"], parameters[f"{name}/bias"]
    biases = {part: parameters[f"{scope}/{part}/bias"] for part in parts}
    if "key" in biases:  # whose true gradient is zero, as softmax is blind to it: zero it is given, not rounding noise
        biases["key"] = biases["key"].detach()
    return torch.cat([parameters[f"{scope}/{part}/kernel"] for part in parts], dim=1), torch.cat(list(biases.values()))


def packed_parameters(
    parameters: _Parameters, config: BertConfig, dtype: torch.dtype, *, reads_few: bool
) -> dict[str, Tensor]:
    """Return a frozen copy of the variables: kernels of the encoder's layers joined and in the layout of `pack_weights`.

    Variables that are not kernels or biases of these layers are not copied.

    Args:
        parameters: all variables by name.
        dtype: the type of the products, float32 or bfloat16.
        reads_few: see `Network`.
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
    """The context of every query, [R, H], before the output projection."""
    config, (packs, _, queries, length) = network.config, bias_B1PL.shape
    heads, size = config.num_attention_heads, config.head_size

    def project(inputs: Tensor, positions: int, parts: tuple[str, ...]) -> tuple[Tensor, ...]:
        """Return for each of `parts` what the heads see of `inputs`, [B, N, positions, D]: one product for all parts."""
        fused = product(inputs, *_joined(network.parameters, scope, parts))
        return tuple(part.transpose(1, 2) for part in fused.reshape(packs, positions, len(parts), heads, size).unbind(2))

    if query_RH is hidden_TH:
        query_BNPD, key_BNLD, value_BNLD = project(hidden_TH, length, _ALL_PARTS)
    else:
        (query_BNPD,) = project(query_RH, queries, _SOME_PARTS[0])
        key_BNLD, value_BNLD = project(hidden_TH, length, _SOME_PARTS[1])
    rate = config.attention_probs_dropout_prob if network.training else 0.0
    context_BNPD = network.attention(query_BNPD, key_BNLD, value_BNLD, bias_B1PL, rate)
    return context_BNPD.transpose(1, 2).reshape(packs * queries, heads * size)


# --- what reads the encoder's outputs


def pool(network: Network, first_PH: Tensor) -> Tensor:
    """BERT's pooler, wide [P, H]: a dense layer and tanh on the hidden state of every [CLS]."""
    scope, parameters = "bert/pooler/dense", network.parameters
    return torch.tanh(_wide_product(first_PH, parameters[f"{scope}/kernel"], parameters[f"{scope}/bias"]))


def word_scores(network: Network, picked_PH: Tensor) -> Tensor:
    """Wide scores [P, V] of every word at the masked slots; the output matrix is the word embeddings."""
    scope = "cls/predictions/transform"
    changed_PH = network.layer_norm(network.activate(network.dense(picked_PH, f"{scope}/dense")), f"{scope}/LayerNorm")
    return widen(linear(changed_PH, network.parameters[WORDS])).add_(network.parameters["cls/predictions/output_bias"])


def pretraining_outputs(network: Network, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Wide scores of the words at the masked slots, [B, Q, V], and of the next sentences, [B, S, 2]."""
    positions_BP = torch.cat([batch["next_sentence_positions"], batch["masked_lm_positions"]], dim=1)
    packs, depth = batch["next_sentence_positions"].shape
    check_logit_count(packs, batch["masked_lm_positions"].shape[1], network.config.vocab_size)
    read_BPH = encode_packs(network, batch, positions_BP).reshape(packs, positions_BP.shape[1], -1)
    first_PH, masked_PH = read_BPH[:, :depth].flatten(0, 1), read_BPH[:, depth:].flatten(0, 1)
    words_BQV = word_scores(network, masked_PH).reshape(packs, -1, network.config.vocab_size)
    # Next sentences: 0 = the second text really follows the first, 1 = it is a random one.
    weights_2H, bias_2 = (network.parameters[f"cls/seq_relationship/output_{name}"] for name in ("weights", "bias"))
    sentences_P2 = _wide_product(pool(network, first_PH), weights_2H.t(), bias_2)
    return words_BQV, sentences_P2.reshape(packs, -1, 2)
