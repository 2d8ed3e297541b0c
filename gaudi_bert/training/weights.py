"""Weights of three kinds: a checkpoint of ours, a Hugging Face folder, a TF1 checkpoint of Google's; and a BERT's config.

One rule decides whether weights fit a model: all settings that its function depends on must be equal, also
`max_position_embeddings`: positions are neither cut off nor added.
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

from gaudi_bert.artefacts.base import Figures
from gaudi_bert.artefacts.mirrored_folder import fetch, fetch_below, files_in, mirrored_bucket
from gaudi_bert.common.arrays import Float32Array, WeightArrays
from gaudi_bert.common.errors import InputError, shorten
from gaudi_bert.common.files import check_model_exists, check_regular_file, explain_os_errors, is_in_store, read_json
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.config.sections import ModelSettings
from gaudi_bert.engines import is_installed
from gaudi_bert.engines.protocol import Model
from gaudi_bert.model.config import BertConfig, find_shape_mismatch, parameter_specs
from gaudi_bert.training.checkpoint import CHECKPOINT_NAMES, find_checkpoint, is_checkpoint, read_checkpoint

COPY_AGAIN = "copy the folder again, or save it again with save_pretrained"
# Of a file or folder in the folder itself: nothing leads out of it.
FileName = Annotated[str, Field(pattern=r"^[^/\\\x00]{0,254}[^./\\\x00]$")]
_BERT_VOCABULARY = 30522
# All other settings of a model are of the function that its weights belong to.
_OF_TRAINING = ("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range")
# What weights of a bare encoder lack; it then starts from random numbers.
_OPTIONAL_SCOPES = ("cls/", "bert/pooler/")
_CONFIG_NAMES = ("config.json", "bert_config.json")
_SAFETENSORS = "model.safetensors"


class _WeightsIndex(Figures):
    """model.safetensors.index.json: which file of the folder holds which tensor."""

    remedy = COPY_AGAIN

    weight_map: Annotated[dict[str, FileName], Field(min_length=1)]


@dataclass(frozen=True)
class Weights:
    """A model as it was stored; `config` is None where a TF1 checkpoint comes without it."""

    path: Path
    kind: Literal["gaudi-bert", "huggingface", "google"]
    config: BertConfig | None
    variables: WeightArrays

    @property
    def missing(self) -> list[str]:
        """Variables of the model that are not there."""
        return [] if self.config is None else [name for name in parameter_specs(self.config) if name not in self.variables]


def read_weights(path: Path | str) -> Weights:
    """Read weights of any of the three kinds.

    Ours: an `update-*.safetensors`, or the folder of a run. Hugging Face: a folder with `config.json` and
    `model.safetensors`, or that file. Google: a prefix such as `bert_model.ckpt`, or a folder with one.
    """
    path = Path(path)
    check_model_exists(path)
    if shards := _hugging_face_files(path):
        weights = _read_hugging_face(path, shards)
    elif prefix := _find_google_checkpoint(path):
        if not is_installed("tensorflow"):  # which reads it, whichever engine runs the model
            raise InputError(
                f"{prefix}: a TF1 checkpoint, which TensorFlow reads, and it is not installed; convert the checkpoint with "
                "`gaudi-bert export` on Python 3.10 or 3.11, where TensorFlow is"
            )
        from gaudi_bert.engines.tensorflow.model import read_google_checkpoint

        weights = Weights(prefix, "google", _config_next_to(prefix.parent), read_google_checkpoint(prefix))
    else:
        file = find_checkpoint(path)
        stored = read_checkpoint(file)
        config = BertConfig.from_json(stored.settings["model"]) if "model" in stored.settings else None
        weights = Weights(file, "gaudi-bert", config, stored.variables)
    for name, value in weights.variables.items():
        if not np.isfinite(value).all():
            raise InputError(f"{weights.path}: {name} is not finite (nan or infinite); give weights from before that")
    return weights


def load_weights(path: Path | str, model: Model, config: BertConfig) -> Weights:
    """Set the model's variables from weights of any kind; those that are `missing` in them keep what they hold."""
    weights = read_weights(path)
    for name, there in ({} if weights.config is None else weights.config.to_json()).items():
        here = getattr(config, name)
        if there != here and name not in _OF_TRAINING:
            reason = "; positions cannot be cut off or added" if name == "max_position_embeddings" else ""
            raise InputError(
                f"{weights.path}: the weights are of another model: {name} is {there} there, {here} here{reason}; "
                f"set model.{name} to {there}, or give other weights"
            )
    problem = find_shape_mismatch(
        model.shapes(), weights.variables, () if weights.kind == "gaudi-bert" else _OPTIONAL_SCOPES
    )
    if problem is not None:
        raise InputError(
            f"{weights.path}: the weights are of another model: {problem}; "
            "use the model settings that they were trained with"
        )
    model.load_values(weights.variables)
    return weights


def read_config(file: Path) -> BertConfig:
    """The size and form of the model, from config.json or bert_config.json."""
    values = read_json(file)
    if not isinstance(values, dict):
        raise InputError(f"{file}: is not an object with the settings of a model; {COPY_AGAIN}")
    try:
        return BertConfig.from_json(values)
    except InputError as error:
        raise InputError(f"{file}: {error}") from error


