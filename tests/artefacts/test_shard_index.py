"""The sizes of a group's records: where a shard's records begin, or nothing where they do not tell it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gaudi_bert.artefacts.shards import index_path, read_starts, write_index
from gaudi_bert.common.crc32c import crc32c


@pytest.fixture
def index(tmp_path: Path) -> Path:
    path = index_path(tmp_path, 7)
    crc = write_index(path, [np.array([20, 30], np.uint32), np.array([], np.uint32), np.array([40, 50, 60], np.uint32)])
    assert crc == crc32c(path.read_bytes())
    return path


def test_the_records_of_a_shard_begin_where_its_sizes_say(index: Path) -> None:
    assert index.name == "group-00007.index"
    assert read_starts(index, 0, 2, 50).tolist() == [0, 20, 50]
    assert read_starts(index, 2, 0, 0).tolist() == [0]
    assert read_starts(index, 2, 3, 150).tolist() == [0, 40, 90, 150]


def test_what_does_not_belong_to_the_shard_is_not_believed(index: Path) -> None:
    assert read_starts(index, 0, 2, 51) is None  # other bytes
    assert read_starts(index, 3, 3, 150) is None  # too few sizes
    assert read_starts(index.with_name("group-00008.index"), 0, 2, 50) is None
