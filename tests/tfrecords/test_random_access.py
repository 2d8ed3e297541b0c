"""Packed folders: their metadata, ours and the predecessor's, and records by their numbers; damage is named."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import numpy as np
import pytest

from gaudi_bert.artefacts.packed import RecordMetadata
from gaudi_bert.artefacts.shards import index_path
from gaudi_bert.common.errors import InputError
from gaudi_bert.tfrecords import random_access
from gaudi_bert.tfrecords.random_access import RecordFiles, open_shards
from gaudi_bert.tfrecords.wire.example import decode_example
from gaudi_bert.tfrecords.wire.framing import read_records
from gaudi_bert.tfrecords.wire.schema import UnpackedSchema
from tests.builders.packing_case import PackingCase, make_case
from tests.builders.shards import mapped_files
from tests.oracles.wire import UNPACKED_KEYS, example, flipped, frame, unpacked_list


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> PackingCase:
    return make_case(tmp_path_factory.mktemp("case"))


def open_case(case: PackingCase) -> RecordFiles:
    return open_shards(case.packed, RecordMetadata.read(case.packed))


@pytest.mark.parametrize("depth", [1, 3, 7])
def test_records_are_those_of_the_plain_reader(tmp_path: Path, depth: int) -> None:
    files = pickle.loads(pickle.dumps(open_case(make_case(tmp_path, depth=depth, algorithm="spfhp"))))  # as for a worker
    places = [(file, record) for file, size in enumerate(files.record_counts) for record in range(size)]
    np.random.default_rng(0).shuffle(places)
    numbers, records = np.array(places).T
    read = files.read_records(numbers, records)
    for row, (file, record) in enumerate(places):
        expected = decode_example(list(read_records(files.paths[file]))[record])
        for name, values in expected.items():
            np.testing.assert_array_equal(read[name][row], values)
    assert files.read_records(np.empty(0, np.int64), np.empty(0, np.int64))["input_ids"].shape[0] == 0


def test_a_record_that_a_file_has_not_is_not_looked_for_behind_it(case: PackingCase) -> None:
    files = open_case(case)
    for record in (-1, files.record_counts[0]):
        with pytest.raises(IndexError, match=f"record {record}: the file does not contain"):
            files.read_records(np.zeros(2, np.int64), np.array([0, record]))


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_other_encodings_and_compressed_files_are_read(tmp_path: Path, compress) -> None:
    case = make_case(tmp_path, files=1)
    order = list(UNPACKED_KEYS)
    content = b"".join(frame(example(features, order, unpacked_list)) for features in case.sequences)
    path = tmp_path / "other"
    path.write_bytes(compress(content))
    files = RecordFiles([path], UnpackedSchema(29, 5))
    assert files.record_counts.tolist() == [len(case.sequences)]
    read = files.read_records(np.zeros(3, np.int64), np.array([4, 0, 22]))
    assert read["input_ids"].tolist() == [case.sequences[number]["input_ids"] for number in (4, 0, 22)]
    assert read["masked_lm_weights"].dtype == np.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:-3], "record 22 at byte .*: the file ends within this record"),
        (lambda content: flipped(content, 50), "record 0 at byte 0: the record is damaged"),
        (lambda content: content + b"\0" * 20, "record 23 at byte .*: the record is damaged, because the CRC of its length"),
        (lambda content: content * 2, "expected 23 records, found 46"),
    ],
)
def test_damage_is_named(tmp_path: Path, change, message: str) -> None:
    path = make_case(tmp_path, files=1).records / "part-0"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InputError, match=rf"part-0: {message}"):
        RecordFiles([path], UnpackedSchema(29, 5), [23]).read_records(np.zeros(23, np.int64), np.arange(23))


# --- by the index of a group


def indexed_case(folder: Path, change=lambda sizes: sizes) -> tuple[RecordFiles, int]:
    """A case whose index has other sizes for the largest shard, and the number of this shard."""
    case = make_case(folder)
    table = RecordMetadata.read(case.packed).shard_table
    largest = int(np.argmax(table.packs))
    index, first = index_path(case.packed, table.locate_shard(largest)[0]), table.packs_before(largest)
    entries, own = np.fromfile(index, "<u4").reshape(-1, 2), slice(first, first + int(table.packs[largest]))
    entries[own, 0] = change(entries[own, 0].tolist())
    entries.tofile(index)
    return open_case(case), largest


def read_all(files: RecordFiles, shard: int) -> dict:
    numbers = np.arange(files.record_counts[shard])
    return files.read_records(np.full_like(numbers, shard), numbers)


def test_the_index_tells_what_a_walk_finds(tmp_path: Path) -> None:
    indexed, shard = indexed_case(tmp_path / "indexed")
    assert indexed.prepare_shard_for_opening(shard).checksums is not None
    walked = RecordFiles(indexed.paths, indexed.schema, indexed.record_counts)
    assert walked.prepare_shard_for_opening(shard).checksums is None
    for name, values in read_all(walked, shard).items():
        np.testing.assert_array_equal(read_all(indexed, shard)[name], values)


@pytest.mark.parametrize(
    "change",
    [
        lambda sizes: [sizes[0] + 1, sizes[1] - 1, *sizes[2:]],
        lambda sizes: [sizes[0] + sizes[1], 0, *sizes[2:]],
        lambda sizes: [sum(sizes), *[0] * (len(sizes) - 1)],
    ],
)
def test_sizes_that_are_not_those_of_the_records_are_refused(tmp_path: Path, change) -> None:
    files, shard = indexed_case(tmp_path, change)
    name = files.paths[shard].name
    with pytest.raises(
        InputError, match=rf"{name}: record [01] at byte .*: the index .* a wrong record size of .*; remove.*$"
    ):
        read_all(files, shard)


def test_sizes_of_another_sum_are_not_used(tmp_path: Path) -> None:
    files, shard = indexed_case(tmp_path, lambda sizes: [*sizes[:-1], sizes[-1] + 1])
    assert files.prepare_shard_for_opening(shard).checksums is None
    assert len(read_all(files, shard)["input_ids"]) == files.record_counts[shard]


def test_damage_is_named_by_an_index_too(tmp_path: Path) -> None:
    files, shard = indexed_case(tmp_path)
    path = files.paths[shard]
    path.write_bytes(flipped(path.read_bytes(), 50))
    with pytest.raises(InputError, match="record 0 at byte 0: the record is damaged"):
        read_all(files, shard)


@pytest.mark.parametrize("has_index", [True, False])
def test_a_shard_that_is_a_copy_of_another_is_noticed_by_whoever_reads_it(tmp_path: Path, has_index: bool) -> None:
    """Also by a process that reads one record of it alone, if there is an index; else when the shard is opened."""
    files = open_case(make_case(tmp_path, files=2, depth=1, algorithm="none"))
    shard, other = np.flatnonzero(files.record_counts == files.record_counts.max())[:2].tolist()
    records = list(map(bytearray, read_records(files.paths[shard])))
    for record in records:  # the last bytes are weights and labels: another label keeps the size
        record[record.index(b"input_ids") + 20] ^= 1
    changed = b"".join(frame(bytes(record)) for record in records)
    assert len(changed) == files.paths[shard].stat().st_size
    files.paths[shard].write_bytes(changed)
    if not has_index:
        for index in files.paths[0].parent.glob("*.index"):
            index.unlink()
    message = r"the checksum differs from the index" if has_index else "the CRC-32C of the shard differs from the manifest"
    for record in range(int(files.record_counts[shard])):
        with pytest.raises(InputError, match=f"{files.paths[shard].name}: .*{message}"):
            files.read_records(np.array([other, shard]), np.array([0, record]))


def test_files_are_closed_unless_they_are_excepted(case: PackingCase) -> None:
    files = open_case(case)
    filled = np.flatnonzero(files.record_counts)
    files.read_records(filled, np.zeros_like(filled))
    assert mapped_files(case.packed) == len(filled)
    files.close_shards_except(filled[:2].tolist())
    assert mapped_files(case.packed) == 2
    files.close_shards_except(())
    assert mapped_files(case.packed) == 0


def test_of_very_many_shards_only_the_names_are_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(tmp_path, files=3)
    metadata = RecordMetadata.read(case.packed)
    shard = case.packed / metadata.shard_table.file_name(1)
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(InputError, match=f"{shard.name}: the metadata states .* bytes, but the shard has"):
        random_access.check_shards_exist(case.packed, metadata.shard_table)
    monkeypatch.setattr(random_access, "_MAX_CHECKED_SIZES", 2)
    random_access.check_shards_exist(case.packed, metadata.shard_table)
    files = open_shards(case.packed, metadata)
    with pytest.raises(InputError, match=f"{shard.name}: the size has changed from .* to .* bytes"):
        files.open_shard(1, files.prepare_shard_for_opening(1))
    shard.unlink()
    with pytest.raises(InputError, match=f"{shard.name}: the shard is missing"):
        random_access.check_shards_exist(case.packed, metadata.shard_table)
