"""Every variable of BERT: its name in Google's checkpoints, its shape, how it starts. No TensorFlow.

The names are those of google-research/bert (`modeling.py`, `run_pretraining.py`), so that published
checkpoints load without a table. The tied output matrix of the masked-LM head is the word embeddings
themselves and has no name of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gaudi_bert.model.config import BertConfig

__all__ = ["ParameterSpec", "initializer_seed", "layer_scope", "parameter_count", "parameter_specs"]


@dataclass(frozen=True)
class ParameterSpec:
    """One variable: `start` says whether it begins as truncated normal noise, zeros or ones."""

    shape: tuple[int, ...]
    start: Literal["normal", "zeros", "ones"]


def layer_scope(layer: int) -> str:
    """The prefix of the variables of encoder layer `layer` (from 0)."""
    return f"bert/encoder/layer_{layer}"


def parameter_specs(config: BertConfig) -> dict[str, ParameterSpec]:
    """The variables of `BertForPretraining`, in the order in which the forward pass meets them."""
    hidden = config.hidden_size
    specs: dict[str, ParameterSpec] = {}
    embeddings = "bert/embeddings"
    specs[f"{embeddings}/word_embeddings"] = ParameterSpec((config.vocab_size, hidden), "normal")
    specs[f"{embeddings}/token_type_embeddings"] = ParameterSpec((config.type_vocab_size, hidden), "normal")
    specs[f"{embeddings}/position_embeddings"] = ParameterSpec((config.max_position_embeddings, hidden), "normal")
    specs.update(_layer_norm(f"{embeddings}/LayerNorm", hidden))
    for layer in range(config.num_hidden_layers):
        specs.update(_encoder_layer(layer_scope(layer), config))
    specs.update(_dense("bert/pooler/dense", hidden, hidden))
    specs.update(_dense("cls/predictions/transform/dense", hidden, hidden))
    specs.update(_layer_norm("cls/predictions/transform/LayerNorm", hidden))
    specs["cls/predictions/output_bias"] = ParameterSpec((config.vocab_size,), "zeros")
    specs["cls/seq_relationship/output_weights"] = ParameterSpec((2, hidden), "normal")
    specs["cls/seq_relationship/output_bias"] = ParameterSpec((2,), "zeros")
    return specs


def parameter_count(config: BertConfig) -> int:
    """Number of trained numbers."""
    total = 0
    for spec in parameter_specs(config).values():
        size = 1
        for extent in spec.shape:
            size *= extent
        total += size
    return total


def initializer_seed(seed: int, name: str) -> tuple[int, int]:
    """Two 31-bit words for the noise of variable `name`: a function of seed and name alone."""
    digest = hashlib.sha256(f"{int(seed)}:initializer:{name}".encode()).digest()
    first, second = (int.from_bytes(digest[start : start + 4], "little") & 0x7FFFFFFF for start in (0, 4))
    return first, second


def _encoder_layer(scope: str, config: BertConfig) -> Iterator[tuple[str, ParameterSpec]]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    for part in ("query", "key", "value"):
        yield from _dense(f"{scope}/attention/self/{part}", hidden, hidden)
    yield from _dense(f"{scope}/attention/output/dense", hidden, hidden)
    yield from _layer_norm(f"{scope}/attention/output/LayerNorm", hidden)
    yield from _dense(f"{scope}/intermediate/dense", hidden, intermediate)
    yield from _dense(f"{scope}/output/dense", intermediate, hidden)
    yield from _layer_norm(f"{scope}/output/LayerNorm", hidden)


def _dense(scope: str, inputs: int, outputs: int) -> Iterator[tuple[str, ParameterSpec]]:
    yield f"{scope}/kernel", ParameterSpec((inputs, outputs), "normal")
    yield f"{scope}/bias", ParameterSpec((outputs,), "zeros")


def _layer_norm(scope: str, size: int) -> Iterator[tuple[str, ParameterSpec]]:
    yield f"{scope}/gamma", ParameterSpec((size,), "ones")
    yield f"{scope}/beta", ParameterSpec((size,), "zeros")