def model_config(settings: ModelSettings, vocabulary_size: int | None, max_sequence_length: int) -> BertConfig:
    """The model's configuration: what the settings leave open comes from the data."""
    values = settings.model_dump()
    if values["vocab_size"] is None:
        values["vocab_size"] = vocabulary_size or _BERT_VOCABULARY
    if values["max_position_embeddings"] is None:
        values["max_position_embeddings"] = max_sequence_length
    return BertConfig(**values)


def _config_next_to(folder: Path) -> BertConfig | None:
    for name in _CONFIG_NAMES:
        if (folder / name).is_file():
            return read_config(folder / name)
    return None


def _hugging_face_files(path: Path) -> list[Path]:
    """The files with the tensors, where `path` is of Hugging Face; none where it is not."""
    if path.is_file() and path.suffix == ".safetensors":
        return [] if path.name.startswith("update-") or is_checkpoint(path) else [path]
    if (path / _SAFETENSORS).is_file():
        return [path / _SAFETENSORS]
    index = path / f"{_SAFETENSORS}.index.json"
    if index.is_file():
        return [path / name for name in sorted(set(_WeightsIndex.read(index).weight_map.values()))]
    if (path / "pytorch_model.bin").is_file():
        raise InputError(f"{path}: holds pytorch_model.bin only; save it with transformers' save_pretrained: safetensors")
    return []


def _read_hugging_face(path: Path, files: list[Path]) -> Weights:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    config = _config_next_to(files[0].parent)
    if config is None:
        raise InputError(f"{files[0]}: config.json is missing next to it; copy the complete folder of the model")
    tensors: dict[str, Float32Array] = {}
    for file in files:
        with explain_os_errors(file, "read"):
            check_regular_file(file)
        try:
            tensors.update(load_file(file))
        except (SafetensorError, OSError, KeyError, TypeError, json.JSONDecodeError) as error:
            reason = shorten(str(error), 200)
            raise InputError(f"{file}: cannot be read ({reason}); copy it again, or save it as float32") from error
    return Weights(path, "huggingface", config, _from_hugging_face(tensors, config))


# --- weights in an object store


@contextmanager
def local_weights(path: Path | str, store: StoreSettings | None = None) -> Iterator[Path]:
    """Weights to read: the newest checkpoint of a run, a checkpoint, or another tool's folder or file, copied if need be."""
    with mirrored_bucket(path, store) as weights:
        if is_in_store(path):
            fetch(weights)
            newest = (
                folder / max(names)
                for folder in (weights, weights / "checkpoints")
                if (names := fnmatch.filter(files_in(folder), CHECKPOINT_NAMES))
            )
            file = weights if weights.is_file() else next(newest, None)
            if file is None:
                fetch_below(weights)
            else:  # and what is next to it of its model and its run; above a bucket, nothing is fetched
                run = file.parent.parent
                of_model = (file.parent / name for name in (*_CONFIG_NAMES, "vocab.txt"))
                of_run = (run / name for name in ("settings.yaml", "vocab.txt", "tokenizer_config.json"))
                fetch(file, *of_model, *of_run, run.parent / "examples" / "vocab.txt")
        yield weights


# --- TF1 checkpoints

_INDEX = ".index"


def _find_google_checkpoint(path: Path) -> Path | None:
    """The prefix of the TF1 checkpoint that `path` means: a prefix, its index file, or a folder that holds one; or None."""
    if path.name.endswith(_INDEX) and path.is_file():
        return path.with_name(path.name.removesuffix(_INDEX))
    if Path(f"{path}{_INDEX}").is_file():
        return path
    files = sorted(path.glob(f"*{_INDEX}")) if path.is_dir() else []
    if len(files) > 1:
        raise InputError(f"{path}: holds {len(files)} TF1 checkpoints; name one, for example {files[-1].with_suffix('')}")
    return files[0].with_suffix("") if files else None


# --- Names and layouts of Hugging Face's BERT (`BertForPreTraining`, `BertModel`), to and from ours
#
# Their dense layers hold the transpose of our kernels. The output matrix of their masked-LM head is tied to the word
# embeddings, its bias exists under two names; both are written once and accepted twice.

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


def _from_hugging_face(tensors: WeightArrays, config: BertConfig) -> dict[str, Float32Array]:
    """The state of `BertForPreTraining`, of a `BertFor...` of a task, or of a bare `BertModel`, as our variables, float32.

    `tensors` may have the names of the first releases, with `gamma` and `beta` for layer norm.
    """
    names: dict[str, str] = {}
    for name in tensors:
        full = name.removesuffix(".gamma") + ".weight" if name.endswith("LayerNorm.gamma") else name
        full = full.removesuffix(".beta") + ".bias" if full.endswith("LayerNorm.beta") else full
        full = full if full.startswith(("bert.", "cls.", *_TASK_HEADS)) else f"bert.{full}"
        other = names.setdefault(full, name)
        if other != name:
            raise InputError(f"weights: {other} and {name} are the same weights; leave out the one that is superfluous")
    everything = {full: tensors[name] for full, name in names.items()}
    state, ours = dict(everything), {}
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
    for name, value in state.items():  # what was not read: counters, and tied ones that equal what they are tied to
        if name in _TIED and _TIED[name] in everything:
            if not np.array_equal(value, everything[_TIED[name]]):
                raise InputError(f"weights: {name} differs from {_TIED[name]}; only tied output weights can be read")
        elif name not in _COUNTERS:
            raise InputError(
                f"weights: {name} is unknown; give those of a BertForPreTraining, a BertModel or a BertFor... of a task"
            )
    return ours
