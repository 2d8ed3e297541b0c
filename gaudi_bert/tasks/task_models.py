"""Reading and writing fine-tuned models as folders that `transformers` can open.

A folder contains `config.json`, `model.safetensors` and the tokenizer. `config.json` includes the label names, and under the
key `gaudi_bert` the settings that our own commands need in addition. `model.safetensors` contains exactly the tensors of the
class `...For<Task>`. The tokenizer is written by `save_tokenizer`.
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
from gaudi_bert.common.files import atomic_file, check_model_exists, fingerprint_file, read_json, write_json
from gaudi_bert.common.progress import format_count
from gaudi_bert.config.options import MODELS, find_preset_name
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.sections import TaskName, TaskSettings
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
from gaudi_bert.rows.tokenizer import RowTokenizer, save_tokenizer
from gaudi_bert.rows.types import LANGUAGE_MODELLING, TASKS_WITH_LABELS
from gaudi_bert.tasks.task import NO_VOCABULARY, Task, Vocabulary, import_task_class
from gaudi_bert.training.checkpoint import read_newest_settings
from gaudi_bert.training.model_files import (
    SentenceSettings,
    TaskConfig,
    read_cross_encoder_settings,
    read_tokenizer_max_length,
)
from gaudi_bert.training.weights import convert_to_hugging_face, make_bert_config, read_bert_config, read_weights

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
    """Return whether a stored model is a BERT, which runs without `transformers`.

    Raises:
        InputError: There is no model, or it is another model and `transformers` is not installed.
    """
    check_run_is_finished(path)
    config = (path if path.is_dir() else path.parent) / "config.json"
    content = read_json(config) if config.is_file() else {}
    kind = content.get("model_type", "bert") if isinstance(content, dict) else "bert"
    if kind != "bert":
        _check_transformers_installed(f"{path}: a model of type {kind}")
    return bool(kind == "bert")


def has_causal_attention(model: Path) -> bool:
    """Return whether a stored model has causal attention. If so, each token attends only to itself and earlier tokens."""
    if is_bert(model):
        return False
    from gaudi_bert.encoders.encoder_weights import build_library_config, read_encoder_config
    from gaudi_bert.encoders.pack_inputs_trial import determine_inputs_for_packs

    folder = model if model.is_dir() else model.parent
    return determine_inputs_for_packs(
        build_library_config(read_encoder_config(folder / "config.json"), VectorHead("cls", normalize=False))
    ).is_causal


def check_run_is_finished(path: Path) -> None:
    """Check that a path contains a finished model. If its run was stopped, the error explains how to finish the run.

    A stopped run of a model other than BERT contains no model yet, because the model is written when the run ends.

    Raises:
        InputError: There is no model, or its run was stopped.
    """
    check_model_exists(path)
    if (path / "config.json").is_file():
        return
    stored = read_newest_settings(path / "checkpoints") or read_newest_settings(path if path.is_dir() else path.parent) or {}
    kind = stored.get("model", {}).get("model_type", "bert")
    if kind != "bert":
        stage = "train" if "task" in stored else "finetune"
        raise InputError(
            f"{path}: the folder belongs to a run of `gaudi-bert {stage}` that was stopped before its {kind} model was "
            f"written; run `gaudi-bert {stage}` again to finish it"
        )


def _check_transformers_installed(subject: str) -> None:
    """Raise an InputError if `transformers` is not installed. The message begins with `subject`, which names what requires
    it.
    """
    if importlib.util.find_spec("transformers") is None:
        raise InputError(f"{subject} needs transformers, which is not installed; run: {install_command('pytorch')}")


@dataclass(frozen=True)
class InitialWeights:
    """The weights that training or inference starts with. Variables that are not stored are newly initialized instead.

    Attributes:
        path: The folder or file of the weights.
        kind: The kind of the weights, for messages.
        config: The configuration of the encoder.
        sizes: The sizes of the encoder.
        architecture: The class of `transformers` for the task.
        variables: The stored variables.
        fresh: The names of the variables that are not stored and are therefore newly initialized.
        identity: Identifies the weights.
        kept: Variables that the model does not use, but that `transformers` expects. They are written unchanged.
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


