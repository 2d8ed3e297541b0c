"""Configs, classes and weights of `transformers` models that are trained for a task.

Only local files are read, and no code from a model folder is run. `transformers` sets missing weights to random values and
ignores superfluous weights. This module reports both as errors.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import SafetensorError, safe_open

from gaudi_bert.common.arrays import AnyArray
from gaudi_bert.common.errors import InputError, short_repr, shorten
from gaudi_bert.common.files import read_json
from gaudi_bert.encoders.pack_inputs import PackInputs
from gaudi_bert.encoders.pack_inputs_trial import determine_inputs_for_packs
from gaudi_bert.encoders.trial import MODEL_ERRORS, explain_library_error, find_max_positions, quiet_transformers
from gaudi_bert.model.config import EncoderConfig, ModelSizes
from gaudi_bert.model.heads import Head, PretrainingHead, TaskHead, TaskKind, VectorHead

_SEQUENCE_CLASS = transformers.AutoModelForSequenceClassification
_CLASS_BY_TASK: Mapping[TaskKind, Any] = {
    "classification": _SEQUENCE_CLASS,
    "multi-label": _SEQUENCE_CLASS,
    "regression": _SEQUENCE_CLASS,
    "reranking": _SEQUENCE_CLASS,
    "token-classification": transformers.AutoModelForTokenClassification,
    "question-answering": transformers.AutoModelForQuestionAnswering,
    "masked-language-modelling": transformers.AutoModelForMaskedLM,
    "causal-language-modelling": transformers.AutoModelForCausalLM,
}
_HEAD_KEYS = ("architectures", "id2label", "label2id", "num_labels", "problem_type", "finetuning_task")
_FILE_KEYS = ("transformers_version", "torch_dtype", "dtype", "_name_or_path", "gaudi_bert")
_ENCODER = VectorHead("cls", normalize=False)
_UNLIMITED = 1 << 20  # the number of positions or segments that is assumed for a model without a limit


def build_library_config(config: EncoderConfig, head: Head) -> transformers.PretrainedConfig:
    """Convert an encoder config into a `transformers` config for a model with the given head.

    Raises:
        InputError: `transformers` does not have the model type, or its config cannot be used.
    """
    values = dict(config.values)
    kind = values.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise InputError(
            f"model_type = {short_repr(kind)}: transformers does not support this model type; specify a supported one"
        )
    try:
        loaded = transformers.CONFIG_MAPPING[kind].from_dict(values)
        if isinstance(head, TaskHead):
            if head.metrics_need_outputs:
                loaded.num_labels = head.width
            if head.is_causal:
                loaded.is_decoder = True
        loaded.use_cache = False
    except MODEL_ERRORS as error:
        raise InputError(
            f"model type {kind!r}: transformers rejects the config: {explain_library_error(error)}; correct the config"
        ) from error
    return loaded


def find_language_modelling_task(config: EncoderConfig) -> TaskKind:
    """Return the language modelling task that a model supports, which is causal for decoders and masked for other models.

    If `transformers` has no class for this task, return the other task.

    Raises:
        InputError: `transformers` has a class for neither of the tasks.
    """
    loaded = build_library_config(config, _ENCODER)
    tasks: tuple[TaskKind, ...] = ("masked-language-modelling", "causal-language-modelling")
    for task in tasks[::-1] if getattr(loaded, "is_decoder", False) else tasks:
        if type(loaded) in _CLASS_BY_TASK[task]._model_mapping:  # noqa: SLF001 - nothing public names its class
            return task
    raise InputError(
        f"model type {loaded.model_type!r}: transformers has no language modelling head for this model type; choose another "
        "model"
    )


def list_model_types() -> tuple[str, ...]:
    """Return the names of all model types that the installed version of `transformers` supports."""
    return tuple(transformers.CONFIG_MAPPING)


def find_model_class(library_config: transformers.PretrainedConfig, head: Head) -> type[Any]:
    """Return the `transformers` class for a model type with the given head.

    Raises:
        InputError: `transformers` has no such class.
    """
    if isinstance(head, PretrainingHead):
        raise InputError(
            f"model type {library_config.model_type!r}: only BERT supports next-sentence prediction; pack a table of texts "
            "instead of records"
        )
    auto = transformers.AutoModel if isinstance(head, VectorHead) else _CLASS_BY_TASK[head.kind]
    classes = auto._model_mapping.get(type(library_config), None)  # noqa: SLF001 - nothing public names its class
    if classes is None:
        what = "hidden states" if isinstance(head, VectorHead) else head.kind
        raise InputError(
            f"model type {library_config.model_type!r}: transformers has no class for {what}; choose another model or task"
        )
    return classes[0] if isinstance(classes, tuple) else classes


# --- Configs and weights in folders


def read_encoder_config(file: Path) -> EncoderConfig:
    """Read a config.json, and return a config with only the keys that describe the encoder.

    Keys that describe the head or the file are omitted.

    Raises:
        InputError: The file cannot be read, does not contain a model type, or contains an impossible number.
    """
    content = read_json(file)
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise InputError(f"{file}: the file contains no model_type; pass the config.json of a transformers model")
    _check_config_numbers(file, content)
    return EncoderConfig({name: content[name] for name in content if name not in {*_HEAD_KEYS, *_FILE_KEYS}})


def build_config_for_data(
    values: Mapping[str, Any], vocab_size: int, token_ids: Mapping[str, int | None], positions: int
) -> EncoderConfig:
    """Return the config of a new model that will be trained on the given data. If a key such as `vocab_size` is missing in
    `values`, derive it from the data.

    If only a `model_type` is given, the model has its usual number of positions, or more if the data needs more.

    Args:
        values: The given keys of the config.
        vocab_size: The number of tokens in the vocabulary of the data.
        token_ids: The ids of the special tokens, by names such as "pad" and "cls". None for missing tokens.
        positions: The number of positions that the data needs.
    """
    known = build_library_config(EncoderConfig(values), _ENCODER)
    named = {
        f"{name}_token_id": number
        for name, number in token_ids.items()
        # Some model types compute position ids from the id of the padding token. Therefore keep the default padding id if
        # the data has no padding token.
        if hasattr(known, f"{name}_token_id") and (number is not None or name != "pad")
    }
    config = EncoderConfig({"vocab_size": vocab_size, **named, **values})
    lacking = positions - find_model_sizes(config, _ENCODER).positions
    if set(values) == {"model_type"} and lacking > 0:
        most = build_library_config(config, _ENCODER).get_text_config().max_position_embeddings
        return EncoderConfig({**config.values, "max_position_embeddings": most + lacking})
    return config


def find_model_sizes(config: EncoderConfig, head: Head) -> ModelSizes:
    """Return the sizes that limit what a model can process, such as its number of positions.

    Raises:
        InputError: The model cannot process packs.
    """
    library_config = build_library_config(config, head)
    return read_model_sizes(
        library_config, determine_inputs_for_packs(library_config, model_class=find_model_class(library_config, head))
    )


def read_model_sizes(library_config: transformers.PretrainedConfig, pack_inputs: PackInputs) -> ModelSizes:
    """Return the sizes in a `transformers` config that limit what the model can process, such as its number of positions.

    Args:
        library_config: The `transformers` config of the model.
        pack_inputs: The inputs that the model needs for packs. They may limit the number of positions.
    """
    text, max_positions = library_config.get_text_config(), find_max_positions(library_config)
    positions = (_UNLIMITED if max_positions is None else max_positions) - pack_inputs.position_offset
    segments = getattr(text, "type_vocab_size", None) if pack_inputs.takes_token_types else None
    return ModelSizes(
        layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        positions=min(positions, pack_inputs.longest_sequence or positions),
        vocab_size=text.vocab_size,
        segments=segments or _UNLIMITED,
    )


class EncoderWeights(NamedTuple):
    """The weights that were read from a model folder.

    Attributes:
        config: The config of the model.
        class_name: The name of the `transformers` class of the model.
        variables: The variables by name. They are float32, except that counters are integers. Tied variables occur once.
        missing: The names of the variables that are missing in the folder and keep their initial values.
    """

    config: EncoderConfig
    class_name: str
    variables: dict[str, AnyArray]
    missing: tuple[str, ...]


def read_encoder_weights(folder: Path, head: Head, *, head_may_be_missing: bool) -> EncoderWeights:
    """Read the weights of a model from its folder, and check that they match its config.

    Args:
        folder: The folder of a `transformers` model.
        head: The head of the model.
        head_may_be_missing: Whether the weights of the head may be missing.

    Raises:
        InputError: The weights cannot be read, or do not match the config.
    """
    config = read_encoder_config(folder / "config.json")
    library_config = build_library_config(config, head)
    model_class = find_model_class(library_config, head)
    model, missing = _read_model_and_missing_names(
        folder, model_class, library_config, head_may_be_missing=head_may_be_missing
    )
    variables: dict[str, Any] = {**dict(model.named_parameters()), **find_persistent_buffers(model)}
    wide = {name: value.float() if value.is_floating_point() else value for name, value in variables.items()}
    values = {name: value.detach().numpy() for name, value in wide.items() if name not in missing}
    return EncoderWeights(config, model_class.__name__, values, tuple(name for name in variables if name in missing))


def find_persistent_buffers(module: Any) -> dict[str, torch.Tensor]:
    """Return the buffers of a module that `save_pretrained` stores together with the parameters, by name."""
    stored = module.state_dict().keys() - set(getattr(module, "_keys_to_ignore_on_save", None) or ())
    return {name: buffer for name, buffer in module.named_buffers() if name in stored}


# --- Reading a model from a folder that `save_pretrained` wrote
#
# Nothing is downloaded. `transformers` sets missing weights to random values and ignores superfluous weights. Here, both are
# errors.

_COPY_REMEDY = "copy the folder again, or save it again with save_pretrained"
_LOADING_ERRORS = (*MODEL_ERRORS, SafetensorError, OSError, EOFError, MemoryError, OverflowError, pickle.UnpicklingError)
_MAX_LAYERS, _MAX_NUMBER = 1 << 10, 1 << 31
_WEIGHT_FILES = ("*.safetensors", "*.bin")


def read_architecture(folder: Path) -> str:
    """Return the first class name under `architectures` in the config.json of a folder, or "" if there is none."""
    file = folder / "config.json"
    content = read_json(file)
    if not isinstance(content, dict):
        raise InputError(f"{file}: expected a JSON object with the settings of a model; {_COPY_REMEDY}")
    names = content.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def read_model(folder: Path, model_class: type[Any], **options: Any) -> Any:
    """Read a model from a folder, check its weights, and return it in evaluation mode.

    Args:
        folder: The folder of the model.
        model_class: A `transformers` class, or one of its `AutoModel...` classes.
        **options: Options for `from_pretrained`.

    Raises:
        InputError: The model cannot be read, or its weights are incomplete, superfluous or not finite.
    """
    return _read_model_and_missing_names(folder, model_class, None, head_may_be_missing=False, **options)[0]


def _read_model_and_missing_names(
    folder: Path, model_class: type[Any], config: transformers.PretrainedConfig, *, head_may_be_missing: bool, **options: Any
) -> tuple[Any, frozenset[str]]:
    """Read a model from a folder. Return the model and the names of the weights that are missing in the folder.

    Args:
        folder: The folder of the model.
        model_class: A `transformers` class, or one of its `AutoModel...` classes.
        config: The config of the model. None for the config in the folder.
        head_may_be_missing: Whether the weights of the head may be missing or have other shapes.
        **options: Options for `from_pretrained`.

    Returns:
        The model in evaluation mode, and the names of the missing weights, which keep their initial values.
    """
    architecture = read_architecture(folder)
    _check_config_numbers(folder / "config.json", read_json(folder / "config.json"))
    local = {"local_files_only": True, "trust_remote_code": False}  # otherwise transformers may prompt the user
    try:
        with quiet_transformers():
            config = config or transformers.AutoConfig.from_pretrained(folder, **local)
            _check_model_fits_files(folder, model_class, config)
            _check_no_duplicate_parameters(folder)
            reading = {"config": config, "output_loading_info": True, "ignore_mismatched_sizes": True}
            model, loaded = model_class.from_pretrained(folder, **reading, **local, **options)
    except _LOADING_ERRORS as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{folder}: transformers cannot load the model: {explain_library_error(error)}; {_COPY_REMEDY}"
        ) from error
    missing = frozenset([*loaded["missing_keys"], *(name for name, *_ in loaded["mismatched_keys"])])
    _check_loaded_weights(folder, model, loaded, architecture, head_may_be_missing)
    return model.eval(), missing


# --- Checks before and after the weights are read


def _check_config_numbers(file: Path, value: Any, name: str = "") -> None:
    """Raise an InputError if a config contains an impossibly large number. `transformers` might build a list of this length
    and run out of memory.

    Args:
        file: The file of the config, for the error message.
        value: The config, or a value in it.
        name: The key of the value.

    Raises:
        InputError: A number is too large.
    """
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else ((name, each) for each in value):
            _check_config_numbers(file, each, key)
    elif type(value) is int:
        max_value = _MAX_LAYERS if name.endswith(("layer", "layers")) else _MAX_NUMBER
        if abs(value) > max_value:
            raise InputError(
                f"{file}: {shorten(name)} must be at most {max_value:,}, but is {short_repr(value)}; {_COPY_REMEDY}"
            )


def _check_model_fits_files(folder: Path, model_class: type[Any], config: transformers.PretrainedConfig) -> None:
    """Raise an InputError if a config describes more weights than the weight files in the folder can contain.

    `transformers` would allocate the memory of the complete model before it notices that weights are missing.

    Raises:
        InputError: The config describes more weights than the files can contain.
    """
    files = [file for pattern in _WEIGHT_FILES for file in folder.glob(pattern)]
    stored_bytes = sum(file.stat().st_size for file in files)
    with torch.device("meta"):
        model = getattr(model_class, "from_config", model_class)(config)
    weights = sum(weight.numel() for weight in model.parameters())
    if files and weights > stored_bytes:
        raise InputError(
            f"{folder}: config.json describes a model of {weights:,} weights, but the weight files contain only "
            f"{stored_bytes:,} bytes; {_COPY_REMEDY}"
        )


def _check_no_duplicate_parameters(folder: Path) -> None:
    """Raise an InputError if the weight files contain a parameter under both its current name and its old name.

    The first releases of BERT named parameters `gamma` and `beta`. `transformers` would silently use only one of the two
    values.

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
                raise InputError(
                    f"{folder}: {name} and {other} are two names for the same weight; remove one of them from "
                    "the weight file"
                )


