"""Find the files of a table, and determine the columns that are packed.

A table is one file, a folder, a glob, or a folder that Hugging Face datasets wrote with `Dataset.save_to_disk`. In such a
folder, `state.json` names the files. Other files in it belong to an earlier save and are ignored. Files are identified by
their names, so two files of a table must not have the same name.
"""

from __future__ import annotations

import glob
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gaudi_bert.artefacts.object_store import ObjectStore
from gaudi_bert.common.arrow import require_pyarrow
from gaudi_bert.common.errors import InputError, shorten
from gaudi_bert.common.files import explain_os_errors, is_in_store, read_json
from gaudi_bert.common.progress import Reporter
from gaudi_bert.tables.parts import read_table_schema

_EXTENSIONS = (".parquet", ".arrow", ".feather", ".jsonl", ".jsonl.gz")
_DATASET_STATE = "state.json"


def is_table(source: str | Path) -> bool:
    """Return whether `source` is a table. A table is a file such as `rows.parquet`, or a folder or pattern of such files.

    Commands read everything else as TFRecords.
    """
    path = Path(source)
    if is_in_store(source):
        names = ObjectStore().list(source, direct_only=True)
        return _has_table_extension(path) or any(name == _DATASET_STATE or name.endswith(_EXTENSIONS) for name in names)
    if path.is_dir():
        return (path / _DATASET_STATE).is_file() or bool(_list_tables(path)) or bool(_list_split_folders(path))
    if os.path.lexists(path):
        return _has_table_extension(path)
    matches = glob.glob(os.fspath(source))
    return _has_table_extension(path) or (bool(matches) and all(name.endswith(_EXTENSIONS) for name in matches))


def list_table_files(source: str | Path, reporter: Reporter | None = None) -> list[Path]:
    """Return the files of a table, sorted by name.

    Args:
        source: A file, a folder, a glob, or a folder that `Dataset.save_to_disk` wrote.
        reporter: Reports tables in the folder that are not part of the data.

    Raises:
        InputError: There is no table, or the source is ambiguous.
    """
    path = Path(source)
    if path.is_file():
        return [path]
    if not path.is_dir():
        return _list_matching_tables(source)
    with explain_os_errors(path, "read"):
        tables = _list_tables(path)
    named = _list_saved_dataset_files(path)
    if named is not None:
        others = [file.name for file in tables if file not in named]
        if others and reporter is not None:
            reporter.say(
                f"{source}: ignored {', '.join(others)}, because state.json does not list them; an earlier save wrote them"
            )
        return named
    if tables:
        return tables
    splits = _list_split_folders(path)
    if splits:
        raise InputError(
            f"{path}: the folder contains the splits {', '.join(splits)}; pass one split, for example {path / splits[0]}"
        )
    raise InputError(
        f"{path}: the folder contains no {', '.join(_EXTENSIONS)} file; pass a folder of tables with a column input_ids"
    )


def _has_table_extension(path: Path) -> bool:
    """Return whether a file name has the extension of a table."""
    return path.name.endswith(_EXTENSIONS)


def _list_tables(folder: Path) -> list[Path]:
    """Return the files in a folder that have the extension of a table, sorted by name.

    The caches of datasets are left out, and so are the hidden files that pyarrow ignores.
    """
    others = (".", "_", "cache-")
    return sorted(child for child in folder.iterdir() if _has_table_extension(child) and not child.name.startswith(others))


def _list_split_folders(folder: Path) -> list[str]:
    """Return the names of the subfolders that contain Arrow files. Each such folder is a split of a `DatasetDict`."""
    return sorted(child.name for child in folder.iterdir() if child.is_dir() and any(child.glob("*.arrow")))


def _list_matching_tables(source: str | Path) -> list[Path]:
    """Return the files that match a pattern, sorted by name.

    Raises:
        InputError: No file matches, a match is not a table, or two files have the same name.
    """
    paths = sorted(map(Path, glob.glob(os.fspath(source))), key=lambda path: path.name)
    if not paths:
        raise InputError(
            f"{source}: the path does not exist, and no file matches it as a pattern; pass a {', '.join(_EXTENSIONS)} "
            "file, a folder of such files, or a pattern"
        )
    for path in paths:
        if not (path.is_file() and _has_table_extension(path)):
            raise InputError(f"{path}: this is not a {', '.join(_EXTENSIONS)} file; pass a pattern that matches only tables")
    for path, following in itertools.pairwise(paths):
        if path.name == following.name:
            raise InputError(
                f"{following}: the file has the same name as {path}; rename one of them, because files are identified by "
                "name"
            )
    return paths


