"""A model from its folder, as `save_pretrained` writes it: with all of its weights, or refused; nothing is downloaded.

`transformers` draws weights that a folder lacks at random and passes over those that the model has no use for: only a
table on standard error shows it. Here both are errors, and its tables and progress bars are turned off.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors import SafetensorError, safe_open

from gaudi_bert.common.errors import InputError, shortened, shown
from gaudi_bert.common.files import read_json
from gaudi_bert.model.config import NO_PACKS
from gaudi_bert.pytorch.encoder import PackedEncoder
from gaudi_bert.pytorch.trial import MODEL_ERRORS, quiet_transformers, reason_of
from gaudi_bert.rows.tokenizer import RowTokenizer

_AUTO = {
    "ForSequenceClassification": transformers.AutoModelForSequenceClassification,
    "ForTokenClassification": transformers.AutoModelForTokenClassification,
}
_COPY = "copy the folder again, or save it again with save_pretrained"
_WAY_ON = "transformers or sentence-transformers run it, a text in each row"
_LOADING_ERRORS = (*MODEL_ERRORS, SafetensorError, OSError, EOFError, MemoryError, OverflowError, pickle.UnpicklingError)
_MOST_LAYERS, _LARGEST_NUMBER = 1 << 10, 1 << 31
_WEIGHTS = ("*.safetensors", "*.bin")


def open_encoder(
    folder: Path, tokenizer: RowTokenizer, *, with_head: bool, precision: Literal["float32", "bfloat16"], device: str = "cpu"
) -> PackedEncoder:
    """The encoder of a folder with its tokenizer, on a device; on "hpu" all batches have one shape.

    `with_head` keeps a head for texts or tokens, if config.json names one; `precision` is that of weights and computation.
    """
    auto: Any = transformers.AutoModel
    if with_head:
        name = architecture_of(folder)
        auto = next((kind for ending, kind in _AUTO.items() if name.endswith(ending)), auto)
    model = read_model(folder, auto)
    model.to(device, torch.float32 if precision == "float32" else torch.bfloat16)
    try:
        with quiet_transformers():
            return PackedEncoder(model, tokenizer, static_shapes=device == "hpu")
    except InputError as error:
        reason = str(error).removesuffix(f"; {NO_PACKS}")
        raise InputError(f"{folder}: {reason}; {_WAY_ON}") from error


def architecture_of(folder: Path) -> str:
    """The class that config.json names, or an empty string."""
    file = folder / "config.json"
    content = read_json(file)
    if not isinstance(content, dict):
        raise InputError(f"{file}: is not an object with the settings of a model; {_COPY}")
    names = content.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def read_model(folder: Path, kind: Any, **options: Any) -> Any:
    """The model of a folder, in evaluation mode.

    `kind` is a class of `transformers`, or one of its `AutoModel...`; `options` are those of `from_pretrained`. Weights that
    are missing, superfluous or not finite are refused.
    """
    return read_parts(folder, kind, None, lacks_head=False, **options)[0]


def read_parts(folder: Path, kind: Any, config: Any, *, lacks_head: bool, **options: Any) -> tuple[Any, frozenset[str]]:
    """The model of a folder, and the names of the weights that are missing there, which keep their initial values.

    `config` is that of the folder when None. With `lacks_head`, weights of the head may be missing, or have other shapes.
    """
    architecture = architecture_of(folder)
    check_numbers(folder / "config.json", read_json(folder / "config.json"))
    local = {"local_files_only": True, "trust_remote_code": False}  # without the second it would ask on a terminal
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
    if lacks_head:
        loaded = _without_head(model, loaded)
    _check_weights(folder, model, loaded, architecture)
    return model.eval(), missing


# --- what is checked before the weights are read, and after


def check_numbers(file: Path, value: Any, name: str = "") -> None:
    """Refuse numbers that no model has: a config would make a list of as many layers."""
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else ((name, each) for each in value):
            check_numbers(file, each, key)
    elif type(value) is int:
        most = _MOST_LAYERS if name.endswith(("layer", "layers")) else _LARGEST_NUMBER
        if abs(value) > most:
            raise InputError(f"{file}: {shortened(name)} = {shown(value)}; at most {most:,} is possible; {_COPY}")


def _check_size(folder: Path, kind: Any, config: Any) -> None:
    """Refuse a config of a model that is larger than its files: `transformers` would reserve the memory first."""
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
    """Refuse two tensors for one parameter: `transformers` takes the one with the name of the first releases."""
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names.update(tensors.keys())
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        for name in sorted(name for name in names if name.endswith(old)):
            other = name.removesuffix(old) + new
            if other in names:
                raise InputError(f"{folder}: {name} and {other} are the same weights; leave out the one that is superfluous")


def _without_head(model: Any, loaded: dict[str, Any]) -> dict[str, Any]:
    """What is missing or superfluous in the encoder, apart from a pooler."""
    prefix, inner = f"{model.base_model_prefix}.", {name for name, _ in model.base_model.named_children()}

    def is_of_encoder(name: str) -> bool:
        first = name.removeprefix(prefix).partition(".")[0]
        return first != "pooler" and (name.startswith(prefix) or first in inner)

    return {
        "missing_keys": [name for name in loaded["missing_keys"] if is_of_encoder(name)],
        "mismatched_keys": [each for each in loaded["mismatched_keys"] if is_of_encoder(each[0])],
        "unexpected_keys": [name for name in loaded["unexpected_keys"] if is_of_encoder(name)],
    }


def _check_weights(folder: Path, model: Any, loaded: dict[str, Any], architecture: str) -> None:
    """Refuse a model whose weights are not those of the folder, all of them.

    A pooler may be missing from an encoder, and superfluous anywhere: nothing here reads it. Of another class than
    config.json names, the head is superfluous.
    """
    prefix = f"{model.base_model_prefix}."
    is_encoder = model.base_model is model
    inner = {name for name, _ in model.named_children()}
    for name in sorted(loaded["missing_keys"]):
        if not (is_encoder and name.startswith("pooler.")):
            raise InputError(f"{folder}: the weights lack {name}, which the model of config.json has; {_COPY}")
    for name, stored, expected in sorted(loaded["mismatched_keys"]):
        raise InputError(f"{folder}: {name} has the shape {list(stored)}, by config.json it is {list(expected)}; {_COPY}")
    for name in sorted(loaded["unexpected_keys"]):
        is_in_model = name.startswith(prefix) or name.partition(".")[0] in inner or architecture == type(model).__name__
        if is_in_model and not name.removeprefix(prefix).startswith("pooler."):
            raise InputError(f"{folder}: the weights hold {name}, which the model of config.json lacks; {_COPY}")
    for name, weight in model.state_dict().items():
        if not bool(torch.isfinite(weight).all()):
            raise InputError(f"{folder}: {name} is not finite (nan or infinite); give weights from before that")
