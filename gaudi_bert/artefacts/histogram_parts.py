"""The parts of a histogram that several machines count: each writes its own, and `plan` takes them all.

Apart from `histogram.py`, which needs numpy: `run` starts without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path


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
    parts_by_count: dict[int, list[Path]] = {}
    for name in sorted(names):
        match = re.fullmatch(re.escape(histogram.stem) + r"-(\d{5})-of-(\d{5})\.json", name)
        if match is not None:
            parts_by_count.setdefault(int(match[2]), []).append(histogram.with_name(name))
    complete = [paths for parts, paths in sorted(parts_by_count.items()) if len(paths) == parts]
    return complete[0] if complete else []
