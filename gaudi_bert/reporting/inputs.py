"""The inputs of the report: the files of one work folder, each of which may be missing.

A file that cannot be understood is an error; a missing one is named on the page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gaudi_bert.artefacts.completion import Signature, read_signature, settings_path
from gaudi_bert.artefacts.examples import PreparedExamples
from gaudi_bert.artefacts.histogram import HistogramFile
from gaudi_bert.artefacts.packed import Metadata, Verification
from gaudi_bert.artefacts.plan import Plan, PlanTotals
from gaudi_bert.artefacts.training import EvaluationResult, FineTuning, FineTuningLine, MetricsLine, TrainingResult
from gaudi_bert.artefacts.work_folder import WorkFolder
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import explained_os_errors, open_file, read_text
from gaudi_bert.config.pipeline import parse_yaml
from gaudi_bert.packing.histogram import Histogram

Content = TypeVar("Content")
Mixture = dict[tuple[int, ...], int]


def _paths(workdir: Path) -> dict[str, Path]:
    """Return the path of each of `ReportInputs`."""
    folder = WorkFolder.existing(workdir)
    train = folder.split("train")
    return {
        "examples": folder.examples_summary,
        "prepare_settings": settings_path(folder.examples),
        "histogram_file": train.histogram,
        "plan": train.plan,
        "plan_settings": settings_path(train.plan),
        "metadata": train.metadata,
        "verification": train.verification,
        "metrics": folder.metrics,
        "training": folder.training_result,
        "evaluation": folder.evaluation_result,
        "pipeline": folder.train / "settings.yaml",
        "finetuning": folder.finetuning_result,
        "finetuning_lines": folder.finetune / "metrics.jsonl",
        "finetuning_pipeline": folder.finetune / "settings.yaml",
        "predictions": folder.predictions,
    }


NAMES = {key: path.as_posix() for key, path in _paths(Path()).items()}
"""How the inputs are called on the page: relative to the work folder."""

_ENOUGH = ("examples", "histogram_file", "plan", "metadata", "metrics", "evaluation", "finetuning", "predictions")


@dataclass(frozen=True)
class ReportInputs:
    """The contents of a work folder by the keys of `NAMES`; None where a file is missing.

    `predictions` is how many rows were answered.
    """

    name: str
    examples: PreparedExamples | None
    prepare_settings: Signature | None
    histogram_file: HistogramFile | None
    plan: Plan | None
    plan_settings: Signature | None
    metadata: Metadata | None
    verification: Verification | None
    metrics: tuple[MetricsLine, ...] | None
    training: TrainingResult | None
    evaluation: EvaluationResult | None
    pipeline: dict[str, Any] | None
    finetuning: FineTuning | None
    finetuning_lines: tuple[FineTuningLine, ...] | None
    finetuning_pipeline: dict[str, Any] | None
    predictions: int | None

    @property
    def histogram(self) -> Histogram | None:
        """Sequences per length, from the metadata or from histogram.json."""
        if self.metadata is not None:
            return Histogram(self.metadata.max_sequence_length, np.array(self.metadata.histogram))
        if self.histogram_file is not None:
            return Histogram(self.histogram_file.max_sequence_length, np.array(self.histogram_file.counts))
        return None

    @property
    def totals(self) -> Metadata | PlanTotals | None:
        """The quality of the packing: of what was written, or else of the plan."""
        if self.metadata is not None:
            return self.metadata
        return self.plan.totals if self.plan is not None else None

    @property
    def mixture(self) -> Mixture | None:
        """Number of packs of each strategy, over all groups of the plan."""
        return self.plan.mixture if self.plan is not None else None


def read_inputs(workdir: Path) -> ReportInputs:
    """Read what `workdir` holds."""
    if not workdir.is_dir():
        raise InputError(f"{workdir}: no such folder; give a work folder, for example work/demo")
    paths = _paths(workdir)
    if not any(paths[key].exists() for key in _ENOUGH):
        names = ", ".join(NAMES[key] for key in _ENOUGH)
        raise InputError(f"{workdir}: nothing to report on (looked for {names}); run the pipeline first")

    def read(key: str, reader: Callable[[Path], Content]) -> Content | None:
        return reader(paths[key]) if paths[key].exists() else None

    metadata = read("metadata", lambda path: Metadata.read(path.parent))
    inputs = ReportInputs(
        name=workdir.resolve().name,
        examples=read("examples", lambda path: PreparedExamples.read(path.parent)),
        prepare_settings=read("prepare_settings", read_signature),
        histogram_file=read("histogram_file", HistogramFile.read),
        plan=read("plan", Plan.read),
        plan_settings=read("plan_settings", read_signature),
        metadata=metadata,
        verification=read(
            "verification", lambda path: Verification.read_of(path, metadata) if metadata else Verification.read(path)
        ),
        metrics=read("metrics", MetricsLine.read_lines),
        training=read("training", TrainingResult.read),
        evaluation=read("evaluation", EvaluationResult.read),
        pipeline=read("pipeline", _read_pipeline),
        finetuning=read("finetuning", FineTuning.read),
        finetuning_lines=read("finetuning_lines", FineTuningLine.read_lines),
        finetuning_pipeline=read("finetuning_pipeline", _read_pipeline),
        predictions=read("predictions", _count_lines),
    )
    _check_together(paths["plan"], inputs)
    return inputs


def _count_lines(path: Path) -> int:
    with explained_os_errors(path, "read"), open_file(path) as handle:
        return sum(block.count(b"\n") for block in iter(lambda: handle.read(2**20), b""))


def _check_together(plan: Path, inputs: ReportInputs) -> None:
    """Refuse a histogram without sequences, and a plan with packs larger than the maximum sequence length."""
    histogram, mixture = inputs.histogram, inputs.mixture
    if histogram is None:
        return
    if histogram.sequences == 0:
        raise InputError(f"{plan.parent}: its histogram holds no sequence; make it again from records that hold some")
    largest = max((sum(strategy) for strategy in mixture or {}), default=0)
    if largest > histogram.max_sequence_length:
        raise InputError(
            f"{plan}: a pack of {largest} tokens, the histogram's rows have {histogram.max_sequence_length}; "
            "plan again from this histogram"
        )


def _read_pipeline(path: Path) -> dict[str, Any] | None:
    pipeline = parse_yaml(read_text(path), str(path))
    return pipeline if isinstance(pipeline, dict) else None
