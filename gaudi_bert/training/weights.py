"""Read the weights and the config of a BERT from a gaudi-bert checkpoint, a Hugging Face folder or a TF1 checkpoint.

Weights fit a model only if all settings on which its function depends are equal. This includes `max_position_embeddings`,
because position embeddings are neither truncated nor extended.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from gaudi_bert.artefacts.base import ExtensibleArtefact
from gaudi_bert.artefacts.mirrored_folder import download_missing_files, download_prefix_or_glob, list_files, mirror_bucket
from gaudi_bert.common.arrays import Float32Array, WeightArrays
from gaudi_bert.common.errors import InputError, shorten
from gaudi_bert.common.files import check_model_exists, check_regular_file, explain_os_errors, is_in_store, read_json
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.config.sections import ModelSettings
from gaudi_bert.engines import is_installed
from gaudi_bert.engines.protocol import Model
from gaudi_bert.model.config import BertConfig, find_shape_mismatch, parameter_specs
from gaudi_bert.training.checkpoint import CHECKPOINT_NAMES, find_checkpoint, is_checkpoint, read_checkpoint

COPY_AGAIN = "copy the folder again, or save the model again with save_pretrained"
# A file or folder name without separators, so that it cannot refer to anything outside of the folder that contains it.
FileName = Annotated[str, Field(pattern=r"^[^/\\\x00]{0,254}[^./\\\x00]$")]
_BERT_VOCABULARY = 30522
# These settings affect only training, so they may differ between the weights and the model. All other settings must be
# equal.
_OF_TRAINING = ("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range")
# Weights without a pretraining head do not contain these variables, which then keep their random initial values.
_OPTIONAL_SCOPES = ("cls/", "bert/pooler/")
_CONFIG_NAMES = ("config.json", "bert_config.json")
_SAFETENSORS = "model.safetensors"


class _WeightsIndex(ExtensibleArtefact):
    """The schema of model.safetensors.index.json, which maps tensor names to file names."""

    remedy = COPY_AGAIN

    weight_map: Annotated[dict[str, FileName], Field(min_length=1)]


@dataclass(frozen=True)
class Weights:
    """The weights of a BERT model that were read from a file or folder and, if known, the config of the model.

    Attributes:
        path: The file or folder of the weights.
        kind: The format of the weights.
        config: The config of the model, or None if a TF1 checkpoint or a gaudi-bert checkpoint contains none.
        variables: The weights by the names of our variables.
    """

    path: Path
    kind: Literal["gaudi-bert", "huggingface", "google"]
    config: BertConfig | None
    variables: WeightArrays

    @property
    def missing_variables(self) -> list[str]:
        """The names of the model variables that are missing from the weights. Empty if the config is unknown."""
        return [] if self.config is None else [name for name in parameter_specs(self.config) if name not in self.variables]


def read_weights(path: Path | str) -> Weights:
    """Read BERT weights from a gaudi-bert checkpoint, a Hugging Face folder or a TF1 checkpoint.

    Args:
        path: One of the following:

            - a gaudi-bert checkpoint, `update-*.safetensors`, or the folder of a run
            - a Hugging Face folder with `config.json` and `model.safetensors`, or the latter file
            - the prefix of a TF1 checkpoint, such as `bert_model.ckpt`, or the folder that contains it

    Raises:
        InputError: The weights are missing, damaged or not finite, or reading them needs TensorFlow, which is not installed.
    """
    path = Path(path)
    check_model_exists(path)
    if shards := _find_hugging_face_files(path):
        weights = _read_hugging_face_weights(path, shards)
    elif prefix := _find_google_checkpoint(path):
        if not is_installed("tensorflow"):  # needed to read it, even if another engine runs the model
            raise InputError(
                f"{prefix}: reading a TF1 checkpoint requires TensorFlow, which is not installed; convert the checkpoint "
                "with `gaudi-bert export` on Python 3.10 or 3.11, for which TensorFlow exists"
            )
        from gaudi_bert.engines.tensorflow.model import read_google_checkpoint

        weights = Weights(prefix, "google", _find_bert_config(prefix.parent), read_google_checkpoint(prefix))
    else:
        file = find_checkpoint(path)
        stored = read_checkpoint(file)
        config = BertConfig.from_json(stored.settings["model"]) if "model" in stored.settings else None
        weights = Weights(file, "gaudi-bert", config, stored.variables)
    for name, value in weights.variables.items():
        if not np.isfinite(value).all():
            raise InputError(f"{weights.path}: {name} is not finite (nan or infinite); pass an earlier checkpoint")
    return weights


def load_weights(path: Path | str, model: Model, config: BertConfig) -> Weights:
    """Read BERT weights in any supported format, copy them into a model, and return them.

    Variables of the model without stored weights keep their values.

    Args:
        path: The weights, as for `read_weights`.
        model: The model.
        config: The config of the model.

    Returns:
        The weights.

    Raises:
        InputError: The weights cannot be read, or they belong to a model with other settings.
    """
    weights = read_weights(path)
    for name, stored in ({} if weights.config is None else weights.config.to_json()).items():
        requested = getattr(config, name)
        if stored != requested and name not in _OF_TRAINING:
            reason = ", and positions can be neither removed nor added" if name == "max_position_embeddings" else ""
            raise InputError(
                f"{weights.path}: the weights belong to another model: {name} is {stored} there, but {requested} "
                f"here{reason}; set model.{name} to {stored}, or pass other weights"
            )
    problem = find_shape_mismatch(
        model.variable_shapes(), weights.variables, () if weights.kind == "gaudi-bert" else _OPTIONAL_SCOPES
    )
    if problem is not None:
        raise InputError(
            f"{weights.path}: the weights belong to another model: {problem}; use the model settings with which they were "
            "trained"
        )
    model.load_variables(weights.variables)
    return weights


def read_bert_config(file: Path) -> BertConfig:
    """Read the config of a BERT model from config.json or bert_config.json.

    Raises:
        InputError: The file cannot be read, or does not describe a BERT that is supported.
    """
    values = read_json(file)
    if not isinstance(values, dict):
        raise InputError(f"{file}: the file does not contain an object with the settings of a model; {COPY_AGAIN}")
    try:
        return BertConfig.from_json(values)
    except InputError as error:
        raise InputError(f"{file}: {error}") from error


def make_bert_config(settings: ModelSettings, vocabulary_size: int | None, max_sequence_length: int) -> BertConfig:
    """Create a BERT config from the model settings. Sizes that are not set are taken from the data.

    Args:
        settings: The settings of the model.
        vocabulary_size: The number of tokens in the vocabulary of the data, or None if it is unknown.
        max_sequence_length: The length of the rows of the data, in tokens.
    """
    values = settings.model_dump()
    if values["vocab_size"] is None:
        values["vocab_size"] = vocabulary_size or _BERT_VOCABULARY
    if values["max_position_embeddings"] is None:
        values["max_position_embeddings"] = max_sequence_length
    return BertConfig(**values)


def _find_bert_config(folder: Path) -> BertConfig | None:
    """Read the BERT config in a folder. Return None if the folder does not contain one."""
    for name in _CONFIG_NAMES:
        if (folder / name).is_file():
            return read_bert_config(folder / name)
    return None


def _find_hugging_face_files(path: Path) -> list[Path]:
    """Return the safetensors files of a Hugging Face model.

    Return an empty list if `path` is not such a model.

    Raises:
        InputError: The folder contains only pytorch_model.bin, which is not supported.
    """
    if path.is_file() and path.suffix == ".safetensors":
        return [] if path.name.startswith("update-") or is_checkpoint(path) else [path]
    if (path / _SAFETENSORS).is_file():
        return [path / _SAFETENSORS]
    index = path / f"{_SAFETENSORS}.index.json"
    if index.is_file():
        return [path / name for name in sorted(set(_WeightsIndex.read(index).weight_map.values()))]
    if (path / "pytorch_model.bin").is_file():
        raise InputError(
            f"{path}: the folder contains only pytorch_model.bin, which is not supported; save the model again with "
            "transformers' save_pretrained, which writes safetensors"
        )
    return []


def _read_hugging_face_weights(path: Path, files: list[Path]) -> Weights:
    """Read the weights of a Hugging Face model from its safetensors files.

    Raises:
        InputError: A file cannot be read, config.json is missing, or the tensors do not match the config.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    config = _find_bert_config(files[0].parent)
    if config is None:
        raise InputError(f"{files[0]}: config.json is missing in the same folder; copy the complete folder of the model")
    tensors: dict[str, Float32Array] = {}
    for file in files:
        with explain_os_errors(file, "read"):
            check_regular_file(file)
        try:
            tensors.update(load_file(file))
        except (SafetensorError, OSError, KeyError, TypeError, json.JSONDecodeError) as error:
            reason = shorten(str(error), 200)
            raise InputError(f"{file}: the file cannot be read ({reason}); copy it again, or save it as float32") from error
    return Weights(path, "huggingface", config, _convert_from_hugging_face(tensors, config))


