"""RECORDS as HDF5: the same plans, packs and proofs as of the same examples in TFRecords; and one line for what is wrong."""

from __future__ import annotations

import contextlib
import sys
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

h5py = pytest.importorskip("h5py", exc_type=ImportError)

from gaudi_bert.common.errors import InputError  # noqa: E402
from gaudi_bert.tfrecords.plan import count_records  # noqa: E402
from gaudi_bert.tfrecords.wire import hdf5  # noqa: E402
from gaudi_bert.tfrecords.wire.framing import RecordStream, read_records  # noqa: E402
from gaudi_bert.training.sources import open_local_records  # noqa: E402
from tests.builders.packing_case import (  # noqa: E402
    columns_of,
    sequences_for_hdf5,
    write_columns,
    write_hdf5,
    write_tfrecord,
)
from tests.builders.reporters import a_run  # noqa: E402
from tests.oracles.wire import crc32c, example, frame  # noqa: E402

# How a file may be stored; only gzip alone is decompressed by us, in chunks of any size (`test_any_chunks_and_types`).
STORED = {
    "as the vendor does": {"compression": "gzip"},
    "shuffled": {"compression": "gzip", "shuffle": True},
    "checksums": {"compression": "gzip", "fletcher32": True},
    "lzf": {"compression": "lzf"},
    "contiguous": {"compression": None},
}


def as_stream(path: Path, piece: int = 1 << 20) -> bytes:
    content, view = b"", memoryview(bytearray(piece))
    with RecordStream(path) as stream:
        while count := stream.read_into(view):
            content += bytes(view[:count])
        assert stream.file_bytes == path.stat().st_size
        assert stream.file_crc32c == crc32c(path.read_bytes())
        assert stream.max_uncompressed_bytes >= len(content)
    return content


def refused(records: Path, message: str) -> None:
    with pytest.raises(InputError, match=message):
        count_records(records, records.parent / "histogram.json", a_run())
    assert not (records.parent / "histogram.json").exists()


@pytest.mark.parametrize("how", STORED)
def test_rows_become_the_records_of_the_same_examples(tmp_path: Path, how: str) -> None:
    sequences = sequences_for_hdf5(211, 23, 7, seed=211)
    path = write_hdf5(tmp_path / "rows.h5", sequences, **STORED[how])
    expected = b"".join(frame(example(sequence)) for sequence in sequences)
    assert as_stream(path) == as_stream(path, piece=101) == expected


@given(
    count=st.integers(1, 40),
    length=st.integers(1, 20),
    predictions=st.integers(1, 6),
    chunk=st.tuples(st.integers(1, 40), st.integers(1, 20)),
    types=st.sampled_from(["i1", "i2", "i4", "i8", ">i4", "u2"]),
    seed=st.integers(0, 99),
)
def test_any_chunks_and_types(tmp_path_factory, count, length, predictions, chunk, types, seed) -> None:
    sequences = sequences_for_hdf5(count, length, predictions, seed)
    path = tmp_path_factory.mktemp("any") / "rows.hdf5"
    columns = columns_of(sequences)
    for name in ("input_ids", "masked_lm_ids"):
        columns[name] %= 127
        columns[name][columns[name] == 0] += columns_of(sequences)[name][columns[name] == 0] > 0
    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            shape = tuple(min(size, most) for size, most in zip(chunk, values.shape, strict=False))
            file.create_dataset(name, data=values, dtype=types, compression="gzip", chunks=shape)
    expected = [
        example({**sequence, **{name: columns[name][row].tolist() for name in ("input_ids", "masked_lm_ids")}})
        for row, sequence in enumerate(sequences)
    ]
    assert list(read_records(path)) == expected


def test_a_column_of_labels_is_taken_too(tmp_path: Path) -> None:
    sequences = sequences_for_hdf5(7, 11, 3, seed=1)
    columns = columns_of(sequences)
    columns["next_sentence_labels"] = columns["next_sentence_labels"].reshape(-1, 1)
    path = write_columns(tmp_path / "rows.hdf5", columns, compression="gzip")
    assert list(read_records(path)) == [example(sequence) for sequence in sequences]


def test_a_chunk_that_was_never_written_is_zeros(tmp_path: Path) -> None:
    columns = columns_of(sequences_for_hdf5(30, 11, 3, seed=1))
    path = write_columns(tmp_path / "rows.hdf5", {**columns, "segment_ids": np.zeros((30, 11), np.int8)})
    with h5py.File(path, "a") as file:
        del file["segment_ids"]
        file.create_dataset("segment_ids", (30, 11), "i1", compression="gzip", chunks=(7, 11))
    assert as_stream(path) == as_stream(
        write_columns(tmp_path / "same.hdf5", {**columns, "segment_ids": np.zeros((30, 11))})
    )


