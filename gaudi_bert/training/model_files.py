"""The JSON files of model folders, which are validated before a model is built.

`transformers` and `sentence-transformers` define these files. A setting that these libraries would apply is either applied
here as well, or rejected with an error that names it. This module does not import TensorFlow.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from gaudi_bert.artefacts.base import ExtensibleArtefact
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
# If config.json contains no labels, `transformers` assumes this number of labels.
_USUAL_LABELS = 2


class _GaudiBertConfig(ExtensibleArtefact):
    """The values that gaudi-bert stores in config.json under the key `gaudi_bert`.

    Only the commands of gaudi-bert read them.
    """

    task: TaskName | None = None
    settings: TaskSettings | None = Field(None, strict=False)
    max_sequence_length: _Positions | None = None


class TaskConfig(ExtensibleArtefact):
    """The keys of config.json that describe the task of a model and the names of its labels."""

    remedy = COPY_AGAIN

    architectures: list[Annotated[str, Field(max_length=200)]] | None = None
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] | None = None
    id2label: Annotated[dict[str, str | int], Field(max_length=_MOST_LABELS)] | None = None
    num_labels: Annotated[int, Field(ge=1, le=_MOST_LABELS)] | None = None
    gaudi_bert: _GaudiBertConfig = _GaudiBertConfig()
    sentence_transformers: dict[str, Any] | None = None
    sbert_ce_default_activation_function: str | None = None

    @field_validator("id2label")
    @classmethod
    def _check_label_numbers(cls, names: dict[str, str | int] | None) -> dict[str, str | int] | None:
        """Check that the keys of `id2label` are consecutive numbers, starting at 0."""
        missing = [number for number in range(len(names or ())) if str(number) not in (names or {})]
        if missing:
            raise ValueError(f"{len(names or ())} labels must be numbered from 0, but the number {missing[0]} is missing")
        return names

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the labels, in the order of their numbers.

        Labels without names are called `LABEL_0`, `LABEL_1` and so on.
        """
        names = self.id2label or {str(number): f"LABEL_{number}" for number in range(self.num_labels or _USUAL_LABELS)}
        return tuple(str(names[str(number)]) for number in range(len(names)))

    @property
    def activation_class(self) -> object:
        """The stored class name of a `CrossEncoder`'s activation function, or None.

        Versions of sentence-transformers before 6 store it in config.json.
        """
        return (self.sentence_transformers or {}).get("activation_fn", self.sbert_ce_default_activation_function)


def read_tokenizer_max_length(folder: Path) -> int | None:
    """Return the maximum number of tokens in a text, as specified by tokenizer_config.json in a model folder.

    Returns:
        The number, which may be far larger than the model's positions, because `transformers` writes a huge number for "no
        limit". None if the file does not contain a usable number.
    """
    most = _read_json_object(folder / "tokenizer_config.json").get("model_max_length")
    return most if type(most) is int and most > 2 else None


# --- Folders of sentence-transformers 5 and 6: pooling, truncation and prompts
#
# `modules.json` lists the modules in the order in which they are applied. `1_Pooling/config.json` specifies the pooling, and
# `sentence_bert_config.json` the maximum number of tokens, which since version 6 the files of the tokenizer specify.

_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
_MODE = "pooling_mode_"
_MODES_BY_NAME: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "max": "max", "lasttoken": "last"}

_CHOOSE = "choose cls, mean, max or last with --pooling (of finetune: --set task.pooling=)"
_SETTINGS = [
    f"sentence_{name}_config.json" for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta")
]
_PROMPTS = "config_sentence_transformers.json"

