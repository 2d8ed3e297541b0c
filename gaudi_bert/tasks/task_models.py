"""Models of tasks as folders that `transformers` opens: read, and written.

A folder holds `config.json` (with the names of the labels, and under `gaudi_bert` what our own commands need besides),
`model.safetensors` with the tensors of `...For<Task>`, no more and no less, and the tokenizer as `copy_tokenizer` writes
it.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from gaudi_bert.common.arrays import WeightArrays
from gaudi_bert.common.errors import InputError, install_command, shorten
from gaudi_bert.common.files import atomic_file, check_model_exists, file_identity, read_json, write_json
from gaudi_bert.common.progress import format_count
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.sections import TaskName, TaskSettings
from gaudi_bert.config.shipped import MODELS, name_of_sizes
from gaudi_bert.model.config import (
    BertConfig,
    EncoderConfig,
    ModelSizes,
    draw_initial_value,
    find_shape_mismatch,
    parameter_specs,
)
from gaudi_bert.model.heads import (
    TASK_BY_PROBLEM_TYPE,
    TaskHead,
    TaskKind,
    VectorHead,
    check_labels,
    parameter_specs_with_head,
)
from gaudi_bert.rows.tokenizer import RowTokenizer, copy_tokenizer
from gaudi_bert.rows.types import LANGUAGE_MODELLING, TASKS_WITH_LABELS
from gaudi_bert.tasks.kinds.task import NO_VOCABULARY, Task, Vocabulary, task_named
from gaudi_bert.training.checkpoint import newest_settings
from gaudi_bert.training.model_files import SentenceFolder, TaskConfig, read_cross_encoder, tokenizer_length
from gaudi_bert.training.weights import model_config, read_config, read_weights, to_hugging_face

_MASKED: TaskKind = "masked-language-modelling"
_FRESH = "fresh weights"
_ARCHITECTURES: dict[str, TaskName] = {
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "masked-language-modelling",
    "ForCausalLM": "causal-language-modelling",
    "LMHeadModel": "causal-language-modelling",
}


def is_bert(path: Path) -> bool:
    """Whether weights are of a BERT; another model is refused without `transformers` to run it."""
    check_finished(path)
    config = (path if path.is_dir() else path.parent) / "config.json"
    content = read_json(config) if config.is_file() else {}
    kind = content.get("model_type", "bert") if isinstance(content, dict) else "bert"
    if kind != "bert":
        _check_transformers(f"{path}: is a model of type {kind}, which")
    return bool(kind == "bert")


def sees_only_before(model: Path) -> bool:
    """Whether a token of a model sees only those before it."""
    if is_bert(model):
        return False
    from gaudi_bert.encoders.encoder_weights import config_of, read_encoder_config
    from gaudi_bert.encoders.feeding_trial import feeding_of

    folder = model if model.is_dir() else model.parent
    return feeding_of(config_of(read_encoder_config(folder / "config.json"), VectorHead("cls", normalize=False))).causal


def check_finished(path: Path) -> None:
    """Refuse a model that is not there, and the run of another one than BERT that was stopped: it holds no such model."""
    check_model_exists(path)
    if (path / "config.json").is_file():
        return
    stored = newest_settings(path / "checkpoints") or newest_settings(path if path.is_dir() else path.parent) or {}
    kind = stored.get("model", {}).get("model_type", "bert")
    if kind != "bert":
        stage = "train" if "task" in stored else "finetune"
        raise InputError(
            f"{path}: is a run of `gaudi-bert {stage}` that was stopped; its {kind} model is written when it ends: run "
            f"`gaudi-bert {stage}` again to finish it"
        )


def _check_transformers(what: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise InputError(f"{what} needs transformers; run: {install_command('pytorch')}")


@dataclass(frozen=True)
class _StartWeights:
    """Stored weights that a model of a task begins with; `kind` tells people what they are, `identity` which.

    `architecture` is the class of `transformers` for the task. Variables that are `fresh` keep their initial values; those
    that `transformers` has besides are `kept` as they are.
    """

    path: Path
    kind: str
    config: BertConfig | EncoderConfig
    sizes: ModelSizes
    architecture: str
    variables: WeightArrays
    fresh: tuple[str, ...]
    identity: str
    kept: WeightArrays = field(default_factory=dict)


def start_of_words(
    path: Path | None, settings: PipelineSettings, tokenizer: RowTokenizer, length: int
) -> tuple[Task, _StartWeights]:
    """The task of words of a model, and what it begins with: for rows of so many tokens, and of this tokenizer.

    `path` is a folder with weights; a config.json, or a type of `transformers`: fresh weights; None: a BERT of the sizes in
    the settings.
    """
    if path is not None and path.is_dir():
        file, kind = path / "config.json", _MASKED
        if not is_bert(path):
            from gaudi_bert.encoders import encoder_weights

            kind = encoder_weights.word_task_of(encoder_weights.read_encoder_config(file))
        elif file.is_file():
            kind = _kind_of_bert(read_config(file))
        task = _task_of_words(kind, settings, tokenizer)
        return task, start_weights(path, task)
    if path is None:
        config = model_config(settings.model, tokenizer.vocabulary_size, length)
        task = _task_of_words(_kind_of_bert(config), settings, tokenizer)
        name = name_of_sizes(settings.model) or "sizes of the settings"
        return task, _StartWeights(Path(name), _FRESH, config, config.sizes, task.architecture, {}, (), "")
    _check_transformers(f"--model {path}")
    from gaudi_bert.encoders import encoder_weights as encoders

    if path.suffix == ".json":
        given = encoders.read_encoder_config(path)
    else:
        name, known = str(path), encoders.known_types()
        if name not in known:
            near = difflib.get_close_matches(name, [*MODELS, *known], n=1, cutoff=0.6) if "/" not in name else []
            hint = f"did you mean {near[0]}?" if near else "not a folder; give one, a config.json, or a type of transformers"
            raise InputError(f"--model {shorten(name)}: {hint}")
        given = EncoderConfig({"model_type": name})
    task = _task_of_words(encoders.word_task_of(given), settings, tokenizer)
    complete = encoders.fresh_config(given.values, tokenizer.vocabulary_size, tokenizer.token_ids(), length)
    architecture = encoders.class_of(encoders.config_of(complete, task.head), task.head).__name__
    return task, _StartWeights(path, _FRESH, complete, encoders.sizes_of(complete, task.head), architecture, {}, (), "")


def _task_of_words(kind: TaskKind, settings: PipelineSettings, tokenizer: RowTokenizer) -> Task:
    vocabulary = vocabulary_of(tokenizer) if kind == _MASKED else NO_VOCABULARY
    return task_named(kind)(settings.task.model_copy(update={"name": kind}), (), vocabulary)


def _kind_of_bert(config: BertConfig) -> TaskKind:
    return "causal-language-modelling" if config.attention == "causal" else _MASKED


def start_weights(path: Path, task: Task | None, *, lacks_head: bool = True) -> _StartWeights:
    """Read the encoder of weights of any kind, and the head of a task where it fits; without `lacks_head` it has to.

    Without a task it is the encoder alone, whatever its head.
    """
    head = VectorHead("cls", normalize=False) if task is None else task.head
    if not is_bert(path):  # any other encoder, as `transformers` reads and names it
        from gaudi_bert.encoders.encoder_weights import read_encoder_config, read_encoder_weights, sizes_of

        folder = path if path.is_dir() else path.parent
        sizes = sizes_of(read_encoder_config(folder / "config.json"), head)  # rejects what cannot be fed packs
        other, name, values, fresh = read_encoder_weights(folder, head, lacks_head=lacks_head)
        files = (file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin") or file.name == "config.json")
        identity = " ".join(map(file_identity, sorted(files)))
        kind = f"{other.model_type} of transformers"
        return _StartWeights(folder, kind, other, sizes, name, values, fresh, identity)
    weights = read_weights(path)
    if weights.config is None:
        raise InputError(f"{weights.path}: its config is not known; put config.json or bert_config.json next to it")
    is_causal = isinstance(head, TaskHead) and head.is_causal
    config = dataclasses.replace(weights.config, attention="causal") if is_causal else weights.config
    specs = parameter_specs_with_head(config, head)
    known = {name: weights.variables[name] for name in specs if name in weights.variables}
    shapes = {name: spec.shape for name, spec in specs.items()}
    problem = None if lacks_head or isinstance(head, VectorHead) else find_shape_mismatch(shapes, known)
    if problem is not None:
        raise InputError(f"{path}: {problem}; fine-tune the model again")
    variables = {name: value for name, value in known.items() if value.shape == specs[name].shape}
    fresh = tuple(name for name in specs if name not in variables)
    for name in fresh:
        if name.startswith("bert/") and not name.startswith("bert/pooler/"):
            raise InputError(f"{weights.path}: {name} is missing; give the weights of a complete encoder")
    checksum, unread = 0, {}
    for name, value in sorted(weights.variables.items()):
        content = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        checksum = zlib.crc32(content.data, zlib.crc32(name.encode(), checksum))
    if isinstance(head, VectorHead):
        # BERT's pooler, which `transformers` expects below any vectors; of weights without one, initial values.
        for name, spec in parameter_specs(config).items():
            if name.startswith("bert/pooler/"):
                value = weights.variables.get(name, draw_initial_value(name, spec, config.initializer_range, 0))
                unread[name] = np.asarray(value, np.float32)
    return _StartWeights(
        path=weights.path,
        kind=weights.kind,
        config=config,
        sizes=config.sizes,
        architecture="BertModel" if task is None else task.architecture,
        variables=variables,
        fresh=fresh,
        identity=f"{checksum:08x}",
        kept=unread,
    )


@dataclass(frozen=True)
class TaskDescription:
    """The description of a task's model in its folder.

    `max_sequence_length` is the most tokens of a sequence as it was trained, or the tokenizer's; None where neither is
    known. `texts` is how the model reads its texts, and what it applies to the logit of a pair.
    """

    path: Path
    task: TaskName
    labels: tuple[str, ...]
    max_sequence_length: int | None
    settings: TaskSettings
    texts: SentenceFolder = field(default_factory=SentenceFolder)

    def make_task(self, settings: TaskSettings | None = None) -> Task:
        """Return the task, with `settings` if they are given, else with those that the model was trained with."""
        task = task_named(self.task)(settings or self.settings, self.labels)
        task.activation = self.texts.activation or task.activation
        return task


def read_task_folder(path: Path) -> TaskDescription:
    """The description of a model in a folder of `finetune`, or of transformers' `...For<Task>`."""
    check_finished(path)
    file = path / "config.json"
    if not file.is_file():
        raise InputError(
            f"{path}: holds no config.json; give a folder that transformers has written, or a finished one of "
            "`gaudi-bert finetune`: one that was stopped is finished by the same command"
        )
    values = TaskConfig.read(file)
    own, labels, cross_encoder = values.gaudi_bert, values.labels, None
    name = values.architectures[0] if values.architectures else "nothing"
    if name.endswith("ForSequenceClassification"):
        cross_encoder = read_cross_encoder(path, values)
    if values.id2label and values.num_labels not in (None, len(values.id2label)):
        problem = f"num_labels is {values.num_labels}, and id2label has {format_count(len(values.id2label), 'label')}"
        raise InputError(f"{file}: {problem}; remove the one that is wrong")
    is_reranker = cross_encoder is not None and len(labels) == 1
    task = own.task or ("reranking" if is_reranker else _task_of(name, values.problem_type, labels, path))
    if task in TASKS_WITH_LABELS:
        check_labels(labels, str(file), is_one_of_them=task == "classification")
    texts = cross_encoder or SentenceFolder(max_sequence_length=tokenizer_length(path))
    length = own.max_sequence_length or texts.max_sequence_length
    settings = own.settings or TaskSettings(name=task)
    return TaskDescription(path, task, labels if task in TASKS_WITH_LABELS else (), length, settings, texts)


