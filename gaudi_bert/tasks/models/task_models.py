"""Models of tasks as folders that `transformers` opens: read, and written.

A folder holds `config.json` (with the names of the labels, and under `gaudi_bert` what our own commands need besides),
`model.safetensors` with the tensors of `BertFor...`, no more and no less, and the tokenizer's files, which are copied
as they are; a bare `vocab.txt` becomes a `tokenizer.json`.
"""

from __future__ import annotations

import dataclasses
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from gaudi_bert.common.arrays import WeightArrays
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import atomic_file, explained_os_errors, write_json, write_text
from gaudi_bert.config.sections import TaskName, TaskSettings
from gaudi_bert.engines.protocol import Device, Engine, Model, ModelSpec
from gaudi_bert.model.config import BertConfig, misfit, shapes_of
from gaudi_bert.model.heads import variables_of
from gaudi_bert.model.huggingface import to_hugging_face
from gaudi_bert.rows.tokenizer import RowTokenizer
from gaudi_bert.tasks.kinds.task import Task, task_named
from gaudi_bert.training.weights.model_files import TaskConfig, read_config, tokenizer_length
from gaudi_bert.training.weights.sources import Weights, read_weights

KEY = "gaudi_bert"
# What transformers means where config.json names no labels: it leaves out the names of two classes that were not named.
_UNNAMED_LABELS = ("LABEL_0", "LABEL_1")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt", "added_tokens.json")
PROBLEMS: dict[str, TaskName] = {
    "single_label_classification": "classification",
    "multi_label_classification": "multi-label",
    "regression": "regression",
}
_ARCHITECTURES: dict[str, TaskName] = {
    "BertForTokenClassification": "token-classification",
    "BertForQuestionAnswering": "question-answering",
    "BertForMaskedLM": "masked-language-modelling",
    "BertLMHeadModel": "causal-language-modelling",
}


@dataclass(frozen=True)
class StartWeights:
    """What of stored weights a model of a task begins with.

    `variables` are those that the model has, `fresh` the ones that start from random numbers.
    """

    weights: Weights
    config: BertConfig
    variables: WeightArrays
    fresh: tuple[str, ...]


def start_weights(path: Path, task: Task) -> StartWeights:
    """The encoder (and the head, where it fits) of weights of any kind, for a task."""
    weights = read_weights(path)
    if weights.config is None:
        raise InputError(f"{weights.path}: its config is not known; put config.json or bert_config.json next to it")
    config = dataclasses.replace(weights.config, attention="causal") if task.head.is_causal else weights.config
    specs = variables_of(config, task.head)
    variables = {
        name: value for name, value in weights.variables.items() if name in specs and value.shape == specs[name].shape
    }
    fresh = tuple(name for name in specs if name not in variables)
    for name in fresh:
        if name.startswith("bert/") and not name.startswith("bert/pooler/"):
            raise InputError(f"{weights.path}: {name} is missing; give the weights of a complete encoder")
    return StartWeights(weights, config, variables, fresh)


def weights_checksum(weights: Weights) -> str:
    """CRC-32 of all names and values."""
    checksum = 0
    for name, value in sorted(weights.variables.items()):
        checksum = zlib.crc32(
            np.ascontiguousarray(value).reshape(-1).view(np.uint8).data, zlib.crc32(name.encode(), checksum)
        )
    return f"{checksum:08x}"


@dataclass(frozen=True)
class _TaskFolder:
    """A model of a task, but for its weights.

    `max_sequence_length` is the most tokens of a sequence as it was trained; else the tokenizer's, or the model's positions.
    """

    path: Path
    task: TaskName
    labels: tuple[str, ...]
    config: BertConfig
    max_sequence_length: int
    settings: TaskSettings

    def make_task(self, settings: TaskSettings | None = None) -> Task:
        """The task, with other settings where they are given."""
        return task_named(self.task)(settings or self.settings, self.labels)


def read_task_folder(path: Path) -> _TaskFolder:
    """The description of a model in a folder of `finetune`, or of transformers' `BertFor...`."""
    file = path / "config.json"
    if not file.is_file():
        raise InputError(
            f"{path}: holds no config.json; give a folder that `gaudi-bert finetune` or transformers has written"
        )
    config, values = read_config(file), TaskConfig.read(file)
    own, labels = values.gaudi_bert, values.labels or _UNNAMED_LABELS
    task = own.task or _task_of(values.architectures, values.problem_type, labels, path)
    length = own.max_sequence_length or tokenizer_length(path) or config.max_position_embeddings
    labelled = task in ("classification", "multi-label", "token-classification")
    settings = own.settings or TaskSettings(name=task)
    length = min(length, config.max_position_embeddings)
    return _TaskFolder(path, task, labels if labelled else (), config, length, settings)


def _task_of(architectures: Sequence[str] | None, problem: str | None, labels: tuple[str, ...], path: Path) -> TaskName:
    name = architectures[0] if architectures else "nothing"
    if name == "BertForSequenceClassification":
        return PROBLEMS[problem or ("regression" if len(labels) == 1 else "single_label_classification")]
    if name not in _ARCHITECTURES:
        raise InputError(f"{path}: its architecture is {name}, which has no head for a task; fine-tune it first")
    return _ARCHITECTURES[name]


def open_task_model(
    folder: _TaskFolder, task: Task, engine: Engine, device: Device | None = None, *, weights: Weights | None = None
) -> Model:
    """The model of a folder, with its weights."""
    weights = weights or read_weights(folder.path)
    specs = variables_of(folder.config, task.head)
    variables = {name: value for name, value in weights.variables.items() if name in specs}
    problem = misfit(shapes_of(specs), variables)
    if problem is not None:
        raise InputError(f"{folder.path}: {problem}; fine-tune the model again")
    model = engine.build(ModelSpec(folder.config, task.head), device, seed=None)
    model.load_values(variables)
    return model


def write_task_folder(
    folder: Path,
    config: BertConfig,
    task: Task,
    variables: WeightArrays,
    tokenizer: RowTokenizer,
    max_sequence_length: int,
) -> None:
    """Write `config.json`, `model.safetensors` and the tokenizer's files into a folder that is there."""
    with atomic_file(folder / "model.safetensors") as handle:
        handle.write(save(to_hugging_face(variables), metadata={"format": "pt"}))
    own = {
        "task": task.name,
        "max_sequence_length": max_sequence_length,
        "settings": task.settings.model_dump(mode="json", exclude_defaults=True, exclude={"labels"}),
    }
    values = {**config.to_json(), "model_type": "bert", "pad_token_id": tokenizer.pad_id, **task.config_json()}
    write_json(folder / "config.json", {**values, KEY: own})
    _copy_tokenizer(folder, tokenizer, config)


def _copy_tokenizer(folder: Path, tokenizer: RowTokenizer, config: BertConfig) -> None:
    source = tokenizer.file.parent
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            with explained_os_errors(folder / name, "write"):
                shutil.copyfile(source / name, folder / name)
    if not (folder / "tokenizer.json").is_file():
        write_text(folder / "tokenizer.json", tokenizer.tokenizer.to_str())
    if not (folder / "tokenizer_config.json").is_file():
        content = {"tokenizer_class": "BertTokenizer", "model_max_length": config.max_position_embeddings}
        write_json(folder / "tokenizer_config.json", content)
