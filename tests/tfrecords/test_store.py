"""The data stages from and to a bucket: the bytes of a disk, whatever the server does, and refusals in one line."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gaudi_bert.artefacts.packed import Verification
from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.config.sections import PackingSettings
from gaudi_bert.tfrecords.histogram import histogram
from gaudi_bert.tfrecords.pack import pack
from gaudi_bert.tfrecords.verify import verify
from gaudi_bert.tfrecords.write import write
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
    objects = Objects(quick(s3.endpoint))
    upload(made.records, "s3://bucket/records", objects)
    objects.put(made.plan, "s3://bucket/plan.json")
    return made


@pytest.fixture(scope="module")
def proxy(s3: S3Server) -> Iterator[FaultyProxy]:
    with faulty_proxy(s3.port) as made:
        yield made


def _packed_and_verified(records: str | Path, packed: Path, store: StoreSettings | None = None) -> StageOutput[Verification]:
    pack(records, packed, PACKING, a_run(store=store))
    return verify(records, packed, a_run(store=store))


def test_packing_through_a_bad_server(case: PackingCase, s3: S3Server, proxy: FaultyProxy, tmp_path: Path) -> None:
    wanted = _packed_and_verified(case.records, tmp_path / "packed")
    proxy.share = 0.15
    verified = _packed_and_verified("s3://bucket/records", Path("s3://bucket/bad/packed"), store=quick(proxy.endpoint))
    proxy.share = 0.0
    assert verified == wanted
    objects = Objects(quick(s3.endpoint))
    assert contents("s3://bucket/bad/packed", objects) == local_contents(tmp_path / "packed")
    assert contents("s3://bucket/bad/packed-plan", objects) == local_contents(tmp_path / "packed-plan")
    assert sum(proxy.happened.values()) > 20


def test_parts_by_many_machines_and_one_that_finishes(case: PackingCase, s3: S3Server, tmp_path: Path) -> None:
    store, plan, out = quick(s3.endpoint), Path("s3://bucket/plan.json"), Path("s3://bucket/parts")
    with pytest.raises(FailedError, match="s3://bucket/parts: 4 of 4 groups are not written"):
        write("s3://bucket/records", plan, out, a_run(store=store, finish=True))
    for part in (2, 0, 1, 2):
        write("s3://bucket/records", plan, out, a_run(store=store, part=(part, 3)))
    write("s3://bucket/records", plan, out, a_run(store=store, finish=True))
    with pytest.raises(FailedError, match="s3://bucket/parts: not every part is verified"):
        verify("s3://bucket/records", out, a_run(store=store, finish=True))
    for part, records in ((2, "s3://bucket/records"), (0, case.records), (1, "s3://bucket/records")):
        verify(records, out, a_run(store=store, part=(part, 3)))
    verify("s3://bucket/records", out, a_run(store=store, finish=True))
    here = Path(shutil.copytree(case.packed, tmp_path / "here"))
    verify(case.records, here, a_run())
    assert contents("s3://bucket/parts", Objects(store)) == local_contents(here)


def test_compressed_files_and_one_side_on_the_disk(s3: S3Server, tmp_path: Path) -> None:
    case, objects = make_case(tmp_path, files=3, sequences_per_file=17, compress=gzip.compress), Objects(quick(s3.endpoint))
    upload(case.records, "s3://bucket/gzip", objects)
    write("s3://bucket/gzip/part-*", case.plan, tmp_path / "here", a_run(store=objects.settings))
    assert local_contents(tmp_path / "here") == local_contents(case.packed)
    write(case.records, case.plan, Path("s3://bucket/there.v2"), a_run(store=objects.settings))
    assert contents("s3://bucket/there.v2", objects) == local_contents(case.packed)


def test_a_shard_that_is_missing_or_damaged_is_found(case: PackingCase, s3: S3Server) -> None:
    objects, url = Objects(quick(s3.endpoint)), "s3://bucket/damaged"
    upload(case.packed, url, objects)
    shard = f"{url}/packed-00001-00002.tfrecord"
    whole = objects.read(shard)
    objects.write(shard, bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(FailedError, match=f"^{shard}: "):
        verify("s3://bucket/records", Path(url), a_run(store=objects.settings))
    objects.remove(shard)
    with pytest.raises(FailedError, match=f"^{shard}: the shard is missing"):
        verify("s3://bucket/records", Path(url), a_run(store=objects.settings))


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ("s3://no-such-bucket/records", "s3://no-such-bucket/records: no record files there, or no such bucket"),
        ("s3://bucket/nothing", "s3://bucket/nothing: no record files there, or no such bucket"),
        ("s3://bucket/plan.json", "s3://bucket/plan.json: "),
    ],
)
def test_records_that_are_not_there(case: PackingCase, s3: S3Server, tmp_path: Path, records: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        histogram(records, tmp_path / "histogram.json", a_run(store=quick(s3.endpoint)))
    assert str(caught.value).startswith(message)


def test_from_the_command_line(case: PackingCase, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    done = run_command("pack", "s3://bucket/records", "--out", "s3://bucket/command", "--verify")
    assert done.returncode == 0, done.stderr
    assert "verified: every one of 280 sequences" in done.stdout
    refused = run_command("pack", "s3://no-such-bucket/records", "--out", "s3://bucket/command", "--verify")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    for printed in (done.stdout, done.stderr, refused.stderr):
        assert "secret-of-the-tests" not in printed
