"""The metadata of a packed folder, whoever packed it."""

from __future__ import annotations

from pathlib import Path

from gaudi_bert.artefacts.metadata import Metadata, read_own_metadata
from gaudi_bert.artefacts.names import METADATA_NAME
from gaudi_bert.records.predecessor import predecessor_metadata_path, read_predecessor_metadata

__all__ = ["read_metadata"]


def read_metadata(folder: Path | str) -> Metadata:
    """The metadata of a packed folder: ours inside it, or the predecessor's beside it (`<folder>_metadata.json`).

    Raises:
        InputError: there is none, or it is damaged or of another format version.
    """
    folder = Path(folder)
    sibling = predecessor_metadata_path(folder)
    if not (folder / METADATA_NAME).exists() and sibling.exists():
        return read_predecessor_metadata(folder, sibling)
    return read_own_metadata(folder)
