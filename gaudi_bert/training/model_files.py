"""The JSON files of a model's folder, typed and with limits: what is wrong with one is reported before a model is built.

They are files of others (`transformers`, `sentence-transformers`). What those libraries would apply is either applied here
or rejected by name. No TensorFlow.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from gaudi_bert.artefacts.base import Figures
from gaudi_bert.common.arrays import Float32Array
from gaudi_bert.common.errors import InputError, join_with_and, short_repr, shorten
from gaudi_bert.common.files import read_json, write_json
from gaudi_bert.common.progress import format_count
from gaudi_bert.config.sections import TaskName, TaskSettings
from gaudi_bert.model.config import LARGEST_SIZES
from gaudi_bert.model.heads import Activation, Pooling
from gaudi_bert.training.weights import COPY_AGAIN, FileName

_Positions = Annotated[int, Field(ge=3, le=LARGEST_SIZES["max_position_embeddings"])]
_MOST_LABELS = 1_000_000
_USUAL_LABELS = 2
"""The number that `transformers` assumes where config.json states none, and omits when it writes the file."""


class _OwnConfig(Figures):
    """Values that our own commands need besides, under `gaudi_bert` in config.json."""

    task: TaskName | None = None
    settings: TaskSettings | None = Field(None, strict=False)
    max_sequence_length: _Positions | None = None


class TaskConfig(Figures):
    """config.json: the head of a model, and the names of its labels."""

    remedy = COPY_AGAIN

    architectures: list[Annotated[str, Field(max_length=200)]] | None = None
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] | None = None
    id2label: Annotated[dict[str, str | int], Field(max_length=_MOST_LABELS)] | None = None
    num_labels: Annotated[int, Field(ge=1, le=_MOST_LABELS)] | None = None
    gaudi_bert: _OwnConfig = _OwnConfig()
    sentence_transformers: dict[str, Any] | None = None
    sbert_ce_default_activation_function: str | None = None

    @field_validator("id2label")
    @classmethod
    def _are_numbered(cls, names: dict[str, str | int] | None) -> dict[str, str | int] | None:
        missing = [number for number in range(len(names or ())) if str(number) not in (names or {})]
        if missing:
            raise ValueError(f"has no label {missing[0]}, and there are {len(names or ())}")
        return names

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the labels in the order of their numbers; without names, those that `transformers` gives them."""
        names = self.id2label or {str(number): f"LABEL_{number}" for number in range(self.num_labels or _USUAL_LABELS)}
        return tuple(str(names[str(number)]) for number in range(len(names)))

    @property
    def activation(self) -> object:
        """What a `CrossEncoder` of sentence-transformers 5 or older applies to its logits; None where nothing is stored."""
        own = self.sentence_transformers or {}
        return own.get("activation_fn", self.sbert_ce_default_activation_function)


def tokenizer_length(folder: Path) -> int | None:
    """The most tokens of a text by tokenizer_config.json; a number that stands for none is larger than all positions."""
    file = folder / "tokenizer_config.json"
    content = read_json(file) if os.path.lexists(file) else None
    most = content.get("model_max_length") if isinstance(content, dict) else None
    return most if type(most) is int and most > 2 else None


# --- Folders of sentence-transformers (5 and 6): how vectors are pooled, where texts are cut, what precedes them
#
# `modules.json` lists what the vectors go through, `1_Pooling/config.json` states how they are pooled,
# `sentence_bert_config.json` the most tokens of a text (since version 6 the tokenizer does).

_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
_MODE = "pooling_mode_"
_MODES_BY_NAME: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "max": "max", "lasttoken": "last"}
_MODULES = "sentence_transformers.models"
_CHOOSE = "choose cls, mean, max or last with --pooling (of finetune: --set task.pooling=)"
_SETTINGS = [
    f"sentence_{name}_config.json" for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta")
]
_PROMPTS = "config_sentence_transformers.json"
_USUAL_PROMPTS = {"query": None, "document": None}
_USUAL_OUTPUTS = {
    "feature-extraction": ("last_hidden_state", "token_embeddings"),
    "sequence-classification": ("logits", "scores"),
}
"""For each task, which output of the model the module Transformer takes, and what it calls it."""
_OF_THE_LOADER = ("subfolder", "token", "cache_dir", "revision", "local_files_only", "trust_remote_code")
_NOT_APPLIED = ("processing_kwargs", "query_length", "document_length", "query_expansion", "tokenizer_name_or_path")
_HARMLESS_FOR_MODELS = ("attn_implementation", "add_pooling_layer", "device_map", "low_cpu_mem_usage")
_POOLING_KEYS = ("word_embedding_dimension", "embedding_dimension", "pooling_mode", "include_prompt")