def test_memory_does_not_grow_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = columns_of(sequences_for_hdf5(3000, 64, 5, seed=3))
    monkeypatch.setattr(hdf5, "_BLOCK_BYTES", 1 << 14)
    most = []
    for times in (1, 8):
        more = {name: np.concatenate([values] * times) for name, values in columns.items()}
        path = tmp_path / f"{times}.hdf5"
        with h5py.File(path, "w") as file:
            for name, values in more.items():
                file.create_dataset(name, data=values, compression="gzip", chunks=(700, 5)[: values.ndim])
        view = memoryview(bytearray(1 << 20))
        tracemalloc.start()
        with RecordStream(path) as stream:
            while stream.read_into(view):
                pass
        most.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert most[1] < 1.2 * most[0]
    monkeypatch.setattr(hdf5, "_MAX_BLOCK_BYTES", 1000)
    with pytest.raises(InputError, match=r"at most 0 MiB, but its 700 rows have 358,400 bytes"):
        hdf5.Hdf5Rows(path)


# --- a file is believed as far as its own bytes go


def elsewhere(name: str, how: str, folder: Path):
    """Have the values of a dataset in another file, or nowhere."""

    def change(file) -> None:
        values = file[name][...]
        del file[name]
        with h5py.File(folder / "other.bin", "w") as other:
            other[name] = values
        if how == "external link":
            file[name] = h5py.ExternalLink(str(folder / "other.bin"), name)
        elif how == "link":
            file["there"] = values
            file[name] = h5py.SoftLink("/there")
        elif how == "external storage":
            (folder / "raw").write_bytes(values.tobytes())
            place = (str(folder / "raw"), 0, h5py.h5f.UNLIMITED)
            file.create_dataset(name, values.shape, values.dtype, external=[place])
        elif how == "virtual data set":
            layout = h5py.VirtualLayout(values.shape, values.dtype)
            layout[...] = h5py.VirtualSource(str(folder / "other.bin"), name, values.shape)
            file.create_virtual_dataset(name, layout)
        else:
            file.create_group(name)

    return change


@pytest.mark.parametrize("how", ["external link", "link", "external storage", "virtual data set", "group"])
def test_no_values_of_other_files_are_read(tmp_path: Path, how: str) -> None:
    name = "next_sentence_labels"
    path = write_hdf5(tmp_path / "records" / "a.hdf5", sequences_for_hdf5(20, 11, 3, seed=5))
    with h5py.File(path, "a") as file:
        elsewhere(name, how, tmp_path)(file)
    refused(path.parent, f"a.hdf5: .*{name},? .*(found|not supported|but must be a dataset)")


def test_a_block_of_the_user_may_come_first(tmp_path: Path) -> None:
    sequences = sequences_for_hdf5(20, 11, 3, seed=5)
    same, path = write_hdf5(tmp_path / "same.hdf5", sequences), tmp_path / "block.hdf5"
    with h5py.File(path, "w", userblock_size=4096) as file:
        for name, values in columns_of(sequences).items():
            file.create_dataset(name, data=values, compression="gzip")
    assert as_stream(path) == as_stream(same)


# We inflate the chunk of the bomb, or we check it and the library inflates it, or both inflate it.
@pytest.mark.parametrize("how", ["as the vendor does", "shuffled", "checksums"])
@pytest.mark.parametrize("count", [20, 4000])  # of rows: the chunk is stored in more bytes than they have, or in fewer
def test_a_chunk_that_inflates_is_refused_before_it_takes_memory(tmp_path: Path, how: str, count: int) -> None:
    path = write_hdf5(tmp_path / "records" / "a.hdf5", sequences_for_hdf5(count, 29, 3, seed=5))
    bomb = zlib.compress(bytes(64 << 20))
    with h5py.File(path, "a") as file:
        values, name = file["input_ids"][...], "input_ids"
        del file[name]
        dataset = file.create_dataset(name, values.shape, values.dtype, chunks=values.shape, **STORED[how])
        dataset.id.write_direct_chunk((0, 0), bomb + b"sums" if how == "checksums" else bomb)
    tracemalloc.start()
    refused(path.parent, r"a.hdf5: the file is not readable as HDF5 \(a (stored|decompressed) chunk ")
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("chunks", [None, True])
def test_rows_that_are_only_claimed_are_refused(tmp_path: Path, chunks: bool | None) -> None:
    path = tmp_path / "records" / "a.hdf5"
    path.parent.mkdir()
    with h5py.File(path, "w") as file:
        for name, values in columns_of(sequences_for_hdf5(2, 11, 3, seed=5)).items():
            file.create_dataset(name, (10**6, *values.shape[1:]), "i4", fillvalue=1, chunks=chunks)
    refused(path.parent, r"a.hdf5: a file of .* bytes cannot contain the claimed 1,000,000 rows")


def test_training_reads_the_rows(tmp_path: Path) -> None:
    for number in range(2):
        sequences = sequences_for_hdf5(9 + number, 29, 5, seed=number)
        write_hdf5(tmp_path / "hdf5" / f"part_{number}.hdf5", sequences)
        write_tfrecord(tmp_path / "tfrecord" / f"part_{number}.tfrecord", sequences)
    ours, theirs = open_local_records(tmp_path / "hdf5"), open_local_records(tmp_path / "tfrecord")
    assert ours.schema == theirs.schema
    assert [list(ours.read_file_records(number)) for number in (0, 1)] == [
        list(theirs.read_file_records(number)) for number in (0, 1)
    ]
    numbers = np.arange(9)
    one, other = (source.open_packs().files.read_records(np.ones_like(numbers), numbers) for source in (ours, theirs))
    assert all(np.array_equal(one[name], other[name]) for name in other)


