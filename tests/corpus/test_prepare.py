"""`prepare`: the division of text into blocks, sections and files, its workers, and the bytes that it makes."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from gaudi_bert.artefacts.results import to_json
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import PrepareSettings
from gaudi_bert.corpus import blocks as blocks_module
from gaudi_bert.corpus.prepare import prepare_examples
from gaudi_bert.corpus.vocabulary import SPECIAL_TOKENS
from gaudi_bert.tfrecords.wire.example import decode_example
from gaudi_bert.tfrecords.wire.framing import read_records
from tests.builders.folders import contents
from tests.builders.reporters import a_run
from tests.oracles.packed_record import restored_ids

SMALL: dict[str, Any] = {"text": "text/*.txt", "vocab": "vocab.txt", "evaluation_fraction": 0.2, "shards": 6}
SMALL |= {"max_sequence_length": 24, "max_predictions": 4, "duplicates": 2}
DOCUMENTS, FILES = 40, 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Text in which the words of document n are `a<n>`: so an example tells which documents it is from."""
    generator = random.Random(1)
    (tmp_path / "text").mkdir()
    for file in range(FILES):
        documents = []
        for number in range(file, DOCUMENTS, FILES):
            sentences = [" ".join([f"a{number}"] * generator.randint(1, 9)) + "." for _ in range(generator.randint(2, 20))]
            documents.append("\n".join(sentences))
        (tmp_path / "text" / f"{file}.txt").write_text("\n\n".join(documents) + "\n")
    tokens = [*SPECIAL_TOKENS, ".", *(f"a{number}" for number in range(DOCUMENTS))]
    (tmp_path / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens))
    return tmp_path


def run(folder: Path, out: str = "out", how: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """What `prepare` prints; `how` it runs besides its settings."""
    settings, given = PrepareSettings(**{**SMALL, **changes}), a_run(**{"workers": 1, **(how or {})})
    printed: dict[str, Any] = to_json(prepare_examples(settings, folder / out, given, pipeline_folder=folder))
    return printed


def documents_in(folder: Path) -> list[set[int]]:
    """For each file of `folder`, the numbers of the documents in it, masks undone."""
    found = []
    for path in sorted(folder.glob("*.tfrecord")):
        ids = [token for payload in read_records(path) for token in restored_ids(decode_example(payload))]
        found.append({token - 6 for token in ids if token >= 6})
    return found


def test_held_out_documents_are_in_no_training_example(folder: Path) -> None:
    summary = run(folder)
    train, evaluation = documents_in(folder / "out/train"), documents_in(folder / "out/evaluation")
    assert (len(train), len(evaluation), len(evaluation[0])) == (6, 1, 8)
    assert sorted([*set.union(*train), *evaluation[0]]) == list(range(DOCUMENTS)), "each document is in one split"
    assert all(len(numbers) > 16 for numbers in train), "documents are spread over files"
    for split in ("train", "evaluation"):
        figures = summary["splits"][split]
        files = [len(list(read_records(folder / "out" / split / file["name"]))) for file in figures["files"]]
        assert files == [file["sequences"] for file in figures["files"]]
        assert sum(files) == figures["sequences"]
        assert max(files) - min(files) <= 1
    assert json.loads((folder / "out/examples.json").read_text()) | {"skipped": False} == summary


def test_workers_and_shards_change_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "BLOCK_CHARACTERS", 500)
    run(folder, "one")
    run(folder, "two", {"workers": 2})
    assert run(folder, "parts", {"part": (1, 2)})["finished"] is False
    assert not (folder / "parts/examples.json").exists()
    assert len(list((folder / "parts/train").glob("part-*"))) == 3
    assert run(folder, "parts", {"part": (0, 2)})["skipped"] is False
    assert contents(folder / "one") == contents(folder / "two") == contents(folder / "parts")
    assert run(folder, "parts", {"part": (7, 8)})["skipped"] is True


def test_nothing_is_done_twice_and_other_settings_are_refused(folder: Path) -> None:
    run(folder)
    before = contents(folder / "out")
    assert run(folder)["skipped"] is True
    with pytest.raises(InputError, match=r"seed: 12345 in the file, 3 now"):
        run(folder, seed=3)
    (folder / "text/0.txt").write_text("Another text.\n\nOf two documents.\n")
    with pytest.raises(InputError, match=r"inputs.text\[0\]\."):
        run(folder)
    assert contents(folder / "out") == before
    assert run(folder, how={"overwrite": True})["skipped"] is False
    assert contents(folder / "out") != before


