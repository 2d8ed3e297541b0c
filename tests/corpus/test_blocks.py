"""Blocks and sections: who is held out, how the text is divided, and what workers return."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.artefacts.examples import PreparedSection
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.corpus import blocks as blocks_module
from gaudi_bert.corpus.blocks import (
    Block,
    Section,
    choose_evaluation_documents,
    divide_blocks_into_sections,
    divide_documents_into_blocks,
    map_in_processes,
    measure_documents,
    read_blocks,
    write_section,
)
from gaudi_bert.corpus.documents import Source
from gaudi_bert.corpus.examples import PretrainingExamples
from gaudi_bert.tfrecords.wire.framing import frame, read_records
from tests.builders.properties import examples
from tests.builders.waiting import wait_until


@pytest.mark.parametrize(
    ("documents", "fraction", "held_out"), [(79, 0.1, 8), (2, 0.01, 1), (2, 0.99, 1), (5, 0.0, 0), (1, 0.0, 0)]
)
def test_how_many_are_held_out(documents: int, fraction: float, held_out: int) -> None:
    chosen = choose_evaluation_documents(documents, fraction, 12345)
    assert (len(chosen), chosen.sum()) == (documents, held_out)


@examples(100)
@given(st.lists(st.tuples(st.integers(1, 100), st.booleans()), max_size=60), st.integers(1, 23))
def test_blocks_and_sections_divide_the_documents(documents: list[tuple[int, bool]], parts: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks_module, "BLOCK_CHARACTERS", 150)
        characters = np.array([size for size, _ in documents], dtype=np.int64)
        chosen = np.array([is_chosen for _, is_chosen in documents], dtype=bool)
        blocks = divide_documents_into_blocks(characters, chosen)
    held = [[number for number in range(block.first, block.stop) if chosen[number]] for block in blocks]
    assert [number for numbers in held for number in numbers] == np.flatnonzero(chosen).tolist()
    assert [block.number for block in blocks] == list(range(len(blocks)))
    assert [block.characters for block in blocks] == [characters[numbers].sum() for numbers in held]
    assert all(block.characters < 150 + 300 for block in blocks)
    assert all(len(numbers) >= min(2, chosen.sum()) for numbers in held)
    if not blocks:
        return
    sections = divide_blocks_into_sections("train", blocks, parts)
    assert [block for section in sections for block in section.blocks] == blocks
    assert [part for section in sections for part in section.parts] == list(range(parts))
    assert all(section.blocks and len(section.parts) for section in sections)


def write_sources(folder: Path) -> list[Source]:
    sources = []
    for name, text in {"a": "0.\n\n1.\n\n2.\n", "b": "3.\n", "c": "4.\n4.\n\n5.\n\n6.\n"}.items():
        (folder / name).write_text(text)
        sources.append(Source(name, folder / name, 0))
    return sources


def test_blocks_are_read_over_the_borders_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "BLOCK_CHARACTERS", 5)
    scans = [measure_documents(source) for source in write_sources(tmp_path)]
    characters = np.concatenate([scan.document_characters for scan in scans])
    assert characters.tolist() == [2, 2, 2, 2, 4, 2, 2]
    chosen = np.array([1, 0, 1, 1, 0, 1, 1], dtype=bool)
    blocks = divide_documents_into_blocks(characters, chosen)
    read = [(block.number, documents) for block, documents in read_blocks(scans, chosen, blocks)]
    assert read == [(0, [["0."], ["2."], ["3."]]), (1, [["5."], ["6."]])]
    assert [documents for _, documents in read_blocks(scans, chosen, blocks[1:])] == [[["5."], ["6."]]]
    (tmp_path / "c").write_text("4.\n")
    with pytest.raises(FailedError, match="the text was changed while it was read"):
        list(read_blocks(scans, chosen, blocks))


SECTION = Section("train", 1, (Block(3, 0, 5, 100),), range(4, 7))


def payloads_of(number: int, size: int) -> list[bytes]:
    return [f"{number}-{index}".encode() * (1 + index % 3) for index in range(size)]


def blocks_of(*sizes: int) -> Iterator[PretrainingExamples]:
    for number, size in enumerate(sizes):
        frames = [frame(payload) for payload in payloads_of(number, size)]
        lengths = np.array([len(record) for record in frames], dtype=np.int64)
        counts = Counter(dict.fromkeys(PreparedSection.model_fields.keys() - {"files"}, len(frames)))
        yield PretrainingExamples(b"".join(frames), lengths, counts)


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


def test_fewer_examples_than_files_are_refused(tmp_path: Path) -> None:
    few = r"prepare\.shards = 9: the train text yields only 2 examples for 3 files"
    for size, message in ((2, few), (0, r"prepare\.text: the train text yields no examples")):
        with pytest.raises(InputError, match=message):
            write_section(SECTION, blocks_of(size), tmp_path, 9, seed=5)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_order_and_few_are_in_flight(workers: int) -> None:
    taken: list[int] = []

    def items() -> object:
        for number in range(20):
            taken.append(number)
            yield -number

    results = map_in_processes(abs, items(), workers)  # type: ignore[arg-type]
    assert next(results) == 0
    assert len(taken) <= workers + 1
    assert list(results) == list(range(1, 20))


def test_a_dead_worker_is_reported() -> None:
    with pytest.raises(FailedError, match="a worker process was killed"):
        list(map_in_processes(os._exit, [9], 2))


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    code = """
import os, sys, time
from pathlib import Path
from gaudi_bert.corpus.blocks import map_in_processes

def note(number):
    Path(sys.argv[1], str(os.getpid())).touch()
    time.sleep(0.2)

if __name__ == "__main__":
    for _ in map_in_processes(note, range(10_000), 2):
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