def _check_loaded_weights(
    folder: Path,
    model: transformers.PreTrainedModel,
    loading_info: dict[str, Any],
    architecture: str,
    head_may_be_missing: bool,
) -> None:
    """Check that a folder contains exactly the weights of a model, and that all of them are finite.

    The pooler of an encoder may be missing, and a pooler may always be superfluous, because nothing reads it. If config.json
    names a different class than the class of the model, weights of its head may be superfluous as well.

    Args:
        folder: The folder of the model.
        model: The model, after its weights were loaded.
        loading_info: The loading information of `transformers`.
        architecture: The class that config.json names.
        head_may_be_missing: Whether only the weights of the encoder are checked.

    Raises:
        InputError: A weight is missing, superfluous, not finite, or has the wrong shape.
    """
    prefix = f"{model.base_model_prefix}."
    is_encoder = model.base_model is model
    inner, of_encoder = ({name for name, _ in module.named_children()} for module in (model, model.base_model))

    def is_checked(name: str) -> bool:
        """Return whether a weight has to be checked. If the head may be missing, only the weights of the encoder are
        checked.
        """
        first = name.removeprefix(prefix).partition(".")[0]
        return not head_may_be_missing or (first != "pooler" and (name.startswith(prefix) or first in of_encoder))

    for name in filter(is_checked, sorted(loading_info["missing_keys"])):
        if not (is_encoder and name.startswith("pooler.")):
            raise InputError(f"{folder}: the weight files do not contain {name}, which config.json requires; {_COPY_REMEDY}")
    for name, stored, expected in sorted(each for each in loading_info["mismatched_keys"] if is_checked(each[0])):
        raise InputError(
            f"{folder}: {name} has shape {list(stored)}, but config.json requires {list(expected)}; {_COPY_REMEDY}"
        )
    for name in filter(is_checked, sorted(loading_info["unexpected_keys"])):
        is_in_model = name.startswith(prefix) or name.partition(".")[0] in inner or architecture == type(model).__name__
        if is_in_model and not name.removeprefix(prefix).startswith("pooler."):
            raise InputError(
                f"{folder}: the weight files contain {name}, which does not belong to the model of config.json; "
                f"{_COPY_REMEDY}"
            )
    for name, weight in model.state_dict().items():
        if not bool(torch.isfinite(weight).all()):
            raise InputError(
                f"{folder}: {name} contains NaN or infinite values; pass an earlier checkpoint with finite weights"
            )
