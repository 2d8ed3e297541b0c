"""Names and layouts of Hugging Face's BERT (`BertForPreTraining`, `BertModel`), to and from ours. No TensorFlow, no files.

Their dense layers hold the transpose of our kernels. The output matrix of their masked-LM head is tied to the
word embeddings, its bias exists under two names; both are written once and accepted twice.
"""

from __future__ import annotations

import numpy as np

from gaudi_bert.common.arrays import Float32Array, WeightArrays
from gaudi_bert.common.errors import InputError
from gaudi_bert.model.config import BertConfig, parameter_specs

_TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
_TASK_HEADS = ("classifier.", "qa_outputs.")
"""The heads of `BertForSequenceClassification`, `...TokenClassification` and `...QuestionAnswering`."""
_COUNTERS = ("bert.embeddings.position_ids", "bert.embeddings.token_type_ids")

_WHOLE_NAMES = {
    "cls/predictions/output_bias": "cls.predictions.bias",
    "cls/seq_relationship/output_weights": "cls.seq_relationship.weight",
    "cls/seq_relationship/output_bias": "cls.seq_relationship.bias",
}
_LAST_PARTS = {"kernel": "weight", "gamma": "weight", "beta": "bias"}


def _hugging_face_name(name: str) -> str:
    """The name in `BertForPreTraining` of our variable `name`.

    `bert/encoder/layer_0/attention/self/query/kernel` is `bert.encoder.layer.0.attention.self.query.weight`.
    """
    if name in _WHOLE_NAMES:
        return _WHOLE_NAMES[name]
    *scope, last = name.replace("/layer_", "/layer/").split("/")
    if last.endswith("_embeddings"):
        return ".".join([*scope, last, "weight"])
    return ".".join([*scope, _LAST_PARTS.get(last, last)])


def to_hugging_face(values: WeightArrays) -> dict[str, Float32Array]:
    """Our variables (by name) as the state of `BertForPreTraining`; tied tensors are omitted, as their own files do."""
    return {
        _hugging_face_name(name): np.ascontiguousarray(value.T if name.endswith("/kernel") else value)
        for name, value in values.items()
    }


def from_hugging_face(tensors: WeightArrays, config: BertConfig) -> dict[str, Float32Array]:
    """The state of `BertForPreTraining`, of a `BertFor...` of a task, or of a bare `BertModel`, as our variables.

    `tensors` may have the names of the first releases, with `gamma` and `beta` for layer norm. The result is float32
    arrays; the heads (`cls/...`), the pooler and the head of a task (`classifier/...`, `qa_outputs/...`) are there if
    `tensors` has them.
    """
    state = _state(tensors)
    ours: dict[str, Float32Array] = {}
    for name, spec in parameter_specs(config).items():
        value = state.pop(_hugging_face_name(name), None)
        if value is None:
            if name.startswith(("cls/", "bert/pooler/")):
                continue
            raise InputError(f"weights: {_hugging_face_name(name)} is missing; give the weights of a model of this config")
        value = np.asarray(value, dtype=np.float32)
        value = np.ascontiguousarray(value.T) if name.endswith("/kernel") else value
        if value.shape != spec.shape:
            raise InputError(
                f"weights: {_hugging_face_name(name)} has the shape {value.shape} (in our order), the config wants "
                f"{spec.shape}; give the weights of a model of this config"
            )
        ours[name] = value
    for name in [name for name in state if name.startswith(_TASK_HEADS)]:
        value = np.asarray(state.pop(name), dtype=np.float32)
        scope, _, last = name.partition(".")
        ours[f"{scope}/kernel" if last == "weight" else f"{scope}/{last}"] = np.ascontiguousarray(value.T)
    everything = {_full_name(name): value for name, value in tensors.items()}
    for name, value in state.items():  # what was not read: counters, and tied ones that equal what they are tied to
        if name in _TIED and _TIED[name] in everything:
            if not np.array_equal(value, everything[_TIED[name]]):
                raise InputError(f"weights: {name} differs from {_TIED[name]}; only tied output weights can be read")
        elif name not in _COUNTERS:
            raise InputError(
                f"weights: {name} is unknown; give those of a BertForPreTraining, a BertModel or a BertFor... of a task"
            )
    return ours


def _state(tensors: WeightArrays) -> dict[str, Float32Array]:
    """The tensors by their full names of today; two for one variable are refused."""
    names: dict[str, str] = {}
    for name in tensors:
        other = names.setdefault(_full_name(name), name)
        if other != name:
            raise InputError(f"weights: {other} and {name} are the same weights; leave out the one that is superfluous")
    return {full: tensors[name] for full, name in names.items()}


def _full_name(name: str) -> str:
    name = name.removesuffix(".gamma") + ".weight" if name.endswith("LayerNorm.gamma") else name
    name = name.removesuffix(".beta") + ".bias" if name.endswith("LayerNorm.beta") else name
    return name if name.startswith(("bert.", "cls.", *_TASK_HEADS)) else f"bert.{name}"
