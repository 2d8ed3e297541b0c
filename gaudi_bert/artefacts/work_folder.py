"""The names of the files that stages write: the layout of a pipeline's work folder, and the files of each stage's output.

A work folder is `work/<pipeline name>` (`WorkFolder`). `OWNED` lists the files that each stage can write, so that
`--overwrite` never removes any other file. `tests/test_overwrite.py` checks every command that has `--overwrite` against
this list.

This module only computes paths. It neither reads nor creates files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gaudi_bert.artefacts.base import METADATA_NAME, NOTES_NAME, VERIFICATION_NAME, manifest_path
from gaudi_bert.common.files import resolve_location
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.places import StoreSettings

_SPLITS = ("train", "evaluation")

EXAMPLES_NAME = "examples.json"
TRAINING_NAME = "training.json"
FINETUNING_NAME = "metrics.json"


@dataclass(frozen=True)
class DataSplitPaths:
    """The paths of the files of one data split, which is `train` or `evaluation`.

    Attributes:
        records: The folder of the unpacked examples.
        histogram: The histogram file.
        plan: The plan file.
        packed: The packed folder.
    """

    records: Path
    histogram: Path
    plan: Path
    packed: Path

    @property
    def metadata_path(self) -> Path:
        """The path of metadata.json in the packed folder. The stage `write` writes this file last."""
        return self.packed / METADATA_NAME

    @property
    def verification_path(self) -> Path:
        """The path of the file that the stage `verify` writes."""
        return self.packed / VERIFICATION_NAME

    def manifest_path(self, group: int) -> Path:
        """Return the path of the manifest of a group, which is written after the shards of the group."""
        return manifest_path(self.packed, group)


@dataclass(frozen=True)
class WorkFolder:
    """The work folder of one pipeline, `work/<pipeline name>`, and the paths of the files in it.

    Attributes:
        root: The work folder.
        records: The folder of existing training examples, or None if `prepare` creates them.
        evaluation_records: The folder of existing evaluation examples, or None if there is none.
        has_evaluation: Whether the pipeline has an evaluation split.
        has_pretraining: Whether the pipeline pretrains a model.
        has_finetuning: Whether the pipeline fine-tunes a model.
        has_prediction: Whether the pipeline predicts with a model.
        store: The settings of the object store, or None for the defaults.
    """

    root: Path
    records: Path | None
    evaluation_records: Path | None
    has_evaluation: bool
    has_pretraining: bool = True
    has_finetuning: bool = False
    has_prediction: bool = False
    store: StoreSettings | None = None

    @classmethod
    def from_settings(cls, settings: PipelineSettings, work: Path, pipeline_folder: Path) -> WorkFolder:
        """Create the `WorkFolder` of a pipeline from its settings.

        Args:
            settings: The settings of the pipeline.
            work: The parent of all work folders.
            pipeline_folder: The folder to which relative paths in the pipeline file refer.
        """
        prepare = settings.prepare
        records, evaluation_records = (
            resolve_location(pipeline_folder, location) if location else None
            for location in (prepare.records, prepare.evaluation_records)
        )
        prepares_evaluation = records is None and prepare.evaluation_fraction > 0
        return cls(
            root=work / settings.name,
            records=records,
            evaluation_records=evaluation_records,
            has_evaluation=prepares_evaluation or evaluation_records is not None,
            has_pretraining=settings.has_pretraining,
            has_finetuning=settings.has_finetuning,
            has_prediction=settings.has_prediction,
            store=settings.store,
        )

    @classmethod
    def from_existing(cls, root: Path) -> WorkFolder:
        """Create a `WorkFolder` for an existing folder without reading its pipeline file.

        The pipeline is assumed to have an evaluation split.
        """
        return cls(root, records=None, evaluation_records=None, has_evaluation=True)

    @property
    def examples_folder(self) -> Path:
        """The folder that the stage `prepare` writes."""
        return self.root / "examples"

    @property
    def examples_summary_path(self) -> Path:
        """The path of the summary that the stage `prepare` writes last."""
        return self.examples_folder / EXAMPLES_NAME

    @property
    def train_folder(self) -> Path:
        """The folder that the stage `train` writes."""
        return self.root / "train"

    @property
    def training_result_path(self) -> Path:
        """The path of the result file that the stage `train` writes last."""
        return self.train_folder / TRAINING_NAME

    @property
    def evaluation_result_path(self) -> Path:
        """The path of the result file that the stage `evaluate` writes."""
        return self.train_folder / "evaluation.json"

    def rows_path(self, split: str) -> Path:
        """Return the path of the labelled rows of a split. The file exists only if the pipeline uses built-in data."""
        return self.root / "rows" / f"{split}.jsonl"

    @property
    def finetune_folder(self) -> Path:
        """The folder that the stage `finetune` writes. It contains a model that `transformers` can load."""
        return self.root / "finetune"

    @property
    def finetuning_result_path(self) -> Path:
        """The path of the metrics file that the stage `finetune` writes last."""
        return self.finetune_folder / FINETUNING_NAME

    @property
    def predictions_path(self) -> Path:
        """The path of the file that the stage `predict` writes."""
        return self.root / "predict" / "predictions.jsonl"

    @property
    def report_path(self) -> Path:
        """The path of the HTML page that the stage `report` writes."""
        return self.root / "report.html"

    @property
    def data_split_names(self) -> tuple[str, ...]:
        """The names of the pipeline's data splits. The split `evaluation` is included only if there is held-out data."""
        return _SPLITS if self.has_evaluation else _SPLITS[:1]

    def data_split_paths(self, split: str) -> DataSplitPaths:
        """Return the paths of the files of one data split, `train` or `evaluation`."""
        given = self.records if split == "train" else self.evaluation_records
        suffix = "" if split == "train" else f"-{split}"
        return DataSplitPaths(
            records=given if given is not None else self.examples_folder / split,
            histogram=self.root / f"histogram{suffix}.json",
            plan=self.root / f"plan{suffix}.json",
            packed=self.root / "packed" / split,
        )


