"""The data stages from and to a bucket: the bytes of a disk, whatever the server does, and refusals in one line."""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from gaudi_bert.artefacts.mirrored_folder import mirror_folder
from gaudi_bert.artefacts.object_store import ObjectStore
from gaudi_bert.artefacts.packed import RecordMetadata, Verification
from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.artefacts.shards import GroupShards, ShardTable
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.config.sections import PackingSettings
from gaudi_bert.model.config import BertConfig
from gaudi_bert.tfrecords.random_access import ShardCache
from gaudi_bert.tfrecords.verify import verify_records
from gaudi_bert.tfrecords.write import pack_records, write_packed_records
from gaudi_bert.training.batches import TrainingOrder, read_evaluation_batches, read_training_batches
from gaudi_bert.training.sources import _make_packed_source, open_local_records
from tests.builders.command_line import run_command
from tests.builders.folders import contents as local_contents
from tests.builders.packing_case import PackingCase, make_case
from tests.builders.reporters import a_run
from tests.builders.s3_server import FaultyProxy, S3Server, contents, faulty_proxy, quick, upload

PACKING = PackingSettings(group_sequences=80, shard_multiple=4)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory, s3: S3Server) -> PackingCase:
    """A small data set on the disk, and the same records in the bucket."""
    made = make_case(tmp_path_factory.mktemp("case"), files=7, sequences_per_file=40)
    objects = ObjectStore(quick(s3.endpoint))
    upload(made.records, "s3://bucket/records", objects)
    objects.upload(made.plan, "s3://bucket/plan.json")
    return made


@pytest.fixture(scope="module")
def proxy(s3: S3Server) -> Iterator[FaultyProxy]:
    with faulty_proxy(s3.port) as made:
        yield made


def _packed_and_verified(records: str | Path, packed: Path, store: StoreSettings | None = None) -> StageOutput[Verification]:
    pack_records(records, packed, PACKING, a_run(store=store))
    return verify_records(records, packed, a_run(store=store))


def test_packing_through_a_bad_server(case: PackingCase, s3: S3Server, proxy: FaultyProxy, tmp_path: Path) -> None:
    wanted = _packed_and_verified(case.records, tmp_path / "packed")
    proxy.share = 0.15
    verified = _packed_and_verified("s3://bucket/records", Path("s3://bucket/bad/packed"), store=quick(proxy.endpoint))
    proxy.share = 0.0
    assert verified == wanted
    objects = ObjectStore(quick(s3.endpoint))
    assert contents("s3://bucket/bad/packed", objects) == local_contents(tmp_path / "packed")
    assert contents("s3://bucket/bad/packed-plan", objects) == local_contents(tmp_path / "packed-plan")
    assert sum(proxy.happened.values()) > 20


def test_parts_by_many_machines_and_one_that_finishes(case: PackingCase, s3: S3Server, tmp_path: Path) -> None:
    store, plan, out = quick(s3.endpoint), Path("s3://bucket/plan.json"), Path("s3://bucket/parts")
    with pytest.raises(FailedError, match="s3://bucket/parts: 4 of 4 groups"):
        write_packed_records("s3://bucket/records", plan, out, a_run(store=store, finish=True))
    for part in (2, 0, 1, 2):
        write_packed_records("s3://bucket/records", plan, out, a_run(store=store, part=(part, 3)))
    write_packed_records("s3://bucket/records", plan, out, a_run(store=store, finish=True))
    with pytest.raises(FailedError, match=r"s3://bucket/parts: .*not verified"):
        verify_records("s3://bucket/records", out, a_run(store=store, finish=True))
    for part, records in ((2, "s3://bucket/records"), (0, case.records), (1, "s3://bucket/records")):
        verify_records(records, out, a_run(store=store, part=(part, 3)))
    verify_records("s3://bucket/records", out, a_run(store=store, finish=True))
    here = Path(shutil.copytree(case.packed, tmp_path / "here"))
    verify_records(case.records, here, a_run())
    assert contents("s3://bucket/parts", ObjectStore(store)) == local_contents(here)


def test_compressed_files_and_one_side_on_the_disk(s3: S3Server, tmp_path: Path) -> None:
    case, objects = (
        make_case(tmp_path, files=3, sequences_per_file=17, compress=gzip.compress),
        ObjectStore(quick(s3.endpoint)),
    )
    upload(case.records, "s3://bucket/gzip", objects)
    write_packed_records("s3://bucket/gzip/part-*", case.plan, tmp_path / "here", a_run(store=objects.settings))
    assert local_contents(tmp_path / "here") == local_contents(case.packed)
    write_packed_records(case.records, case.plan, Path("s3://bucket/there.v2"), a_run(store=objects.settings))
    assert contents("s3://bucket/there.v2", objects) == local_contents(case.packed)


