"""conversion.json: all packs of a folder are there in another format, in the folder `OUT` next to `OUT-conversion/`.

Other trainers read every file of a folder, so nothing else is in that folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from gaudi_bert.artefacts.base import Artefact, Count

PackFormatName = Literal["hdf5", "parquet", "predecessor"]


class Conversion(Artefact):
    """conversion.json, written last.

    Attributes:
        format: what `--to` named.
        files: how many were written; shards without packs have none.
    """

    remedy = "convert the packs again"

    format: PackFormatName
    files: Count
    packs: Count
    sequences: Count


def conversion_path(out: Path) -> Path:
    """Where the conversion.json of the folder `out` is stored."""
    return out.with_name(f"{out.name}-conversion") / "conversion.json"
