"""The files that the output (artefact) of each stage can contain, so that `--overwrite` never removes any other file.

`OWNED` lists them for each stage, and `tests/test_overwrite.py` checks every command that has `--overwrite` against this
list. A file belongs to an output if its name matches a pattern, it is a regular file, and the folder contains a settings
file of the same command. A symbolic link never belongs to an output, and is never followed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gaudi_bert.artefacts.base import METADATA_NAME, NOTES_NAME, VERIFICATION_NAME
from gaudi_bert.artefacts.mirrored_folder import is_mirrored, list_names
from gaudi_bert.artefacts.work_folder import EXAMPLES_NAME, FINETUNING_NAME, TRAINING_NAME

# The tokenizer files that are copied to the folders of tokens, packs and models.
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
    """Return whether the name of a file matches one of the patterns of an output's files.

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
# The files that each stage can write, by the name of the stage in its settings file.
OWNED = {stage: owned for owned in _ALL for stage in owned.stages}


def list_files_below(folder: Path) -> Iterator[tuple[str, bool]]:
    """Yield (relative path, whether it is a regular file) for each file in a folder and its sub-folders.

    Symbolic links are not followed. Folders without read permission are skipped, because nothing in them can be removed.
    """
    if is_mirrored(folder):
        yield from ((name, True) for name in list_names(folder))
        return
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from ((f"{entry.name}/{name}", is_regular) for name, is_regular in list_files_below(Path(entry)))
            else:
                yield entry.name, entry.is_file(follow_symlinks=False)