# --- what is wrong is one line, and nothing is written


def with_value(row: int, value: int):
    def change(values: np.ndarray) -> np.ndarray:
        values = values.astype(np.int64)
        values[(row, 0)[: values.ndim]] = value
        return values

    return change


RIGHT = {
    "input_ids": np.full((20, 11), 7),
    "input_mask": np.ones((20, 11), np.int64),
    "segment_ids": np.zeros((20, 11), np.int64),
    "masked_lm_positions": np.array([[1, 0, 0]] * 20),
    "masked_lm_ids": np.array([[5, 0, 0]] * 20),
    "next_sentence_labels": np.ones(20, np.int64),
    "next_sentence_positions": None,
}
WRONG = [
    ("segment_ids", lambda _: None, "expected a dataset segment_ids, found input_ids"),
    ("next_sentence_labels", lambda values: values[1:], r"next_sentence_labels has the shape \(19,\), .* require \(20,\)"),
    ("input_mask", np.float32, r"dataset input_mask must contain rows of integers, found float32 \(20, 11\)"),
    ("input_ids", lambda _: np.array(7), r"dataset input_ids must contain rows of integers, found int64 \(\)"),
    ("next_sentence_positions", lambda _: np.zeros((20, 3), np.int32), "expected unpacked records, found packs"),
    ("input_ids", with_value(7, -3), "row 7: `input_ids` must contain 0 to 2097151 at position 0, but contains -3"),
    ("masked_lm_positions", with_value(3, 11), "row 3: `masked_lm_positions` .* at position 0, but contains 11"),
    ("next_sentence_labels", with_value(19, 2), "row 19: `next_sentence_labels` must be 0 .* or 1 .*, but is 2"),
    (
        "masked_lm_ids",
        lambda values: np.roll(values, 2, axis=1),
        "row 0: `masked_lm_weights` must contain ones and then zeros",
    ),
]


@pytest.mark.parametrize(("name", "change", "message"), WRONG)
def test_wrong_files_are_refused(tmp_path: Path, name: str, change, message: str) -> None:
    columns = {name: values for name, values in {**RIGHT, name: change(RIGHT[name])}.items() if values is not None}
    path = write_columns(tmp_path / "records" / "rows.hdf5", columns, types={})
    refused(path.parent, f"^{path}: .*{message}")


def test_a_file_cut_short_is_refused_and_damage_is_or_changes_what_is_read(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "records" / "a.hdf5", sequences_for_hdf5(100, 29, 5, seed=5))
    content, rng = bytearray(path.read_bytes()), np.random.default_rng(0)
    for part in (0.05, 0.999):
        path.write_bytes(content[: int(part * len(content))])
        refused(path.parent, r"a\.hdf5: the file is not readable as HDF5")
    for number in range(10):
        for position in rng.integers(len(content) // 2, len(content), 20):  # chunks of values; not the file's structure
            content[position] ^= int(rng.integers(1, 256))
        path.write_bytes(content)
        with contextlib.suppress(InputError):
            count_records(path.parent, tmp_path / f"{number}.json", a_run())


def test_names_and_contents_must_agree(tmp_path: Path) -> None:
    sequences = sequences_for_hdf5(5, 11, 3, seed=5)
    write_hdf5(tmp_path / "rows.bin", sequences)
    write_tfrecord(tmp_path / "rows.hdf5", sequences)
    (tmp_path / "empty.h5").write_bytes(b"")
    for name, message in {
        "rows.bin": r"the name of an HDF5 file must end in .hdf5 or .h5",
        "rows.hdf5": "expected an HDF5 file because of its name",
        "empty.h5": "the file is empty; remove it, or create it again",
    }.items():
        refused(tmp_path / name, message)
    path = write_columns(tmp_path / "none.h5", {name: values[:0] for name, values in columns_of(sequences).items()})
    refused(path, r"none.h5: the file contains no records; remove it, or create it again")


def test_a_folder_of_both_formats_is_refused(tmp_path: Path) -> None:
    sequences = sequences_for_hdf5(5, 11, 3, seed=5)
    write_hdf5(tmp_path / "records" / "a.hdf5", sequences)
    write_tfrecord(tmp_path / "records" / "b.tfrecord", sequences)
    refused(tmp_path / "records", r"contains both HDF5 files \(a.hdf5\) and other files \(b.tfrecord\).* pattern")
    assert count_records(tmp_path / "records" / "*.hdf5", tmp_path / "h.json", a_run()).content.sequences == 5


def test_without_h5py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_hdf5(tmp_path / "rows.hdf5", sequences_for_hdf5(5, 11, 3, seed=5))
    monkeypatch.setitem(sys.modules, "h5py", None)
    refused(path, r"HDF5 files require h5py.*\[hdf5\]")
