"""What the report is made of: the files of one work folder, each of which may be missing.

A file that is there but cannot be understood is an error; one that is not there is said on the page.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import read_json
from gaudi_bert.packing.histogram import Histogram

__all__ = ["ReportInputs", "read_inputs"]

# What a work folder may hold, as `gaudi_bert.stages.layout` names it.
NAMES = {
    "examples": "examples/examples.json",
    "prepare_settings": "examples/settings.json",
    "histogram": "histogram.json",
    "plan": "plan.json",
    "plan_settings": "plan.settings.json",
    "metadata": "packed/train/metadata.json",
    "verification": "verify.json",
    "evaluation_metadata": "packed/evaluation/metadata.json",
    "metrics": "train/metrics.jsonl",
    "evaluation": "train/evaluation.json",
    "train_settings": "train/settings.yaml",
}
# What the page takes from each of them; `.` goes one level down.
_TOTALS = ("packs", "lower_bound", "efficiency", "packing_factor", "padding_tokens")
_COUNTS = (
    "text_documents",
    "text_sentences",
    "text_tokens",
    "unknown_tokens",
    "sequences",
    "tokens",
    "masked",
    "random_next",
)
_FIGURES = ("masked_lm_loss", "masked_lm_accuracy", "next_sentence_loss", "next_sentence_accuracy")
_NEEDED: Mapping[str, Sequence[str]] = {
    "examples": (*(f"splits.train.{name}" for name in _COUNTS), "vocabulary.size", "vocabulary.trained"),
    "prepare_settings": ("settings",),
    "histogram": ("max_sequence_length", "counts"),
    "plan": (
        "depth",
        "groups",
        "totals.algorithm",
        "totals.algorithms_used",
        "totals.strategies_used",
        *(f"totals.{name}" for name in _TOTALS),
    ),
    "plan_settings": ("settings",),
    "metadata": ("max_sequence_length", "histogram", *_TOTALS),
    "verification": ("sequences",),
    "evaluation": _FIGURES,
}
_ENOUGH = ("examples", "histogram", "plan", "metadata", "metrics", "evaluation")


@dataclass(frozen=True)
class ReportInputs:
    """The contents by the keys of `NAMES`, as far as they are there; `metrics` is a list of lines.

    Args:
        name: of the pipeline, which is the name of the folder.
        contents: what was read.
    """

    name: str
    contents: Mapping[str, Any]

    def get(self, key: str) -> Any:
        """The content of a file, None where it is missing."""
        return self.contents.get(key)

    @property
    def histogram(self) -> Histogram | None:
        """Sequences per length, from the metadata or from histogram.json."""
        metadata, histogram = self.get("metadata"), self.get("histogram")
        if metadata is not None:
            return Histogram(metadata["max_sequence_length"], np.array(metadata["histogram"]))
        if histogram is not None:
            return Histogram(histogram["max_sequence_length"], np.array(histogram["counts"]))
        return None

    @property
    def mixture(self) -> dict[tuple[int, ...], int] | None:
        """How often each strategy is used, over all groups of the plan."""
        plan = self.get("plan")
        if plan is None:
            return None
        mixture: dict[tuple[int, ...], int] = {}
        for group in plan["groups"]:
            for lengths, count in group["strategies"]:
                mixture[tuple(lengths)] = mixture.get(tuple(lengths), 0) + count
        return mixture


def read_inputs(workdir: Path) -> ReportInputs:
    """Read what `workdir` holds.

    Raises:
        InputError: it is missing, holds nothing to report on, or a file is malformed.
    """
    if not workdir.is_dir():
        raise InputError(f"{workdir}: no such folder; give a work folder, for example work/demo")
    contents = {key: _read(workdir / name, key) for key, name in NAMES.items() if (workdir / name).exists()}
    if not any(key in contents for key in _ENOUGH):
        wanted = ", ".join(NAMES[key] for key in _ENOUGH)
        raise InputError(f"{workdir}: nothing to report on (looked for {wanted}); run the pipeline first")
    return ReportInputs(workdir.resolve().name, contents)


def _read(path: Path, key: str) -> Any:
    if path.suffix == ".json":
        content = read_json(path)
    else:
        try:
            text = path.read_text(encoding="utf-8")
            content = _lines(path, text) if path.suffix == ".jsonl" else yaml.safe_load(text)
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())
            raise InputError(f"{path}: cannot read: {reason}; make it again with `gaudi-bert train`") from error
    needed = ("kind", "sequences") if key == "metrics" else _NEEDED.get(key, ())
    for part in content if key == "metrics" else [content]:
        for place in needed:
            _demand(path, part, place)
    return content


def _demand(path: Path, content: Any, place: str) -> None:
    """Refuse `content` where it has nothing at `place`."""
    for name in place.split("."):
        if not isinstance(content, dict) or name not in content:
            raise InputError(f"{path}: is not as this version writes it, it has no `{place}`; make it again")
        content = content[name]


def _lines(path: Path, text: str) -> list[Any]:
    """The lines of a JSON-lines file; a last one cut short, as a killed run leaves it, is left out."""
    values = []
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            values.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise InputError(f"{path}: line {number} is not JSON; remove it, or train again with --overwrite") from error
    return values
