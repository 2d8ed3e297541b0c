"""What the report is made of: the files of one work folder, each of which may be missing.

A file that is there but cannot be understood is an error; one that is not there is said on the page.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml
from pydantic import BaseModel, ValidationError

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import read_json
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.reporting.contents import (
    EvaluationFile,
    ExamplesFile,
    HistogramFile,
    MetadataFile,
    MetricsLine,
    PackedTotals,
    PlanFile,
    SettingsFile,
    VerificationFile,
)

__all__ = ["NAMES", "ReportInputs", "read_inputs"]

# What a work folder may hold, as `gaudi_bert.artefacts.work_folder` names it.
NAMES = {
    "examples": "examples/examples.json",
    "prepare_settings": "examples/settings.json",
    "histogram_file": "histogram.json",
    "plan": "plan.json",
    "plan_settings": "plan.settings.json",
    "metadata": "packed/train/metadata.json",
    "verification": "verify.json",
    "metrics": "train/metrics.jsonl",
    "evaluation": "train/evaluation.json",
    "pipeline": "train/settings.yaml",
}
_ENOUGH = ("examples", "histogram_file", "plan", "metadata", "metrics", "evaluation")

Content = TypeVar("Content", bound=BaseModel)
Mixture = dict[tuple[int, ...], int]


@dataclass(frozen=True)
class ReportInputs:
    """The contents of a work folder by the keys of `NAMES`; None where a file is missing.

    Args:
        name: of the pipeline, which is the name of the folder.
    """

    name: str
    examples: ExamplesFile | None
    prepare_settings: SettingsFile | None
    histogram_file: HistogramFile | None
    plan: PlanFile | None
    plan_settings: SettingsFile | None
    metadata: MetadataFile | None
    verification: VerificationFile | None
    metrics: tuple[MetricsLine, ...] | None
    evaluation: EvaluationFile | None
    pipeline: dict[str, Any] | None

    @property
    def histogram(self) -> Histogram | None:
        """Sequences per length, from the metadata or from histogram.json."""
        if self.metadata is not None:
            return Histogram(self.metadata.max_sequence_length, np.array(self.metadata.histogram))
        if self.histogram_file is not None:
            return Histogram(self.histogram_file.max_sequence_length, np.array(self.histogram_file.counts))
        return None

    @property
    def totals(self) -> PackedTotals | None:
        """The quality of the packing: of what was written, or else of the plan."""
        if self.metadata is not None:
            return self.metadata
        return self.plan.totals if self.plan is not None else None

    @property
    def mixture(self) -> Mixture | None:
        """How often each strategy is used, over all groups of the plan."""
        if self.plan is None:
            return None
        mixture: Mixture = {}
        for group in self.plan.groups:
            for lengths, count in group.strategies:
                mixture[lengths] = mixture.get(lengths, 0) + count
        return mixture


def read_inputs(workdir: Path) -> ReportInputs:
    """Read what `workdir` holds.

    Raises:
        InputError: it is missing, holds nothing to report on, or its files are malformed or do not belong together.
    """
    if not workdir.is_dir():
        raise InputError(f"{workdir}: no such folder; give a work folder, for example work/demo")
    if not any((workdir / NAMES[key]).exists() for key in _ENOUGH):
        wanted = ", ".join(NAMES[key] for key in _ENOUGH)
        raise InputError(f"{workdir}: nothing to report on (looked for {wanted}); run the pipeline first")
    inputs = ReportInputs(
        name=workdir.resolve().name,
        examples=_read(workdir, "examples", ExamplesFile),
        prepare_settings=_read(workdir, "prepare_settings", SettingsFile),
        histogram_file=_read(workdir, "histogram_file", HistogramFile),
        plan=_read(workdir, "plan", PlanFile),
        plan_settings=_read(workdir, "plan_settings", SettingsFile),
        metadata=_read(workdir, "metadata", MetadataFile),
        verification=_read(workdir, "verification", VerificationFile),
        metrics=_read_metrics(workdir / NAMES["metrics"]),
        evaluation=_read(workdir, "evaluation", EvaluationFile),
        pipeline=_read_pipeline(workdir / NAMES["pipeline"]),
    )
    _check_together(workdir, inputs)
    return inputs


def _check_together(workdir: Path, inputs: ReportInputs) -> None:
    """Refuse a histogram without sequences, and a plan with packs larger than the maximum sequence length."""
    histogram, mixture = inputs.histogram, inputs.mixture
    if histogram is None:
        return
    if histogram.sequences == 0:
        raise InputError(f"{workdir}: its histogram holds no sequence; make it again from records that hold some")
    largest = max((sum(strategy) for strategy in mixture or {}), default=0)
    if largest > histogram.max_sequence_length:
        raise InputError(
            f"{workdir / NAMES['plan']}: a pack of {largest} tokens, the histogram's rows have "
            f"{histogram.max_sequence_length}; plan again from this histogram"
        )


def _read(workdir: Path, key: str, model: type[Content]) -> Content | None:
    path = workdir / NAMES[key]
    return _validated(path, read_json(path), model) if path.exists() else None


def _validated(path: Path, content: Any, model: type[Content]) -> Content:
    try:
        return model.model_validate(content)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"]) or "its content"
        raise InputError(f"{path}: is not as this version writes it: `{place}`: {problem['msg']}; make it again") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot read: {error}; make it again with `gaudi-bert train`") from error


def _read_pipeline(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        pipeline = yaml.safe_load(_read_text(path))
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: not a YAML file: {reason}; make it again with `gaudi-bert train`") from error
    return pipeline if isinstance(pipeline, dict) else None


def _read_metrics(path: Path) -> tuple[MetricsLine, ...] | None:
    """The lines of a JSON-lines file; a last one cut short, as a killed run leaves it, is left out."""
    if not path.exists():
        return None
    metrics = []
    lines = _read_text(path).splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            content = json.loads(line)
        except ValueError as error:
            if number < len(lines):
                raise InputError(f"{path}: line {number} is not JSON; remove it, or train again with --overwrite") from error
            break
        metrics.append(_validated(path, content, MetricsLine))
    return tuple(metrics)
