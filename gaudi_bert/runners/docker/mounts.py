"""What a container sees of the host's disk: the work folder, the pipeline file, and what that names; the latter read-only.

Everything lies in the container where it lies on the host, so that relative paths in the pipeline file, `--work` and the
paths in messages mean the same inside and outside.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from gaudi_bert.artefacts.store.location import in_store
from gaudi_bert.common.errors import InputError
from gaudi_bert.config import PipelineSettings
from gaudi_bert.runners.named_paths import named_paths
from gaudi_bert.runners.stage_table import STAGES

__all__ = ["bind_mount", "input_mounts", "secret_mount"]

Mount = dict[str, Any]

# Where an image has its own files: nothing of the host may lie over them.
_OF_THE_IMAGE = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr", "/var/lib"),
    *("/opt/venv", "/opt/gaudi-bert", "/opt/habanalabs", "/opt/amazon"),
)


def bind_mount(path: Path, key: str, *, source: Path | None = None, read_only: bool = True) -> Mount:
    """Show `path` (or `source` in its place) at the same place in the container.

    Args:
        path: an absolute path.
        key: the setting that named it, for the error.
        source: what is shown there; default: the path itself.
        read_only: whether the container may not write there.

    Raises:
        InputError: the path would hide files of the image.
    """
    target = PurePosixPath(os.path.abspath(path))
    for place in map(PurePosixPath, _OF_THE_IMAGE):
        if target.is_relative_to(place) or place.is_relative_to(target):
            raise InputError(f"{key} = {target}: in a container, {place} is the image's own; put it somewhere else")
    if target == PurePosixPath("/tmp"):
        raise InputError(f"{key} = /tmp: a container has a /tmp of its own; put it in a folder below")
    real = os.path.realpath(source if source is not None else path)
    return {"Type": "bind", "Source": real, "Target": str(target), "ReadOnly": read_only}


def secret_mount(path: Path, target: str) -> Mount:
    """Show a file or folder with log-ins or certificates, read-only, at a place that only containers have."""
    return {"Type": "bind", "Source": os.path.realpath(path), "Target": target, "ReadOnly": True}


def input_mounts(settings: PipelineSettings, stage: str, pipeline_folder: Path) -> list[Mount]:
    """Mounts of all that the pipeline file names and `stage` reads, but for what lies in object stores.

    Args:
        settings: the pipeline.
        stage: one of `gaudi_bert.runners.stage_table.STAGES`.
        pipeline_folder: where relative paths of text and records start.

    Raises:
        InputError: something is not there, or would hide files of the image.
    """
    mounts: dict[str, Mount] = {}
    for key, text in named_paths(settings):
        if key in STAGES[stage].reads and not in_store(text):
            for path, source in _shown(key, text, pipeline_folder):
                mount = bind_mount(path, key, source=source)
                mounts[mount["Target"]] = mount
    return [mount for target, mount in mounts.items() if not _is_inside_another(target, mounts)]


def _shown(key: str, text: str, pipeline_folder: Path) -> Iterator[tuple[Path, Path]]:
    """What has to be shown for a path, and what is shown there.

    That is the path itself; of a glob or of a checkpoint's prefix, the folder; and with records, the vocabulary beside them.
    """
    is_checkpoint = key.endswith(".init_checkpoint")
    start = Path() if is_checkpoint else pipeline_folder
    path = Path(os.path.abspath(start / Path(text).expanduser()))
    if not path.exists() and glob.has_magic(text):
        path = next(parent for parent in path.parents if not glob.has_magic(str(parent)))
    elif is_checkpoint and any(path.parent.glob(f"{glob.escape(path.name)}.*")):
        path = path.parent
    elif key == "finetune.init_checkpoint" and path.is_file():
        path = path.parent  # with its config and its tokenizer
    if not path.exists():
        raise InputError(f"{key} = {path}: no such file or folder; check the path")
    yield path, path
    folder = path if path.is_dir() else path.parent
    vocabulary = folder.resolve().parent / "vocab.txt"
    if key.endswith("records") and vocabulary.is_file():
        yield folder.parent / "vocab.txt", vocabulary


def _is_inside_another(target: str, mounts: dict[str, Mount]) -> bool:
    """Whether the mount of a folder above shows it already."""
    path = PurePosixPath(target)
    for other, mount in mounts.items():
        if other != target and path.is_relative_to(other):
            below = os.path.join(mount["Source"], path.relative_to(other))
            return os.path.realpath(below) == mounts[target]["Source"]
    return False
