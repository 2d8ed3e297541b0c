"""The columns of a table that is packed: which are lists that run along `input_ids`, and which hold one value a row.

Lists of numbers or truths are *aligned*: in every row they are as long as `input_ids`, and each value belongs to a token.
All else is a *scalar*: one value belongs to the whole sequence. Every file of a table must have the same columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gaudi_bert.common.errors import InputError, shortened
from gaudi_bert.records.tables.arrow import require_pyarrow
from gaudi_bert.records.tables.parts import table_schema

__all__ = [
    "LABELS_COLUMN",
    "MADE_COLUMNS",
    "MASK_COLUMN",
    "TOKENS_COLUMN",
    "TableColumns",
    "check_same_columns",
    "check_storable",
    "columns_of",
    "is_list",
]

TOKENS_COLUMN = "input_ids"
MASK_COLUMN = "attention_mask"
LABELS_COLUMN = "labels"
MADE_COLUMNS = ("position_ids", "seq_lens", "sequence_ids", "indices", "starts", "row")
"""What packing adds; a table may not bring its own."""


@dataclass(frozen=True)
class TableColumns:
    """The columns that are packed, by name, with their pyarrow types (aligned: of a value of the list).

    Attributes:
        schema: the pyarrow schema of all columns of the table.
        aligned: lists along the tokens; `input_ids` is the first.
        scalars: one value a row.
    """

    schema: Any
    aligned: Mapping[str, Any]
    scalars: Mapping[str, Any]

    @property
    def names(self) -> list[str]:
        """All of them."""
        return [*self.aligned, *self.scalars]

    def tokens_only(self, *others: str) -> TableColumns:
        """`input_ids`, the mask if there is one, and `others`: what tells the lengths."""
        aligned = {name: kind for name, kind in self.aligned.items() if name in (TOKENS_COLUMN, MASK_COLUMN)}
        return TableColumns(self.schema, aligned, {name: self.scalars[name] for name in others})


def is_list(kind: Any) -> bool:
    """Whether a pyarrow type is any of the lists."""
    types = require_pyarrow().types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def columns_of(path: Path, chosen: Sequence[str] | None = None) -> TableColumns:
    """The columns of a table, as its first file has them.

    Args:
        path: the first file.
        chosen: the columns to pack; all when None.

    Raises:
        InputError: `input_ids` or a chosen column is missing or of a type that cannot be packed, or has a name that packing
            needs.
    """
    schema = table_schema(path)
    names = list(schema.names)
    if TOKENS_COLUMN not in names:
        raise InputError(f"{path}: has no column {TOKENS_COLUMN} (it has {', '.join(names)}); tokenise the text first")
    for name in chosen or ():
        if name not in names:
            raise InputError(f"{path}: has no column {name}; it has {', '.join(names)}")
    wanted = [name for name in names if chosen is None or name in chosen or name == TOKENS_COLUMN]
    if len(set(wanted)) < len(wanted):
        raise InputError(f"{path}: has two columns of one name among {', '.join(wanted)}; rename one")
    aligned, scalars = {}, {}
    for name in sorted(wanted, key=lambda name: name != TOKENS_COLUMN):
        kind = schema.field(name).type
        if name in MADE_COLUMNS:
            raise InputError(f"{path}: column {name} has a name that packing writes itself; {_leave_out(name)}")
        if is_list(kind):
            aligned[name] = _value_type(path, name, kind)
        elif name == TOKENS_COLUMN:
            raise InputError(f"{path}: column {name} holds {kind}; it must hold lists of whole numbers")
        elif "list_view" in str(kind):
            raise InputError(f"{path}: column {name} holds {kind}, whose lists are not packed; cast it to a list")
        else:
            scalars[name] = kind
    return TableColumns(schema, aligned, scalars)


def _value_type(path: Path, name: str, kind: Any) -> Any:
    types = require_pyarrow().types
    value = kind.value_type
    if name == TOKENS_COLUMN and not types.is_integer(value):
        raise InputError(f"{path}: column {name} holds {kind}; it must hold lists of whole numbers")
    if not (types.is_integer(value) or types.is_floating(value) or types.is_boolean(value)):
        raise InputError(f"{path}: column {name} holds {kind}; only lists of numbers are packed, {_leave_out(name)}")
    return value


def check_storable(path: Path, columns: TableColumns) -> None:
    """What packing does with columns must be possible with their types: padding of labels, and scalars as lists in Parquet.

    Raises:
        InputError: it is not; before anything is written.
    """
    pyarrow = require_pyarrow()
    from pyarrow import parquet

    labels = columns.aligned.get(LABELS_COLUMN)
    if labels is not None and (pyarrow.types.is_unsigned_integer(labels) or pyarrow.types.is_boolean(labels)):
        raise InputError(
            f"{path}: column {LABELS_COLUMN} holds lists of {labels}, which cannot be -100, and padding must be; cast it to "
            "int32, or leave it out with --columns"
        )
    for name, kind in columns.scalars.items():
        try:
            values = pyarrow.nulls(1, kind).take(pyarrow.array([0]))
            parquet.write_table(
                pyarrow.table({name: pyarrow.ListArray.from_arrays(pyarrow.array([0, 1], pyarrow.int32()), values)}),
                pyarrow.BufferOutputStream(),
            )
        except pyarrow.ArrowException as error:
            reason = shortened(str(error), 120)
            raise InputError(
                f"{path}: column {name} holds {kind}, which cannot be packed ({reason}); cast it, or leave it out with "
                "--columns"
            ) from error


def _leave_out(name: str) -> str:
    return f"rename it, or name the columns to pack without {name}: --columns input_ids,..."


def check_same_columns(files: Sequence[Path], columns: TableColumns) -> None:
    """Every file must have the columns of the first, with their types.

    Raises:
        InputError: a file lacks one or has another type; both files are named.
    """
    for path in files[1:]:
        schema = table_schema(path)
        for name in columns.names:
            if name not in schema.names:
                raise InputError(f"{path}: has no column {name}, which {files[0].name} has; give all files the same columns")
            kind, first = schema.field(name).type, columns.schema.field(name).type
            same = kind.value_type == first.value_type if is_list(kind) and is_list(first) else kind == first
            if not same:
                raise InputError(
                    f"{path}: column {name} holds {kind}, in {files[0].name} it holds {first}; cast it to one type"
                )
