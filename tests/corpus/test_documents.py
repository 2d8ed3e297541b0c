"""Documents of text files and of Python, their sentences, and labelled rows."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given as given_values
from hypothesis import strategies as st

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import LONGEST_ROW_BYTES
from gaudi_bert.corpus import documents as module
from gaudi_bert.corpus.documents import (
    Source,
    compute_source_identity,
    convert_texts_to_documents,
    detect_line_layout,
    detect_text_format,
    find_sources,
    read_documents,
    split_lines_into_sentences,
    split_sentences,
)
from tests.builders.properties import examples

PLAIN = "One.\nTwo.\n\n\n \nThree.\n"
WIKI = (
    '<doc id="1" url="u" title="A &amp; B">\nA &amp; B\n\nOne here. Two here.\n\nThree.\n</doc>\n\n'
    '<doc id="2" url="u" title="C">\nC\n</doc>\n'
)
JSON = "".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(["One.\n\nTwo.", "", "Three."]))


def source(path: Path, content: bytes | str) -> Source:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return Source(path.name, path, path.stat().st_size)


def read(given: Source) -> list[list[str]]:
    return list(read_documents(given, detect_text_format(given)))


@pytest.mark.parametrize(("name", "gzipped"), [("a.txt", False), ("odd.bin", True), ("wrong.gz", False)])
@pytest.mark.parametrize(
    ("content", "shown", "expected"),
    [
        (PLAIN, "plain text", [["One.", "Two."], ["Three."]]),
        ("\ufeff" + PLAIN.replace("\n", "\r\n"), "plain text", [["One.", "Two."], ["Three."]]),
        (WIKI, "WikiExtractor", [["One here.", "Two here.", "Three."]]),
        (JSON, "JSON lines", [["One.", "Two."], ["Three."]]),
        ("{ not json }\n", "plain text", [["{ not json }"]]),
    ],
)
def test_formats_are_found_by_content(
    tmp_path: Path, name: str, gzipped: bool, content: str, shown: str, expected: list[list[str]]
) -> None:
    data = content.encode()
    given = source(tmp_path / name, gzip.compress(data) if gzipped else data)
    assert str(detect_text_format(given)).startswith(shown + (", gzipped" if gzipped else ""))
    assert read(given) == expected


def test_a_long_document_is_cut_between_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DOCUMENT_CHARACTERS", 10)
    documents = read(source(tmp_path / "a", "1234.\n5678.\n9.\n123456789012.\n"))
    assert documents == [["1234.", "5678."], ["9."], ["123456789012."]]


def test_a_line_without_end_is_refused(tmp_path: Path) -> None:
    given = source(tmp_path / "a.gz", gzip.compress(b"x" * (LONGEST_ROW_BYTES + 1), 1))
    with pytest.raises(InputError, match=r"a\.gz: line 1: a line must be shorter than 64 MiB"):
        detect_text_format(given)


@pytest.mark.parametrize("around", ["{}", '<doc id="1" title="t">\n{}</doc>\n'], ids=["plain text", "WikiExtractor"])
def test_a_document_without_end_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, around: str) -> None:
    monkeypatch.setattr(module, "DOCUMENT_CHARACTERS", 1 << 12)
    given = source(tmp_path / "a.gz", gzip.compress(around.format("a word.\n" * 100_000).encode(), 1))
    tracemalloc.start()
    documents = sum(1 for _ in read_documents(given, detect_text_format(given)))
    assert tracemalloc.get_traced_memory()[1] < 2 << 20
    tracemalloc.stop()
    assert documents == -(-100_000 // ((1 << 12) // 7))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"fine\n\xff\xfe bad\n", r"not valid UTF-8 at byte 5 \(line 2\)"),
        (gzip.compress(b"fine\nab\xff bad\n", mtime=0), r"not valid UTF-8 at byte 7 of the unpacked text \(line 2\)"),
        (gzip.compress(b"text\n" * 1000, mtime=0)[:-12], "damaged or incomplete"),
        (b"BZh91AY", "bzip2 compression is not supported"),
        ('{"text": "a"}\n[1]\n', "line 2: the field `text`"),
        ('{"text": "a"}\n{"text": \n', "line 2: the line is not valid JSON"),
        ('<doc id="1" title="t">\na.\n<doc id="2" title="u">\n', "line 3: a <doc> block begins inside another one"),
        ('<doc id="1" title="t">\na.\n</doc>\nlost\n', "line 4: all text must be between"),
    ],
)
def test_bad_input_names_file_and_place(tmp_path: Path, content: bytes | str, message: str) -> None:
    given = source(tmp_path / "bad.txt", content)
    with pytest.raises(InputError, match=message) as caught:
        read(given)
    assert str(given.path) in str(caught.value)


def test_a_file_named_jsonl_must_be_json_and_any_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="line 1: the line is not valid JSON"):
        read(source(tmp_path / "a.jsonl", "{'text': 'a'}\n"))
    with pytest.raises(InputError, match="cannot read: No such file"):
        detect_text_format(Source("a", tmp_path / "a", 0))


# --- files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("wiki/AB/wiki_00", "wiki/AA/wiki_01", "wiki/AA/wiki_00", "wiki/.hidden", "one.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


@pytest.mark.parametrize(
    ("texts", "names"),
    [
        (["wiki"], ["AA/wiki_00", "AA/wiki_01", "AB/wiki_00"]),
        (["wiki/A*/wiki_00"], ["AA/wiki_00", "AB/wiki_00"]),
        (["wiki/**/*_01"], ["AA/wiki_01"]),
        (["one.txt", "*.txt", "./one.txt"], ["one.txt"]),
        (["python-docstrings", "one.txt", "python-docs"], ["python-docstrings", "one.txt", "python-docs"]),
    ],
)
def test_files_folders_and_globs_in_a_fixed_order(folder: Path, texts: list[str], names: list[str]) -> None:
    assert [source.name for source in find_sources(texts, folder)] == names


def test_what_is_missing_is_named(folder: Path) -> None:
    (folder / "empty").mkdir()
    for text, message in [("nowhere", "does not exist"), ("no*.txt", "contains no files"), ("empty", "contains no files")]:
        with pytest.raises(InputError, match=message) as caught:
            find_sources([text], folder)
        assert text in str(caught.value)
    with pytest.raises(InputError, match=r"prepare\.text: the setting is missing"):
        find_sources([], folder)


def test_identity_knows_the_bytes_and_no_path(folder: Path) -> None:
    one, same, other = folder / "one.txt", folder / "copy" / "one.txt", folder / "other" / "one.txt"
    for path, text in ((same, "one.txt"), (other, "one.tyt")):
        path.parent.mkdir()
        path.write_text(text)
    identities = [compute_source_identity(find_sources([str(path)], folder)[0]) for path in (one, same, other)]
    assert identities[0] == identities[1] != identities[2]
    assert identities[0]["bytes"] == 7


# --- the texts of Python

SHORT = """The "short" topic
*****************