# --- Weights in an object store


@contextmanager
def open_local_weights(path: Path | str, store: StoreSettings | None = None) -> Iterator[Path]:
    """Yield a local path to weights. If the weights are in an object store, copy them to this machine first.

    If the folder of a run is in a store, only its newest checkpoint and the small files next to it are copied. A folder of
    another tool is copied completely.
    """
    with mirror_bucket(path, store) as weights:
        if is_in_store(path):
            download_missing_files(weights)
            newest = (
                folder / max(names)
                for folder in (weights, weights / "checkpoints")
                if (names := fnmatch.filter(list_files(folder), CHECKPOINT_NAMES))
            )
            file = weights if weights.is_file() else next(newest, None)
            if file is None:
                download_prefix_or_glob(weights)
            else:  # also the files of its model and its run that are next to it; outside the bucket, nothing is fetched
                run = file.parent.parent
                of_model = (file.parent / name for name in (*_CONFIG_NAMES, "vocab.txt"))
                of_run = (run / name for name in ("settings.yaml", "vocab.txt", "tokenizer_config.json"))
                download_missing_files(file, *of_model, *of_run, run.parent / "examples" / "vocab.txt")
        yield weights


# --- TF1 checkpoints

_INDEX = ".index"


def _find_google_checkpoint(path: Path) -> Path | None:
    """Return the path prefix of a TF1 checkpoint, given the prefix itself, the index file or the folder.

    Returns:
        The prefix, or None if `path` is not a TF1 checkpoint.

    Raises:
        InputError: The folder contains several TF1 checkpoints.
    """
    if path.name.endswith(_INDEX) and path.is_file():
        return path.with_name(path.name.removesuffix(_INDEX))
    if Path(f"{path}{_INDEX}").is_file():
        return path
    files = sorted(path.glob(f"*{_INDEX}")) if path.is_dir() else []
    if len(files) > 1:
        raise InputError(
            f"{path}: the folder contains {len(files)} TF1 checkpoints; pass one of them, such as "
            f"{files[-1].with_suffix('')}"
        )
    return files[0].with_suffix("") if files else None


