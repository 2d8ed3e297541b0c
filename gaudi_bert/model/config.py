"""The configuration of a BERT, with the keys of Hugging Face's `config.json`, and the names, shapes and initial values of
its variables.

Nothing here depends on a framework. The engines build models from these descriptions. Other encoders are described only by
the content of their config.json (`EncoderConfig`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from gaudi_bert.common.arrays import Float32Array, WeightArrays, make_bit_generator
from gaudi_bert.common.errors import InputError, short_repr

_ACTIVATIONS = ("gelu", "gelu_new", "relu")
_ATTENTIONS = ("bidirectional", "causal")

# The largest sizes that a config may contain, far above those of any existing model. Building a larger model would exhaust
# the memory, so larger values are rejected before the model is built.
LARGEST_SIZES = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 16,
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 10,
    "intermediate_size": 1 << 18,
    "max_position_embeddings": 1 << 24,
    "type_vocab_size": 1 << 16,
}

# Float settings in a model config, such as `layer_norm_eps`, must be less than this.
_MAX_FLOAT = 1_000_000


class ModelSizes(NamedTuple):
    """The sizes of a model that the data and the tokenizer must be compatible with.

    Attributes:
        layers: The number of encoder layers.
        hidden_size: The size of a hidden state.
        positions: The maximum number of positions in a sequence.
        vocab_size: The number of tokens in the vocabulary.
        segments: The number of different segment ids.
    """

    layers: int
    hidden_size: int
    positions: int
    vocab_size: int
    segments: int


@dataclass(frozen=True)
class BertConfig:
    """The settings of a BERT model. The defaults are those of BERT-base (Devlin et al., 2019).

    Raises:
        InputError: A setting is out of range.
    """

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
        for name, maximum in LARGEST_SIZES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= maximum:
                raise InputError(f"model: {name} is {short_repr(value)}, but must be an integer from 1 to {maximum:,}")
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            if not 0 <= self._number_or_nan(name) < 1:
                raise InputError(
                    f"model: {name} is {short_repr(getattr(self, name))}, but must be at least 0 and less than 1"
                )
        for name in ("initializer_range", "layer_norm_eps"):
            if not 0 < self._number_or_nan(name) < _MAX_FLOAT:
                raise InputError(
                    f"model: {name} is {short_repr(getattr(self, name))}, but must be greater than 0 and less than "
                    f"{_MAX_FLOAT:,}"
                )
        for name, allowed in (("hidden_act", _ACTIVATIONS), ("attention", _ATTENTIONS)):
            if getattr(self, name) not in allowed:
                raise InputError(
                    f"model: {name} is {short_repr(getattr(self, name))}, but must be one of {', '.join(allowed)}"
                )
        if self.hidden_size % self.num_attention_heads:
            raise InputError(
                f"model: hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                f"{self.num_attention_heads}; choose a number of heads that divides it"
            )

    def _number_or_nan(self, name: str) -> float:
        """Return the value of a field, or NaN if the value is not a number. Every range check rejects NaN."""
        value = getattr(self, name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan

    @property
    def sizes(self) -> ModelSizes:
        """The model sizes that the data and the tokenizer must be compatible with."""
        positions, segments = self.max_position_embeddings, self.type_vocab_size
        return ModelSizes(self.num_hidden_layers, self.hidden_size, positions, self.vocab_size, segments)

    @property
    def head_size(self) -> int:
        """The size of one attention head."""
        return self.hidden_size // self.num_attention_heads

    def to_json(self) -> dict[str, Any]:
        """Return all fields as a dictionary that can be written to a JSON file."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> BertConfig:
        """Create a configuration from the content of a Hugging Face `config.json`. Unknown keys are ignored.

        Raises:
            InputError: The model is not a BERT, or it has features that are not supported.
        """
        kind = values.get("model_type", "bert")
        if kind != "bert":
            raise InputError(f"model: model_type is {short_repr(kind)}, but only bert is supported; use a BERT model")
        positions = values.get("position_embedding_type", "absolute")
        if positions != "absolute":
            raise InputError(
                f"model: position_embedding_type is {short_repr(positions)}, but only absolute positions are supported; use "
                "another model"
            )
        if values.get("add_cross_attention"):
            raise InputError("model: add_cross_attention is true, but cross-attention is not supported; set it to false")
        if values.get("is_decoder"):
            values = {**values, "attention": "causal"}
        return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls) if field.name in values})


