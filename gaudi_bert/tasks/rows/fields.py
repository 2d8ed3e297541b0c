"""One record (a JSON object, a line of a table) as a typed row, every value checked. Errors name the file and the row."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from gaudi_bert.common.errors import InputError, shown
from gaudi_bert.config.tasks import TaskName, TaskSettings
from gaudi_bert.tasks.rows.types import IdsRow, Row, TaggedRow, TextRow

__all__ = ["Record", "RowReader"]

Record: TypeAlias = Mapping[str, Any]

LABELLED_TEXT = ("classification", "multi-label", "regression")
LANGUAGE_MODELLING = ("masked-language-modelling", "causal-language-modelling")
INPUT_IDS = "input_ids"
# Words of a text without given words: letters and digits together, every other sign alone, as BERT's own splitting has it.
WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class RowReader:
    """Makes rows of records.

    Attributes:
        source: how errors call the file.
        task: None for plain texts.
        settings: names of columns.
        label_names: names of labels that stand in the records as numbers; None if they stand as names.
        labelled: read labels, and refuse a record without one; else labels are passed over.
        named_by_header: the columns are called what the first line of the file says.
    """

    source: str
    task: TaskName | None
    settings: TaskSettings
    label_names: tuple[str, ...] | None = None
    labelled: bool = False
    named_by_header: bool = False

    def row(self, number: int, record: Record) -> Row:
        """The row that `record` holds.

        Raises:
            InputError: a column is missing, or a value is not what the task needs.
        """
        if self.task == "token-classification":
            return self._tagged_row(number, record)
        if self.task in LANGUAGE_MODELLING and INPUT_IDS in record:
            return self._ids_row(number, record)
        return self._text_row(number, record)

    def error(self, number: int, problem: str, remedy: str) -> InputError:
        """One line that names file and row."""
        return InputError(f"{self.source}: row {number}: {problem}; {remedy}")

    def _column_remedy(self, setting: str, column: str) -> str:
        remedy = f"name the column with --set task.{setting}=NAME (now {column})"
        return f"{remedy}; without a header line, name all: --columns text,label,id" if self.named_by_header else remedy

    def _text_row(self, number: int, record: Record) -> TextRow:
        settings = self.settings
        text = self._text(number, record, settings.text)
        pair = None
        if record.get(settings.text_pair) is not None and settings.text_pair != settings.text:
            pair = self._text(number, record, settings.text_pair)
        label = self._label(number, record) if self.labelled and self.task in LABELLED_TEXT else None
        return TextRow(number, text, pair, label)

    def _text(self, number: int, record: Record, column: str) -> str:
        if column not in record:
            raise self.error(number, f"has no {column!r}, only {_names(record)}", self._column_remedy("text", column))
        value = record[column]
        if not isinstance(value, str):
            raise self.error(number, f"{column} is {shown(value)}", "it must be a text")
        if not value.strip():
            raise self.error(number, f"{column} is empty", "give it a text, or leave the row out")
        return value

    def _label(self, number: int, record: Record) -> str | tuple[str, ...] | float:
        column = self.settings.label
        value = record.get(column)
        if value is None:
            problem = f"has no {column!r}, only {_names(record)}" if column not in record else f"{column} is null"
            raise self.error(number, problem, self._column_remedy("label", column))
        if self.task == "regression":
            return self._number(number, value)
        if self.task == "multi-label":
            values = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
            if not isinstance(values, list | tuple):
                raise self.error(number, f"{column} is {shown(value)}", "it must be a list of names")
            return tuple(dict.fromkeys(self._name(number, column, each) for each in values))
        return self._name(number, column, value)

    def _number(self, number: int, value: object) -> float:
        try:
            found = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
        except (ValueError, OverflowError):
            found = math.nan
        if not math.isfinite(found):
            raise self.error(number, f"{self.settings.label} is {shown(value)}", "regression needs a finite number")
        return found

    def _name(self, number: int, column: str, value: object) -> str:
        """A label's name, also where the record holds its number."""
        names = self.label_names
        if isinstance(value, str) and names is not None and value in names:
            return value
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if is_number or (isinstance(value, str) and re.fullmatch(r"\s*-?\d+\s*", value)):
            if names is None:
                raise self.error(
                    number, f"{column} is the number {shown(value)}", "name the labels in a file, one a line: --labels FILE"
                )
            if not 0 <= int(str(value)) < len(names):
                raise self.error(number, f"{column} is {shown(value)}", f"--labels names 0 to {len(names) - 1}")
            return names[int(str(value))]
        if not isinstance(value, str) or not value.strip():
            raise self.error(number, f"{column} is {shown(value)}", "it must be the name of a label")
        if names is not None:
            raise self.error(
                number, f"{column} is {shown(value)}", "--labels does not name it; add it there, or mend the row"
            )
        return value.strip()

    def _tagged_row(self, number: int, record: Record) -> TaggedRow:
        settings = self.settings
        if settings.tokens not in record:
            return self._words_of_text(number, record)
        tokens = self._strings(number, settings.tokens, record[settings.tokens])
        if not tokens:
            raise self.error(number, f"{settings.tokens} is empty", "give it words, or leave the row out")
        if not self.labelled:
            return TaggedRow(number, tokens)
        value = record.get(settings.tags)
        if value is None:
            problem = f"has no {settings.tags!r}, only {_names(record)}"
            raise self.error(number, problem, self._column_remedy("tags", settings.tags))
        if not isinstance(value, list | tuple):
            raise self.error(number, f"{settings.tags} is {shown(value)}", "it must be a list, a tag for each word")
        tags = tuple(self._name(number, settings.tags, tag) for tag in value)
        if len(tags) != len(tokens):
            raise self.error(number, f"has {len(tokens)} words and {len(tags)} tags", "give each word a tag")
        return TaggedRow(number, tokens, tags)

    def _words_of_text(self, number: int, record: Record) -> TaggedRow:
        settings = self.settings
        if self.labelled or settings.text not in record:
            raise self.error(
                number, f"has no {settings.tokens!r}, only {_names(record)}", self._column_remedy("tokens", settings.tokens)
            )
        text = self._text(number, record, settings.text)
        found = list(WORD.finditer(text))
        return TaggedRow(number, tuple(word[0] for word in found), None, tuple(word.start() for word in found))

    def _strings(self, number: int, column: str, value: object) -> tuple[str, ...]:
        if not isinstance(value, list | tuple):
            raise self.error(number, f"{column} is {shown(value)}", "it must be a list of words")
        for place, word in enumerate(value):
            if not isinstance(word, str) or not word.strip():
                raise self.error(number, f"{column}[{place}] is {shown(word)}", "each must be a word")
        return tuple(value)

    def _ids_row(self, number: int, record: Record) -> IdsRow:
        values = record[INPUT_IDS]
        whole = isinstance(values, list | tuple) and all(isinstance(value, int) and value >= 0 for value in values)
        if not whole or not values:
            raise self.error(number, f"{INPUT_IDS} is {shown(values)}", "it must be a list of token numbers, not empty")
        return IdsRow(number, tuple(values))


def _names(record: Record) -> str:
    return ", ".join(repr(str(name)) for name in list(record)[:8]) or "nothing"
