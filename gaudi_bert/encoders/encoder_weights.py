"""Configs, classes and weights of `transformers` models that are trained for a task.

Only local files are read, and no code from a model folder is run. `transformers` fills in missing weights at random and
ignores superfluous ones, whereas this module reports both as errors.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open

from gaudi_bert.common.arrays import AnyArray
from gaudi_bert.common.errors import InputError, short_repr, shorten
from gaudi_bert.common.files import read_json
from gaudi_bert.encoders.feeding import Feeding
from gaudi_bert.encoders.feeding_trial import feeding_of
from gaudi_bert.encoders.trial import MODEL_ERRORS, positions_of, quiet_transformers, reason_of
from gaudi_bert.model.config import EncoderConfig, ModelSizes
from gaudi_bert.model.heads import Head, PretrainingHead, TaskHead, TaskKind, VectorHead

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
_ANY_NUMBER = 1 << 20  # the number of positions or segments that is assumed for a model without a limit


def config_of(config: EncoderConfig, head: Head) -> Any:
    """Return the `transformers` config of a model with a head.

    Raises:
        InputError: `transformers` does not have the model type, or its config cannot be used.
    """
    values = dict(config.values)
    kind = values.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise InputError(f"model_type {short_repr(kind)}: transformers does not know it; give a type that it has")
    try:
        loaded = transformers.CONFIG_MAPPING[kind].from_dict(values)
        if isinstance(head, TaskHead):
            if head.needs_outputs:
                loaded.num_labels = head.width
            if head.is_causal:
                loaded.is_decoder = True
        loaded.use_cache = False
    except MODEL_ERRORS as error:
        raise InputError(f"model type {kind!r}: its config cannot be used: {reason_of(error)}; correct it") from error
    return loaded


def word_task_of(config: EncoderConfig) -> TaskKind:
    """Return the language modelling task of a model: causal if it is a decoder, otherwise masked.

    If `transformers` has no class for this task, return the other one.

    Raises:
        InputError: `transformers` has a class for neither of the tasks.
    """
    loaded = config_of(config, _ENCODER)
    tasks: tuple[TaskKind, ...] = ("masked-language-modelling", "causal-language-modelling")
    for task in tasks[::-1] if getattr(loaded, "is_decoder", False) else tasks:
        if type(loaded) in _AUTO[task]._model_mapping:  # noqa: SLF001 - nothing public names its class
            return task
    raise InputError(f"model type {loaded.model_type!r}: transformers has no head of words for it; choose another model")


def known_types() -> tuple[str, ...]:
    """Return the model types that `transformers` supports."""
    return tuple(transformers.CONFIG_MAPPING)


def class_of(config: Any, head: Head) -> Any:
    """Return the `transformers` class for a config and a head.

    Raises:
        InputError: `transformers` has no such class.
    """
    if isinstance(head, PretrainingHead):
        raise InputError(f"model type {config.model_type!r}: next-sentence prediction is BERT's; pack a table of texts")
    auto = transformers.AutoModel if isinstance(head, VectorHead) else _AUTO[head.kind]
    classes = auto._model_mapping.get(type(config), None)  # noqa: SLF001 - nothing public names its class
    if classes is None:
        what = "no vectors of tokens" if isinstance(head, VectorHead) else f"no class for {head.kind}"
        raise InputError(f"model type {config.model_type!r}: transformers has {what}; choose another model or task")
    return classes[0] if isinstance(classes, tuple) else classes


# --- Configs and weights in folders


def read_encoder_config(file: Path) -> EncoderConfig:
    """Read a config.json, and return only the keys that describe the encoder.

    Keys that describe the head or the file are omitted.

    Raises:
        InputError: The file cannot be read, does not contain a model type, or contains an impossible number.
    """
    content = read_json(file)
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise InputError(f"{file}: names no model_type; give the config.json of a model of transformers")
    _check_numbers(file, content)
    return EncoderConfig({name: content[name] for name in content if name not in {*_OF_THE_HEAD, *_OF_THE_FILE}})


def fresh_config(
    values: Mapping[str, Any], vocab_size: int, token_ids: Mapping[str, int | None], positions: int
) -> EncoderConfig:
    """Return the config of a model with random weights, in which missing values are taken from the data.

    If only a `model_type` is given, the model has its usual number of positions, or more if the data needs more.

    Args:
        values: The given keys of the config.
        vocab_size: The number of tokens in the vocabulary of the data.
        token_ids: The ids of the special tokens, by names such as "pad" and "cls". None for missing tokens.
        positions: The number of positions that the data needs.
    """
    known = config_of(EncoderConfig(values), _ENCODER)
    named = {
        f"{name}_token_id": number
        for name, number in token_ids.items()
        # Some types number positions from the id of the padding token on, so their padding id must not be removed.
        if hasattr(known, f"{name}_token_id") and (number is not None or name != "pad")
    }
    config = EncoderConfig({"vocab_size": vocab_size, **named, **values})
    lacking = positions - sizes_of(config, _ENCODER).positions
    if set(values) == {"model_type"} and lacking > 0:
        most = config_of(config, _ENCODER).get_text_config().max_position_embeddings
        return EncoderConfig({**config.values, "max_position_embeddings": most + lacking})
    return config


def sizes_of(config: EncoderConfig, head: Head) -> ModelSizes:
    """Return the sizes of a model with a head.

    Raises:
        InputError: The model cannot be fed packs.
    """
    library = config_of(config, head)
    return sizes_by(library, feeding_of(library, kind=class_of(library, head)))


def sizes_by(library: Any, feeding: Feeding) -> ModelSizes:
    """Return the sizes of a model.

    Args:
        library: The `transformers` config of the model.
        feeding: How the model is fed packs. It may limit the number of positions.
    """
    text, most = library.get_text_config(), positions_of(library)
    positions = (_ANY_NUMBER if most is None else most) - feeding.position_offset
    segments = getattr(text, "type_vocab_size", None) if feeding.token_types else None
    return ModelSizes(
        layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        positions=min(positions, feeding.longest_sequence or positions),
        vocab_size=text.vocab_size,
        segments=segments or _ANY_NUMBER,
    )


def read_encoder_weights(
    folder: Path, head: Head, *, lacks_head: bool
) -> tuple[EncoderConfig, str, dict[str, AnyArray], tuple[str, ...]]:
    """Read the weights in a folder for a model with a head.

    Args:
        folder: The folder of a `transformers` model.
        head: The head of the model.
        lacks_head: Whether the weights of the head may be missing.

    Returns:
        A tuple of four values: the config, the name of the `transformers` class, the variables by name, and the names of the
        variables that are missing in the folder and keep their initial values. Variables are float32, except that counters
        are integers. Tied variables occur once.

    Raises:
        InputError: The weights cannot be read, or do not match the config.
    """
    config = read_encoder_config(folder / "config.json")
    library = config_of(config, head)
    kind = class_of(library, head)
    model, missing = _read_parts(folder, kind, library, lacks_head=lacks_head)
    variables: dict[str, Any] = {**dict(model.named_parameters()), **stored_buffers(model)}
    wide = {name: value.float() if value.is_floating_point() else value for name, value in variables.items()}
    values = {name: value.detach().numpy() for name, value in wide.items() if name not in missing}
    return config, kind.__name__, values, tuple(name for name in variables if name in missing)


def stored_buffers(module: Any) -> dict[str, torch.Tensor]:
    """Return the buffers that `save_pretrained` writes in addition to the parameters, by name."""
    stored = module.state_dict().keys() - set(getattr(module, "_keys_to_ignore_on_save", None) or ())
    return {name: buffer for name, buffer in module.named_buffers() if name in stored}


# --- Reading a model from a folder that `save_pretrained` wrote
#
# Nothing is downloaded. `transformers` sets missing weights to random values and ignores superfluous weights. Here, both are
# errors.

_COPY = "copy the folder again, or save it again with save_pretrained"
_LOADING_ERRORS = (*MODEL_ERRORS, SafetensorError, OSError, EOFError, MemoryError, OverflowError, pickle.UnpicklingError)
_MOST_LAYERS, _LARGEST_NUMBER = 1 << 10, 1 << 31
_WEIGHTS = ("*.safetensors", "*.bin")


def architecture_of(folder: Path) -> str:
    """Return the first class name under `architectures` in config.json. Empty if there is none."""
    file = folder / "config.json"
    content = read_json(file)
    if not isinstance(content, dict):
        raise InputError(f"{file}: is not an object with the settings of a model; {_COPY}")
    names = content.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def read_model(folder: Path, kind: Any, **options: Any) -> Any:
    """Read a model from a folder, and return it in evaluation mode.

    Args:
        folder: The folder of the model.
        kind: A `transformers` class, or one of its `AutoModel...` classes.
        **options: Options for `from_pretrained`.

    Raises:
        InputError: The model cannot be read, or its weights are incomplete, superfluous or not finite.
    """
    return _read_parts(folder, kind, None, lacks_head=False, **options)[0]


def _read_parts(folder: Path, kind: Any, config: Any, *, lacks_head: bool, **options: Any) -> tuple[Any, frozenset[str]]:
    """Read a model from a folder.

    Args:
        folder: The folder of the model.
        kind: A `transformers` class, or one of its `AutoModel...` classes.
        config: The config of the model. None for the config in the folder.
        lacks_head: Whether the weights of the head may be missing or have other shapes.
        **options: Options for `from_pretrained`.

    Returns:
        The model in evaluation mode, and the names of the missing weights, which keep their initial values.
    """
    architecture = architecture_of(folder)
    _check_numbers(folder / "config.json", read_json(folder / "config.json"))
    local = {"local_files_only": True, "trust_remote_code": False}  # otherwise transformers may prompt the user
    try:
        with quiet_transformers():
            config = config or transformers.AutoConfig.from_pretrained(folder, **local)
            _check_size(folder, kind, config)
            _check_names(folder)
            reading = {"config": config, "output_loading_info": True, "ignore_mismatched_sizes": True}
            model, loaded = kind.from_pretrained(folder, **reading, **local, **options)
    except _LOADING_ERRORS as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{folder}: transformers cannot open it: {reason_of(error)}; {_COPY}") from error
    missing = frozenset([*loaded["missing_keys"], *(name for name, *_ in loaded["mismatched_keys"])])
    _check_weights(folder, model, loaded, architecture, lacks_head)
    return model.eval(), missing


# --- Checks before and after the weights are read


def _check_numbers(file: Path, value: Any, name: str = "") -> None:
    """Check that a config contains no impossibly large numbers, because `transformers` would build lists of such lengths.

    Args:
        file: The file of the config, for the error message.
        value: The config, or a value in it.
        name: The key of the value.

    Raises:
        InputError: A number is too large.
    """
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else ((name, each) for each in value):
            _check_numbers(file, each, key)
    elif type(value) is int:
        most = _MOST_LAYERS if name.endswith(("layer", "layers")) else _LARGEST_NUMBER
        if abs(value) > most:
            raise InputError(f"{file}: {shorten(name)} = {short_repr(value)}; at most {most:,} is possible; {_COPY}")


def _check_size(folder: Path, kind: Any, config: Any) -> None:
    """Check that the model of a config is not larger than its weight files.

    `transformers` would allocate the memory of the complete model before it notices that weights are missing.

    Raises:
        InputError: The config describes more weights than the files can contain.
    """
    files = [file for pattern in _WEIGHTS for file in folder.glob(pattern)]
    stored_bytes = sum(file.stat().st_size for file in files)
    with torch.device("meta"):
        model = getattr(kind, "from_config", kind)(config)
    weights = sum(weight.numel() for weight in model.parameters())
    if files and weights > stored_bytes:
        raise InputError(
            f"{folder}: config.json describes a model of {weights:,} weights, and the files of weights hold "
            f"{stored_bytes:,} bytes; {_COPY}"
        )


def _check_names(folder: Path) -> None:
    """Check that no parameter is stored twice, under its current name and under its name in the first releases.

    `transformers` would silently use one of the two.

    Raises:
        InputError: A parameter is stored under both names.
    """
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names.update(tensors.keys())
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        for name in sorted(name for name in names if name.endswith(old)):
            other = name.removesuffix(old) + new
            if other in names:
                raise InputError(f"{folder}: {name} and {other} are the same weights; leave out the one that is superfluous")


def _check_weights(folder: Path, model: Any, loaded: dict[str, Any], architecture: str, lacks_head: bool) -> None:
    """Check that the weights in a folder are exactly those of a model, and that they are finite.

    The pooler of an encoder may be missing, and a pooler may always be superfluous, because nothing reads it. If config.json
    names another class than that of the model, the head of that class may be superfluous as well.

    Args:
        folder: The folder of the model.
        model: The model, after its weights were loaded.
        loaded: The loading information of `transformers`.
        architecture: The class that config.json names.
        lacks_head: Whether only the weights of the encoder are checked.

    Raises:
        InputError: A weight is missing, superfluous, not finite, or has the wrong shape.
    """
    prefix = f"{model.base_model_prefix}."
    is_encoder = model.base_model is model
    inner, of_encoder = ({name for name, _ in module.named_children()} for module in (model, model.base_model))

    def is_checked(name: str) -> bool:
        """Return whether a weight may not be missing."""
        first = name.removeprefix(prefix).partition(".")[0]
        return not lacks_head or (first != "pooler" and (name.startswith(prefix) or first in of_encoder))

    for name in filter(is_checked, sorted(loaded["missing_keys"])):
        if not (is_encoder and name.startswith("pooler.")):
            raise InputError(f"{folder}: the weights lack {name}, which the model of config.json has; {_COPY}")
    for name, stored, expected in sorted(each for each in loaded["mismatched_keys"] if is_checked(each[0])):
        raise InputError(f"{folder}: {name} has the shape {list(stored)}, by config.json it is {list(expected)}; {_COPY}")
    for name in filter(is_checked, sorted(loaded["unexpected_keys"])):
        is_in_model = name.startswith(prefix) or name.partition(".")[0] in inner or architecture == type(model).__name__
        if is_in_model and not name.removeprefix(prefix).startswith("pooler."):
            raise InputError(f"{folder}: the weights hold {name}, which the model of config.json lacks; {_COPY}")
    for name, weight in model.state_dict().items():
        if not bool(torch.isfinite(weight).all()):
            raise InputError(f"{folder}: {name} is not finite (nan or infinite); give weights from before that")