# For each task, the name of the model output that the `Transformer` module reads, and the name under which the module passes
# this output on.
_USUAL_OUTPUTS = {
    "feature-extraction": ("last_hidden_state", "token_embeddings"),
    "sequence-classification": ("logits", "scores"),
}
_OF_THE_LOADER = ("subfolder", "token", "cache_dir", "revision", "local_files_only", "trust_remote_code")
_NOT_APPLIED = ("processing_kwargs", "query_length", "document_length", "query_expansion", "tokenizer_name_or_path")
_HARMLESS_FOR_MODELS = ("attn_implementation", "add_pooling_layer", "device_map", "low_cpu_mem_usage")
_POOLING_KEYS = ("word_embedding_dimension", "embedding_dimension", "pooling_mode", "include_prompt")


class _Module(ExtensibleArtefact):
    """An entry of modules.json, which names the class of a module and the folder that contains its settings."""

    type: str
    path: Literal[""] | FileName = ""

    @property
    def class_name(self) -> str:
        """The name of the class without the Python module that defines it."""
        return self.type.rpartition(".")[2]


class _TransformerSettings(ExtensibleArtefact):
    """The schema of sentence_bert_config.json, the settings of the `Transformer` module.

    `unpad_inputs`, `backend` and `cache_dir` are ignored. The first only changes the layout of a batch, and the loader of
    sentence-transformers sets the others itself.
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

    def collect_from_pretrained_kwargs(self, old_key: str, current_key: str) -> dict[str, Any]:
        """Return the keyword arguments for a `from_pretrained` method that sentence_bert_config.json contains, without those
        that sentence-transformers sets itself.

        Args:
            old_key: The key under which older versions store the arguments. It takes precedence.
            current_key: The key under which current versions store them.
        """
        stored = getattr(self, old_key) if old_key in self.model_fields_set else getattr(self, current_key)
        return {key: value for key, value in (stored or {}).items() if key not in _OF_THE_LOADER}

    def find_unsupported_settings(self, task: str, config: Mapping[str, Any]) -> Iterator[str]:
        """Yield the names of unsupported settings that may change the results.

        Args:
            task: "feature-extraction" or "sequence-classification".
            config: The content of config.json in the same folder.
        """
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
        for key, value in self.collect_from_pretrained_kwargs("model_args", "model_kwargs").items():
            is_usual_type = key in ("dtype", "torch_dtype") and value in (None, "auto", "float32")
            if key not in _HARMLESS_FOR_MODELS and not is_usual_type:
                yield f"model_kwargs.{key}"
        for key, value in self.collect_from_pretrained_kwargs("config_args", "config_kwargs").items():
            if key != "use_cache" and (key not in config or config[key] != value):
                yield f"config_kwargs.{key} (which belongs in config.json)"
        if self.collect_from_pretrained_kwargs("tokenizer_args", "processor_kwargs").get("use_fast", True) is not True:
            yield "processor_kwargs.use_fast"


class _Prompts(ExtensibleArtefact):
    """The schema of config_sentence_transformers.json, which contains named prompts and the type of the model."""

    file_name = _PROMPTS
    remedy = COPY_AGAIN

    prompts: dict[str, str | None] = Field({}, max_length=10_000)
    default_prompt_name: str | None = None
    truncate_dim: Annotated[int, Field(ge=1)] | None = None
    model_type: Literal["SentenceTransformer", "CrossEncoder"] | None = None
    activation_fn: str | None = None


@dataclass(frozen=True)
class SentenceSettings:
    """How a sentence-transformers model converts texts to vectors, or pairs of texts to scores.

    Attributes:
        pooling: How the hidden states of a text become one vector.
        normalize: Whether vectors are scaled to length 1.
        max_sequence_length: The number of tokens to which texts are truncated. None if the folder specifies no number.
        lower_case: Whether texts are converted to lower case before they are tokenized.
        prompts: The texts that may be prepended to each text, by name.
        default_prompt_name: The name of the prompt that is used if the user chooses none, or None.
        pools_prompt: Whether the tokens of the prompt are included in the pooling.
        truncate_dim: The number of values of a vector that are kept. None if all are kept.
        tokenizer_settings: Arguments for the tokenizer class, which override those in the tokenizer's own files.
        activation: The function that a `CrossEncoder` applies to its logits. None for other models.
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

    def truncate_vectors(self, vectors: Float32Array, *, renormalize: bool = False) -> Float32Array:
        """Truncate vectors to their first `truncate_dim` values.

        Args:
            vectors: float32 [texts, values].
            renormalize: Whether truncated vectors are scaled to length 1.

        Returns:
            The vectors, unchanged if they are not longer than `truncate_dim`.
        """
        if self.truncate_dim is None or self.truncate_dim >= vectors.shape[1]:
            return vectors
        shorten = vectors[:, : self.truncate_dim]
        if renormalize:
            shorten = shorten / np.maximum(np.linalg.norm(shorten, axis=1, keepdims=True), 1e-12)
        return np.ascontiguousarray(shorten, np.float32)

    def find_prompt(self, name: str | None) -> str:
        """Return the text of a named prompt. If the name is None, return the default prompt.

        Return an empty string if there is no default prompt.

        Raises:
            InputError: There is no prompt with this name.
        """
        name = self.default_prompt_name if name is None else name
        if name is not None and name not in self.prompts:
            known = ", ".join(name for name, prompt in self.prompts.items() if prompt) or "none"
            raise InputError(
                f"prompt {short_repr(name)}: the model does not define this prompt; {_PROMPTS} defines {shorten(known)}; "
                "pass --prompt TEXT, or --prompt '' for no prompt"
            )
        return (self.prompts[name] or "") if name is not None else ""


