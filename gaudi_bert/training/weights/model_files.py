"""The JSON files of a model's folder, typed and with limits: what is wrong with one is said before a model is built.

They are files of others (`transformers`, `sentence-transformers`), so keys that we do not need are ignored. No TensorFlow.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError, field_validator

from gaudi_bert.artefacts.base import Figures
from gaudi_bert.common.errors import InputError, shortened
from gaudi_bert.common.files import read_json
from gaudi_bert.config.sections import TaskName, TaskSettings
from gaudi_bert.model.config import LARGEST_SIZES, BertConfig

_COPY = "copy the folder again, or save it again with save_pretrained"
_Positions = Annotated[int, Field(ge=3, le=LARGEST_SIZES["max_position_embeddings"])]
# Of a file or folder in the folder itself: nothing leads out of it.
_Name = Annotated[str, Field(pattern=r"^[^/\\\x00]{0,254}[^./\\\x00]$")]
_MOST_LABELS = 1_000_000


class OwnConfig(Figures):
    """What our own commands need besides, under `gaudi_bert` in config.json."""

    task: TaskName | None = None
    settings: TaskSettings | None = Field(None, strict=False)
    max_sequence_length: _Positions | None = None


class TaskConfig(Figures):
    """config.json: the head of a model, and the names of its labels."""

    remedy = _COPY

    architectures: list[Annotated[str, Field(max_length=200)]] | None = None
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] | None = None
    id2label: Annotated[dict[str, str | int], Field(max_length=_MOST_LABELS)] | None = None
    gaudi_bert: OwnConfig = OwnConfig()

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


class WeightsIndex(Figures):
    """model.safetensors.index.json: which file of the folder holds which tensor."""

    remedy = _COPY

    weight_map: Annotated[dict[str, _Name], Field(min_length=1)]


def read_config(file: Path) -> BertConfig:
    """The size and form of the model, from config.json or bert_config.json."""
    values = read_json(file)
    if not isinstance(values, dict):
        raise InputError(f"{file}: is not an object with the settings of a model; {_COPY}")
    try:
        return BertConfig.from_json(values)
    except InputError as error:
        raise InputError(f"{file}: {error}") from error


# --- Folders of sentence-transformers: how vectors are pooled, and where texts are cut
#
# `modules.json` lists what the vectors go through (a Transformer, a Pooling, perhaps a Normalize), `1_Pooling/config.json`
# says how they are pooled, `sentence_bert_config.json` the most tokens of a text.

Pooling = Literal["cls", "mean", "max"]
_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
}
_MODE = "pooling_mode_"


class _Module(Figures):
    """An entry of modules.json, and the folder with its settings."""

    type: str
    path: Literal[""] | _Name = ""


class _SentenceSettings(Figures):
    """sentence_bert_config.json."""

    remedy = _COPY

    max_seq_length: Annotated[int, Field(ge=1, le=LARGEST_SIZES["max_position_embeddings"])] | None = None
    do_lower_case: bool | None = None


@dataclass(frozen=True)
class SentenceFolder:
    """What a folder says of vectors: texts of more than `max_sequence_length` tokens are cut (None: it does not say where),
    and lower-cased before the tokenizer sees them.
    """

    pooling: Pooling
    normalize: bool
    max_sequence_length: int | None
    lower_case: bool


def read_sentence_folder(folder: Path) -> SentenceFolder | None:
    """The folder's own settings; None where it is not of sentence-transformers."""
    file = folder / "modules.json"
    if not os.path.lexists(file):
        return None
    try:
        modules = TypeAdapter(list[_Module]).validate_python(read_json(file))
    except ValidationError as error:
        raise InputError(f"{file}: is not a list of modules; {_COPY}") from error
    kinds = {module.type.rpartition(".")[2]: module.path for module in modules}
    other = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if other or "Pooling" not in kinds:
        what = f"has a module {other[0]}" if other else "has no Pooling"
        raise InputError(f"{folder}: {what}, which is not known here; choose with --pooling cls, mean or max")
    settings = _SentenceSettings.read_if_present(folder / "sentence_bert_config.json") or _SentenceSettings()
    return SentenceFolder(
        pooling=_pooling(folder / kinds["Pooling"] / "config.json"),
        normalize="Normalize" in kinds,
        max_sequence_length=settings.max_seq_length,
        lower_case=settings.do_lower_case is True,
    )


def _pooling(path: Path) -> Pooling:
    content = read_json(path) if os.path.lexists(path) else {}
    settings: dict[str, Any] = content if isinstance(content, dict) else {}
    chosen = [name for name, value in settings.items() if name.startswith(_MODE) and value is True]
    if isinstance(settings.get("pooling_mode"), str):
        chosen = [f"{_MODE}{settings['pooling_mode']}_tokens"]
        chosen = ["pooling_mode_cls_token"] if settings["pooling_mode"] == "cls" else chosen
    if len(chosen) != 1 or chosen[0] not in _MODES:
        modes = shortened(", ".join(chosen)) or "nothing"
        raise InputError(f"{path}: pools by {modes}; only one of cls, mean and max can be done, choose with --pooling")
    return _MODES[chosen[0]]
