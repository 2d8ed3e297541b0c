"""The JSON files of a model's folder, typed and with limits: what is wrong with one is said before a model is built.

They are files of others (`transformers`, `sentence-transformers`), so keys that we do not need are ignored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError, field_validator

from gaudi_bert.artefacts.base import Figures
from gaudi_bert.common.errors import InputError
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


class SentenceModule(Figures):
    """An entry of modules.json: what the vectors go through, and the folder with its settings."""

    type: str
    path: Literal[""] | _Name = ""


class SentenceSettings(Figures):
    """sentence_bert_config.json: where texts are cut, and whether they are lower-cased."""

    remedy = _COPY

    max_seq_length: Annotated[int, Field(ge=1, le=LARGEST_SIZES["max_position_embeddings"])] | None = None
    do_lower_case: bool | None = None


def read_config(file: Path) -> BertConfig:
    """The size and form of the model, from config.json or bert_config.json."""
    values = read_json(file)
    if not isinstance(values, dict):
        raise InputError(f"{file}: is not an object with the settings of a model; {_COPY}")
    try:
        return BertConfig.from_json(values)
    except InputError as error:
        raise InputError(f"{file}: {error}") from error


def read_modules(file: Path) -> list[SentenceModule]:
    """What modules.json lists."""
    try:
        return TypeAdapter(list[SentenceModule]).validate_python(read_json(file))
    except ValidationError as error:
        raise InputError(f"{file}: is not a list of modules; {_COPY}") from error