# If an encoder cannot process packs, the error message ends with this advice.
NO_PACKS_REMEDY = "put a single sequence in each row, or choose another model"


@dataclass(frozen=True)
class EncoderConfig:
    """The content of config.json for an encoder of `transformers` that is not a BERT."""

    values: Mapping[str, Any]

    @property
    def model_type(self) -> str:
        """The name of the architecture in `transformers`, such as roberta."""
        return str(self.values["model_type"])

    def to_json(self) -> dict[str, Any]:
        """Return the content of config.json."""
        return dict(self.values)


# --- the variables of BERT: names, shapes and initial values
#
# The names are those of google-research/bert (`modeling.py`, `run_pretraining.py`), so that published checkpoints load
# without a table of names. The masked-LM head uses the word embeddings as its output matrix, so this matrix has no name of
# its own.


@dataclass(frozen=True)
class ParameterSpec:
    """The shape and the initialization of a trainable variable. The initial values are truncated normal noise, zeros or
    ones.
    """

    shape: tuple[int, ...]
    start: Literal["normal", "zeros", "ones"]


def layer_name_prefix(layer: int) -> str:
    """Return the prefix of the variable names of one encoder layer. Layers are counted from 0."""
    return f"bert/encoder/layer_{layer}"


def parameter_specs(config: BertConfig) -> dict[str, ParameterSpec]:
    """Return the shape and the initialization of every variable of a BERT, by variable name.

    The pretraining heads are included. The variables are in the order of the forward pass.
    """
    hidden = config.hidden_size
    specs = {
        "bert/embeddings/word_embeddings": ParameterSpec((config.vocab_size, hidden), "normal"),
        "bert/embeddings/token_type_embeddings": ParameterSpec((config.type_vocab_size, hidden), "normal"),
        "bert/embeddings/position_embeddings": ParameterSpec((config.max_position_embeddings, hidden), "normal"),
        **dict(_layer_norm_specs("bert/embeddings/LayerNorm", hidden)),
    }
    for layer in range(config.num_hidden_layers):
        specs.update(_encoder_layer_specs(layer_name_prefix(layer), config))
    return {
        **specs,
        **dict(_dense_specs("bert/pooler/dense", hidden, hidden)),
        **dict(_dense_specs("cls/predictions/transform/dense", hidden, hidden)),
        **dict(_layer_norm_specs("cls/predictions/transform/LayerNorm", hidden)),
        "cls/predictions/output_bias": ParameterSpec((config.vocab_size,), "zeros"),
        "cls/seq_relationship/output_weights": ParameterSpec((2, hidden), "normal"),
        "cls/seq_relationship/output_bias": ParameterSpec((2,), "zeros"),
    }


def count_parameters(config: BertConfig) -> int:
    """Return the number of trainable parameters of a BERT, including its pretraining heads."""
    return sum(math.prod(spec.shape) for spec in parameter_specs(config).values())


def find_shape_mismatch(
    expected_shapes: Mapping[str, tuple[int, ...]], weights: WeightArrays, optional_prefixes: str | tuple[str, ...] = ()
) -> str | None:
    """Describe the first weight that does not have the expected shape. Return None if all weights have the expected shapes.

    Args:
        expected_shapes: The expected shapes, by name.
        weights: The weights.
        optional_prefixes: Prefixes of the names of weights that may be missing.
    """
    for name in [*expected_shapes, *(name for name in weights if name not in expected_shapes)]:
        found = list(weights[name].shape) if name in weights else "none"
        expected = list(expected_shapes[name]) if name in expected_shapes else "none"
        if found != expected and not (found == "none" and name.startswith(optional_prefixes)):
            return f"{name}: expected shape {expected}, found {found}"
    return None


