"""Tables from and to a bucket: the bytes of a folder, however the work is shared out or cut short."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyarrow", exc_type=ImportError)

from gaudi_bert.artefacts.references import NOTES_NAME
from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.config.sections import TableSettings
from gaudi_bert.tables.pack import pack_table
from gaudi_bert.tables.sources import is_table
from gaudi_bert.tables.verify import verify_table
from tests.builders import tables
from tests.builders.faulty_proxy import faulty_proxy
from tests.builders.folders import contents as local_contents
from tests.builders.reporters import QUIET
from tests.builders.s3_server import S3Server, contents, quick, upload

SETTINGS = TableSettings(max_sequence_length=61, shard_multiple=2, group_sequences=31)
SOURCE = "s3://bucket/tables/rows"


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, s3: S3Server) -> Path:
    """A folder with a table of three files, its packs, and the same table in the bucket."""
    folder = tmp_path_factory.mktemp("tables")
    (folder / "rows").mkdir()
    for number, (ending, write) in enumerate(
        (("parquet", tables.write_parquet), ("arrow", tables.write_file), ("jsonl", tables.write_lines))
    ):
        write(folder / "rows" / f"part-{number}.{ending}", tables.random_rows(41, 61, seed=number))
    upload(folder / "rows", SOURCE, Objects(quick(s3.endpoint)))
    pack_table(folder / "rows", folder / "packed", SETTINGS, reporter=QUIET, verified=True)
    return folder


def test_from_and_to_a_bucket_through_a_bad_server(local: Path, s3: S3Server, tmp_path: Path) -> None:
    out = Path("s3://bucket/tables/packed.v2")
    with faulty_proxy(s3.port, seed=3) as proxy:
        proxy.share = 0.1
        store = quick(proxy.endpoint, scratch=str(tmp_path))
        result = pack_table(SOURCE, out, SETTINGS, reporter=QUIET, verified=True, store=store)
        assert sum(proxy.happened.values()) > 3
        assert result.verified is not None
        assert result.verified.content.sequences == 123
        assert contents(f"{SOURCE[:-5]}/packed.v2", Objects(quick(s3.endpoint))) == local_contents(local / "packed")
        assert pack_table(SOURCE, out, SETTINGS, reporter=QUIET, store=store).written.skipped
    assert list(tmp_path.iterdir()) == [], "scratch is left"


def test_what_a_killed_run_left_is_gone_on_from(local: Path, s3: S3Server) -> None:
    objects = Objects(quick(s3.endpoint))
    lacking = [*(f"{NOTES_NAME}/{name}.json" for name in ("metadata", "verification", "group-00002"))]
    for name, content in local_contents(local / "packed").items():
        if name not in lacking:
            objects.write(f"s3://bucket/tables/killed/{name}", content)
    with faulty_proxy(s3.port) as counting:
        store = quick(counting.endpoint)
        pack_table(SOURCE, Path("s3://bucket/tables/killed"), SETTINGS, reporter=QUIET, store=store)
        shards = len([name for name in local_contents(local / "packed") if name.startswith("packed-00002-")])
        assert counting.requests["PUT"] == shards + 3, "settings aside, only the group without manifest is written"
    expected = {name: content for name, content in local_contents(local / "packed").items() if "verification" not in name}
    created = contents("s3://bucket/tables/killed", objects)
    assert {name: content for name, content in created.items() if "verification" not in name} == expected


def test_a_row_at_fault_leaves_nothing_and_names_the_object(s3: S3Server, tmp_path: Path) -> None:
    objects = Objects(quick(s3.endpoint))
    objects.write("s3://bucket/tables/bad.jsonl", b'{"input_ids": [1, 2]}\n{"input_ids": "no"}\n')
    out = Path("s3://bucket/tables/never")
    with pytest.raises(InputError, match=r"^s3://bucket/tables/bad.jsonl: "):
        pack_table("s3://bucket/tables/bad.jsonl", out, SETTINGS, reporter=QUIET, store=objects.settings)
    assert contents("s3://bucket/tables/never", objects) == {}
    with pytest.raises(InputError, match=r"s3://bucket/tables/none.parquet: no objects there, or no such bucket"):
        pack_table("s3://bucket/tables/none.parquet", out, SETTINGS, reporter=QUIET, store=objects.settings)


def test_damage_is_found(local: Path, s3: S3Server) -> None:
    objects, url = Objects(quick(s3.endpoint)), "s3://bucket/tables/damaged"
    upload(local / "packed", url, objects)
    name = "packed-00001-00000.parquet"
    whole = objects.read(f"{url}/{name}")
    objects.write(f"{url}/{name}", whole[:-5] + b"X" + whole[-4:])
    with pytest.raises(FailedError, match=f"{url}/{name}: its CRC-32C differs from the manifest"):
        verify_table(SOURCE, Path(url), reporter=QUIET, store=objects.settings)
    objects.remove(f"{url}/{name}")
    with pytest.raises(FailedError, match=f"{url}/{name}: the shard is missing"):
        verify_table(SOURCE, Path(url), reporter=QUIET, store=objects.settings)


def test_a_folder_of_tables_is_known_by_what_is_in_it(local: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    Objects().write("s3://bucket/tables/records/part-0", b"x")
    assert is_table(SOURCE)
    assert is_table("s3://bucket/tables/none.parquet")
    assert not is_table("s3://bucket/tables/records")
