from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.corpus import parts as module
from gaudi_bert.corpus.blocks import Block, Section
from gaudi_bert.corpus.examples import BlockExamples, ExampleCounts
from gaudi_bert.corpus.parts import part_name, write_section
from gaudi_bert.records.wire.framing import frame, read_records

SECTION = Section("train", 1, (Block(3, 0, 5, 100),), range(4, 7))


def block(*payloads: bytes) -> BlockExamples:
    frames = [frame(payload) for payload in payloads]
    return BlockExamples(
        b"".join(frames), np.array([len(record) for record in frames], dtype=np.int64), ExampleCounts(sequences=len(frames))
    )


def blocks(sizes: tuple[int, ...]) -> list[BlockExamples]:
    names = [[f"{number}-{place}".encode() * (1 + place % 3) for place in range(size)] for number, size in enumerate(sizes)]
    return [block(*payloads) for payloads in names]


def written(folder: Path) -> list[list[bytes]]:
    return [list(read_records(path)) for path in sorted(folder.iterdir())]


@pytest.mark.parametrize("shuffle_bytes", [1, 400, 1 << 20])
def test_every_example_is_in_one_file_and_files_are_even(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle_bytes: int
) -> None:
    monkeypatch.setattr(module, "SHUFFLE_BYTES", shuffle_bytes)
    given = blocks((7, 0, 13, 1, 11))
    section = write_section(SECTION, iter(given), tmp_path, 9, seed=5)
    found = written(tmp_path)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [part_name(part, 9) for part in (4, 5, 6)]
    assert [len(records) for records in found] == [11, 11, 10]
    expected = [
        payload
        for number, size in enumerate((7, 0, 13, 1, 11))
        for payload in (f"{number}-{place}".encode() * (1 + place % 3) for place in range(size))
    ]
    assert sorted(payload for records in found for payload in records) == sorted(expected)
    assert section.counts.sequences == 32
    assert [(file.name, file.sequences, file.bytes) for file in section.files] == [
        (path.name, len(records), path.stat().st_size)
        for path, records in zip(sorted(tmp_path.iterdir()), found, strict=True)
    ]


def test_the_order_is_a_matter_of_seed_split_and_section(tmp_path: Path) -> None:
    sections = [
        SECTION,
        Section("evaluation", 1, SECTION.blocks, SECTION.parts),
        Section("train", 2, SECTION.blocks, SECTION.parts),
    ]
    orders = []
    for run, (section, seed) in enumerate([(SECTION, 5), (SECTION, 5), (SECTION, 6), (sections[1], 5), (sections[2], 5)]):
        write_section(section, iter(blocks((50,))), tmp_path / str(run), 9, seed)
        orders.append(written(tmp_path / str(run)))
    assert orders[0] == orders[1]
    assert all(orders[0] != other for other in orders[2:])
    first = [payload for records in orders[0] for payload in records]
    assert first != sorted(first)


def test_fewer_examples_than_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"prepare\.shards = 9: the text of train gives only 2 examples for 3 files"):
        write_section(SECTION, iter(blocks((2,))), tmp_path, 9, seed=5)
    assert not list(tmp_path.iterdir())
