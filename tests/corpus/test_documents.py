"""Documents of text files, and their sentences."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.errors import InputError
from gaudi_bert.corpus import documents as module
from gaudi_bert.corpus.documents import Source, detect_format, find_sources, read_documents, source_identity
from gaudi_bert.corpus.sentences import detect_layout, sentences_of_lines, split_sentences
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
    return list(read_documents(given, detect_format(given)))


@pytest.mark.parametrize("name", ["a.txt", "odd.bin", "wrong.gz"])
@pytest.mark.parametrize("gzipped", [False, True])
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
    assert str(detect_format(given)).startswith(shown + (", gzipped" if gzipped else ""))
    assert read(given) == expected


def test_a_long_document_is_cut_between_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DOCUMENT_CHARACTERS", 10)
    documents = read(source(tmp_path / "a", "1234.\n5678.\n9.\n123456789012.\n"))
    assert documents == [["1234.", "5678."], ["9."], ["123456789012."]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"fine\n\xff\xfe bad\n", r"not UTF-8 at byte 5 \(line 2\)"),
        (gzip.compress(b"fine\nab\xff bad\n", mtime=0), r"not UTF-8 at byte 7 of the unpacked text \(line 2\)"),
        (gzip.compress(b"text\n" * 1000, mtime=0)[:-12], "damaged or cut short"),
        (b"BZh91AY", "compressed with bzip2"),
        ('{"text": "a"}\n{"title": "b"}\n', "line 2: no field `text`"),
        ('{"text": "a"}\n{"text": 5}\n', "line 2: no field `text`"),
        ('{"text": "a"}\n[1]\n', "line 2: no field `text`"),
        ('{"text": "a"}\n{"text": \n', "line 2: not JSON"),
        ('<doc id="1" title="t">\na.\n<doc id="2" title="u">\n', "line 3: <doc> inside a <doc>"),
        ('<doc id="1" title="t">\na.\n</doc>\nlost\n', "line 4: text outside"),
    ],
)
def test_bad_input_names_file_and_place(tmp_path: Path, content: bytes | str, message: str) -> None:
    given = source(tmp_path / "bad.txt", content)
    with pytest.raises(InputError, match=message) as caught:
        read(given)
    assert str(given.path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_named_jsonl_must_be_json_and_any_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="line 1: not JSON"):
        read(source(tmp_path / "a.jsonl", "{'text': 'a'}\n"))
    with pytest.raises(InputError, match="cannot read: No such file"):
        detect_format(Source("a", tmp_path / "a", 0))


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
        (["one.txt", "wiki/AB"], ["one.txt", "wiki_00"]),
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
    for text, message in [("nowhere", "no such file"), ("no*.txt", "no text file"), ("empty", "no text file")]:
        with pytest.raises(InputError, match=message) as caught:
            find_sources([text], folder)
        assert text in str(caught.value)
    with pytest.raises(InputError, match="no text was given"):
        find_sources([], folder)


def test_identity_knows_the_bytes_and_no_path(folder: Path) -> None:
    one, same, other = folder / "one.txt", folder / "copy" / "one.txt", folder / "other" / "one.txt"
    for path, text in ((same, "one.txt"), (other, "one.tyt")):
        path.parent.mkdir()
        path.write_text(text)
    identities = [source_identity(find_sources([str(path)], folder)[0]) for path in (one, same, other)]
    assert identities[0] == identities[1] != identities[2]
    assert identities[0]["bytes"] == 7


# --- sentences


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", []),
        ("   ", []),
        ("No stop here", ["No stop here"]),
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ("Dr. Smith met Mrs. Jones. They left.", ["Dr. Smith met Mrs. Jones.", "They left."]),
        ("J. R. R. Tolkien wrote it. We read it.", ["J. R. R. Tolkien wrote it.", "We read it."]),
        ("Pi is 3.14 or so. See example.org today.", ["Pi is 3.14 or so.", "See example.org today."]),
        ("See Fig. 3 and No. 5. He said no. Then he went.", ["See Fig. 3 and No. 5.", "He said no.", "Then he went."]),
        ("The U.S. Army came. It was late.", ["The U.S. Army came.", "It was late."]),
        ("Fruit, e.g. Apples, is sweet. vs. Nuts.", ["Fruit, e.g. Apples, is sweet. vs. Nuts."]),
        ('"Really?" she said. "Yes." He smiled.', ['"Really?" she said.', '"Yes."', "He smiled."]),
        ("Wait... what? (Yes.) Then [no].", ["Wait... what?", "(Yes.)", "Then [no]."]),
        ("Not I. You did it.", ["Not I.", "You did it."]),
        ("你好。世界！Good. Bye", ["你好。", "世界！", "Good.", "Bye"]),
    ],
)
def test_rules(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences


@examples(200)
@given(st.text(alphabet="aB. !?\"'()。…3\n", max_size=60))
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
    assert detect_layout([lines, lines] if lines else []) == layout
    assert sentences_of_lines(lines, layout) == sentences
