"""BERT's size and form, with the names of Hugging Face's `config.json`. No TensorFlow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gaudi_bert.common.errors import InputError

__all__ = ["BertConfig"]

ACTIVATIONS = ("gelu", "gelu_new", "relu")
ATTENTIONS = ("bidirectional", "causal")

_AT_LEAST_ONE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
)


@dataclass(frozen=True)
class BertConfig:
    """What fixes a BERT, apart from its weights; the defaults are BERT-base's (Devlin et al., 2019).

    Raises:
        InputError: a value is outside its range, or the heads do not divide the hidden size.
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
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"model: {name} = {value!r}; it must be a whole number of at least 1")
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"model: {name} = {getattr(self, name)!r}; it must be at least 0 and less than 1")
        for name in ("initializer_range", "layer_norm_eps"):
            if not getattr(self, name) > 0:
                raise InputError(f"model: {name} = {getattr(self, name)!r}; it must be greater than 0")
        for name, allowed in (("hidden_act", ACTIVATIONS), ("attention", ATTENTIONS)):
            if getattr(self, name) not in allowed:
                raise InputError(f"model: {name} = {getattr(self, name)!r}; it must be one of {', '.join(allowed)}")
        if self.hidden_size % self.num_attention_heads:
            raise InputError(
                f"model: hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                f"{self.num_attention_heads}; choose a number of heads that divides it"
            )

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    def to_json(self) -> dict[str, Any]:
        """All fields, ready for `json.dump`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> BertConfig:
        """The config in `values`, e.g. a parsed `config.json` of Hugging Face; keys that are not ours are passed over.

        Raises:
            InputError: it is another kind of model, or a value is not allowed.
        """
        kind = values.get("model_type", "bert")
        if kind != "bert":
            raise InputError(f"model: model_type = {kind!r}; only bert can be read")
        positions = values.get("position_embedding_type", "absolute")
        if positions != "absolute":
            raise InputError(f"model: position_embedding_type = {positions!r}; only absolute positions can be read")
        if values.get("is_decoder") and values.get("attention") != "causal":
            raise InputError(
                "model: is_decoder = true; its attention is causal, and only encoders of Hugging Face can be read"
            )
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})