def prepare_language_modelling(
    model_path: Path | None, settings: PipelineSettings, tokenizer: RowTokenizer, row_length: int
) -> tuple[Task, InitialWeights]:
    """Choose the language modelling task for a model, and return it with the weights that training starts from.

    Args:
        model_path: A folder of weights. For fresh weights, a config.json, or the name of a model type of `transformers`, or
            None for a BERT with the sizes in the settings.
        settings: The settings of the pipeline.
        tokenizer: The tokenizer, which determines the vocabulary of fresh weights.
        row_length: The row length in tokens for which fresh weights are made.

    Raises:
        InputError: The path is neither weights, nor a configuration, nor a known type.
    """
    if model_path is not None and model_path.is_dir():
        file, kind = model_path / "config.json", _MASKED
        if not is_bert(model_path):
            from gaudi_bert.encoders import encoder_weights

            kind = encoder_weights.find_language_modelling_task(encoder_weights.read_encoder_config(file))
        elif file.is_file():
            kind = _choose_language_modelling_task(read_bert_config(file))
        task = _make_language_modelling_task(kind, settings, tokenizer)
        return task, load_initial_weights(model_path, task)
    if model_path is None:
        config = make_bert_config(settings.model, tokenizer.vocabulary_size, row_length)
        task = _make_language_modelling_task(_choose_language_modelling_task(config), settings, tokenizer)
        name = find_preset_name(settings.model) or "sizes of the settings"
        return task, InitialWeights(Path(name), _FRESH, config, config.sizes, task.architecture, {}, (), "")
    _check_transformers_installed(f"--model {model_path}")
    from gaudi_bert.encoders import encoder_weights as encoders

    if model_path.suffix == ".json":
        given = encoders.read_encoder_config(model_path)
    else:
        name, known = str(model_path), encoders.list_model_types()
        if name not in known:
            near = difflib.get_close_matches(name, [*MODELS, *known], n=1, cutoff=0.6) if "/" not in name else []
            hint = (
                f"did you mean {near[0]}?"
                if near
                else "the value must be a folder, a config.json, or a model type of transformers"
            )
            raise InputError(f"--model {shorten(name)}: {hint}")
        given = EncoderConfig({"model_type": name})
    task = _make_language_modelling_task(encoders.find_language_modelling_task(given), settings, tokenizer)
    ids = tokenizer.special_token_ids()
    complete = encoders.build_config_for_data(given.values, tokenizer.vocabulary_size, ids, row_length)
    architecture = encoders.find_model_class(encoders.build_library_config(complete, task.head), task.head).__name__
    return task, InitialWeights(
        model_path, _FRESH, complete, encoders.find_model_sizes(complete, task.head), architecture, {}, (), ""
    )


def _make_language_modelling_task(kind: TaskKind, settings: PipelineSettings, tokenizer: RowTokenizer) -> Task:
    """Return the masked or causal language modelling task, depending on `kind`. For masked language modelling, the task
    contains the vocabulary from which replacements for masked tokens are drawn.
    """
    vocabulary = make_mask_vocabulary(tokenizer) if kind == _MASKED else NO_VOCABULARY
    return import_task_class(kind)(settings.task.model_copy(update={"name": kind}), (), vocabulary)


def _choose_language_modelling_task(config: BertConfig) -> TaskKind:
    """Return causal language modelling for a BERT with causal attention, otherwise masked language modelling."""
    return "causal-language-modelling" if config.attention == "causal" else _MASKED


