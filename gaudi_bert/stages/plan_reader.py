"""Reading `plan.json` to write by it: every value that the writer builds on is checked here."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import read_json
from gaudi_bert.records.metadata import VocabularyInfo
from gaudi_bert.records.schema import PackedSchema, UnpackedSchema

__all__ = ["PlannedFile", "PlannedGroup", "WritePlan", "read_plan"]

FORMAT_VERSION = 1


class _Read(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class PlannedFile(_Read):
    """An input file, as the histogram found it."""

    name: str
    bytes: int = Field(ge=1)
    crc32c: int = Field(ge=0, lt=2**32)
    sequences: int = Field(ge=0)


class PlannedGroup(_Read):
    """A group: the names of its files, and how often each strategy is used."""

    files: tuple[str, ...]
    sequences: int = Field(ge=1)
    packs: int = Field(ge=1)
    lower_bound: int = Field(ge=0)
    strategies: tuple[tuple[tuple[int, ...], int], ...]


class WritePlan(_Read):
    """What `write` takes from plan.json, and the SHA-256 of all of it."""

    sha256: str
    algorithm: str
    depth: int = Field(ge=1)
    max_sequence_length: int = Field(ge=1)
    max_predictions: int = Field(ge=1)
    masked_slots: int = Field(ge=1)
    seed: int
    shard_multiple: int = Field(ge=1)
    shard_bytes: int = Field(ge=1)
    vocabulary: VocabularyInfo | None = None
    files: tuple[PlannedFile, ...]
    groups: tuple[PlannedGroup, ...]

    @property
    def unpacked_schema(self) -> UnpackedSchema:
        """The sizes of the records that are read."""
        return UnpackedSchema(self.max_sequence_length, self.max_predictions)

    @property
    def packed_schema(self) -> PackedSchema:
        """The sizes of the records that are written."""
        return PackedSchema(self.max_sequence_length, self.masked_slots, self.depth, self.max_predictions)


def read_plan(path: Path) -> WritePlan:
    """Read and check a plan.

    Raises:
        InputError: it is missing, damaged, of another version, or made from counts without files.
    """
    content = read_json(path)
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise InputError(f"{path}: format_version {version}, this version reads {FORMAT_VERSION}; make the plan again")
    if not content.get("files"):
        raise InputError(f"{path}: made from counts without files; plan from what `gaudi-bert histogram RECORDS` wrote")
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode("utf-8")).hexdigest()
    try:
        plan = WritePlan.model_validate({**content, "sha256": digest})
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"])
        raise InputError(f"{path}: `{place}`: {problem['msg']}; make the plan again") from error
    _check_groups(path, plan)
    return plan


def _check_groups(path: Path, plan: WritePlan) -> None:
    """Every file is in one group, and each group's strategies hold its sequences and fit."""
    named: list[Any] = [name for group in plan.groups for name in group.files]
    if sorted(named) != sorted(file.name for file in plan.files):
        raise InputError(f"{path}: the groups do not hold every file once; make the plan again")
    for number, group in enumerate(plan.groups):
        sequences = sum(len(strategy) * count for strategy, count in group.strategies)
        packs = sum(count for _, count in group.strategies)
        if (sequences, packs) != (group.sequences, group.packs):
            raise InputError(f"{path}: the strategies of group {number} do not add up; make the plan again")
        for strategy, count in group.strategies:
            fits = 1 <= len(strategy) <= plan.depth and min(strategy) >= 1 and sum(strategy) <= plan.max_sequence_length
            if not fits or count < 1:
                raise InputError(f"{path}: strategy {list(strategy)} of group {number} is not feasible; plan again")