class _Module(Figures):
    """An entry of modules.json, and the folder with its settings."""

    type: str
    path: Literal[""] | FileName = ""

    @property
    def kind(self) -> str:
        """The name of the class."""
        return self.type.rpartition(".")[2]


class _TransformerSettings(Figures):
    """sentence_bert_config.json: how the module Transformer is opened, and what it does with texts.

    `unpad_inputs` only chooses how a batch is laid out, and the loader sets `backend` and `cache_dir` itself.
    """

    model_config = ConfigDict(extra="forbid")
    remedy = COPY_AGAIN

    max_seq_length: Annotated[int, Field(ge=1, le=LARGEST_SIZES["max_position_embeddings"])] | None = None
    do_lower_case: bool | None = None
    transformer_task: str = "feature-extraction"
    modality_config: dict[str, Any] | None = None
    module_output_name: str | None = None
    processing_kwargs: dict[str, Any] | None = None
    query_length: int | None = None
    document_length: int | None = None
    query_expansion: Any = None
    tokenizer_name_or_path: str | None = None
    unpad_inputs: bool | None = None
    backend: str | None = None
    cache_dir: str | None = None
    model_args: dict[str, Any] | None = None
    model_kwargs: dict[str, Any] | None = None
    tokenizer_args: dict[str, Any] | None = None
    processor_kwargs: dict[str, Any] | None = None
    config_args: dict[str, Any] | None = None
    config_kwargs: dict[str, Any] | None = None

    def arguments(self, old_name: str, name: str) -> dict[str, Any]:
        """Return the arguments for one class of `transformers`, without those that the loader replaces by its own."""
        stored = getattr(self, old_name) if old_name in self.model_fields_set else getattr(self, name)
        return {key: value for key, value in (stored or {}).items() if key not in _OF_THE_LOADER}

    def unsupported(self, task: str, config: Mapping[str, Any]) -> Iterator[str]:
        """Yield what sentence-transformers would apply and we do not, for a folder with this config.json."""
        output, name = _USUAL_OUTPUTS[task]
        if self.transformer_task != task:
            yield f"transformer_task {short_repr(self.transformer_task)}"
        usual = {"method": "forward", "method_output_name": output}
        modalities = {"text": usual} if self.modality_config is None else self.modality_config
        if modalities.get("text") != usual:
            yield "modality_config.text"
        if "message" in modalities:
            yield "modality_config.message"
        if self.module_output_name not in (None, name):
            yield f"module_output_name {short_repr(self.module_output_name)}"
        yield from (key for key in _NOT_APPLIED if getattr(self, key))
        for key, value in self.arguments("model_args", "model_kwargs").items():
            is_usual_type = key in ("dtype", "torch_dtype") and value in (None, "auto", "float32")
            if key not in _HARMLESS_FOR_MODELS and not is_usual_type:
                yield f"model_kwargs.{key}"
        for key, value in self.arguments("config_args", "config_kwargs").items():
            if key != "use_cache" and (key not in config or config[key] != value):
                yield f"config_kwargs.{key} (which config.json can hold)"
        if self.arguments("tokenizer_args", "processor_kwargs").get("use_fast", True) is not True:
            yield "processor_kwargs.use_fast"


class _Prompts(Figures):
    """config_sentence_transformers.json: texts by name, and the name of the one that is used by default."""

    file_name = _PROMPTS
    remedy = COPY_AGAIN

    prompts: dict[str, str | None] = Field({}, max_length=10_000)
    default_prompt_name: str | None = None
    truncate_dim: Annotated[int, Field(ge=1)] | None = None
    model_type: Literal["SentenceTransformer", "CrossEncoder"] | None = None
    activation_fn: str | None = None


@dataclass(frozen=True)
class SentenceFolder:
    """The way in which a folder of sentence-transformers reads texts, and makes vectors or scores of them.

    Attributes:
        max_sequence_length: longer texts are cut; None where sentence-transformers has no number for it.
        lower_case: whether the tokenizer writes texts in lower case first.
        tokenizer_settings: arguments for the tokenizer's class, which replace those in the tokenizer's own files.
        prompts: what may precede each text, by name; `default_prompt_name`: that of the one that is used by itself.
        pools_prompt: whether the tokens of the prompt are pooled too.
        truncate_dim: how many values of a vector remain; None for all.
        activation: what a `CrossEncoder` applies to its logits; None where the folder is not one.
    """

    pooling: Pooling = "mean"
    normalize: bool = False
    max_sequence_length: int | None = None
    lower_case: bool = False
    prompts: Mapping[str, str | None] = field(default_factory=dict)
    default_prompt_name: str | None = None
    pools_prompt: bool = True
    truncate_dim: int | None = None
    tokenizer_settings: Mapping[str, Any] = field(default_factory=dict)
    activation: Activation | None = None

    def cut(self, vectors: Float32Array, *, normalize_again: bool = False) -> Float32Array:
        """Return the first `truncate_dim` values of vectors; with `normalize_again` as vectors of the length 1."""
        if self.truncate_dim is None or self.truncate_dim >= vectors.shape[1]:
            return vectors
        shorten = vectors[:, : self.truncate_dim]
        if normalize_again:
            shorten = shorten / np.maximum(np.linalg.norm(shorten, axis=1, keepdims=True), 1e-12)
        return np.ascontiguousarray(shorten, np.float32)

    def prompt(self, name: str | None) -> str:
        """The prompt of this name, or the default one; empty where there is none."""
        name = self.default_prompt_name if name is None else name
        if name is not None and name not in self.prompts:
            known = ", ".join(name for name, prompt in self.prompts.items() if prompt) or "none"
            raise InputError(
                f"prompt {short_repr(name)}: the model's folder has {shorten(known)} ({_PROMPTS}); give --prompt TEXT, "
                "or --prompt '' for none"
            )
        return (self.prompts[name] or "") if name is not None else ""


