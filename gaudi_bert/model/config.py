"""BERT's size and form, with the names of Hugging Face's `config.json`. No TensorFlow."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from gaudi_bert.common.arrays import Float32Array, WeightArrays, philox
from gaudi_bert.common.errors import InputError, shown

_ACTIVATIONS = ("gelu", "gelu_new", "relu")
_ATTENTIONS = ("bidirectional", "causal")

LARGEST_SIZES = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 16,
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 10,
    "intermediate_size": 1 << 18,
    "max_position_embeddings": 1 << 24,
    "type_vocab_size": 1 << 16,
}
"""Far above any model there is: what is larger is a mistake, and must not be built before that is noticed."""

_LARGEST_NUMBER = 1_000_000


class ModelSizes(NamedTuple):
    """Sizes of a model of any type that data and tokenizer have to fit; `positions` are those of one sequence."""

    layers: int
    hidden_size: int
    positions: int
    vocab_size: int
    segments: int


@dataclass(frozen=True)
class BertConfig:
    """Settings of a BERT, all but its weights; the defaults are BERT-base's (Devlin et al., 2019)."""

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: Literal["gelu", "gelu_new", "relu"] = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    attention: Literal["bidirectional", "causal"] = "bidirectional"

    def __post_init__(self) -> None:
        for name, most in LARGEST_SIZES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise InputError(f"model: {name} = {shown(value)}; it must be an integer from 1 to {most:,}")
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            if not 0 <= self._number(name) < 1:
                raise InputError(f"model: {name} = {shown(getattr(self, name))}; it must be at least 0 and less than 1")
        for name in ("initializer_range", "layer_norm_eps"):
            if not 0 < self._number(name) < _LARGEST_NUMBER:
                value = shown(getattr(self, name))
                raise InputError(f"model: {name} = {value}; it must be greater than 0 and less than {_LARGEST_NUMBER:,}")
        for name, allowed in (("hidden_act", _ACTIVATIONS), ("attention", _ATTENTIONS)):
            if getattr(self, name) not in allowed:
                raise InputError(f"model: {name} = {shown(getattr(self, name))}; it must be one of {', '.join(allowed)}")
        if self.hidden_size % self.num_attention_heads:
            raise InputError(
                f"model: hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                f"{self.num_attention_heads}; choose a number of heads that divides it"
            )

    def _number(self, name: str) -> float:
        """A field that is a number; nan, which is in no range, where it is something else."""
        value = getattr(self, name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan

    @property
    def sizes(self) -> ModelSizes:
        """Return the sizes that data and tokenizer have to fit."""
        positions, segments = self.max_position_embeddings, self.type_vocab_size
        return ModelSizes(self.num_hidden_layers, self.hidden_size, positions, self.vocab_size, segments)

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    def to_json(self) -> dict[str, Any]:
        """All fields, ready for `json.dump`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> BertConfig:
        """The config in `values`, e.g. a parsed `config.json` of Hugging Face; other keys are ignored."""
        kind = values.get("model_type", "bert")
        if kind != "bert":
            raise InputError(f"model: model_type = {shown(kind)}; only bert can be read")
        positions = values.get("position_embedding_type", "absolute")
        if positions != "absolute":
            raise InputError(f"model: position_embedding_type = {shown(positions)}; only absolute positions can be read")
        if values.get("add_cross_attention"):
            raise InputError("model: add_cross_attention = true; only models without a second input can be read")
        if values.get("is_decoder"):
            values = {**values, "attention": "causal"}
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})


NO_PACKS = "give it rows of one sequence, or choose another model"
"""The remedy where packs cannot be fed to an encoder."""


@dataclass(frozen=True)
class EncoderConfig:
    """Any other encoder of `transformers`, by the content of its config.json."""

    values: Mapping[str, Any]

    @property
    def model_type(self) -> str:
        """Return its name in `transformers`, for example roberta."""
        return str(self.values["model_type"])

    def to_json(self) -> dict[str, Any]:
        """The content of config.json."""
        return dict(self.values)


# --- Every variable of BERT: its name in Google's checkpoints, its shape, how it starts
#
# The names are those of google-research/bert (`modeling.py`, `run_pretraining.py`), so that published checkpoints load
# without a table. The tied output matrix of the masked-LM head is the word embeddings and has no separate name.


@dataclass(frozen=True)
class ParameterSpec:
    """One variable: it starts as truncated normal noise, zeros or ones."""

    shape: tuple[int, ...]
    start: Literal["normal", "zeros", "ones"]


def layer_scope(layer: int) -> str:
    """The prefix of the variables of encoder layer `layer` (from 0)."""
    return f"bert/encoder/layer_{layer}"


def parameter_specs(config: BertConfig) -> dict[str, ParameterSpec]:
    """The variables of a BERT with the heads of pretraining, in the order in which the forward pass meets them."""
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
    return sum(math.prod(spec.shape) for spec in parameter_specs(config).values())


def misfit(needed: Mapping[str, tuple[int, ...]], given: WeightArrays, may_lack: str | tuple[str, ...] = ()) -> str | None:
    """Return which weight does not fit the shapes that are `needed`, and why; None where all do.

    Those whose names begin with `may_lack` may be absent.
    """
    for name in [*needed, *(name for name in given if name not in needed)]:
        there = list(given[name].shape) if name in given else "absent"
        here = list(needed[name]) if name in needed else "absent"
        if there != here and not (there == "absent" and name.startswith(may_lack)):
            return f"{name} is {there} there, {here} here"
    return None


_LARGEST_DRAW = 1 << 18


def initial_value(name: str, spec: ParameterSpec, deviation: float, seed: int | None) -> Float32Array:
    """Return the first value of the variable `name`: a function of its name and shape, the seed and the deviation alone.

    Normal noise is cut off at two deviations, by Box and Muller's method. With no seed it is zeros, which is fast.
    """
    if spec.start == "ones":
        return np.ones(spec.shape, np.float32)
    values = np.zeros(math.prod(spec.shape), np.float32)
    if spec.start == "normal" and seed is not None:
        generator, filled = philox(seed, f"initial value of {name}"), 0
        while filled < len(values):
            pairs = min(_LARGEST_DRAW, (len(values) - filled) * 5 // 9 + 8)
            uniform_2P = ((generator.random_raw(2 * pairs) >> np.uint64(11)) + 0.5).reshape(2, pairs) * 2.0**-53
            radius_P, angle_P = np.sqrt(-2.0 * np.log(uniform_2P[0])), 2.0 * np.pi * uniform_2P[1]
            noise = np.concatenate([radius_P * np.cos(angle_P), radius_P * np.sin(angle_P)])
            noise = noise[np.abs(noise) <= 2.0][: len(values) - filled]
            values[filled : filled + len(noise)] = noise * deviation
            filled += len(noise)
    return values.reshape(spec.shape)


_NOT_DECAYED = ("layernorm", "layer_norm", "bias")


def is_decayed(name: str) -> bool:
    """Whether weight decay applies to the variable `name`: not to biases and layer norms."""
    return not any(part in name.lower() for part in _NOT_DECAYED)


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
