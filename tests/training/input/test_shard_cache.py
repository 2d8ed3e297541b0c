"""Shards from a bucket within a bound of local disk: what is read is what lies there, whatever had to go meanwhile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.common.errors import InputError
from gaudi_bert.records.packed_folder import read_metadata
from gaudi_bert.records.read.random_access import RecordFiles
from gaudi_bert.records.schema import PackedSchema
from gaudi_bert.training.input.shard_cache import ShardCache
from tests.builders.packing_case import make_case
from tests.builders.s3_server import S3Server, quick, upload


def test_records_in_any_order_within_the_bound(s3: S3Server, tmp_path: Path) -> None:
    case = make_case(tmp_path / "case", files=3, sequences_per_file=17)
    metadata = read_metadata(case.packed)
    sizes = {shard.name: shard.bytes for shard in metadata.shards}
    objects = Objects(quick(s3.endpoint, cache_bytes=2 * max(sizes.values())))
    upload(case.packed, "s3://bucket/cached", objects)
    cache = ShardCache(objects, "s3://bucket/cached", tmp_path / "copies", sizes)
    names, schema = list(sizes), PackedSchema.of(metadata)
    local = RecordFiles([case.packed / name for name in names], schema)
    stored = RecordFiles(
        [cache.folder / name for name in names], schema, [shard.packs for shard in metadata.shards], cache.bring
    )
    rng = np.random.default_rng(5)
    for _ in range(23):
        files = rng.choice(np.flatnonzero([shard.packs > 0 for shard in metadata.shards]), 2).astype(np.int64)
        records = np.array([rng.integers(metadata.shards[file].packs) for file in files], np.int64)
        found, wanted = stored.read(files, records), local.read(files, records)
        assert all((found[name] == wanted[name]).all() for name in wanted)
        assert sum(path.stat().st_size for path in cache.folder.iterdir()) <= objects.settings.cache_bytes


def test_what_an_epoch_needs_must_fit(s3: S3Server, tmp_path: Path) -> None:
    cache = ShardCache(
        Objects(quick(s3.endpoint, cache_bytes=100)), "s3://bucket/x", tmp_path, {f"{n}": 50 for n in range(4)}
    )
    cache.check_room(2)
    for processes in (1, 3):
        with pytest.raises(
            InputError, match=r"a process reads 200 bytes of shards an epoch, store.cache_bytes is 100; raise it"
        ):
            cache.check_room(processes)