def read_sentence_folder(folder: Path, pooling: Pooling | None = None) -> SentenceFolder | None:
    """Return how a folder of a `SentenceTransformer` makes vectors; None if sentence-transformers did not write the folder.

    `pooling` replaces that of its modules.

    Raises:
        InputError: The folder asks for something that is not done here.
    """
    modules = _read_modules(folder)
    if modules is None:
        return None
    kinds = [module.kind for module in modules]
    is_bare = pooling is not None and kinds == ["Transformer"]
    if not is_bare and kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise InputError(
            f"{folder}: modules.json lists {shorten(', '.join(kinds)) or 'no module'}; only Transformer, Pooling and, "
            "optionally, Normalize are supported, in this order; for the transformer alone, pass a copy of the folder "
            "without modules.json"
        )
    if modules[0].path:
        inner = folder / modules[0].path
        raise InputError(f"{folder}: its transformer is in {inner}; give --model {inner}, and {_CHOOSE}")
    prompts = _Prompts.read_if_present(folder / _PROMPTS) or _Prompts()
    if prompts.model_type == "CrossEncoder":
        raise InputError(f"{folder}: is a CrossEncoder, which scores pairs and has no vectors; use `gaudi-bert predict`")
    pooling_file = folder / (modules[1].path if len(modules) > 1 else "1_Pooling") / "config.json"
    pooling_settings = _read_object(pooling_file)
    for module in modules[2:]:
        file = folder / module.path / "config.json"
        names = [key for key, value in _read_object(file).items() if value != "sentence_embedding"] if module.path else []
        if names:
            raise InputError(f"{file}: {short_repr(names[0])} is not applied here; run the model with sentence-transformers")
    return replace(
        _read_transformer(folder, "feature-extraction", prompts),
        pooling=pooling or _pooling(pooling_file, pooling_settings),
        normalize="Normalize" in kinds,
        pools_prompt=bool(pooling_settings.get("include_prompt", True)),
        truncate_dim=prompts.truncate_dim,
    )


def read_cross_encoder(folder: Path, config: TaskConfig) -> SentenceFolder | None:
    """Return how a folder of a `CrossEncoder` reads pairs and scores them; None if sentence-transformers did not write it.

    Version 6 writes modules.json and keeps the activation and the prompts in config_sentence_transformers.json. Older
    versions keep the activation in config.json.

    Raises:
        InputError: The folder asks for something that is not done here.
    """
    modules = _read_modules(folder)
    stored = None if modules is None else _Prompts.read_if_present(folder / _PROMPTS)
    if modules is None or stored is None or stored.model_type != "CrossEncoder":
        if config.activation is None:
            return None
        activation = _activation(folder / "config.json", config.activation, len(config.labels))
        return SentenceFolder(max_sequence_length=tokenizer_length(folder), activation=activation)
    kinds = [module.kind for module in modules]
    if kinds != ["Transformer"] or modules[0].path:
        raise InputError(
            f"{folder}: modules.json lists {shorten(', '.join(kinds)) or 'no module'}; of a CrossEncoder, only one "
            "Transformer in the folder itself is supported; run it with sentence-transformers"
        )
    file, name = (_PROMPTS, stored.activation_fn) if stored.activation_fn else ("config.json", config.activation)
    activation = _activation(folder / file, name, len(config.labels))
    return replace(_read_transformer(folder, "sequence-classification", stored), activation=activation)


def _activation(file: Path, name: object, labels: int) -> Activation:
    """Return the activation of a `CrossEncoder` by the name of its class; None is the default of sentence-transformers."""
    module, _, kind = str(name).rpartition(".")
    if name is None:
        module, kind = "torch", "Sigmoid" if labels == 1 else "Identity"
    known: tuple[Activation, ...] = get_args(Activation) if labels == 1 else ("Identity",)
    chosen = next((activation for activation in known if activation == kind), None)
    if chosen is None or module.partition(".")[0] != "torch":
        raise InputError(
            f"{file}: the activation_fn {short_repr(name)} is not supported for {format_count(labels, 'label')}, only "
            f"{join_with_and(known)} of PyTorch; run the model with sentence-transformers"
        )
    return chosen