def test_an_interrupted_run_goes_on_where_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "BLOCK_CHARACTERS", 500)
    run(folder)
    before = contents(folder / "out")
    (folder / "out/examples.json").unlink()
    (folder / "out/sections/train-00001.json").unlink()
    (folder / "out/train/part-00004-of-00006.tfrecord").unlink()
    (folder / "out/train/.part-00005-of-00006.tfrecord.tmp").write_bytes(b"half")
    run(folder)
    assert contents(folder / "out") == before


def test_the_vocabulary_is_trained_on_the_training_documents(folder: Path) -> None:
    summary = run(folder, vocab=None, train_vocab=100)
    tokens = (folder / "out/vocab.txt").read_text().split("\n")[:-1]
    assert summary["vocabulary"]["size"] == len(tokens) <= 100
    assert summary["vocabulary"]["trained"] is True
    assert summary["splits"]["train"]["unknown_tokens"] == 0


def test_few_documents_make_few_files(folder: Path) -> None:
    (folder / "text").rename(folder / "unused")
    (folder / "few.txt").write_text("a1 a2.\na5.\n\na3.\na6.\n\na4 a5 a6.\na1.\n")
    assert len(run(folder, text="few.txt")["splits"]["train"]["files"]) == 2
    assert run(folder, "none", text="few.txt", evaluation_fraction=0)["splits"].keys() == {"train"}
    with pytest.raises(InputError, match="single document"):
        (folder / "one.txt").write_text("a1.\na2.\n")
        run(folder, "single", text="one.txt")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": "blank.txt"}, r"blank\.txt: the source contains no text"),
        ({"text": "latin.txt"}, r"latin\.txt: the text is not valid UTF-8 at byte 3"),
        ({"vocab": "blank.txt"}, r"blank\.txt: the vocabulary lacks \[PAD\]"),
        ({"vocab": None, "train_vocab": 64, "text": "letters.txt"}, "different characters"),
    ],
)
def test_bad_input_leaves_nothing_that_looks_finished(folder: Path, changes: dict[str, Any], message: str) -> None:
    (folder / "letters.txt").write_text("\n\n".join(chr(0x4E00 + number) for number in range(50)))
    (folder / "blank.txt").write_text("\n \n")
    (folder / "latin.txt").write_bytes("caf\xe9.".encode("latin-1"))
    with pytest.raises(InputError, match=message):
        run(folder, **changes)
    assert not (folder / "out/examples.json").exists()
    assert not list(folder.glob("out/**/*.tfrecord"))
    assert run(folder)["skipped"] is False, "what was refused does not stand in the way"


def test_bad_input_found_by_a_worker_process_is_told_alike(folder: Path) -> None:
    (folder / "text/1.txt").write_bytes(b"fine.\n\xff")
    with pytest.raises(InputError, match=r"1\.txt: the text is not valid UTF-8 at byte 6"):
        run(folder, how={"workers": 2})


# --- the bytes that `prepare` makes: the same for ever for one seed, and the same after any number of kills.


def write_text(path: Path) -> None:
    """101 documents of words over letters with accents, digits and punctuation."""
    rng = random.Random(17)
    words = ["".join(rng.choices("abcdeéöñßñ.,-'σ你0", k=rng.randint(1, 9))) for _ in range(211)]
    documents = [
        "\n".join(" ".join(rng.choices(words, k=rng.randint(1, 23))).capitalize() + "." for _ in range(rng.randint(1, 19)))
        for _ in range(101)
    ]
    path.write_text("\n\n".join(documents) + "\n", encoding="utf-8")


def digest(folder: Path) -> str:
    hashed = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".tfrecord", ".txt"):
            hashed.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return hashed.hexdigest()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"train_vocab": 300, "max_sequence_length": 41, "max_predictions": 7},
            "b93479f4359bb0c8ea028441e9897c516dff4ad973dffcedad4800bf01d31c2b",
        ),
        (
            {"train_vocab": 150, "lower_case": False, "whole_word_masking": True, "duplicates": 2, "seed": 3},
            "b5aa3348234446729cc57a01e7061bd64b3b2046ed004cb3caf36637b728fcd5",
        ),
    ],
)
def test_the_same_seed_gives_the_same_examples_in_every_version(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    write_text(tmp_path / "text.txt")
    settings = PrepareSettings(text=str(tmp_path / "text.txt"), **changes)
    prepare_examples(settings, tmp_path / "out", a_run(workers=1), pipeline_folder=tmp_path)
    assert digest(tmp_path / "out") == expected
