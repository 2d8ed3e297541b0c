"""Paths: the names of files in the folders that stages make, and the folders below `work/<pipeline>/`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gaudi_bert.artefacts.base import METADATA_NAME, VERIFICATION_NAME, manifest_path
from gaudi_bert.common.files import resolve_location
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.places import StoreSettings

_SPLITS = ("train", "evaluation")

EXAMPLES_NAME = "examples.json"
TRAINING_NAME = "training.json"
FINETUNING_NAME = "metrics.json"


@dataclass(frozen=True)
class SplitPaths:
    """The artefacts of one split (`train` or `evaluation`), in the order in which they are written."""

    records: Path
    histogram: Path
    plan: Path
    packed: Path

    @property
    def metadata(self) -> Path:
        """The last file of the packed folder."""
        return self.packed / METADATA_NAME

    @property
    def verification(self) -> Path:
        """The last file of `verify`."""
        return self.packed / VERIFICATION_NAME

    def manifest(self, group: int) -> Path:
        """The last file of a group of the packed folder."""
        return manifest_path(self.packed, group)


@dataclass(frozen=True)
class WorkFolder:
    """The work folder of one pipeline, `work/<pipeline name>`.

    `records` are unpacked examples that exist already, one folder a split; None where `prepare` makes them.
    """

    root: Path
    records: Path | None
    evaluation_records: Path | None
    has_evaluation: bool
    pretrains: bool = True
    finetunes: bool = False
    predicts: bool = False
    store: StoreSettings | None = None

    @classmethod
    def of(cls, settings: PipelineSettings, work: Path, pipeline_folder: Path) -> WorkFolder:
        """The work folder below `work`; relative paths in the pipeline file are taken from `pipeline_folder`."""
        prepare = settings.prepare
        records = resolve_location(pipeline_folder, prepare.records) if prepare.records else None
        evaluation_records = None
        if prepare.evaluation_records:
            evaluation_records = resolve_location(pipeline_folder, prepare.evaluation_records)
        prepares_evaluation = records is None and prepare.evaluation_fraction > 0
        return cls(
            root=work / settings.name,
            records=records,
            evaluation_records=evaluation_records,
            has_evaluation=prepares_evaluation or evaluation_records is not None,
            pretrains=settings.pretrains,
            finetunes=settings.finetunes,
            predicts=settings.predicts,
            store=settings.store,
        )

    @classmethod
    def existing(cls, root: Path) -> WorkFolder:
        """An existing work folder, whatever its pipeline file states."""
        return cls(root, records=None, evaluation_records=None, has_evaluation=True)

    @property
    def examples(self) -> Path:
        """The folder that `prepare` makes."""
        return self.root / "examples"

    @property
    def examples_summary(self) -> Path:
        """The last file of the folder that `prepare` makes."""
        return self.examples / EXAMPLES_NAME

    @property
    def train(self) -> Path:
        """The folder that `train` makes."""
        return self.root / "train"

    @property
    def training_result(self) -> Path:
        """The last file that `train` writes: how the run ended."""
        return self.train / TRAINING_NAME

    @property
    def evaluation_result(self) -> Path:
        """Return the path of what `evaluate` measured."""
        return self.train / "evaluation.json"

    def rows(self, split: str) -> Path:
        """The labelled rows of a split, where they are built in."""
        return self.root / "rows" / f"{split}.jsonl"

    @property
    def finetune(self) -> Path:
        """The folder that `finetune` makes: a model, as transformers opens it."""
        return self.root / "finetune"

    @property
    def finetuning_result(self) -> Path:
        """The last file that `finetune` writes: how good the model is."""
        return self.finetune / FINETUNING_NAME

    @property
    def predictions(self) -> Path:
        """The file that `predict` makes."""
        return self.root / "predict" / "predictions.jsonl"

    @property
    def report(self) -> Path:
        """The page that `report` makes."""
        return self.root / "report.html"

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits of this pipeline."""
        return _SPLITS if self.has_evaluation else _SPLITS[:1]

    def split(self, name: str) -> SplitPaths:
        """The paths of one split."""
        given = self.records if name == "train" else self.evaluation_records
        suffix = "" if name == "train" else f"-{name}"
        return SplitPaths(
            records=given if given is not None else self.examples / name,
            histogram=self.root / f"histogram{suffix}.json",
            plan=self.root / f"plan{suffix}.json",
            packed=self.root / "packed" / name,
        )