def _read_modules(folder: Path) -> list[_Module] | None:
    """Return the modules of a folder; None if sentence-transformers did not write the folder."""
    file = folder / "modules.json"
    if not os.path.lexists(file):
        return None
    try:
        modules = TypeAdapter(list[_Module]).validate_python(read_json(file))
    except ValidationError as error:
        raise InputError(f"{file}: is not a list of modules; {COPY_AGAIN}") from error
    foreign = [module.type for module in modules if not module.type.startswith("sentence_transformers.")]
    if foreign:
        problem = f"{short_repr(foreign[0])} is not a class of sentence-transformers, and other code is not run here"
        raise InputError(f"{file}: {problem}; run the model with sentence-transformers")
    return modules


def _read_object(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file; empty if there is no such file, or no object in it."""
    content = read_json(file) if os.path.lexists(file) else {}
    return content if isinstance(content, dict) else {}


def _read_transformer(folder: Path, task: str, prompts: _Prompts) -> SentenceFolder:
    """Return how the module Transformer of a folder reads texts; reject by name what it does otherwise than we do."""
    file = next((path for name in _SETTINGS if os.path.lexists(path := folder / name)), folder / _SETTINGS[0])
    settings = _TransformerSettings.read_if_present(file) or _TransformerSettings()
    unsupported = list(settings.unsupported(task, _read_object(folder / "config.json")))
    if unsupported:
        raise InputError(
            f"{file}: {join_with_and(unsupported)} may change the results and cannot be applied here; remove it, or run the "
            "model with sentence-transformers"
        )
    arguments = settings.arguments("tokenizer_args", "processor_kwargs")
    most = arguments.pop("model_max_length", None) or settings.max_seq_length or tokenizer_length(folder)
    return SentenceFolder(
        max_sequence_length=most if type(most) is int and most > 2 else None,
        lower_case=settings.do_lower_case is True,
        prompts={**_USUAL_PROMPTS, **prompts.prompts},
        default_prompt_name=prompts.default_prompt_name,
        tokenizer_settings={key: value for key, value in arguments.items() if key != "use_fast"},
    )


def _pooling(path: Path, settings: Mapping[str, Any]) -> Pooling:
    unknown = [key for key in settings if key not in _POOLING_KEYS and not key.startswith(_MODE)]
    if unknown:
        raise InputError(f"{path}: {short_repr(unknown[0])} is not applied here; run the model with sentence-transformers")
    given = settings.get("pooling_mode")
    if given is None:
        chosen = [name for name, value in settings.items() if name.startswith(_MODE) and value]
        known = [_MODES.get(name) for name in chosen]
    else:
        chosen = given if isinstance(given, list) else [given]
        known = [_MODES_BY_NAME.get(name) if isinstance(name, str) else None for name in chosen]
    if len(known) != 1 or known[0] is None:
        modes = shorten(" and ".join(map(str, chosen))) or "nothing"
        raise InputError(f"{path}: pools by {modes}; only one of cls, mean, max and last can be done: {_CHOOSE}")
    return known[0]


def write_sentence_folder(
    folder: Path, settings: TaskSettings, start: SentenceFolder, max_sequence_length: int, hidden_size: int
) -> None:
    """Write modules.json, the pooling, perhaps the normalisation, the cut, and the prompts; modules.json comes last."""
    pooling = settings.pooling or "mean"
    modes = {name: mode == pooling for name, mode in _MODES.items()}
    kinds = {"Transformer": "", "Pooling": "1_Pooling", **({"Normalize": "2_Normalize"} if start.normalize else {})}
    for path in filter(None, kinds.values()):
        (folder / path).mkdir(exist_ok=True)
    write_json(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": hidden_size, **modes, "include_prompt": start.pools_prompt},
    )
    cut = {"max_seq_length": max_sequence_length, "do_lower_case": start.lower_case}
    write_json(folder / "sentence_bert_config.json", cut)
    prompts = {**start.prompts, "query": settings.query_prompt, "document": settings.document_prompt}
    stored = {
        "prompts": {name: prompt or "" for name, prompt in prompts.items()},
        "default_prompt_name": start.default_prompt_name,
        "similarity_fn_name": "cosine",
        **({} if start.truncate_dim is None else {"truncate_dim": start.truncate_dim}),
    }
    write_json(folder / "config_sentence_transformers.json", stored)
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"{_MODULES}.{kind}"}
        for number, (kind, path) in enumerate(kinds.items())
    ]
    write_json(folder / "modules.json", modules)