# --- Converting names and layouts between Hugging Face's BERT (`BertForPreTraining`, `BertModel`) and ours
#
# The weights of Hugging Face's dense layers are the transposes of our kernels. The output matrix of the masked-LM head is
# tied to the word embeddings, and its bias exists under two names. Each is written once, and accepted under both names.

_TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
# The prefixes of tensor names in the heads of `BertForSequenceClassification`, `...TokenClassification` and
# `...QuestionAnswering`.
_TASK_HEADS = ("classifier.", "qa_outputs.")
_COUNTERS = ("bert.embeddings.position_ids", "bert.embeddings.token_type_ids")

_WHOLE_NAMES = {
    "cls/predictions/output_bias": "cls.predictions.bias",
    "cls/seq_relationship/output_weights": "cls.seq_relationship.weight",
    "cls/seq_relationship/output_bias": "cls.seq_relationship.bias",
}
_LAST_PARTS = {"kernel": "weight", "gamma": "weight", "beta": "bias"}


def _convert_to_hugging_face_name(variable: str) -> str:
    """Convert the name of a gaudi-bert variable to its name in `BertForPreTraining`.

    For example, `bert/encoder/layer_0/attention/self/query/kernel` becomes
    `bert.encoder.layer.0.attention.self.query.weight`.
    """
    if variable in _WHOLE_NAMES:
        return _WHOLE_NAMES[variable]
    *scope, last = variable.replace("/layer_", "/layer/").split("/")
    if last.endswith("_embeddings"):
        return ".".join([*scope, last, "weight"])
    return ".".join([*scope, _LAST_PARTS.get(last, last)])