def _list_saved_dataset_files(folder: Path) -> list[Path] | None:
    """Return the files that the `state.json` of a folder lists, sorted, or None if `Dataset.save_to_disk` did not write the
    folder.

    Raises:
        InputError: A file is missing, or the dataset is a selection of rows.
    """
    path = folder / _DATASET_STATE
    state = read_json(path) if path.exists() else None
    if not isinstance(state, dict) or "_data_files" not in state:
        return None
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise InputError(
            f"{path}: the dataset is a selection of rows, which is not supported; save `dataset.flatten_indices()` instead"
        )
    entries = state["_data_files"] if isinstance(state["_data_files"], list) else []
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    if not names or not all(isinstance(name, str) and name == Path(name).name for name in names):
        raise InputError(f"{path}: `_data_files` lists no files; save the dataset again")
    files = sorted(folder / str(name) for name in names)
    for file in files:
        if not file.is_file():
            raise InputError(
                f"{file}: the file is missing, although {_DATASET_STATE} lists it; copy the file, or save the dataset again"
            )
    return files


# --- the columns of a table that is packed
#
# Lists of numbers or booleans are *aligned* columns: in every row they have one value for each token, so they are as long as
# `input_ids`. All other columns are *scalar* columns, with one value per sequence. Every file of a table must have the same
# columns.

TOKENS_COLUMN = "input_ids"
MASK_COLUMN = "attention_mask"
LABELS_COLUMN = "labels"
# Packing adds columns with these names, so a table must not contain them.
_ADDED_COLUMNS = ("position_ids", "seq_lens", "sequence_ids", "indices", "starts", "row")


@dataclass(frozen=True)
class TableColumns:
    """The columns of a table that are packed. Aligned columns have one value per token, and scalar columns have one value
    per row.

    Attributes:
        schema: The pyarrow schema of all columns in the table.
        aligned: The aligned columns by name, with the type of a single value. `input_ids` comes first.
        scalars: The scalar columns by name, with their types.
        tokens: The name that `input_ids` has in the table.
    """

    schema: Any
    aligned: Mapping[str, Any]
    scalars: Mapping[str, Any]
    tokens: str = TOKENS_COLUMN

    @property
    def names(self) -> list[str]:
        """The names of all packed columns."""
        return [*self.aligned, *self.scalars]

    @property
    def stored_names(self) -> list[str]:
        """The names that the packed columns have in the table, in the order of `names`."""
        return [self.tokens if name == TOKENS_COLUMN else name for name in self.names]

    def select_length_columns(self) -> TableColumns:
        """Return the columns that determine the lengths of rows: `input_ids`, and `attention_mask` if there is one."""
        aligned = {name: kind for name, kind in self.aligned.items() if name in (TOKENS_COLUMN, MASK_COLUMN)}
        return TableColumns(self.schema, aligned, {}, self.tokens)

    def check_types(self, path: Path) -> None:
        """Raise an InputError if the type of a column cannot be packed.

        Raises:
            InputError: The type of `labels` cannot hold -100, or a scalar cannot be stored in a list.
        """
        pyarrow = require_pyarrow()
        from pyarrow import parquet

        labels = self.aligned.get(LABELS_COLUMN)
        if labels is not None and (pyarrow.types.is_unsigned_integer(labels) or pyarrow.types.is_boolean(labels)):
            raise InputError(
                f"{path}: column {LABELS_COLUMN} contains lists of {labels}, which cannot represent -100, the label of "
                "padding; cast the column to int32, or omit it with --columns"
            )
        for name, kind in self.scalars.items():
            try:
                values = pyarrow.nulls(1, kind).take(pyarrow.array([0]))
                parquet.write_table(
                    pyarrow.table({name: pyarrow.ListArray.from_arrays(pyarrow.array([0, 1], pyarrow.int32()), values)}),
                    pyarrow.BufferOutputStream(),
                )
            except pyarrow.ArrowException as error:
                raise InputError(
                    f"{path}: column {name} has type {kind}, which cannot be packed ({shorten(str(error), 120)}); cast the "
                    "column, or omit it with --columns"
                ) from error


