"""How the stages that many machines share are shared out, and where the parts of a histogram lie.

Machine K of N counts the files K, K + N, ... of a split into `histogram-KKKKK-of-NNNNN.json`; `plan` takes all parts
together, and its result is the same as from one histogram. A split of fewer than N files keeps only so many machines busy.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["histogram_part", "histogram_parts", "histogram_shard"]


def histogram_shard(records: str | Path, shard: tuple[int, int]) -> tuple[int, int] | None:
    """The part (K, N) that machine `shard` counts, N no more than there are files; None where none is left for it.

    Raises:
        InputError: there are no records.
    """
    from gaudi_bert.records.files import list_record_files

    number, machines = shard
    parts = min(machines, len(list_record_files(records)))
    return (number, parts) if number < parts else None


def histogram_part(histogram: Path, shard: tuple[int, int]) -> Path:
    """Where part K of N of `histogram` lies."""
    return histogram.with_name(f"{histogram.stem}-{shard[0]:05d}-of-{shard[1]:05d}.json")


def histogram_parts(histogram: Path) -> list[Path]:
    """The files that make up a histogram: the whole one, or all its parts; empty where it is not complete."""
    if histogram.exists():
        return [histogram]
    found: dict[int, list[Path]] = {}
    for path in sorted(histogram.parent.glob(f"{histogram.stem}-*-of-*.json")):
        match = re.fullmatch(re.escape(histogram.stem) + r"-(\d{5})-of-(\d{5})", path.stem)
        if match is not None:
            found.setdefault(int(match[2]), []).append(path)
    complete = [paths for parts, paths in sorted(found.items()) if len(paths) == parts]
    return complete[0] if complete else []
