"""Finds out which format of packs a folder contains: packed TFRecords, a packed table, several packed tables, or none.

Several packed tables with different row lengths are sub-folders of one folder, and `row_lengths.json` describes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from gaudi_bert.artefacts.base import METADATA_NAME, NOTES_NAME, Artefact, Length
from gaudi_bert.artefacts.completion import read_signature, settings_path
from gaudi_bert.common.errors import InputError, join_with_and


class RowLengthTables(Artefact):
    """The content of row_lengths.json, which lists the row lengths of several packed tables in one folder.

    The tables are in the sub-folders `rows-512` and so on. This file is written last.

    Attributes:
        row_lengths: The row length of each table.
    """

    file_name = f"{NOTES_NAME}/row_lengths.json"
    remedy = "pack the table again"

    format_version: Literal[1]
    format: Literal["row_lengths"]
    row_lengths: Annotated[tuple[Length, ...], Field(min_length=1)]


def row_table_path(folder: Path, length: int) -> Path:
    """Return the path of the packed table with the given row length in a folder that contains several tables."""
    return folder / f"rows-{length}"


def check_no_row_tables(folder: Path) -> None:
    """Raise an error if a folder contains several packed tables with different row lengths.

    Raises:
        InputError: The folder contains several tables. The message names one of them, because only one can be used.
    """
    tables = RowLengthTables.read_if_present(folder)
    if tables is not None:
        lengths = join_with_and(f"{length:,}" for length in tables.row_lengths)
        raise InputError(
            f"{folder}: the folder contains packed tables with rows of {lengths} tokens; pass one of them, such as "
            f"{row_table_path(folder, tables.row_lengths[0])}"
        )


PackFormat = Literal["records", "table"]
# The commands that write packs, by the name of their stage. If packing has not finished, an error message names the command
# to run again.
_COMMANDS = {"write": "gaudi-bert write` or `pack", "pack-table": "gaudi-bert pack", "pack-rows": "gaudi-bert pack"}


def detect_pack_format(folder: Path) -> PackFormat | None:
    """Return whether a folder contains packed TFRecords or a packed table. Return None if it contains neither.

    Only the presence of metadata.json is checked.

    Raises:
        InputError: Packing was started in the folder but has not finished.
    """
    found = next((name for name, path in _metadata_path_by_format(folder).items() if path.exists()), None)
    if found is None and not RowLengthTables.json_path_in(folder).exists():
        for path in filter(Path.is_file, _settings_path_by_format(folder).values()):
            try:
                command = _COMMANDS.get(read_signature(path).stage)
            except InputError:  # a file of the user that happens to have this name
                continue
            if command is not None:
                raise InputError(
                    f"{folder}: packing has not finished; run the same `{command}` command again until it finishes"
                )
    return found


def list_format_detection_files(folder: Path) -> tuple[Path, ...]:
    """Return the paths of the files that `detect_pack_format` checks.

    If the folder is in a store, the caller must download these files first.
    """
    return (
        *_metadata_path_by_format(folder).values(),
        RowLengthTables.json_path_in(folder),
        *_settings_path_by_format(folder).values(),
    )


def _metadata_path_by_format(folder: Path) -> dict[PackFormat, Path]:
    """Return where metadata.json is in a folder of packed TFRecords, and where it is in a folder with a packed table."""
    return {"table": folder / NOTES_NAME / METADATA_NAME, "records": folder / METADATA_NAME}


def _settings_path_by_format(folder: Path) -> dict[PackFormat, Path]:
    """Return where the settings file is in a folder of packed TFRecords, and where it is in a folder with packed tables."""
    return {
        "records": settings_path(folder, folder / METADATA_NAME),
        "table": settings_path(folder, RowLengthTables.json_path_in(folder)),
    }