def load_initial_weights(path: Path, task: Task | None, *, allow_missing_head: bool = True) -> InitialWeights:
    """Load the stored weights of an encoder, and the weights of a task's head if they are stored.

    Args:
        path: Weights of any supported kind.
        task: The task. None reads only the encoder, whatever its head is.
        allow_missing_head: Whether the head may be missing. Otherwise it must be stored with the expected shapes.

    Raises:
        InputError: The weights are incomplete, or a head that must be stored is missing or has other shapes.
    """
    head = VectorHead("cls", normalize=False) if task is None else task.head
    if not is_bert(path):  # every other encoder is read by `transformers`, which also names its variables
        from gaudi_bert.encoders.encoder_weights import find_model_sizes, read_encoder_config, read_encoder_weights

        folder = path if path.is_dir() else path.parent
        # This raises an error if the model cannot process packs, so call it before reading the weights.
        sizes = find_model_sizes(read_encoder_config(folder / "config.json"), head)
        other, name, values, fresh = read_encoder_weights(folder, head, head_may_be_missing=allow_missing_head)
        files = (file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin") or file.name == "config.json")
        identity = " ".join(map(fingerprint_file, sorted(files)))
        return InitialWeights(folder, f"{other.model_type} of transformers", other, sizes, name, values, fresh, identity)
    weights = read_weights(path)
    if weights.config is None:
        raise InputError(
            f"{weights.path}: the weights have no configuration; put config.json or bert_config.json next to the weights"
        )
    is_causal = isinstance(head, TaskHead) and head.is_causal
    config = dataclasses.replace(weights.config, attention="causal") if is_causal else weights.config
    specs = parameter_specs_with_head(config, head)
    known = {name: weights.variables[name] for name in specs if name in weights.variables}
    shapes = {name: spec.shape for name, spec in specs.items()}
    problem = None if allow_missing_head or isinstance(head, VectorHead) else find_shape_mismatch(shapes, known)
    if problem is not None:
        raise InputError(f"{path}: {problem}; fine-tune the model again")
    variables = {name: value for name, value in known.items() if value.shape == specs[name].shape}
    fresh = tuple(name for name in specs if name not in variables)
    for name in fresh:
        if name.startswith("bert/") and not name.startswith("bert/pooler/"):
            raise InputError(f"{weights.path}: {name} is missing; pass the weights of a complete encoder")
    checksum = 0
    for name, value in sorted(weights.variables.items()):
        content = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        checksum = zlib.crc32(content.data, zlib.crc32(name.encode(), checksum))
    # `transformers` expects a pooler in every BERT, so keep the pooler although embeddings do not use it. If the weights
    # have no pooler, use initial values.
    unused = {name: spec for name, spec in parameter_specs(config).items() if name.startswith("bert/pooler/")}
    kept = {
        name: np.asarray(
            weights.variables.get(name, draw_initial_value(name, spec, config.initializer_range, 0)), np.float32
        )
        for name, spec in (unused.items() if isinstance(head, VectorHead) else ())
    }
    return InitialWeights(
        path=weights.path,
        kind=weights.kind,
        config=config,
        sizes=config.sizes,
        architecture="BertModel" if task is None else task.architecture,
        variables=variables,
        fresh=fresh,
        identity=f"{checksum:08x}",
        kept=kept,
    )


@dataclass(frozen=True)
class TaskDescription:
    """The task of a fine-tuned model, as described by the files in the model's folder.

    Attributes:
        path: The folder.
        task: The task.
        labels: The names of the labels by number.
        max_sequence_length: The largest number of tokens in a sequence during training. If this is unknown, the maximum of
            the tokenizer, or None.
        settings: The settings of the task with which the model was trained.
        texts: How the model reads its texts, and the activation that it applies to the logit of a pair.
    """

    path: Path
    task: TaskName
    labels: tuple[str, ...]
    max_sequence_length: int | None
    settings: TaskSettings
    texts: SentenceSettings = field(default_factory=SentenceSettings)

    def make_task(self, settings: TaskSettings | None = None) -> Task:
        """Return the task of the model. If `settings` is None, use the settings that the model was trained with."""
        task = import_task_class(self.task)(settings or self.settings, self.labels)
        task.activation = self.texts.activation or task.activation
        return task


def read_task_description(path: Path) -> TaskDescription:
    """Read the task of a fine-tuned model from the folder that `finetune` or transformers wrote.

    Raises:
        InputError: The folder contains no finished model, or a model without a supported task.
    """
    check_run_is_finished(path)
    file = path / "config.json"
    if not file.is_file():
        raise InputError(
            f"{path}: the folder contains no config.json; pass a folder that transformers or `gaudi-bert finetune` wrote. If"
            " a fine-tuning run was stopped, run its command again to finish it"
        )
    values = TaskConfig.read(file)
    own, labels, cross_encoder = values.gaudi_bert, values.labels, None
    name = values.architectures[0] if values.architectures else "nothing"
    if name.endswith("ForSequenceClassification"):
        cross_encoder = read_cross_encoder_settings(path, values)
    if values.id2label and values.num_labels not in (None, len(values.id2label)):
        raise InputError(
            f"{file}: num_labels is {values.num_labels}, but id2label has {format_count(len(values.id2label), 'label')}; "
            "correct one of the two values"
        )
    is_reranker = cross_encoder is not None and len(labels) == 1
    task = own.task or ("reranking" if is_reranker else _infer_task(name, values.problem_type, labels, path))
    if task in TASKS_WITH_LABELS:
        check_labels(labels, str(file), has_exactly_one=task == "classification")
    texts = cross_encoder or SentenceSettings(max_sequence_length=read_tokenizer_max_length(path))
    length = own.max_sequence_length or texts.max_sequence_length
    settings = own.settings or TaskSettings(name=task)
    return TaskDescription(path, task, labels if task in TASKS_WITH_LABELS else (), length, settings, texts)


def _infer_task(name: str, problem: str | None, labels: tuple[str, ...], path: Path) -> TaskName:
    """Infer the task of a model that transformers wrote, using its class name, its problem type and its labels."""
    if name.endswith("ForSequenceClassification"):
        if problem == "regression" and len(labels) > 1:
            raise InputError(
                f"{path}: the model predicts {len(labels)} values, but regression supports one value; pass another model"
            )
        return TASK_BY_PROBLEM_TYPE[problem or ("regression" if len(labels) == 1 else "single_label_classification")]
    task = next((task for ending, task in _ARCHITECTURES.items() if name.endswith(ending)), None)
    if task is None:
        raise InputError(
            f"{path}: the architecture is {name}, which has no head for a supported task; fine-tune the model first"
        )
    return task


# A model does not store these task settings, because they describe one data file, and the next file may differ.
_OF_A_FILE = {"labels", "format", "on_bad_row"}


def write_task_folder(
    folder: Path,
    start: InitialWeights,
    task: Task,
    variables: WeightArrays,
    tokenizer: RowTokenizer,
    max_sequence_length: int,
) -> None:
    """Write a fine-tuned model into an existing folder, as `config.json`, `model.safetensors` and the files of the
    tokenizer.

    Args:
        folder: The folder.
        start: The weights with which the training began.
        task: The task.
        variables: The trained variables.
        tokenizer: The tokenizer.
        max_sequence_length: The largest number of tokens in a sequence during training.
    """
    config = start.config
    own = {
        "task": task.name,
        "max_sequence_length": max_sequence_length,
        "settings": task.settings.model_dump(mode="json", exclude_defaults=True, exclude=_OF_A_FILE),
    }
    if isinstance(config, BertConfig):
        tensors = convert_to_hugging_face({**variables, **start.kept})
        values = {**config.to_json(), "model_type": "bert", "pad_token_id": tokenizer.pad_id or 0}
    else:
        tensors = {name: np.asarray(value, order="C") for name, value in variables.items()}
        values = {**config.to_json(), "dtype": "float32"}
    with atomic_file(folder / "model.safetensors") as handle:
        handle.write(save(tensors, metadata={"format": "pt"}))
    values |= {**task.make_config_json(), "architectures": [start.architecture]}
    write_json(folder / "config.json", {**values, "gaudi_bert": own})
    # Other programs truncate texts to the maximum length that the tokenizer states, so state the sequence length of the
    # training. A language model is an exception, because it can read every text that fits its positions.
    save_tokenizer(tokenizer, folder, start.sizes.positions if task.name in LANGUAGE_MODELLING else max_sequence_length)


def make_mask_vocabulary(tokenizer: RowTokenizer) -> Vocabulary:
    """Convert the vocabulary of a tokenizer to the `Vocabulary` that masked language modelling uses."""
    return Vocabulary(tokenizer.vocabulary_size, tokenizer.special_ids, tokenizer.mask_id)