def test_from_the_command_line(case: PackingCase, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    done = run_command("pack", "s3://bucket/records", "--out", "s3://bucket/command", "--verify")
    assert done.returncode == 0, done.stderr
    assert "verified: each of 280 sequences" in done.stdout
    refused = run_command("pack", "s3://no-such-bucket/records", "--out", "s3://bucket/command", "--verify")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    for printed in (done.stdout, done.stderr, refused.stderr):
        assert "secret-of-the-tests" not in printed


# --- shards as they are read: the rows of a disk, whatever the server does, within a bound of local disk

CONFIG = BertConfig(
    vocab_size=30522,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=8,
    max_position_embeddings=29,
)
BATCH = 4


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory, s3: S3Server) -> PackingCase:
    """A small data set on the disk, and in the bucket."""
    made = make_case(tmp_path_factory.mktemp("case"), files=3, sequences_per_file=17)
    upload(made.packed, "s3://bucket/cached", ObjectStore(quick(s3.endpoint)))
    return made


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stream, and the next shards after 12 packs."""
    monkeypatch.setattr("gaudi_bert.tfrecords.random_access.choose_shard_stream_count", lambda _: 1)
    monkeypatch.setattr("gaudi_bert.reading.streams._FIRST_PACKS", 12)


@contextmanager
def stored_source(few: PackingCase, endpoint: str, room: int = 1 << 30, url: str = "s3://bucket/cached"):
    metadata, store = RecordMetadata.read(few.packed), quick(endpoint)
    with mirror_folder(Path(url), store) as folder:
        yield _make_packed_source(folder, metadata, ShardCache(folder, metadata.shard_table, room, 3))


def rows(batches) -> list[bytes]:
    return [ids.tobytes() for batch in batches for ids in batch["input_ids"]]


def test_a_bucket_is_read_through_the_shards_of_its_streams(few: PackingCase, s3: S3Server) -> None:
    """Equal to a local folder, over epochs, with room for four sets of one stream and the next shard."""
    metadata = RecordMetadata.read(few.packed)
    table, batches = metadata.shard_table, 3 * metadata.packs // BATCH
    sizes = {table.file_name(shard): int(table.bytes[shard]) for shard in range(len(table))}
    local, room = open_local_records(few.packed), int(np.sort(table.bytes)[-5:].sum())
    with stored_source(few, s3.endpoint, room) as stored:
        stored.cache.check_capacity_for_open_shards(1, 1, 4)
        most, order = 0, TrainingOrder(seed=3, shuffle_packs=4)
        read, expected = (read_training_batches(source, CONFIG, BATCH, order) for source in (stored, local))
        with closing(read), closing(expected):
            for batch, right in islice(zip(read, expected, strict=False), batches):
                assert rows([batch]) == rows([right])
                most = max(most, sum(sizes.get(name, 0) for name in os.listdir(stored.path)))
        assert 0 < most <= room < table.bytes.sum()
        evaluated = rows(read_evaluation_batches(stored, CONFIG, BATCH))
        assert evaluated == rows(read_evaluation_batches(local, CONFIG, BATCH))


def test_two_readers_of_a_shard_fetch_it_once(few: PackingCase, s3: S3Server) -> None:
    with faulty_proxy(s3.port) as proxy, stored_source(few, proxy.endpoint) as stored:
        shard = int(np.argmax(stored.metadata.shard_table.packs))
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(stored.cache.download, [shard] * 8))
        assert proxy.sent == stored.metadata.shard_table.bytes[shard]


def test_a_shard_that_is_not_the_one_of_the_metadata_is_refused(few: PackingCase, s3: S3Server) -> None:
    objects, url = ObjectStore(quick(s3.endpoint)), "s3://bucket/replaced"
    upload(few.packed, url, objects)
    table = RecordMetadata.read(few.packed).shard_table
    shard, other = (int(number) for number in np.flatnonzero(table.bytes)[:2])
    content = objects.read(f"{url}/{table.file_name(shard)}")
    with stored_source(few, s3.endpoint, room=1, url=url) as stored:
        stored.cache.download(shard)
        stored.cache.release(shard)
        objects.write(f"{url}/{table.file_name(other)}", content + b"x")
        with pytest.raises(InputError, match=table.file_name(other)):
            stored.cache.download(other)  # the first one makes room
        objects.write(f"{url}/{table.file_name(shard)}", content[::-1])
        with pytest.raises(InputError, match="changed while it was read"):
            stored.cache.download(shard)


def table_of(packs: Iterable[int], sizes: Iterable[int]) -> ShardTable:
    return ShardTable.from_groups([GroupShards(packs=tuple(packs), bytes=tuple(sizes), manifest_crc32c=0)], "")


def test_a_shard_stays_while_it_is_read_and_then_until_its_room_is_needed(s3: S3Server, tmp_path: Path) -> None:
    table = table_of([1] * 4, [10] * 4)
    for number in range(3):
        (tmp_path / table.file_name(number)).write_bytes(b"0123456789")
    upload(tmp_path, "s3://bucket/held", ObjectStore(quick(s3.endpoint)))
    with mirror_folder(Path("s3://bucket/held"), quick(s3.endpoint)) as folder:
        cache = ShardCache(folder, table, 20, 1)
        here = lambda: sorted(int(path.name[-1]) for path in folder.iterdir())  # noqa: E731
        for number in (0, 0, 1):
            cache.download(number)
        cache.release(0)
        cache.release(1)
        assert here() == [0, 1]
        cache.download(2)
        assert here() == [0, 2]
        cache.release(0)
        cache.release(2)
        cache.download(1)
        assert here() == [1, 2]
        with pytest.raises(InputError, match="s3://bucket/held/packed-00000-00003"):
            cache.download(3)


def test_what_the_streams_need_must_fit(tmp_path: Path) -> None:
    """The largest shards: one of each stream, and as many of the next as a process reads at once."""
    table = table_of([7] * 100, range(50, 150))
    ShardCache(tmp_path, table, 9_000, 1).check_capacity_for_open_shards(32, 1)  # 64 of at most 149 bytes
    cache = ShardCache(tmp_path, table, 7_519, 1)
    cache.check_capacity_for_open_shards(32, 2)
    with pytest.raises(InputError, match="7,520 bytes"):
        cache.check_capacity_for_open_shards(32, 1)