def read_sentence_settings(folder: Path, pooling: Pooling | None = None) -> SentenceSettings | None:
    """Read the settings that determine how a `SentenceTransformer` model computes vectors.

    Args:
        folder: The folder of the model.
        pooling: Replaces the pooling that the folder specifies.

    Returns:
        The settings, or None if the folder has no modules.json and so was not written by sentence-transformers.

    Raises:
        InputError: The folder specifies something that is not supported.
    """
    modules = _read_modules(folder)
    if modules is None:
        return None
    kinds = [module.class_name for module in modules]
    is_bare = pooling is not None and kinds == ["Transformer"]
    if not is_bare and kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise InputError(
            f"{folder}: modules.json lists {shorten(', '.join(kinds)) or 'no module'}, but only Transformer, Pooling and, "
            "optionally, Normalize are supported, in this order; to use the transformer alone, pass a copy of the folder "
            "without modules.json"
        )
    if modules[0].path:
        inner = folder / modules[0].path
        raise InputError(f"{folder}: the transformer is in {inner}; pass --model {inner}, and {_CHOOSE}")
    prompts = _Prompts.read_if_present(folder / _PROMPTS) or _Prompts()
    if prompts.model_type == "CrossEncoder":
        raise InputError(
            f"{folder}: the model is a CrossEncoder, which scores pairs and computes no vectors; use `gaudi-bert predict`"
        )
    pooling_file = folder / (modules[1].path if len(modules) > 1 else "1_Pooling") / "config.json"
    pooling_settings = _read_json_object(pooling_file)
    for module in modules[2:]:
        file = folder / module.path / "config.json"
        names = (
            [key for key, value in _read_json_object(file).items() if value != "sentence_embedding"] if module.path else []
        )
        if names:
            raise InputError(f"{file}: {short_repr(names[0])} is not supported; run the model with sentence-transformers")
    return replace(
        _read_transformer_settings(folder, "feature-extraction", prompts),
        pooling=pooling or _parse_pooling(pooling_file, pooling_settings),
        normalize="Normalize" in kinds,
        pools_prompt=bool(pooling_settings.get("include_prompt", True)),
        truncate_dim=prompts.truncate_dim,
    )


