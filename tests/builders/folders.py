"""What a reader sees of a folder."""

from __future__ import annotations

from pathlib import Path


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder by their names there, but for hidden ones."""
    files = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name.as_posix(): path.read_bytes() for name, path in files.items() if not name.name.startswith(".")}


# What says how fast a run was, or where it ran.
OF_THE_RUN = ("tensorboard/", ".log", "metrics.jsonl", "training.json", "settings.yaml", "report.html")


def comparable(found: dict[str, bytes], *others: str) -> dict[str, bytes]:
    """What two runs of a pipeline have in common to the byte, without `others`; hidden files are locks."""
    kept = {name: content for name, content in found.items() if not any(part in name for part in (*OF_THE_RUN, *others))}
    return {name: content for name, content in kept.items() if not any(part.startswith(".") for part in name.split("/"))}
