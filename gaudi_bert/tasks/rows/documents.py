"""CoNLL files (a word and its tag a line, a blank line after each sentence) and SQuAD's JSON (versions 1.1 and 2.0)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gaudi_bert.common.errors import InputError, shortened, shown
from gaudi_bert.tasks.rows.fields import Record
from gaudi_bert.tasks.rows.records import open_bytes, text_lines
from gaudi_bert.tasks.rows.types import QuestionRow, source_name

__all__ = ["question_of_record", "read_conll", "read_squad"]

DOCUMENT_LINE = "-DOCSTART-"


def read_conll(path: str | Path, tokens: str, tags: str, labelled: bool) -> Iterator[tuple[int, Record]]:
    """The sentences of a CoNLL file as records; the word is the first column of a line, the tag the last.

    Args:
        path: a file or `-`.
        tokens, tags: what the words and the tags of a record are called.
        labelled: refuse lines without a tag.

    Raises:
        InputError: a line has no word, or some lines of a sentence have a tag and others have none.
    """
    name = source_name(path)
    first = 0
    words: list[str] = []
    found: list[str] = []
    with open_bytes(path) as handle:
        for number, line in text_lines(handle, name):
            cells = line.split("\t") if "\t" in line else line.split()
            if not line.strip() or cells[0] == DOCUMENT_LINE:
                if words:
                    yield first, _sentence(name, first, words, found, tokens, tags)
                words, found = [], []
                continue
            if not cells[0].strip():
                raise InputError(f"{name}: row {number}: has no word before its tag; write WORD, a tab, TAG")
            if labelled and len(cells) < 2:
                raise InputError(f"{name}: row {number}: the word {shown(cells[0])} has no tag; write WORD, a tab, TAG")
            first = first if words else number
            words.append(cells[0].strip())
            found += [cells[-1].strip()] if len(cells) > 1 else []
        if words:
            yield first, _sentence(name, first, words, found, tokens, tags)


def _sentence(name: str, number: int, words: list[str], found: list[str], tokens: str, tags: str) -> Record:
    if found and len(found) != len(words):
        raise InputError(f"{name}: row {number}: a sentence of {len(words)} words has {len(found)} tags; give each word one")
    return {tokens: words, tags: found} if found else {tokens: words}


def read_squad(path: str | Path, labelled: bool) -> Iterator[QuestionRow]:
    """The questions of a SQuAD file, in its order.

    Raises:
        InputError: it is not SQuAD's JSON, or an answer does not stand where it says.
    """
    name = source_name(path)
    with open_bytes(path) as handle:
        content = handle.read()
    try:
        articles = json.loads(content)["data"]
        paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
        questions = [(paragraph["context"], question) for paragraph in paragraphs for question in paragraph["qas"]]
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{name}: not JSON ({shortened(str(error))}); give a SQuAD file, or JSON lines as .jsonl"
        ) from error
    except (KeyError, TypeError) as error:
        raise InputError(
            f"{name}: is not SQuAD's JSON, {shown(error)} is missing or wrong; it is data / paragraphs / qas"
        ) from error
    for number, (context, question) in enumerate(questions, start=1):
        if not isinstance(question, dict):
            raise InputError(f"{name}: row {number}: {shown(question)} is no question; it must be an object")
        yield question_of_record(name, number, {"context": context, **question}, labelled)


def question_of_record(name: str, number: int, record: Record, labelled: bool) -> QuestionRow:
    """A question with the keys of SQuAD: `question`, `context`, `answers`, `is_impossible`, `id`.

    `answers` is a list of `{"text", "answer_start"}`, or `{"text": [], "answer_start": []}` as in Hugging Face datasets.

    Raises:
        InputError: something is missing or wrong, or an answer does not stand in the context where it says.
    """
    place = f"{name}: row {number}"
    for key in ("question", "context"):
        value = record.get(key)
        if not isinstance(value, str) or not value.strip():
            raise InputError(f"{place}: {key} is {shown(value)}; it must be a text that is not empty")
    answers: tuple[tuple[str, int], ...] | None = None
    if labelled:
        given = [] if record.get("is_impossible") is True else record.get("answers")
        if given is None:
            raise InputError(f"{place}: has no `answers`; give some, an empty list where there is none")
        answers = tuple(_answer(place, record["context"], answer) for answer in _answer_list(place, given))
    return QuestionRow(number, str(record.get("id", number)), record["question"], record["context"], answers)


def _answer_list(place: str, answers: Any) -> list[Any]:
    if isinstance(answers, dict):
        texts, starts = answers.get("text"), answers.get("answer_start")
        if isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts):
            return [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    if not isinstance(answers, list):
        raise InputError(f"{place}: answers is {shown(answers)}; it must be a list of text and answer_start")
    return answers


def _answer(place: str, context: str, answer: Any) -> tuple[str, int]:
    text = answer.get("text") if isinstance(answer, dict) else None
    start = answer.get("answer_start") if isinstance(answer, dict) else None
    if not isinstance(text, str) or not text or isinstance(start, bool) or not isinstance(start, int):
        raise InputError(f"{place}: an answer is {shown(answer)}; it must have a text and answer_start, a whole number")
    if start < 0 or context[start : start + len(text)] != text:
        there = context[max(start, 0) : max(start, 0) + len(text)]
        raise InputError(
            f"{place}: the answer {shown(text)} does not stand at {start}, {shown(there)} does; mend answer_start"
        )
    return text, start
