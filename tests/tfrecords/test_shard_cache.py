"""Shards of a bucket: the rows of a disk, by parts or whole, whatever the server does, within a bound of local disk."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from gaudi_bert.artefacts.shards import GroupShards, ShardTable, index_path
from gaudi_bert.artefacts.store.mirrored_folder import mirrored
from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.common.errors import InputError
from gaudi_bert.model.config import BertConfig
from gaudi_bert.tfrecords.packed_folder import read_metadata
from gaudi_bert.tfrecords.shard_cache import ShardCache
from gaudi_bert.training.input.batches import TrainingOrder, evaluation_batches, training_batches, value_limits
from gaudi_bert.training.input.source import open_source, packed_source
from tests.builders.packing_case import PackingCase, make_case
from tests.builders.s3_server import S3Server, faulty_proxy, quick, upload

CONFIG = BertConfig(
    vocab_size=30522,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=8,
    max_position_embeddings=29,
)
BATCH, BY_PARTS, WHOLE = 4, 0, 1 << 20
"""`small_bytes` of a cache: no shard is small, or all are."""


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory, s3: S3Server) -> PackingCase:
    """A small data set on the disk, and in the bucket."""
    made = make_case(tmp_path_factory.mktemp("case"), files=3, sequences_per_file=17)
    upload(made.packed, "s3://bucket/cached", Objects(quick(s3.endpoint)))
    return made


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stream, and whole shards after 12 packs, in pieces of 500 bytes."""
    monkeypatch.setattr("gaudi_bert.tfrecords.packed_folder.streams_of", lambda _: 1)
    monkeypatch.setattr("gaudi_bert.reading.streams._FIRST_PACKS", 12)
    monkeypatch.setattr("gaudi_bert.tfrecords.shard_cache._PIECE_BYTES", 500)
    monkeypatch.setattr("gaudi_bert.tfrecords.random_access._GAP_BYTES", 200)


@contextmanager
def stored_source(case: PackingCase, endpoint: str, small_bytes: int, room: int = 1 << 30, url: str = "s3://bucket/cached"):
    metadata, store = read_metadata(case.packed), quick(endpoint)
    with (
        mirrored(Path(url), store) as folder,
        closing(ShardCache(folder, metadata.shard_table, room, 3, small_bytes)) as cache,
    ):
        yield packed_source(folder, metadata, cache)


def trained(source, batches: int) -> list[bytes]:
    """The token ids of each pack of so many batches."""
    order = TrainingOrder(seed=3, shuffle_packs=4)
    with closing(training_batches(source, value_limits(source, CONFIG), BATCH, order)) as read:
        return rows(islice(read, batches))


def rows(batches) -> list[bytes]:
    return [ids.tobytes() for batch in batches for ids in batch["input_ids"]]


@pytest.mark.parametrize("small_bytes", [BY_PARTS, WHOLE])
def test_a_bucket_is_read_through_the_shards_of_its_streams(case: PackingCase, s3: S3Server, small_bytes: int) -> None:
    """Equal to a local folder, over epochs, with room for four sets of one stream and the next shard."""
    metadata = read_metadata(case.packed)
    table, batches = metadata.shard_table, 3 * metadata.packs // BATCH
    sizes = {table.name(shard): int(table.bytes[shard]) for shard in range(len(table))}
    local, room = open_source(case.packed), int(np.sort(table.bytes)[-5:].sum())
    with stored_source(case, s3.endpoint, small_bytes, room) as stored:
        stored.cache.check_room(1, 1, 4)
        found, most, order = [], 0, TrainingOrder(seed=3, shuffle_packs=4)
        with closing(training_batches(stored, value_limits(stored, CONFIG), BATCH, order)) as read:
            for batch in islice(read, batches):
                found += rows([batch])
                most = max(most, sum(sizes.get(name, 0) for name in os.listdir(stored.path)))
        assert found == trained(local, batches)
        assert 0 < most <= room < table.bytes.sum()
        evaluated = rows(evaluation_batches(stored, value_limits(stored, CONFIG), BATCH))
        assert evaluated == rows(evaluation_batches(local, value_limits(local, CONFIG), BATCH))


def test_first_rows_need_their_own_bytes_only(case: PackingCase, s3: S3Server) -> None:
    """The packs that were read, and the index of a shard: 4 bytes a pack."""
    with faulty_proxy(s3.port) as proxy, stored_source(case, proxy.endpoint, BY_PARTS) as stored:
        files = stored.open_packs().files
        shard = int(np.argmax(stored.metadata.shard_table.packs))
        files.open(shard, files.prepare(shard))
        index = proxy.sent
        assert index == 4 * files.sizes[shard]
        last = int(files.sizes[shard]) - 1
        files.read(np.array([shard] * 3), np.array([0, last, 0]))
        assert proxy.sent - index == frame_bytes(case.packed, stored, shard, [0, last])
        files.prefetch(shard, 0, 1)
        stored.cache.fill(shard).result()
        whole = proxy.sent
        files.read(np.full(last + 1, shard), np.arange(last + 1))
        assert proxy.sent == whole


def frame_bytes(packed: Path, source, shard: int, records: list[int]) -> int:
    """The bytes of these records with their frames, by the index of the local folder."""
    group, _ = source.metadata.shard_table.group_and_number(shard)
    sizes = np.fromfile(index_path(packed, group), "<u4")
    first = source.metadata.shard_table.packs_before(shard)
    return int(sum(sizes[first + record] for record in records))


