"""The results of the commands that read a packed folder: verification.json (`verify`) and conversion.json (`convert`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typing_extensions import Self

from gaudi_bert.artefacts.base import VERIFICATION_NAME, Artefact, Count, ExtensibleArtefact, Sha256, TooLongRows
from gaudi_bert.artefacts.packed import PackedMetadata
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import format_count
from gaudi_bert.config.values import require_pattern

_Fingerprint = Annotated[str, require_pattern("[0-9a-f]{16}", "16 digits from 0 to f")]


class Verification(ExtensibleArtefact):
    """The content of verification.json, which is only written if the verification was successful.

    Attributes:
        sequences: The number of sequences.
        tokens: The number of non-padding tokens.
        packs: The number of packs.
        shards: The number of shards.
        groups: The number of groups.
        packs_sha256: The identity of the packs (`PackedMetadata.compute_packs_sha256`).
        lower_bound: The proven minimum number of packs.
        input_files: The number of input files.
        bad_files: The number of input files that were skipped because they cannot be read.
        fingerprint: The fingerprint of all sequences, independent of their order. Only for TFRecords.
        rows: The number of table rows.
        columns: The columns whose values were compared. Only for tables.
        too_long: The rows that were longer than a pack. Only for tables.
    """

    file_name = VERIFICATION_NAME
    remedy = "remove it and verify again"
    omits_defaults = True

    sequences: Count
    tokens: Count
    packs: Count
    shards: Count
    groups: Count
    packs_sha256: Sha256
    lower_bound: Count
    input_files: Count = 0
    bad_files: Count = 0
    fingerprint: _Fingerprint | None = None
    rows: Count = 0
    columns: tuple[str, ...] = ()
    too_long: TooLongRows | None = None

    @classmethod
    def read_matching(cls, path: Path, metadata: PackedMetadata) -> Self:
        """Read the verification of a packed folder, and check that it belongs to the current packs.

        Args:
            path: The verification file, or its folder.
            metadata: The metadata of the packed folder.

        Raises:
            InputError: The file cannot be read, is invalid, or is the verification of other packs.
        """
        stored = cls.read(path)
        if stored.packs_sha256 != metadata.compute_packs_sha256() or stored.sequences != metadata.sequences:
            raise InputError(
                f"{cls.json_path_in(path)}: the file verifies packs that differ from those in metadata.json; {cls.remedy}"
            )
        return stored

    def format_lines(self) -> list[str]:
        """Return lines of text that describe what was verified."""
        if self.too_long is None:
            return [f"each of {format_count(self.sequences, 'sequence')} is in the packs exactly once"]
        return [
            f"{format_count(self.rows, 'row')}, {format_count(self.sequences, 'sequence')} in "
            f"{format_count(self.packs, 'pack')}",
            f"each sequence is in the packs exactly once, with equal values in {', '.join(self.columns)}",
            self.too_long.format_line(),
        ]


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


def conversion_summary_path(hdf5_folder: Path) -> Path:
    """Return the path of the conversion.json file for a folder of HDF5 files.

    The file is in the folder `OUT-conversion` next to the folder `OUT`, because other trainers read every file in `OUT`.
    """
    return hdf5_folder.with_name(f"{hdf5_folder.name}-conversion") / "conversion.json"
