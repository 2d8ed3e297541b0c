"""Where the text comes from: files, folders, globs, or the documentation that Python carries.

A source is known by its name (relative to the folder or glob that was given), its size and the CRC-32 of its bytes, so the
same text in another place makes the same examples.
"""

from __future__ import annotations

import glob
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gaudi_bert.common.built_in_texts import BUILT_IN_TEXTS
from gaudi_bert.common.errors import InputError
from gaudi_bert.corpus.python_texts import python_texts

__all__ = ["Source", "find_sources", "source_identity"]

_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Source:
    """One input: a text file, or a text that Python carries (`path` is None).

    Args:
        name: relative name, the same on every machine, or a key of `BUILT_IN_TEXTS`.
        path: where the file is.
        size_bytes: as it lies on the disk, compressed or not; 0 for a built-in text.
    """

    name: str
    path: Path | None
    size_bytes: int

    @property
    def shown(self) -> str:
        """How messages name it."""
        return str(self.path) if self.path is not None else self.name


def find_sources(texts: Sequence[str], folder: Path) -> list[Source]:
    """All sources of `texts` in a fixed order; relative paths start at `folder`.

    Raises:
        InputError: nothing was given, or a file, folder or glob is missing or holds no file.
    """
    if not texts:
        raise InputError(f"prepare: no text was given; name files, folders or globs, or {' or '.join(BUILT_IN_TEXTS)}")
    sources: list[Source] = []
    seen: set[Path] = set()
    for text in texts:
        if text in BUILT_IN_TEXTS:
            sources.append(Source(text, None, 0))
            continue
        for name, path in _named_files(text, folder):
            if path.resolve() not in seen:
                seen.add(path.resolve())
                sources.append(Source(name, path, path.stat().st_size))
    return sources


def _named_files(text: str, folder: Path) -> list[tuple[str, Path]]:
    path = folder / Path(text).expanduser()
    if path.is_file():
        return [(path.name, path)]
    if path.is_dir():
        found = [child for child in path.rglob("*") if child.is_file()]
        root = path
    elif glob.has_magic(text):
        found = [Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file()]
        root = Path(*_leading_parts(path))
    else:
        raise InputError(f"{path}: no such file or folder; check the path of the text (prepare.text)")
    named = sorted((child.relative_to(root).as_posix(), child) for child in found)
    named = [(name, child) for name, child in named if not any(part.startswith(".") for part in name.split("/"))]
    if not named:
        raise InputError(f"{path}: holds no text file; check the path of the text (prepare.text)")
    return named


def _leading_parts(path: Path) -> list[str]:
    parts: list[str] = []
    for part in path.parts:
        if glob.has_magic(part):
            break
        parts.append(part)
    return parts


def source_identity(source: Source) -> dict[str, Any]:
    """Name, size and CRC-32 of a source, for the settings kept beside what was made from it.

    Raises:
        InputError: the file cannot be read.
    """
    checksum, size = 0, 0
    if source.path is None:
        content = json.dumps(python_texts(source.name), sort_keys=True, ensure_ascii=True).encode("utf-8")
        checksum, size = zlib.crc32(content), len(content)
    else:
        try:
            with open(source.path, "rb") as handle:
                while chunk := handle.read(_READ_BYTES):
                    checksum, size = zlib.crc32(chunk, checksum), size + len(chunk)
        except OSError as error:
            raise InputError(f"{source.path}: cannot read: {error.strerror}; check the file and its permissions") from error
    return {"name": source.name, "bytes": size, "crc32": f"{checksum:08x}"}