# --- the files of each stage's output
#
# A file belongs to an output if its name matches a pattern, it is a regular file, and the folder contains a settings file of
# the same command. A symbolic link never belongs to an output, and is never followed.

# The files of a tokenizer. Folders of tokens, packs and models contain copies of these files.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt"),
)


@dataclass(frozen=True)
class OwnedFiles:
    """Patterns of the files that one command can write to its output folder.

    Attributes:
        command: The command that users run to write the output.
        stages: The stages that may replace each other's output, by their names in settings files.
        names: Patterns of paths in the folder. `#` stands for digits, and `*` for any characters except a slash. If the
            output is a single file, there are no patterns.
        names_beside: Patterns of paths in a second folder, for an output whose settings file is not in its own folder.
    """

    command: str
    stages: tuple[str, ...]
    names: tuple[str, ...] = ()
    names_beside: tuple[str, ...] = ()


def is_owned(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a stage can have written a file with the given name, according to the patterns of its output files.

    If a file belongs to an output, then its lock file and its temporary files do too.

    Args:
        name: The path of the file in its folder, with slashes.
        patterns: The patterns of `OwnedFiles`.
    """
    parent, slash, last = name.rpartition("/")
    if last.startswith("."):
        last = re.sub(r"^\.(.+)\.(lock|[0-9a-f]{8}\.tmp)$", r"\1", last)
    return _compile_patterns(patterns).fullmatch(f"{parent}{slash}{last}") is not None


@cache
def _compile_patterns(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Return a regular expression that matches any of the given patterns."""
    return re.compile("|".join(re.escape(name).replace(r"\#", "[0-9]+").replace(r"\*", "[^/]*") for name in patterns))


_RUN_FILES = (
    *("settings.json", "settings.yaml", "metrics.jsonl", "engine.log", "engine-#.log", "checkpoints/update-#.safetensors"),
    *("tensorboard/events.out.tfevents.*", *TOKENIZER_FILES),
)
_PRETRAINING_FILES = (TRAINING_NAME, "mlperf.log", "evaluation.json", "evaluation.settings.json", "config.json")
_MODEL_FILES = ("config.json", "model.safetensors")
_SENTENCE_FILES = (
    *("modules.json", "1_Pooling/config.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
)
_RECORD_FILES = (
    *("settings.json", "packed-#-#.tfrecord", "group-#.index", "group-#.json", METADATA_NAME, VERIFICATION_NAME),
    "verification-#-of-#.json",
)
_TABLE_NOTES = (
    *("settings.json", "group-#.json", METADATA_NAME, "row_lengths.json", VERIFICATION_NAME, "verification-#-of-#.json"),
    *TOKENIZER_FILES,
)
_TABLE_FILES = ("packed-#-#.parquet", *(f"{NOTES_NAME}/{name}" for name in _TABLE_NOTES))
_TOKEN_NOTES = ("settings.json", "tokens.json", "tokens-#-of-#.json", *TOKENIZER_FILES)

_ALL = (
    OwnedFiles(
        "gaudi-bert prepare",
        ("prepare",),
        (
            *("settings.json", "vocab.txt", EXAMPLES_NAME, "sections/train-#.json", "sections/evaluation-#.json"),
            *("train/part-#-of-#.tfrecord", "evaluation/part-#-of-#.tfrecord"),
        ),
    ),
    OwnedFiles(
        "gaudi-bert tokenize",
        ("tokenize",),
        ("tokens-#-of-#.parquet", *(f"{NOTES_NAME}/{name}" for name in _TOKEN_NOTES)),
    ),
    OwnedFiles("gaudi-bert histogram", ("histogram",)),
    OwnedFiles("gaudi-bert plan", ("plan",)),
    OwnedFiles("gaudi-bert write", ("write",), _RECORD_FILES),
    OwnedFiles(
        "gaudi-bert pack",
        ("pack-table", "pack-rows"),
        (*_TABLE_FILES, *(f"rows-#/{name}" for name in _TABLE_FILES)),
    ),
    OwnedFiles("gaudi-bert convert", ("convert",), ("packed-#-#.hdf5",), ("settings.json", "conversion.json")),
    OwnedFiles("gaudi-bert train", ("train",), (*_RUN_FILES, *_PRETRAINING_FILES, *_MODEL_FILES)),
    OwnedFiles("gaudi-bert evaluate", ("evaluate",)),
    OwnedFiles("gaudi-bert export", ("export",), ("settings.json", *_MODEL_FILES, *TOKENIZER_FILES)),
    OwnedFiles(
        "gaudi-bert finetune",
        ("finetune",),
        (
            *(*_RUN_FILES, *_MODEL_FILES, *_SENTENCE_FILES, FINETUNING_NAME, "predictions.jsonl"),
            *("best/best.json", "best/baseline.json", "best/update-#.safetensors"),
        ),
    ),
    OwnedFiles("gaudi-bert predict", ("predict",)),
    OwnedFiles("gaudi-bert embed", ("embed",)),
    OwnedFiles("gaudi-bert run", ("rows",), ("settings.json", "train.jsonl", "evaluation.jsonl")),
)
# For each stage, the names of the files that it can write. `--overwrite` removes only these files. The keys are the stage
# names in settings files.
OWNED = {stage: owned for owned in _ALL for stage in owned.stages}
