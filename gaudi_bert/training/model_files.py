"""The JSON files of a model's folder, typed and with limits: what is wrong with one is reported before a model is built.

They are files of others (`transformers`, `sentence-transformers`), so keys that we do not need are ignored. No TensorFlow.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError, field_validator

from gaudi_bert.artefacts.base import Figures
from gaudi_bert.common.arrays import Float32Array
from gaudi_bert.common.errors import InputError, short_repr, shorten
from gaudi_bert.common.files import read_json, write_json
from gaudi_bert.config.sections import TaskName, TaskSettings
from gaudi_bert.model.config import LARGEST_SIZES
from gaudi_bert.model.heads import Pooling
from gaudi_bert.training.weights import COPY_AGAIN, FileName

_Positions = Annotated[int, Field(ge=3, le=LARGEST_SIZES["max_position_embeddings"])]
_MOST_LABELS = 1_000_000


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
    gaudi_bert: _OwnConfig = _OwnConfig()
    sentence_transformers: dict[str, Any] | None = None

    @field_validator("id2label")
    @classmethod
    def _are_numbered(cls, names: dict[str, str | int] | None) -> dict[str, str | int] | None:
        missing = [number for number in range(len(names or ())) if str(number) not in (names or {})]
        if missing:
            raise ValueError(f"has no label {missing[0]}, and there are {len(names or ())}")
        return names

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the labels in the order of their numbers."""
        names = self.id2label or {}
        return tuple(str(names[str(number)]) for number in range(len(names)))

    @property
    def is_reranker(self) -> bool:
        """Whether it is a `CrossEncoder` of sentence-transformers that scores by the sigmoid of its one value."""
        activation = (self.sentence_transformers or {}).get("activation_fn")
        return len(self.labels) == 1 and isinstance(activation, str) and activation.endswith(".Sigmoid")


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
_USUAL_METHOD = {"method": "forward", "method_output_name": "last_hidden_state"}


class _Module(Figures):
    """An entry of modules.json, and the folder with its settings."""

    type: str
    path: Literal[""] | FileName = ""


class _SentenceSettings(Figures):
    """sentence_bert_config.json; keys that are not here do not change vectors of texts."""

    remedy = COPY_AGAIN

    max_seq_length: Annotated[int, Field(ge=1, le=LARGEST_SIZES["max_position_embeddings"])] | None = None
    do_lower_case: bool | None = None
    transformer_task: str = "feature-extraction"
    modality_config: dict[str, Any] = Field({})
    processing_kwargs: dict[str, Any] | None = None

    @property
    def is_usual(self) -> bool:
        """Whether a text's vectors are the last hidden states of its tokens."""
        method = self.modality_config.get("text", _USUAL_METHOD)
        return method == _USUAL_METHOD and self.transformer_task == "feature-extraction" and not self.processing_kwargs


class _Prompts(Figures):
    """config_sentence_transformers.json: texts by name, and the name of the one that is used by default."""

    file_name = _PROMPTS
    remedy = COPY_AGAIN

    prompts: dict[str, str | None] = Field({}, max_length=10_000)
    default_prompt_name: str | None = None
    truncate_dim: Annotated[int, Field(ge=1)] | None = None
    model_type: Literal["SentenceTransformer"] | None = None


@dataclass(frozen=True)
class SentenceFolder:
    """The way in which a folder makes vectors.

    Attributes:
        max_sequence_length: longer texts are cut; None where sentence-transformers has no number for it.
        prompts: what may precede each text, by name; `default_prompt_name`: that of the one that is used by itself.
        pools_prompt: whether the tokens of the prompt are pooled too.
        truncate_dim: how many values of a vector remain; None for all.
    """

    pooling: Pooling = "mean"
    normalize: bool = False
    max_sequence_length: int | None = None
    lower_case: bool = False
    prompts: Mapping[str, str | None] = field(default_factory=dict)
    default_prompt_name: str | None = None
    pools_prompt: bool = True
    truncate_dim: int | None = None

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
    """The folder's own settings; None where it is not of sentence-transformers. `pooling` replaces that of its modules."""
    file = folder / "modules.json"
    if not os.path.lexists(file):
        return None
    try:
        modules = TypeAdapter(list[_Module]).validate_python(read_json(file))
    except ValidationError as error:
        raise InputError(f"{file}: is not a list of modules; {COPY_AGAIN}") from error
    kinds = [module.type.rpartition(".")[2] for module in modules]
    is_bare = pooling is not None and kinds == ["Transformer"]
    if not is_bare and kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise InputError(
            f"{folder}: modules.json has {shorten(', '.join(kinds)) or 'no module'}; known are Transformer, Pooling and "
            "perhaps Normalize, in this order; for the transformer alone give a copy of the folder without modules.json"
        )
    if modules[0].path:
        inner = folder / modules[0].path
        raise InputError(f"{folder}: its transformer is in {inner}; give --model {inner}, and {_CHOOSE}")
    settings_file = next((path for name in _SETTINGS if os.path.lexists(path := folder / name)), folder / _SETTINGS[0])
    settings = _SentenceSettings.read_if_present(settings_file) or _SentenceSettings()
    if not settings.is_usual:
        raise InputError(f"{settings_file}: its texts do not become vectors in the usual way; sentence-transformers runs it")
    prompts = _Prompts.read_if_present(folder / _PROMPTS) or _Prompts()
    pooling_file = folder / (modules[1].path if len(modules) > 1 else "1_Pooling") / "config.json"
    pooling_settings = read_json(pooling_file) if os.path.lexists(pooling_file) else {}
    pooling_settings = pooling_settings if isinstance(pooling_settings, dict) else {}
    return SentenceFolder(
        pooling=pooling or _pooling(pooling_file, pooling_settings),
        normalize="Normalize" in kinds,
        max_sequence_length=settings.max_seq_length or tokenizer_length(folder),
        lower_case=settings.do_lower_case is True,
        prompts={**_USUAL_PROMPTS, **prompts.prompts},
        default_prompt_name=prompts.default_prompt_name,
        pools_prompt=pooling_settings.get("include_prompt") is not False,
        truncate_dim=prompts.truncate_dim,
    )


def _pooling(path: Path, settings: Mapping[str, Any]) -> Pooling:
    given = settings.get("pooling_mode")
    if given is None:
        chosen = [name for name, value in settings.items() if name.startswith(_MODE) and value is True]
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
