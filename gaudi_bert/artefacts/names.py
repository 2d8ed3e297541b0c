"""The names of files inside the folders that stages make. Where the folders lie is in `work_folder`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

__all__ = [
    "EXAMPLES_NAME",
    "FINETUNING_NAME",
    "METADATA_NAME",
    "TRAINING_NAME",
    "VERIFICATION_NAME",
    "complete_parts",
    "histogram_part",
    "histogram_parts",
    "manifest_path",
    "section_path",
]

EXAMPLES_NAME = "examples.json"
METADATA_NAME = "metadata.json"
VERIFICATION_NAME = "verification.json"
TRAINING_NAME = "training.json"
FINETUNING_NAME = "metrics.json"


def section_path(folder: Path, split: str, number: int) -> Path:
    """Where the figures of a finished section of `prepare` lie, in the folder of examples."""
    return folder / "sections" / f"{split}-{number:05d}.json"


def manifest_path(folder: Path, group: int) -> Path:
    """Where the manifest of `group` lies in a packed folder."""
    return folder / f"group-{group:05d}.json"


def histogram_part(histogram: Path, shard: tuple[int, int]) -> Path:
    """Where part K of N of `histogram` lies: machine K counts the files K, K + N, ..., and `plan` takes all parts."""
    return histogram.with_name(f"{histogram.stem}-{shard[0]:05d}-of-{shard[1]:05d}.json")


def histogram_parts(histogram: Path) -> list[Path]:
    """The files that make up a histogram: the whole one, or all its parts; empty where it is not complete."""
    if histogram.exists():
        return [histogram]
    return complete_parts(histogram, (path.name for path in histogram.parent.glob(f"{histogram.stem}-*-of-*.json")))


def complete_parts(histogram: Path, names: Iterable[str]) -> list[Path]:
    """All parts of a histogram, where `names` has them all."""
    found: dict[int, list[Path]] = {}
    for name in sorted(names):
        match = re.fullmatch(re.escape(histogram.stem) + r"-(\d{5})-of-(\d{5})\.json", name)
        if match is not None:
            found.setdefault(int(match[2]), []).append(histogram.with_name(name))
    complete = [paths for parts, paths in sorted(found.items()) if len(paths) == parts]
    return complete[0] if complete else []
