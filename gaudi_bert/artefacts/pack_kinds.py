"""What packs a folder holds: TFRecords, a table, tables of several lengths of rows; or packs that are not finished."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from gaudi_bert.artefacts.base import METADATA_NAME, NOTES_NAME, Artefact, Length
from gaudi_bert.artefacts.completion import read_signature, settings_path
from gaudi_bert.common.errors import InputError, enumerated

PackKind = Literal["records", "table"]
_COMMANDS = {"write": "gaudi-bert write` or `pack", "pack-table": "gaudi-bert pack", "pack-rows": "gaudi-bert pack"}
"""What makes packs, by the name of the stage in its settings."""


def pack_kind(folder: Path) -> PackKind | None:
    """Return what packs a folder holds, by the metadata there; None for none.

    Raises:
        InputError: their writing was begun and has not been finished.
    """
    kind = next((kind for kind, path in _metadata_paths(folder).items() if path.exists()), None)
    if kind is None and not RowTables.path_in(folder).exists():
        _refuse_unfinished(folder)
    return kind


def files_that_tell_kinds(folder: Path) -> tuple[Path, ...]:
    """Return each file that `pack_kind` looks for, to be fetched before it is asked about a folder in a store."""
    return *_metadata_paths(folder).values(), RowTables.path_in(folder), *_settings_paths(folder)


def _metadata_paths(folder: Path) -> dict[PackKind, Path]:
    return {"table": folder / NOTES_NAME / METADATA_NAME, "records": folder / METADATA_NAME}


def _settings_paths(folder: Path) -> tuple[Path, Path]:
    """Return where the settings of packs are stored, of TFRecords and of tables; the metadata are written last."""
    return settings_path(folder, folder / METADATA_NAME), settings_path(folder, RowTables.path_in(folder))


def _refuse_unfinished(folder: Path) -> None:
    for path in filter(Path.is_file, _settings_paths(folder)):
        try:
            command = _COMMANDS.get(read_signature(path).stage)
        except InputError:  # the user's own file of this name
            continue
        if command is not None:
            raise InputError(f"{folder}: packing has not finished; run the `{command}` that began it again, to its end")


# --- tables of several lengths of rows


class RowTables(Artefact):
    """row_lengths.json of a folder of packed tables, `rows-512` and so on, one for each length of rows; written last."""

    file_name = f"{NOTES_NAME}/row_lengths.json"
    remedy = "pack the table again"

    format_version: Literal[1]
    format: Literal["row_lengths"]
    row_lengths: Annotated[tuple[Length, ...], Field(min_length=1)]


def row_table_path(folder: Path, length: int) -> Path:
    """The packed table of rows of one of the lengths of a folder."""
    return folder / f"rows-{length}"


def refuse_row_tables(folder: Path) -> None:
    """Refuse a folder of rows of several lengths, for what takes one packed folder."""
    tables = RowTables.read_if_present(folder)
    if tables is not None:
        lengths = enumerated(f"{length:,}" for length in tables.row_lengths)
        table = row_table_path(folder, tables.row_lengths[0])
        raise InputError(f"{folder}: holds rows of {lengths}; give the packed table of one length, such as {table}")