def read_cross_encoder_settings(folder: Path, config: TaskConfig) -> SentenceSettings | None:
    """Read the settings that determine how a `CrossEncoder` model scores pairs of texts.

    Version 6 of sentence-transformers writes modules.json, and stores the activation and the prompts in
    config_sentence_transformers.json. Older versions store the activation in config.json.

    Args:
        folder: The folder of the model.
        config: The content of its config.json.

    Returns:
        The settings, or None if the folder is not that of a `CrossEncoder`.

    Raises:
        InputError: The folder specifies something that is not supported.
    """
    modules = _read_modules(folder)
    stored = None if modules is None else _Prompts.read_if_present(folder / _PROMPTS)
    if modules is None or stored is None or stored.model_type != "CrossEncoder":
        if config.activation_class is None:
            return None
        activation = _parse_activation(folder / "config.json", config.activation_class, len(config.labels))
        return SentenceSettings(max_sequence_length=read_tokenizer_max_length(folder), activation=activation)
    kinds = [module.class_name for module in modules]
    if kinds != ["Transformer"] or modules[0].path:
        raise InputError(
            f"{folder}: modules.json lists {shorten(', '.join(kinds)) or 'no module'}, but a CrossEncoder is only supported "
            "if it lists one Transformer in the folder itself; run the model with sentence-transformers"
        )
    file, name = (_PROMPTS, stored.activation_fn) if stored.activation_fn else ("config.json", config.activation_class)
    activation = _parse_activation(folder / file, name, len(config.labels))
    return replace(_read_transformer_settings(folder, "sequence-classification", stored), activation=activation)


def _parse_activation(file: Path, class_name: object, label_count: int) -> Activation:
    """Return the activation function for a stored class name, such as `torch.nn.modules.activation.Sigmoid`.

    Args:
        file: The file that contains the name, for the error message.
        class_name: The class name with its module. None stands for the default of sentence-transformers: Sigmoid for one
            label, otherwise Identity.
        label_count: The number of labels.

    Raises:
        InputError: The activation is not supported for this number of labels.
    """
    module, _, kind = str(class_name).rpartition(".")
    if class_name is None:
        module, kind = "torch", "Sigmoid" if label_count == 1 else "Identity"
    known: tuple[Activation, ...] = get_args(Activation) if label_count == 1 else ("Identity",)
    chosen = next((activation for activation in known if activation == kind), None)
    if chosen is None or module.partition(".")[0] != "torch":
        raise InputError(
            f"{file}: activation_fn {short_repr(class_name)} is not supported; for a model with "
            f"{format_count(label_count, 'label')}, gaudi-bert supports only {join_with_and(known)} from PyTorch; run the "
            "model with sentence-transformers"
        )
    return chosen


def _read_modules(folder: Path) -> list[_Module] | None:
    """Return the entries of modules.json, or None if the folder does not contain this file.

    Raises:
        InputError: The file is not a list of modules, or names a class that sentence-transformers does not define.
    """
    file = folder / "modules.json"
    if not os.path.lexists(file):
        return None
    try:
        modules = TypeAdapter(list[_Module]).validate_python(read_json(file))
    except ValidationError as error:
        raise InputError(f"{file}: the file is not a list of modules; {COPY_AGAIN}") from error
    foreign = [module.type for module in modules if not module.type.startswith("sentence_transformers.")]
    if foreign:
        raise InputError(
            f"{file}: {short_repr(foreign[0])} is not a class of sentence-transformers, and code of other packages is not "
            "supported; run the model with sentence-transformers"
        )
    return modules


def _read_json_object(file: Path) -> dict[str, Any]:
    """Return the JSON object that a file contains.

    Return an empty dictionary if the file does not exist or does not contain an object.
    """
    content = read_json(file) if os.path.lexists(file) else {}
    return content if isinstance(content, dict) else {}