# Normal noise is computed from pairs of uniform random numbers. To limit the memory use, at most this many pairs are drawn
# at once.
_MAX_PAIRS_PER_DRAW = 1 << 18


def draw_initial_value(name: str, spec: ParameterSpec, deviation: float, seed: int | None) -> Float32Array:
    """Return the initial values of a variable as a float32 array.

    The value depends only on the name and shape of the variable, the seed and the deviation. Normal noise is truncated at
    two standard deviations, and is drawn by the Box-Muller method.

    Args:
        name: The name of the variable.
        spec: The shape of the variable and the kind of its initial values.
        deviation: The standard deviation of normal noise.
        seed: The seed of the noise. If it is None, use zeros instead of noise, which is fast.
    """
    if spec.start == "ones":
        return np.ones(spec.shape, np.float32)
    values = np.zeros(math.prod(spec.shape), np.float32)
    if spec.start == "normal" and seed is not None:
        generator, filled = make_bit_generator(seed, f"initial value of {name}"), 0
        while filled < len(values):
            pairs = min(_MAX_PAIRS_PER_DRAW, (len(values) - filled) * 5 // 9 + 8)
            uniform_2P = ((generator.random_raw(2 * pairs) >> np.uint64(11)) + 0.5).reshape(2, pairs) * 2.0**-53
            radius_P, angle_P = np.sqrt(-2.0 * np.log(uniform_2P[0])), 2.0 * np.pi * uniform_2P[1]
            noise = np.concatenate([radius_P * np.cos(angle_P), radius_P * np.sin(angle_P)])
            noise = noise[np.abs(noise) <= 2.0][: len(values) - filled]
            values[filled : filled + len(noise)] = noise * deviation
            filled += len(noise)
    return values.reshape(spec.shape)


# Weight decay does not apply to layer norms and biases. Their names contain one of these words.
_NAMES_WITHOUT_WEIGHT_DECAY = ("layernorm", "layer_norm", "bias")


def has_weight_decay(name: str) -> bool:
    """Return whether weight decay applies to the variable with this name. It does not apply to biases and layer norms."""
    return not any(part in name.lower() for part in _NAMES_WITHOUT_WEIGHT_DECAY)


def _encoder_layer_specs(name_prefix: str, config: BertConfig) -> Iterator[tuple[str, ParameterSpec]]:
    """Yield (name, specification) for each variable of an encoder layer."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    for part in ("query", "key", "value"):
        yield from _dense_specs(f"{name_prefix}/attention/self/{part}", hidden, hidden)
    yield from _dense_specs(f"{name_prefix}/attention/output/dense", hidden, hidden)
    yield from _layer_norm_specs(f"{name_prefix}/attention/output/LayerNorm", hidden)
    yield from _dense_specs(f"{name_prefix}/intermediate/dense", hidden, intermediate)
    yield from _dense_specs(f"{name_prefix}/output/dense", intermediate, hidden)
    yield from _layer_norm_specs(f"{name_prefix}/output/LayerNorm", hidden)


def _dense_specs(name_prefix: str, inputs: int, outputs: int) -> Iterator[tuple[str, ParameterSpec]]:
    """Yield (name, specification) for each variable of a dense layer."""
    yield f"{name_prefix}/kernel", ParameterSpec((inputs, outputs), "normal")
    yield f"{name_prefix}/bias", ParameterSpec((outputs,), "zeros")


def _layer_norm_specs(name_prefix: str, size: int) -> Iterator[tuple[str, ParameterSpec]]:
    """Yield (name, specification) for each variable of a layer normalization."""
    yield f"{name_prefix}/gamma", ParameterSpec((size,), "ones")
    yield f"{name_prefix}/beta", ParameterSpec((size,), "zeros")
