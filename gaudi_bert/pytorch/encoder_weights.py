"""Encoders of `transformers` as models of a task: their configs, their classes, and the weights of their folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from gaudi_bert.common.arrays import AnyArray
from gaudi_bert.common.errors import InputError, shown
from gaudi_bert.common.files import read_json
from gaudi_bert.model.config import EncoderConfig, ModelSizes
from gaudi_bert.model.heads import Head, PretrainingHead, TaskHead, TaskKind, VectorHead
from gaudi_bert.pytorch.asking import feeding_of
from gaudi_bert.pytorch.model_folder import check_numbers, read_parts
from gaudi_bert.pytorch.trial import MODEL_ERRORS, positions_of, reason_of

_OF_TEXTS = transformers.AutoModelForSequenceClassification
_AUTO: Mapping[TaskKind, Any] = {
    "classification": _OF_TEXTS,
    "multi-label": _OF_TEXTS,
    "regression": _OF_TEXTS,
    "reranking": _OF_TEXTS,
    "token-classification": transformers.AutoModelForTokenClassification,
    "question-answering": transformers.AutoModelForQuestionAnswering,
    "masked-language-modelling": transformers.AutoModelForMaskedLM,
    "causal-language-modelling": transformers.AutoModelForCausalLM,
}
_OF_THE_HEAD = ("architectures", "id2label", "label2id", "num_labels", "problem_type", "finetuning_task")
_OF_THE_FILE = ("transformers_version", "torch_dtype", "dtype", "_name_or_path", "gaudi_bert")
_ENCODER = VectorHead("cls", normalize=False)
_ANY_POSITIONS = 1 << 20
_ANY_SEGMENTS = 1 << 20


def config_of(config: EncoderConfig, head: Head) -> Any:
    """The config of `transformers` for a model with this head."""
    values = dict(config.values)
    kind = values.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise InputError(f"model_type {shown(kind)}: transformers does not know it; give a type that it has")
    try:
        loaded = transformers.CONFIG_MAPPING[kind].from_dict(values)
        if isinstance(head, TaskHead):
            if head.keeps_outputs:
                loaded.num_labels = head.width
            if head.is_causal:
                loaded.is_decoder = True
        loaded.use_cache = False
    except MODEL_ERRORS as error:
        raise InputError(f"model type {kind!r}: its config cannot be used: {reason_of(error)}; correct it") from error
    return loaded


def word_task_of(config: EncoderConfig) -> TaskKind:
    """What a model is trained for on texts alone: masked words where it sees both sides, else the next one."""
    loaded = config_of(config, VectorHead("cls", normalize=False))
    tasks: tuple[TaskKind, ...] = ("masked-language-modelling", "causal-language-modelling")
    for task in tasks[::-1] if getattr(loaded, "is_decoder", False) else tasks:
        if type(loaded) in _AUTO[task]._model_mapping:  # noqa: SLF001 - nothing public names its class
            return task
    raise InputError(f"model type {loaded.model_type!r}: transformers has no head of words for it; choose another model")


def known_types() -> tuple[str, ...]:
    """The types of models that `transformers` has."""
    return tuple(transformers.CONFIG_MAPPING)


def class_of(config: Any, head: Head) -> Any:
    """The class of `transformers` for a config and a head."""
    if isinstance(head, PretrainingHead):
        raise InputError(f"model type {config.model_type!r}: next-sentence prediction is BERT's; pack a table of texts")
    auto = transformers.AutoModel if isinstance(head, VectorHead) else _AUTO[head.kind]
    classes = auto._model_mapping.get(type(config), None)  # noqa: SLF001 - nothing public names its class
    if classes is None:
        what = "no vectors of tokens" if isinstance(head, VectorHead) else f"no class for {head.kind}"
        raise InputError(f"model type {config.model_type!r}: transformers has {what}; choose another model or task")
    return classes[0] if isinstance(classes, tuple) else classes


# --- configs and weights of folders


class _EncoderWeights(NamedTuple):
    """An encoder, and its head where it fits.

    Attributes:
        architecture: the class of `transformers` that has these variables.
        variables: by name, float32 (counters are integers); tied ones once.
        fresh: the variables that the folder lacks: they keep their initial values.
    """

    config: EncoderConfig
    architecture: str
    variables: Mapping[str, AnyArray]
    fresh: tuple[str, ...]


def read_encoder_config(file: Path) -> EncoderConfig:
    """What a config.json holds on the encoder, without what it holds on a head and on the file."""
    content = read_json(file)
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise InputError(f"{file}: names no model_type; give the config.json of a model of transformers")
    check_numbers(file, content)
    return EncoderConfig({name: content[name] for name in content if name not in {*_OF_THE_HEAD, *_OF_THE_FILE}})


def fresh_config(
    values: Mapping[str, Any], vocab_size: int, token_ids: Mapping[str, int | None], positions: int
) -> EncoderConfig:
    """A config with what it leaves open taken from the data: how many tokens there are, which are special, the positions.

    A type alone (`model_type`) has as many positions as usual, or more where the data needs them.
    """
    known = config_of(EncoderConfig(values), _ENCODER)
    named = {
        f"{name}_token_id": number
        for name, number in token_ids.items()
        # The position after that of padding is the first one of some types, which therefore need one.
        if hasattr(known, f"{name}_token_id") and (number is not None or name != "pad")
    }
    config = EncoderConfig({"vocab_size": vocab_size, **named, **values})
    lacking = positions - sizes_of(config, _ENCODER).positions
    if set(values) == {"model_type"} and lacking > 0:
        most = config_of(config, _ENCODER).get_text_config().max_position_embeddings
        return EncoderConfig({**config.values, "max_position_embeddings": most + lacking})
    return config


def sizes_of(config: EncoderConfig, head: Head) -> ModelSizes:
    """The sizes of a model; one that packs cannot be fed to is refused."""
    library = config_of(config, head)
    feeding, text = feeding_of(library, kind=class_of(library, head)), library.get_text_config()
    most = positions_of(library)
    positions = (_ANY_POSITIONS if most is None else most) - feeding.position_offset
    segments = getattr(text, "type_vocab_size", None) if feeding.token_types else None
    return ModelSizes(
        layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        positions=min(positions, feeding.longest_sequence or positions),
        vocab_size=text.vocab_size,
        segments=segments or _ANY_SEGMENTS,
    )


def read_encoder_weights(folder: Path, head: Head, *, lacks_head: bool) -> _EncoderWeights:
    """The weights of a folder for a model with this head; with `lacks_head`, those of the head may be missing."""
    config = read_encoder_config(folder / "config.json")
    library = config_of(config, head)
    kind = class_of(library, head)
    model, missing = read_parts(folder, kind, library, lacks_head=lacks_head)
    variables: dict[str, Any] = {**dict(model.named_parameters()), **stored_buffers(model)}
    return _EncoderWeights(
        config,
        kind.__name__,
        {name: _numbers(value) for name, value in variables.items() if name not in missing},
        tuple(name for name in variables if name in missing),
    )


def stored_buffers(module: Any) -> dict[str, torch.Tensor]:
    """What `save_pretrained` writes in addition to the parameters, by name: buffers that are part of the model."""
    stored = module.state_dict().keys() - set(getattr(module, "_keys_to_ignore_on_save", None) or ())
    return {name: buffer for name, buffer in module.named_buffers() if name in stored}


def _numbers(tensor: torch.Tensor) -> AnyArray:
    wide: AnyArray = (tensor.detach().float() if tensor.is_floating_point() else tensor).numpy()
    return wide