def convert_to_hugging_face(values: WeightArrays) -> dict[str, Float32Array]:
    """Convert gaudi-bert variables to a state dict of `BertForPreTraining`.

    Args:
        values: Our variables by name.

    Returns:
        The tensors by their Hugging Face names. Tied tensors are omitted, as in the files of Hugging Face.
    """
    return {
        _convert_to_hugging_face_name(name): np.ascontiguousarray(value.T if name.endswith("/kernel") else value)
        for name, value in values.items()
    }


def _convert_from_hugging_face(tensors: WeightArrays, config: BertConfig) -> dict[str, Float32Array]:
    """Convert the state dict of a Hugging Face BERT to gaudi-bert variables in float32.

    Args:
        tensors: The state dict of a `BertForPreTraining`, a `BertFor...` class of a task, or a `BertModel`. The names may be
            those of the first releases, which had `gamma` and `beta` for layer normalization.
        config: The config of the model.

    Returns:
        The weights by the names of our variables. The head and the pooler may be missing.

    Raises:
        InputError: A tensor is missing, unknown, duplicated or has another shape than the config requires.
    """
    names: dict[str, str] = {}
    for name in tensors:
        full = name.removesuffix(".gamma") + ".weight" if name.endswith("LayerNorm.gamma") else name
        full = full.removesuffix(".beta") + ".bias" if full.endswith("LayerNorm.beta") else full
        full = full if full.startswith(("bert.", "cls.", *_TASK_HEADS)) else f"bert.{full}"
        other = names.setdefault(full, name)
        if other != name:
            raise InputError(f"weights: {other} and {name} are two names of the same tensor; remove one of them")
    everything = {full: tensors[name] for full, name in names.items()}
    state, ours = dict(everything), {}
    for name, spec in parameter_specs(config).items():
        full_name = _convert_to_hugging_face_name(name)
        value = state.pop(full_name, None)
        if value is None:
            if name.startswith(("cls/", "bert/pooler/")):
                continue
            raise InputError(f"weights: {full_name} is missing; pass weights that match config.json")
        value = np.asarray(value, dtype=np.float32)
        value = np.ascontiguousarray(value.T) if name.endswith("/kernel") else value
        if value.shape != spec.shape:
            raise InputError(
                f"weights: {full_name} must have the shape {spec.shape} according to config.json, but has {value.shape} "
                "(in the layout of gaudi-bert); pass weights that match config.json"
            )
        ours[name] = value
    for name in [name for name in state if name.startswith(_TASK_HEADS)]:
        value = np.asarray(state.pop(name), dtype=np.float32)
        scope, _, last = name.partition(".")
        ours[f"{scope}/kernel" if last == "weight" else f"{scope}/{last}"] = np.ascontiguousarray(value.T)
    for name, value in state.items():  # the remaining tensors must be counters, or equal to the tensors they are tied to
        if name in _TIED and _TIED[name] in everything:
            if not np.array_equal(value, everything[_TIED[name]]):
                raise InputError(
                    f"weights: {name} differs from {_TIED[name]}, but only tied output weights are supported; tie the "
                    "weights"
                )
        elif name not in _COUNTERS:
            raise InputError(
                f"weights: the tensor {name} is not supported; pass the weights of BertForPreTraining, BertModel, or a "
                "BERT model with a task head"
            )
    return ours
