"""Finds out which kind of packs a folder contains: packed TFRecords, a packed table, several packed tables, or none.

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
    """The content of row_lengths.json, which is the last file of a folder that contains packed tables with several row
    lengths.

    The tables are the sub-folders `rows-512` and so on.

    Attributes:
        row_lengths: The row length of each table.
    """

    file_name = f"{NOTES_NAME}/row_lengths.json"
    remedy = "pack the table again"

    format_version: Literal[1]
    format: Literal["row_lengths"]
    row_lengths: Annotated[tuple[Length, ...], Field(min_length=1)]


def row_table_path(folder: Path, length: int) -> Path:
    """Return the path of the packed table with the given row length."""
    return folder / f"rows-{length}"


def check_no_row_tables(folder: Path) -> None:
    """Check that a folder does not contain packed tables with several row lengths.

    Raises:
        InputError: It does. The message names one of the tables, because the caller can use only one.
    """
    tables = RowLengthTables.read_if_present(folder)
    if tables is not None:
        lengths = join_with_and(f"{length:,}" for length in tables.row_lengths)
        table = row_table_path(folder, tables.row_lengths[0])
        raise InputError(
            f"{folder}: contains packed tables with rows of {lengths} tokens; pass one of these tables, such as {table}"
        )


PackKind = Literal["records", "table"]
_COMMANDS = {"write": "gaudi-bert write` or `pack", "pack-table": "gaudi-bert pack", "pack-rows": "gaudi-bert pack"}
"""The commands that write packs, by the stage name in their settings file."""


def find_pack_kind(folder: Path) -> PackKind | None:
    """Return the kind of packs in a folder, or None if it contains none. Only the presence of the metadata is checked.

    Raises:
        InputError: Packing was started in the folder but has not finished.
    """
    kind = next((kind for kind, path in _metadata_path_by_kind(folder).items() if path.exists()), None)
    if kind is None and not RowLengthTables.path_in(folder).exists():
        for path in filter(Path.is_file, _list_settings_paths(folder)):
            try:
                command = _COMMANDS.get(read_signature(path).stage)
            except InputError:  # not a settings file of this package, but a file of the user with the same name
                continue
            if command is not None:
                raise InputError(f"{folder}: packing has not finished; run the same `{command}` again until it ends")
    return kind


def list_pack_kind_files(folder: Path) -> tuple[Path, ...]:
    """Return the files whose presence `find_pack_kind` checks. For a folder in a store, the caller downloads them first."""
    return *_metadata_path_by_kind(folder).values(), RowLengthTables.path_in(folder), *_list_settings_paths(folder)


def _metadata_path_by_kind(folder: Path) -> dict[PackKind, Path]:
    """Return the path that metadata.json has in a folder, for each kind of packs."""
    return {"table": folder / NOTES_NAME / METADATA_NAME, "records": folder / METADATA_NAME}


def _list_settings_paths(folder: Path) -> tuple[Path, Path]:
    """Return the paths that the settings file may have in a folder: for packed TFRecords, and for packed tables."""
    return settings_path(folder, folder / METADATA_NAME), settings_path(folder, RowLengthTables.path_in(folder))
