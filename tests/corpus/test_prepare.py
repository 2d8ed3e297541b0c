"""`prepare`: the division of text into blocks, sections and files, its workers, and the bytes that it makes."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.artefacts.results import to_json
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.config.sections import PrepareSettings
from gaudi_bert.corpus import blocks as blocks_module
from gaudi_bert.corpus.blocks import (
    Block,
    Section,
    choose_evaluation,
    form_blocks,
    form_sections,
    ordered_map,
    read_blocks,
    scan_source,
    write_section,
)
from gaudi_bert.corpus.documents import Source
from gaudi_bert.corpus.examples import BlockExamples, ExampleCounts
from gaudi_bert.corpus.prepare import prepare
from gaudi_bert.corpus.vocabulary import SPECIAL_TOKENS
from gaudi_bert.tfrecords.wire.example import decode_example
from gaudi_bert.tfrecords.wire.framing import frame, read_records
from tests.builders.folders import contents
from tests.builders.properties import examples
from tests.builders.reporters import a_run
from tests.builders.waiting import wait_until

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
    printed: dict[str, Any] = to_json(prepare(settings, folder / out, given, pipeline_folder=folder))
    return printed


def documents_in(folder: Path) -> list[set[int]]:
    """For each file of `folder`, the numbers of the documents in it, masks undone."""
    found = []
    for path in sorted(folder.glob("*.tfrecord")):
        numbers: set[int] = set()
        for payload in read_records(path):
            example = decode_example(payload)
            ids = example["input_ids"].copy()
            used = example["masked_lm_weights"] == 1
            ids[example["masked_lm_positions"][used]] = example["masked_lm_ids"][used]
            numbers |= {int(token) - 6 for token in ids if token >= 6}
        found.append(numbers)
    return found


def test_held_out_documents_are_in_no_training_example(folder: Path) -> None:
    summary = run(folder)
    train, evaluation = documents_in(folder / "out/train"), documents_in(folder / "out/evaluation")
    assert len(train) == 6
    assert len(evaluation) == 1
    assert set.union(*train) | set.union(*evaluation) == set(range(DOCUMENTS))
    assert not set.union(*train) & set.union(*evaluation)
    assert len(set.union(*evaluation)) == 8
    assert all(len(numbers) > 16 for numbers in train), "documents are spread over files"
    for split in ("train", "evaluation"):
        figures = summary["splits"][split]
        files = [len(list(read_records(folder / "out" / split / file["name"]))) for file in figures["files"]]
        assert files == [file["sequences"] for file in figures["files"]]
        assert sum(files) == figures["sequences"]
        assert max(files) - min(files) <= 1
    assert json.loads((folder / "out/examples.json").read_text()) | {"skipped": False} == summary


@pytest.mark.slow
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
    with pytest.raises(InputError, match=r"with --seed 12345, not --seed 3"):
        run(folder, seed=3)
    (folder / "text/0.txt").write_text("Another text.\n\nOf two documents.\n")
    with pytest.raises(InputError, match=r"written from other input .text\[0\]\."):
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
    summary = run(folder, text="few.txt")
    assert len(summary["splits"]["train"]["files"]) == 2
    assert run(folder, "none", text="few.txt", evaluation_fraction=0)["splits"].keys() == {"train"}
    with pytest.raises(InputError, match="single document"):
        (folder / "one.txt").write_text("a1.\na2.\n")
        run(folder, "single", text="one.txt")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": "blank.txt"}, r"blank\.txt: holds no text"),
        ({"text": "latin.txt"}, r"latin\.txt: not UTF-8 at byte 3"),
        ({"vocab": "blank.txt"}, r"blank\.txt: the vocabulary has no \[PAD\]"),
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
    with pytest.raises(InputError, match=r"1\.txt: not UTF-8 at byte 6"):
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


def prepared(out: Path, texts: list[Path], **changes: Any) -> str:
    settings = PrepareSettings(text=tuple(map(str, texts)), **changes)
    prepare(settings, out, a_run(workers=1), pipeline_folder=out)
    return digest(out)


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
    assert prepared(tmp_path / "out", [tmp_path / "text.txt"], **changes) == expected


# --- held-out documents, blocks and sections


@pytest.mark.parametrize(
    ("documents", "fraction", "held_out"), [(79, 0.1, 8), (2, 0.01, 1), (2, 0.99, 1), (5, 0.0, 0), (1, 0.0, 0)]
)
def test_how_many_are_held_out(documents: int, fraction: float, held_out: int) -> None:
    chosen = choose_evaluation(documents, fraction, 12345)
    assert (len(chosen), chosen.sum()) == (documents, held_out)


def test_who_is_held_out_is_a_matter_of_the_seed() -> None:
    assert (choose_evaluation(1000, 0.2, 1) == choose_evaluation(1000, 0.2, 1)).all()
    assert (choose_evaluation(1000, 0.2, 1) != choose_evaluation(1000, 0.2, 2)).any()
    with pytest.raises(InputError, match="single document"):
        choose_evaluation(1, 0.1, 1)


@examples(100)
@given(st.lists(st.tuples(st.integers(1, 100), st.booleans()), max_size=60), st.integers(1, 23))
def test_blocks_and_sections_divide_the_documents(documents: list[tuple[int, bool]], parts: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks_module, "BLOCK_CHARACTERS", 150)
        characters = np.array([size for size, _ in documents], dtype=np.int64)
        chosen = np.array([is_chosen for _, is_chosen in documents], dtype=bool)
        blocks = form_blocks(characters, chosen)
    held = [[number for number in range(block.first, block.stop) if chosen[number]] for block in blocks]
    assert [number for numbers in held for number in numbers] == np.flatnonzero(chosen).tolist()
    assert [block.number for block in blocks] == list(range(len(blocks)))
    assert [block.characters for block in blocks] == [characters[numbers].sum() for numbers in held]
    assert all(block.characters < 150 + 300 for block in blocks)
    assert all(len(numbers) >= min(2, chosen.sum()) for numbers in held)
    if not blocks:
        return
    sections = form_sections("train", blocks, parts)
    assert [block for section in sections for block in section.blocks] == blocks
    assert [part for section in sections for part in section.parts] == list(range(parts))
    assert all(section.blocks and len(section.parts) for section in sections)


def test_large_text_is_divided_by_its_size() -> None:
    blocks = form_blocks(np.full(1000, blocks_module.BLOCK_CHARACTERS), np.ones(1000, dtype=bool))
    sections = form_sections("train", blocks, 16)
    assert len(blocks) == 500
    assert [len(section.blocks) for section in sections] == [125] * 4


def write_sources(folder: Path) -> list[Source]:
    sources = []
    for name, text in {"a": "0.\n\n1.\n\n2.\n", "b": "3.\n", "c": "4.\n4.\n\n5.\n\n6.\n"}.items():
        (folder / name).write_text(text)
        sources.append(Source(name, folder / name, 0))
    return sources


def test_blocks_are_read_over_the_borders_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "BLOCK_CHARACTERS", 5)
    scans = [scan_source(source) for source in write_sources(tmp_path)]
    characters = np.concatenate([scan.document_characters for scan in scans])
    assert characters.tolist() == [2, 2, 2, 2, 4, 2, 2]
    chosen = np.array([1, 0, 1, 1, 0, 1, 1], dtype=bool)
    blocks = form_blocks(characters, chosen)
    read = [(block.number, documents) for block, documents in read_blocks(scans, chosen, blocks)]
    assert read == [(0, [["0."], ["2."], ["3."]]), (1, [["5."], ["6."]])]
    assert [documents for _, documents in read_blocks(scans, chosen, blocks[1:])] == [[["5."], ["6."]]]
    (tmp_path / "c").write_text("4.\n")
    with pytest.raises(FailedError, match="changed while it was read"):
        list(read_blocks(scans, chosen, blocks))


# --- writing a section

SECTION = Section("train", 1, (Block(3, 0, 5, 100),), range(4, 7))


def payloads_of(number: int, size: int) -> list[bytes]:
    return [f"{number}-{index}".encode() * (1 + index % 3) for index in range(size)]


def blocks_of(*sizes: int) -> Iterator[BlockExamples]:
    for number, size in enumerate(sizes):
        frames = [frame(payload) for payload in payloads_of(number, size)]
        lengths = np.array([len(record) for record in frames], dtype=np.int64)
        yield BlockExamples(b"".join(frames), lengths, ExampleCounts(sequences=len(frames)))


def written(folder: Path) -> list[list[bytes]]:
    return [list(read_records(path)) for path in sorted(folder.iterdir())]


@pytest.mark.parametrize("shuffle_bytes", [1, 400, 1 << 20])
def test_every_example_is_in_one_file_and_files_are_even(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle_bytes: int
) -> None:
    monkeypatch.setattr(blocks_module, "SHUFFLE_BYTES", shuffle_bytes)
    sizes = (7, 0, 13, 1, 11)
    section = write_section(SECTION, blocks_of(*sizes), tmp_path, 9, seed=5)
    paths, found = sorted(tmp_path.iterdir()), written(tmp_path)
    assert [path.name for path in paths] == [f"part-0000{part}-of-00009.tfrecord" for part in (4, 5, 6)]
    assert [len(records) for records in found] == [11, 11, 10]
    expected = [payload for number, size in enumerate(sizes) for payload in payloads_of(number, size)]
    assert sorted(payload for records in found for payload in records) == sorted(expected)
    assert section.sequences == 32
    assert [(file.name, file.sequences, file.bytes) for file in section.files] == [
        (path.name, len(records), path.stat().st_size) for path, records in zip(paths, found, strict=True)
    ]


def test_the_order_is_a_matter_of_seed_split_and_section(tmp_path: Path) -> None:
    evaluation, second = (Section(*which, SECTION.blocks, SECTION.parts) for which in (("evaluation", 1), ("train", 2)))
    orders = []
    for run, (section, seed) in enumerate([(SECTION, 5), (SECTION, 5), (SECTION, 6), (evaluation, 5), (second, 5)]):
        write_section(section, blocks_of(50), tmp_path / str(run), 9, seed)
        orders.append(written(tmp_path / str(run)))
    assert orders[0] == orders[1]
    assert all(orders[0] != other for other in orders[2:])
    first = [payload for records in orders[0] for payload in records]
    assert first != sorted(first)


def test_fewer_examples_than_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"prepare\.shards = 9: the text of train gives only 2 examples for 3 files"):
        write_section(SECTION, blocks_of(2), tmp_path, 9, seed=5)
    with pytest.raises(InputError, match=r"prepare\.text: the text of train gives no example"):
        write_section(SECTION, blocks_of(0), tmp_path, 9, seed=5)
    assert not list(tmp_path.iterdir())


# --- workers


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_order_and_few_are_in_flight(workers: int) -> None:
    taken: list[int] = []

    def items() -> object:
        for number in range(20):
            taken.append(number)
            yield -number

    results = ordered_map(abs, items(), workers)  # type: ignore[arg-type]
    assert next(results) == 0
    assert len(taken) <= workers + 1
    assert list(results) == list(range(1, 20))


def test_a_dead_worker_is_reported() -> None:
    with pytest.raises(FailedError, match="a worker process died"):
        list(ordered_map(os._exit, [9], 2))


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    code = """
import os, sys, time
from pathlib import Path
from gaudi_bert.corpus.blocks import ordered_map

def note(number):
    Path(sys.argv[1], str(os.getpid())).touch()
    time.sleep(0.2)

if __name__ == "__main__":
    for _ in ordered_map(note, range(10_000), 2):
        pass
"""
    (tmp_path / "pids").mkdir()
    (tmp_path / "main.py").write_text(code)
    parent = subprocess.Popen([sys.executable, str(tmp_path / "main.py"), str(tmp_path / "pids")])
    wait_until(lambda: len(list((tmp_path / "pids").iterdir())) == 2)
    workers = [int(path.name) for path in (tmp_path / "pids").iterdir()]
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(is_running(worker) for worker in workers))


def is_running(process: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return False