def is_list_type(arrow_type: Any) -> bool:
    """Return whether a pyarrow type is a list of any kind."""
    types = require_pyarrow().types
    return bool(types.is_list(arrow_type) or types.is_large_list(arrow_type) or types.is_fixed_size_list(arrow_type))


def is_same_type(first: Any, second: Any) -> bool:
    """Return whether two pyarrow types are equal. Different kinds of lists with the same type of values count as equal."""
    return bool(first.value_type == second.value_type if is_list_type(first) and is_list_type(second) else first == second)


def select_columns(
    files: Sequence[Path], chosen: Sequence[str] | None = None, tokens_column: str = TOKENS_COLUMN
) -> TableColumns:
    """Choose the columns of a table to pack, and check that all files contain them with the same types.

    Args:
        files: The files.
        chosen: The names of the columns to pack. None for all.
        tokens_column: The column that contains the token ids.

    Raises:
        InputError: A column is missing, has a type that cannot be packed, or differs between files.
    """
    path = files[0]
    schema = read_table_schema(path)
    names = list(schema.names)
    if tokens_column not in names:
        raise InputError(
            f"{path}: the table has no column {tokens_column}, only {', '.join(names)}; name the column of the token ids "
            "with --input-column, or create them from text with `gaudi-bert tokenize`"
        )
    for name in chosen or ():
        if name not in names:
            raise InputError(f"{path}: the table has no column {name}, only {', '.join(names)}; check --columns")
    packed = [name for name in names if chosen is None or name in chosen or name == tokens_column]
    if tokens_column != TOKENS_COLUMN and TOKENS_COLUMN in packed:
        raise InputError(
            f"{path}: the table contains both {TOKENS_COLUMN} and {tokens_column}; {_format_column_remedy(TOKENS_COLUMN)}"
        )
    if len(set(packed)) < len(packed):
        raise InputError(f"{path}: two of the columns {', '.join(packed)} have the same name; rename one of them")
    aligned, scalars = {}, {}
    for stored in sorted(packed, key=lambda name: name != tokens_column):
        kind, name = schema.field(stored).type, TOKENS_COLUMN if stored == tokens_column else stored
        if name in _ADDED_COLUMNS:
            raise InputError(
                f"{path}: column {name} has the name of a column that packing adds; {_format_column_remedy(name)}"
            )
        types = require_pyarrow().types
        if name == TOKENS_COLUMN and not (is_list_type(kind) and types.is_integer(kind.value_type)):
            raise InputError(f"{path}: column {name} must contain lists of integers, but has type {kind}; cast it")
        if is_list_type(kind):
            value = kind.value_type
            if not (types.is_integer(value) or types.is_floating(value) or types.is_boolean(value)):
                raise InputError(
                    f"{path}: column {name} has type {kind}, but only lists of numbers can be packed; "
                    f"{_format_column_remedy(name)}"
                )
            aligned[name] = value
        elif "list_view" in str(kind):
            raise InputError(f"{path}: column {name} has type {kind}, which is not supported; cast it to a list")
        else:
            scalars[name] = kind
    columns = TableColumns(schema, aligned, scalars, tokens_column)
    _check_same_columns(files, columns)
    return columns


def _format_column_remedy(column_name: str) -> str:
    """Return the remedy for a column that cannot be packed: the user has to rename or omit it."""
    return f"rename the column, or select the columns to pack without {column_name}: --columns input_ids,..."


def _check_same_columns(files: Sequence[Path], columns: TableColumns) -> None:
    """Check that all files of a table contain the columns to pack, with the same types as in the first file."""
    for path in files[1:]:
        schema = read_table_schema(path)
        for name in columns.stored_names:
            if name not in schema.names:
                raise InputError(
                    f"{path}: the file has no column {name}, although {files[0].name} has one; use the same columns in all "
                    "files"
                )
            kind, first = schema.field(name).type, columns.schema.field(name).type
            if not is_same_type(kind, first):
                raise InputError(
                    f"{path}: column {name} has type {kind}, but {first} in {files[0].name}; cast it to the same type in "
                    "all files"
                )