def _read_transformer_settings(folder: Path, task: str, prompts: _Prompts) -> SentenceSettings:
    """Read the settings that determine how the `Transformer` module in a folder tokenizes texts.

    Raises:
        InputError: The module has settings that are not supported. The error names them.
    """
    file = next((path for name in _SETTINGS if os.path.lexists(path := folder / name)), folder / _SETTINGS[0])
    settings = _TransformerSettings.read_if_present(file) or _TransformerSettings()
    unsupported = list(settings.find_unsupported_settings(task, _read_json_object(folder / "config.json")))
    if unsupported:
        raise InputError(
            f"{file}: settings that are not supported may change the results: {join_with_and(unsupported)}; remove them, or "
            "run the model with sentence-transformers"
        )
    arguments = settings.collect_from_pretrained_kwargs("tokenizer_args", "processor_kwargs")
    most = arguments.pop("model_max_length", None) or settings.max_seq_length or read_tokenizer_max_length(folder)
    return SentenceSettings(
        max_sequence_length=most if type(most) is int and most > 2 else None,
        lower_case=settings.do_lower_case is True,
        prompts={"query": None, "document": None, **prompts.prompts},
        default_prompt_name=prompts.default_prompt_name,
        tokenizer_settings={key: value for key, value in arguments.items() if key != "use_fast"},
    )


def _parse_pooling(path: Path, settings: Mapping[str, Any]) -> Pooling:
    """Return the kind of pooling that the settings of a `Pooling` module specify.

    Raises:
        InputError: The pooling is not supported. `path` is named in the error.
    """
    unknown = [key for key in settings if key not in _POOLING_KEYS and not key.startswith(_MODE)]
    if unknown:
        raise InputError(f"{path}: {short_repr(unknown[0])} is not supported; run the model with sentence-transformers")
    given = settings.get("pooling_mode")
    if given is None:
        chosen = [name for name, value in settings.items() if name.startswith(_MODE) and value]
        known = [_MODES.get(name) for name in chosen]
    else:
        chosen = given if isinstance(given, list) else [given]
        known = [_MODES_BY_NAME.get(name) if isinstance(name, str) else None for name in chosen]
    if len(known) != 1 or known[0] is None:
        modes = shorten(" and ".join(map(str, chosen))) or "nothing"
        raise InputError(f"{path}: the pooling is {modes}, but only one of cls, mean, max and last is supported; {_CHOOSE}")
    return known[0]


def write_sentence_settings(
    folder: Path, settings: TaskSettings, start: SentenceSettings, max_sequence_length: int, hidden_size: int
) -> None:
    """Write the configuration files that sentence-transformers needs to load a fine-tuned embedding model.

    modules.json is written last.

    Args:
        folder: The folder of the model.
        settings: The pooling and the prompts of the task.
        start: The settings of the model that was fine-tuned. Its other prompts, its normalization and its truncation are
            kept.
        max_sequence_length: The number of tokens to which texts are truncated.
        hidden_size: The number of values of a vector.
    """
    modes = {name: mode == (settings.pooling or "mean") for name, mode in _MODES.items()}
    kinds = {"Transformer": "", "Pooling": "1_Pooling", **({"Normalize": "2_Normalize"} if start.normalize else {})}
    for path in filter(None, kinds.values()):
        (folder / path).mkdir(exist_ok=True)
    write_json(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": hidden_size, **modes, "include_prompt": start.pools_prompt},
    )
    write_json(
        folder / "sentence_bert_config.json",
        {"max_seq_length": max_sequence_length, "do_lower_case": start.lower_case},
    )
    prompts = {**start.prompts, "query": settings.query_prompt, "document": settings.document_prompt}
    stored = {
        "prompts": {name: prompt or "" for name, prompt in prompts.items()},
        "default_prompt_name": start.default_prompt_name,
        "similarity_fn_name": "cosine",
        **({} if start.truncate_dim is None else {"truncate_dim": start.truncate_dim}),
    }
    write_json(folder / "config_sentence_transformers.json", stored)
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(kinds.items())
    ]
    write_json(folder / "modules.json", modules)
