"""conversion.json, the result of `convert`.

It is in the folder `OUT-conversion` next to the folder `OUT` of HDF5 files, because other trainers read every file in `OUT`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from gaudi_bert.artefacts.base import Artefact, Count
from gaudi_bert.common.progress import format_count


class Conversion(Artefact):
    """The content of conversion.json, which summarizes a conversion of packs. It is written after all HDF5 files.

    Attributes:
        format: The format of the files.
        files: The number of files. Shards without packs produce no file.
        packs: The number of packs.
        sequences: The number of sequences.
    """

    remedy = "convert the packs again"

    format: Literal["hdf5"]
    files: Count
    packs: Count
    sequences: Count

    def format_lines(self) -> list[str]:
        """Return a line of text with the number of packs and the number of files."""
        return [f"{self.format}: {format_count(self.packs, 'pack')} in {format_count(self.files, 'file')}"]


def conversion_path(out: Path) -> Path:
    """Return the path of the conversion.json file for a folder of HDF5 files."""
    return out.with_name(f"{out.name}-conversion") / "conversion.json"