def _task_of(name: str, problem: str | None, labels: tuple[str, ...], path: Path) -> TaskName:
    if name.endswith("ForSequenceClassification"):
        if problem == "regression" and len(labels) > 1:
            raise InputError(f"{path}: is a regression of {len(labels)} values, and only one value can be predicted here")
        return TASK_BY_PROBLEM_TYPE[problem or ("regression" if len(labels) == 1 else "single_label_classification")]
    task = next((task for ending, task in _ARCHITECTURES.items() if name.endswith(ending)), None)
    if task is None:
        raise InputError(f"{path}: its architecture is {name}, which has no head for a task; fine-tune it first")
    return task


_OF_A_FILE = {"labels", "format", "on_bad_row"}
"""Settings of the task that a model does not keep: they are of one file, and the next may be written otherwise."""


def write_task_folder(
    folder: Path,
    start: _StartWeights,
    task: Task,
    variables: WeightArrays,
    tokenizer: RowTokenizer,
    max_sequence_length: int,
) -> None:
    """Write `config.json`, `model.safetensors` and the tokenizer's files into a folder that is there."""
    config = start.config
    own = {
        "task": task.name,
        "max_sequence_length": max_sequence_length,
        "settings": task.settings.model_dump(mode="json", exclude_defaults=True, exclude=_OF_A_FILE),
    }
    if isinstance(config, BertConfig):
        tensors = to_hugging_face({**variables, **start.kept})
        values = {**config.to_json(), "model_type": "bert", "pad_token_id": tokenizer.pad_id or 0}
    else:
        tensors = {name: np.asarray(value, order="C") for name, value in variables.items()}
        values = {**config.to_json(), "dtype": "float32"}
    with atomic_file(folder / "model.safetensors") as handle:
        handle.write(save(tensors, metadata={"format": "pt"}))
    values |= {**task.config_json(), "architectures": [start.architecture]}
    write_json(folder / "config.json", {**values, "gaudi_bert": own})
    # A model of words reads any text that its positions hold; other tasks cut where training did, in other programs too.
    copy_tokenizer(tokenizer, folder, start.sizes.positions if task.name in LANGUAGE_MODELLING else max_sequence_length)


def vocabulary_of(tokenizer: RowTokenizer) -> Vocabulary:
    """Return what masks are drawn from."""
    return Vocabulary(tokenizer.vocabulary_size, tokenizer.special_ids, tokenizer.mask_id)
