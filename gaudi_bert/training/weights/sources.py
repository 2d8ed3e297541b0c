"""Weights from wherever they are: a checkpoint of ours, a Hugging Face folder, a TF1 checkpoint of Google's.

One rule decides whether weights fit a model: all settings that its function depends on must be equal, also
`max_position_embeddings`. Positions are neither cut off nor made up; a model that is to be trained on longer
sequences later has all its positions from the start, as published: phase 1 with sequences of 128 and 512 positions,
phase 2 with 512 and 512.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gaudi_bert.common.arrays import Float32Array, WeightArrays
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import read_json
from gaudi_bert.model.bert import BertForPretraining
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.huggingface import from_hugging_face
from gaudi_bert.model.parameters import parameter_specs
from gaudi_bert.training.checkpoint import find_checkpoint, is_checkpoint, read_checkpoint
from gaudi_bert.training.weights.google_checkpoint import find_google_checkpoint, read_google_checkpoint

__all__ = ["Weights", "check_same_model", "load_weights", "read_weights"]

# All but dropout and the noise of the start: what the function is that the weights belong to.
FUNCTION_SETTINGS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "max_position_embeddings",
    "type_vocab_size",
    "layer_norm_eps",
    "attention",
)
# What weights of a bare encoder lack; it then starts from random numbers.
OPTIONAL_SCOPES = ("cls/", "bert/pooler/")
CONFIG_NAMES = ("config.json", "bert_config.json")
SAFETENSORS = "model.safetensors"


@dataclass(frozen=True)
class Weights:
    """A model as it was stored.

    Attributes:
        path: the file, folder or prefix.
        kind: whose format it is.
        config: the model; None where a TF1 checkpoint lies there without its config.
        variables: by our names; heads and pooler may be missing unless it is ours.
        settings: of a checkpoint of ours (see `Checkpoint.settings`).
    """

    path: Path
    kind: Literal["gaudi-bert", "huggingface", "google"]
    config: BertConfig | None
    variables: WeightArrays
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def missing(self) -> list[str]:
        """Variables of the model that are not there."""
        return [] if self.config is None else [name for name in parameter_specs(self.config) if name not in self.variables]


def read_weights(path: Path | str) -> Weights:
    """Read weights of any of the three kinds.

    Args:
        path: ours: an `update-*.safetensors`, or the folder of a run. Hugging Face: a folder with `config.json` and
            `model.safetensors`, or that file. Google: a prefix such as `bert_model.ckpt`, or a folder with one.

    Raises:
        InputError: nothing of the kind is there, or it is damaged.
    """
    path = Path(path)
    shards = _hugging_face_files(path)
    if shards:
        return _read_hugging_face(path, shards)
    prefix = find_google_checkpoint(path)
    if prefix is not None:
        return Weights(prefix, "google", _config_beside(prefix.parent), read_google_checkpoint(prefix))
    file = find_checkpoint(path)
    stored = read_checkpoint(file)
    config = BertConfig.from_json(stored.settings["model"]) if "model" in stored.settings else None
    return Weights(file, "gaudi-bert", config, stored.variables, stored.settings)


def load_weights(path: Path | str, model: BertForPretraining) -> Weights:
    """Set the model's variables, and nothing else, from weights of any kind.

    Returns:
        What was read; variables that are `missing` in it keep what they hold.

    Raises:
        InputError: as `read_weights`, or they are of another model; the model is then unchanged.
    """
    weights = read_weights(path)
    if weights.config is not None:
        check_same_model(weights.config, model.config, weights.path)
    _check_shapes(weights, model.config)
    model.load_values(weights.variables)
    return weights


def check_same_model(stored: BertConfig, wanted: BertConfig, path: Path) -> None:
    """Refuse weights of another model.

    Raises:
        InputError: a setting that the function depends on differs.
    """
    for name in FUNCTION_SETTINGS:
        there, here = getattr(stored, name), getattr(wanted, name)
        if there != here:
            reason = "; positions are neither cut off nor made up" if name == "max_position_embeddings" else ""
            raise InputError(
                f"{path}: the weights are of another model: {name} is {there} there, {here} here{reason}; "
                f"set model.{name} to {there}, or give other weights"
            )


def _check_shapes(weights: Weights, config: BertConfig) -> None:
    specs = parameter_specs(config)
    for name in [*specs, *(name for name in weights.variables if name not in specs)]:
        found = list(weights.variables[name].shape) if name in weights.variables else "absent"
        wanted = list(specs[name].shape) if name in specs else "absent"
        may_lack = weights.kind != "gaudi-bert" and name.startswith(OPTIONAL_SCOPES)
        if found != wanted and not (found == "absent" and may_lack):
            raise InputError(
                f"{weights.path}: the weights are of another model: {name} is {found} there, {wanted} here; "
                "use the model settings that they were trained with"
            )


def _config_beside(folder: Path) -> BertConfig | None:
    for name in CONFIG_NAMES:
        if (folder / name).is_file():
            return BertConfig.from_json(read_json(folder / name))
    return None


def _hugging_face_files(path: Path) -> list[Path]:
    """The files with the tensors, where `path` is of Hugging Face; none where it is not."""
    if path.is_file() and path.suffix == ".safetensors":
        return [] if path.name.startswith("update-") or is_checkpoint(path) else [path]
    if (path / SAFETENSORS).is_file():
        return [path / SAFETENSORS]
    index = path / f"{SAFETENSORS}.index.json"
    if index.is_file():
        content = read_json(index)
        names = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(names, dict):
            raise InputError(f"{index}: has no weight_map; save the model again with save_pretrained")
        return [path / name for name in sorted(set(names.values()))]
    if (path / "pytorch_model.bin").is_file():
        raise InputError(f"{path}: holds pytorch_model.bin only; save it with transformers' save_pretrained: safetensors")
    return []


def _read_hugging_face(path: Path, files: list[Path]) -> Weights:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    config = _config_beside(files[0].parent)
    if config is None:
        raise InputError(f"{files[0]}: there is no config.json beside it; copy the whole folder of the model")
    tensors: dict[str, Float32Array] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except (SafetensorError, OSError, KeyError, TypeError, json.JSONDecodeError) as error:
            reason = " ".join(str(error).split())
            raise InputError(f"{file}: cannot be read ({reason}); copy it again, or save it as float32") from error
    return Weights(path, "huggingface", config, from_hugging_face(tensors, config))
