"""Questions about contexts: SQuAD's JSON (versions 1.1 and 2.0), an article at a time, and the values of a question."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from gaudi_bert.common import files
from gaudi_bert.common.errors import InputError, shortened, shown
from gaudi_bert.rows.fields import half_character
from gaudi_bert.rows.parts import BYTE_ORDER_MARK, RowPart, longest_row
from gaudi_bert.rows.types import PlacedRecord, QuestionRow, Record, RowPosition

_READ_BYTES = 1 << 20
_SPACE, _AFTER_NUMBER = re.compile(r"[ \t\r\n]*"), tuple(",]} \t\r\n")


def read_squad(part: RowPart) -> Iterator[PlacedRecord]:
    """The questions of a SQuAD file with their contexts, in its order."""
    number = 0
    with part.opened() as handle:
        for article in _JsonText(part, handle).articles():
            for context, question in _questions(part, article):
                number += 1
                position = RowPosition(number)
                if isinstance(question, dict):
                    yield position, {"context": context, **question}
                else:
                    problem = f"{shown(question)} is not a question; it must be an object"
                    yield position, InputError(f"{part.location(position)}: {problem}")


def _questions(part: RowPart, article: Any) -> Iterator[tuple[Any, Any]]:
    for paragraph in _listed(part, article, "paragraphs", "an article"):
        for question in _listed(part, paragraph, "qas", "a paragraph"):
            if "context" not in paragraph:
                raise _not_squad(part, "a paragraph has no `context`")
            yield paragraph["context"], question


def _listed(part: RowPart, value: Any, key: str, what: str) -> list[Any]:
    entries = value.get(key) if isinstance(value, dict) else None
    if not isinstance(entries, list):
        raise _not_squad(part, f"{what} has no list `{key}`")
    return entries


def _not_squad(part: RowPart, problem: str) -> InputError:
    form = '{"data": [{"paragraphs": [{"context": "...", "qas": [...]}]}]}'
    return InputError(f"{part.name}: is not SQuAD's JSON, {problem}; it is {form}")


class _JsonText:
    """The text of a JSON file, of which no more is held than the value that is being read."""

    def __init__(self, part: RowPart, handle: BinaryIO) -> None:
        self._part, self._handle = part, handle
        self._decode = codecs.getincrementaldecoder(part.encoding)().decode
        self._text, self._at = "", 0
        self._accept(BYTE_ORDER_MARK)

    def articles(self) -> Iterator[Any]:
        """The entries of the list `data`."""
        if not self._accept("{"):
            raise _not_squad(self._part, "it is not an object")
        found = False
        while not self._accept("}"):
            key = self._value()
            self._expect(":")
            if key != "data":
                self._value()
            elif not self._accept("["):
                raise _not_squad(self._part, "`data` is not a list")
            else:
                found = True
                while not self._accept("]"):
                    yield self._value()
                    self._accept(",")
            self._accept(",")
        if not found:
            raise _not_squad(self._part, "it has no list `data`")

    def _accept(self, character: str) -> bool:
        """Whether this character is next; then it is passed."""
        while True:
            self._at = cast(re.Match[str], _SPACE.match(self._text, self._at)).end()
            if self._at < len(self._text):
                is_next = self._text[self._at] == character
                self._at += is_next
                return is_next
            if not self._read():
                return False

    def _expect(self, character: str) -> None:
        if not self._accept(character):
            raise self._not_json(f"no {character!r} where it should be")

    def _value(self) -> Any:
        """The next value: read further, twice as far each time, until it is complete."""
        self._accept("")
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self._text, self._at)
            except (ValueError, RecursionError) as error:
                if not self._read():
                    raise self._not_json(str(error)) from error
                continue
            may_go_on = isinstance(value, int | float) and self._text[end : end + 1] not in _AFTER_NUMBER
            if not may_go_on or not self._read():
                self._at = end
                return value

    def _read(self) -> bool:
        """Take in as much again as is held; False at the end of the file."""
        held = self._text[self._at :]
        if len(held) > files.LONGEST_ROW_BYTES:
            raise InputError(
                f"{self._part.name}: an article is longer than {longest_row()}; write its questions as JSON lines (.jsonl)"
            )
        data = self._handle.read(max(_READ_BYTES, len(held)))
        try:
            text = self._decode(data, not data)
        except UnicodeDecodeError as error:
            raise InputError(f"{self._part.name}: not {self._part.encoding}; name its encoding with --encoding") from error
        if data:
            self._text, self._at = held + text, 0
        return bool(data)

    def _not_json(self, reason: str) -> InputError:
        return InputError(f"{self._part.name}: not JSON ({shortened(reason)}); give a SQuAD file, or JSON lines as .jsonl")


def question_of_record(part: RowPart, position: RowPosition, record: Record, labelled: bool) -> QuestionRow:
    """A question with the keys of SQuAD: `question`, `context`, `answers`, `is_impossible`, `id`.

    `answers` is a list of `{"text", "answer_start"}`, or `{"text": [], "answer_start": []}` as in Hugging Face datasets.
    """
    row = part.location(position)
    for key in ("question", "context"):
        value = record.get(key)
        if not isinstance(value, str) or not value.strip():
            raise InputError(f"{row}: {key} is {shown(value)}; it must be a text that is not empty")
        problem = half_character(value)
        if problem:
            raise InputError(f"{row}: {key} {problem}; write the other half too, or leave it out")
    answers: tuple[tuple[str, int], ...] | None = None
    if labelled:
        given = [] if record.get("is_impossible") is True else record.get("answers")
        if given is None:
            raise InputError(f"{row}: has no `answers`; give some, an empty list where there is none")
        answers = tuple(_answer(row, record["context"], answer) for answer in _answer_list(row, given))
    return QuestionRow(position, str(record.get("id", position.number)), record["question"], record["context"], answers)


def _answer_list(row: str, answers: Any) -> list[Any]:
    if isinstance(answers, dict):
        texts, starts = answers.get("text"), answers.get("answer_start")
        if isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts):
            return [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    if not isinstance(answers, list):
        raise InputError(f"{row}: answers is {shown(answers)}; it must be a list of text and answer_start")
    return answers


def _answer(row: str, context: str, answer: Any) -> tuple[str, int]:
    text = answer.get("text") if isinstance(answer, dict) else None
    start = answer.get("answer_start") if isinstance(answer, dict) else None
    if not isinstance(text, str) or not text or isinstance(start, bool) or not isinstance(start, int):
        raise InputError(f"{row}: an answer is {shown(answer)}; it must have a text and answer_start, an integer")
    if start < 0 or context[start : start + len(text)] != text:
        actual = context[max(start, 0) : max(start, 0) + len(text)]
        raise InputError(f"{row}: the answer {shown(text)} is not at {start}, {shown(actual)} is; correct answer_start")
    return text, start
