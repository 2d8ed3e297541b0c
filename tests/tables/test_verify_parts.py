"""A packed table that is verified in parts: the same proof, and nothing less gets through."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("pyarrow", exc_type=ImportError)

from gaudi_bert.artefacts.references import NOTES_NAME
from gaudi_bert.artefacts.results import GroupsResult
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.config.sections import TableSettings
from gaudi_bert.tables.pack import pack_table
from gaudi_bert.tables.verify import verify_table
from gaudi_bert.tables.verify_parts import finish_table, verify_table_shard
from tests.builders import tables
from tests.builders.folders import contents
from tests.builders.reporters import QUIET

GROUPS = 4


@pytest.fixture(scope="module", params=[False, True], ids=["tokens", "index"])
def whole(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A table in four groups, packed and verified by one process."""
    folder = tmp_path_factory.mktemp("whole")
    tables.write_parquet(folder / "rows.parquet", tables.random_rows(200, 30, seed=1), row_group_size=10)
    sizes = {"max_sequence_length": 24, "group_sequences": 60, "shard_multiple": 2, "index_only": request.param}
    pack_table(folder / "rows.parquet", folder / "packed", TableSettings(too_long="split", **sizes), reporter=QUIET)
    shutil.copytree(folder / "packed", folder / "plain")
    verify_table(folder / "rows.parquet", folder / "plain", reporter=QUIET)
    assert len(list((folder / "packed" / NOTES_NAME).glob("group-*.json"))) == GROUPS
    return folder


@pytest.fixture
def packed(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole / "packed", tmp_path / "packed"))


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_parts_in_any_order_give_the_proof_of_one_process(whole: Path, packed: Path, parts: int) -> None:
    rows = whole / "rows.parquet"
    for number in [*range(1, parts), 0]:
        with pytest.raises(FailedError, match="groups are not verified: group 0 has no proof"):
            finish_table(rows, packed, reporter=QUIET)
        done = verify_table_shard(rows, packed, (number, parts), reporter=QUIET)
        assert isinstance(done, GroupsResult)
        assert done.groups == len(range(number, GROUPS, parts))
    assert verify_table_shard(rows, packed, (0, parts), reporter=QUIET).groups_written == 0
    finish_table(rows, packed, reporter=QUIET)
    assert contents(packed) == contents(whole / "plain")
    assert verify_table(rows, packed, reporter=QUIET).skipped


def test_damage_is_found_by_its_part_and_a_later_change_by_the_last_step(whole: Path, packed: Path) -> None:
    rows = whole / "rows.parquet"
    shard = sorted(packed.glob("packed-00002-*"))[0]
    data = shard.read_bytes()
    shard.write_bytes(data[:4] + bytes([data[4] ^ 1]) + data[5:])
    verify_table_shard(rows, packed, (0, 4), reporter=QUIET)
    with pytest.raises(FailedError, match=shard.name):
        verify_table_shard(rows, packed, (2, 4), reporter=QUIET)
    shard.write_bytes(data)
    for number in range(4):
        verify_table_shard(rows, packed, (number, 4), reporter=QUIET)
    shard.write_bytes(data)
    with pytest.raises(FailedError, match=r"1 of 4 groups are not verified: verification-00002.json is of files that have"):
        finish_table(rows, packed, reporter=QUIET)
    verify_table_shard(rows, packed, (0, 1), reporter=QUIET)
    finish_table(rows, packed, reporter=QUIET)


def test_a_row_that_is_lost_in_one_part_and_doubled_in_another(whole: Path, packed: Path) -> None:
    """The shards of two groups are exchanged: every row is there once, but not where its group has it."""
    one, other = (sorted(packed.glob(f"packed-0000{group}-*"))[0] for group in (0, 1))
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    for number in range(2):
        with pytest.raises(FailedError, match=r"packed-0000\d"):
            verify_table_shard(whole / "rows.parquet", packed, (number, 2), reporter=QUIET)
    with pytest.raises(FailedError, match=r"packed-0000|2 of 4 groups"):
        finish_table(whole / "rows.parquet", packed, reporter=QUIET)


def test_a_table_in_a_store_is_verified_at_once(whole: Path) -> None:
    with pytest.raises(InputError, match=r"s3://bucket/packed: parts of a table are not verified in a store, .* at once"):
        verify_table_shard(whole / "rows.parquet", Path("s3://bucket/packed"), (0, 2), reporter=QUIET)