@pytest.mark.parametrize("index", [None, b"", b"1234"])
def test_a_bucket_without_a_right_index_is_read_whole(case: PackingCase, s3: S3Server, index: bytes | None) -> None:
    objects, url = Objects(quick(s3.endpoint)), "s3://bucket/unindexed"
    upload(case.packed, url, objects)
    for group in range(len(read_metadata(case.packed).groups)):
        name = f"{url}/{index_path(Path(), group)}"
        objects.remove(name) if index is None else objects.write(name, index)
    with stored_source(case, s3.endpoint, BY_PARTS, url=url) as stored:
        assert trained(stored, 20) == trained(open_source(case.packed), 20)


def test_a_shard_that_is_not_the_one_of_the_metadata_is_refused(case: PackingCase, s3: S3Server) -> None:
    objects, url = Objects(quick(s3.endpoint)), "s3://bucket/replaced"
    upload(case.packed, url, objects)
    table = read_metadata(case.packed).shard_table
    shard, other = (int(number) for number in np.flatnonzero(table.bytes)[:2])
    content = objects.read(f"{url}/{table.name(shard)}")
    with stored_source(case, s3.endpoint, BY_PARTS, url=url) as stored:
        files = stored.open_packs().files
        files.open(shard, files.prepare(shard))
        objects.write(f"{url}/{table.name(shard)}", content[::-1])
        with pytest.raises(InputError, match=rf"{table.name(shard)}: changed while it was read"):
            files.read(np.array([shard]), np.array([0]))
        files.prefetch(shard, 0, 1)
        with pytest.raises(InputError, match=rf"{table.name(shard)}: changed while it was read"):
            stored.cache.fill(shard).result()
        with pytest.raises(InputError, match=rf"{table.name(shard)}: changed while it was read"):
            files.read(np.array([shard]), np.array([0]))
        objects.write(f"{url}/{table.name(other)}", content + b"x")
        with pytest.raises(InputError, match=rf"{table.name(other)}: has .* bytes, but .* in the metadata"):
            files.prepare(other)


def table_of(packs: Iterable[int], sizes: Iterable[int]) -> ShardTable:
    return ShardTable.of_groups([GroupShards(packs=tuple(packs), bytes=tuple(sizes), manifest_crc32c=0)], "")


def test_a_shard_stays_while_it_is_read_and_then_until_its_room_is_needed(s3: S3Server, tmp_path: Path) -> None:
    table = table_of([1] * 4, [10] * 4)
    for number in range(3):
        (tmp_path / table.name(number)).write_bytes(b"0123456789")
    upload(tmp_path, "s3://bucket/held", Objects(quick(s3.endpoint)))
    with (
        mirrored(Path("s3://bucket/held"), quick(s3.endpoint)) as folder,
        closing(ShardCache(folder, table, 20, 1)) as cache,
    ):
        here = lambda: sorted(int(path.name[-1]) for path in folder.iterdir())  # noqa: E731
        for number in (0, 0, 1):
            cache.bring(number)
        cache.release(0)
        cache.release(1)
        assert here() == [0, 1]
        cache.bring(2)
        assert here() == [0, 2]
        cache.release(0)
        cache.release(2)
        cache.bring(1)
        assert here() == [1, 2]
        with pytest.raises(InputError, match="s3://bucket/held/packed-00000-00003: no such object"):
            cache.bring(3)


def test_a_shard_whose_room_is_needed_is_not_fetched_to_its_end(s3: S3Server, tmp_path: Path) -> None:
    """Nor is that an error; and it is fetched again when it is read again."""
    table = table_of([1, 1], [2000, 2000])
    for number in range(2):
        (tmp_path / table.name(number)).write_bytes(bytes([number]) * 2000)
    upload(tmp_path, "s3://bucket/stopped", Objects(quick(s3.endpoint)))
    with (
        mirrored(Path("s3://bucket/stopped"), quick(s3.endpoint)) as folder,
        closing(ShardCache(folder, table, 2000, 2, BY_PARTS)) as cache,
    ):
        cache.bring(0, complete=False)
        cache.fetch_parts([(0, 100, 300), (0, 1999, 2000)])
        assert (folder / table.name(0)).read_bytes() == bytes(2000)
        cache.release(0)
        filling = cache.fill(0)
        cache.bring(1)
        filling.result()
        assert [path.name for path in folder.iterdir()] == [table.name(1)]
        assert (folder / table.name(1)).read_bytes() == b"\1" * 2000
        assert cache.bytes_here(1) == 2000
        cache.release(1)
        cache.bring(0)
        assert [path.name for path in folder.iterdir()] == [table.name(0)]


def test_what_the_streams_need_must_fit(tmp_path: Path) -> None:
    """The largest shards: one of each stream, and as many of the next as a process reads at once."""
    table = table_of([7] * 100, range(50, 150))
    ShardCache(tmp_path, table, 9_000, 1).check_room(32, 1)  # 64 of at most 149 bytes
    cache = ShardCache(tmp_path, table, 7_519, 1)
    cache.check_room(32, 2)
    with pytest.raises(
        InputError,
        match=r"needs 7,520 bytes for the shards of 32 streams and the next 32, store.cache_bytes is 7,519; raise it",
    ):
        cache.check_room(32, 1)