This paragraph, which is wrapped, stands in both of the topics. It has
two sentences.
"""


LONG = """A longer topic
**************

This paragraph, which is wrapped, stands in both of the topics. It has
two sentences.

For example:

   >>> print("a. B")
   a. B

* An item of a list. It has two sentences.

+------+-----+
| left | one |
+------+-----+
| more | two |
+------+-----+

   An indented paragraph that follows no colon is text. Is it not?
"""


def test_what_becomes_a_sentence() -> None:
    long, short = convert_texts_to_documents({"z": SHORT, "a": LONG, "rulers": "****\n\n====\n"}).values()
    common = "This paragraph, which is wrapped, stands in both of the topics."
    assert short == ['The "short" topic', common, "It has two sentences."]
    assert long == [
        *("A longer topic", "For example:", '>>> print("a. B")', "a. B", "An item of a list.", "It has two sentences."),
        *("left one", "more two", "An indented paragraph that follows no colon is text.", "Is it not?"),
    ]


# --- where sentences end, and how the lines of a file are read


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", []),
        ("No stop here", ["No stop here"]),
        ("Dr. Smith met Mrs. Jones. They left.", ["Dr. Smith met Mrs. Jones.", "They left."]),
        ("J. R. R. Tolkien wrote it. We read it.", ["J. R. R. Tolkien wrote it.", "We read it."]),
        ("Pi is 3.14 or so. See example.org today.", ["Pi is 3.14 or so.", "See example.org today."]),
        ("See Fig. 3 and No. 5. He said no. Then he went.", ["See Fig. 3 and No. 5.", "He said no.", "Then he went."]),
        ("The U.S. Army came. It was late.", ["The U.S. Army came.", "It was late."]),
        ("Fruit, e.g. Apples, is sweet. vs. Nuts.", ["Fruit, e.g. Apples, is sweet. vs. Nuts."]),
        ('"Really?" she said. "Yes." He smiled.', ['"Really?" she said.', '"Yes."', "He smiled."]),
        ("Wait... what? (Yes.) Then [no].", ["Wait... what?", "(Yes.)", "Then [no]."]),
        ("你好。世界！Good. Bye", ["你好。", "世界！", "Good.", "Bye"]),
    ],
)
def test_rules(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences


@examples(200)
@given_values(st.text(alphabet="aB. !?\"'()。…3\n", max_size=60))
def test_no_character_but_white_space_is_lost(text: str) -> None:
    sentences = split_sentences(text)
    assert all(sentence and sentence == sentence.strip() for sentence in sentences)
    assert "".join("".join(sentences).split()) == "".join(text.split())


SENTENCES = ["The first one (i.e.", "“broken”) goes on.", "Second. Stop.", "Third.", "Fourth!", "Fifth?"]


PARAGRAPHS = ["One is here. Two is here. Three is here.", "Four is here. Five is here."]


WRAPPED = [
    "It was the best of times, it was the worst of times, it",
    "was the age of wisdom, it was the age of foolishness. We",
    "had everything before us, we had nothing before us, and",
    "that was all.",
]


UNPUNCTUATED = ["he went home", "she read a very long and winding book about whales", "they slept"]


@pytest.mark.parametrize(
    ("lines", "layout", "sentences"),
    [
        (SENTENCES, "sentences", SENTENCES),
        (UNPUNCTUATED, "sentences", UNPUNCTUATED),
        ([], "sentences", []),
        (PARAGRAPHS, "paragraphs", [f"{n} is here." for n in ("One", "Two", "Three", "Four", "Five")]),
        (
            WRAPPED,
            "wrapped",
            [
                "It was the best of times, it was the worst of times, it was the age of wisdom, "
                "it was the age of foolishness.",
                "We had everything before us, we had nothing before us, and that was all.",
            ],
        ),
    ],
)
def test_layouts(lines: list[str], layout: Literal["sentences", "paragraphs", "wrapped"], sentences: list[str]) -> None:
    assert detect_line_layout([lines, lines] if lines else []) == layout
    assert split_lines_into_sentences(lines, layout) == sentences
