"""Objects: whole or not at all, through a server and a network that do wrong; what stays wrong is said in one line."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from gaudi_bert.artefacts.object_store import PART_BYTES, ObjectStore
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import format_location, get_store_url, is_in_store, resolve_location
from gaudi_bert.config.places import StoreSettings
from tests.builders.s3_server import FAULTS, S3Server, faulty_proxy, quick


def test_places_in_a_store_are_paths_too() -> None:
    work = Path("s3://bucket/work")
    assert is_in_store(work)
    assert format_location(work / "demo" / "plan.json") == "s3://bucket/work/demo/plan.json"
    assert get_store_url("gs://bucket/a/") == "gs://bucket/a"
    assert resolve_location(Path("/pipelines"), "s3://bucket/text") == Path("s3://bucket/text")
    assert resolve_location(Path("/pipelines"), "text") == Path("/pipelines/text")
    assert not any(is_in_store(place) for place in ("work", "/work", "./s3:/x", "c:", "s3:", "s3://"))
    # Credentials in a URL are refused, and not repeated.
    with pytest.raises(InputError, match="credentials") as caught:
        get_store_url("s3://key:secret@bucket/x")
    assert "secret" not in str(caught.value)


def test_objects_survive_a_bad_server(s3: S3Server, tmp_path: Path) -> None:
    with faulty_proxy(s3.port, seed=3) as proxy:
        objects, content = ObjectStore(quick(proxy.endpoint)), bytes(range(256)) * 1001
        (tmp_path / "file").write_bytes(content)
        proxy.share = 0.3
        for number in range(13):
            url = f"s3://bucket/objects/{number}"
            objects.upload(tmp_path / "file", url)
            objects.download(url, tmp_path / "copy")
            assert (tmp_path / "copy").read_bytes() == content
            assert objects.read(url) == content
        assert list(objects.list("s3://bucket/objects")) == sorted(str(number) for number in range(13))
        objects.remove("s3://bucket/objects/7")
        assert objects.info("s3://bucket/objects/7") is None
        assert set(proxy.happened) == set(FAULTS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "file"]


def test_large_objects_go_up_in_parts_and_come_back(s3: S3Server, tmp_path: Path) -> None:
    objects, content = ObjectStore(quick(s3.endpoint)), bytes(range(251)) * (5 * PART_BYTES // 2 // 251)
    (tmp_path / "large").write_bytes(content)
    objects.upload(tmp_path / "large", "s3://bucket/large")
    objects.download("s3://bucket/large", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == content


def test_an_object_that_changes_while_it_is_read_is_refused(s3: S3Server, tmp_path: Path) -> None:
    """Half of the one comes, then the connection is lost, and the other half is asked for."""
    direct, url = ObjectStore(quick(s3.endpoint)), "s3://bucket/changing"
    direct.write(url, b"one" * 100)
    with faulty_proxy(s3.port) as proxy:

        def replace(path: str) -> None:
            proxy.share = 0.0
            direct.write(url, b"another" * 100)

        proxy.faults, proxy.share, proxy.after_get = ("truncated",), 1.0, replace
        with pytest.raises(
            InputError, match=r"changing: the object changed while it was read \(300 bytes before, 700 bytes now\)"
        ):
            ObjectStore(quick(proxy.endpoint)).download(url, tmp_path / "copy")
    known = direct.info(url)
    direct.write(url, b"third" * 100)
    with pytest.raises(InputError, match=r"changing: the object changed .* \(700 bytes before, 500 bytes now\)"):
        direct.download(url, tmp_path / "copy", known)
    direct.remove(url)
    with pytest.raises(InputError, match="changing: the object was removed while it was read"):
        direct.download(url, tmp_path / "copy", known)
    assert list(tmp_path.iterdir()) == []


def test_what_is_empty_or_not_there(s3: S3Server, tmp_path: Path) -> None:
    objects = ObjectStore(quick(s3.endpoint))
    assert objects.info("s3://bucket/none") is None
    assert objects.list("s3://bucket/none") == objects.list("s3://no-such-bucket/none") == {}
    with pytest.raises(InputError, match="s3://no-such-bucket/x: the object or its bucket does not exist"):
        objects.download("s3://no-such-bucket/x", tmp_path / "copy")
    with pytest.raises(InputError, match="s3://no-such-bucket/x: cannot upload: the bucket does not exist"):
        objects.write("s3://no-such-bucket/x", b"x")
    objects.write("s3://bucket/empty", b"")
    objects.download("s3://bucket/empty", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b""


def test_a_server_that_is_away_is_asked_again_with_growing_pauses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    pauses: list[float] = []
    pausing = {"attempts": 5, "first_pause_seconds": 0.5, "longest_pause_seconds": 3, "timeout_seconds": 1}
    settings = StoreSettings(endpoint_url="http://127.0.0.1:9", **pausing)
    with pytest.raises(FailedError, match=r"s3://bucket/x: cannot .*127.0.0.1:9.* after 5 attempts; .*endpoint_url"):
        ObjectStore(settings, sleep=pauses.append).info("s3://bucket/x")
    assert pauses == [0.5, 1, 2, 3]
    # One line in some seconds, and on a slow machine more lines.
    line = r"s3://bucket/x: cannot read the state of: .*; attempt [2-5] of 5 follows in [\d.]+ s\n"
    assert re.fullmatch(f"({line})+", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("gs://bucket/x", r"gs://: no library for such URLs is installed; run .*\[gcs\]"),
        ("xyz://bucket/x", "xyz://: .*; use s3://, gs://, az://"),
        # The library of hdfs:// raises an error of many lines if there is no Java.
        ("hdfs://host/x", "hdfs://: .*; install the missing library, or copy the data"),
    ],
)
def test_a_missing_library_is_one_line(monkeypatch: pytest.MonkeyPatch, url: str, message: str) -> None:
    monkeypatch.setenv("ARROW_LIBHDFS_DIR", "/nonexistent")
    with pytest.raises(InputError, match=rf"\A{message}[^\n]*\Z"):
        ObjectStore().info(url)


def test_missing_credentials_are_said_at_once(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    with pytest.raises(FailedError, match="no credentials were found"):
        ObjectStore(quick(s3.endpoint, timeout_seconds=7), sleep=pytest.fail).write("s3://bucket/x", b"x")


def test_a_full_disk_is_said_at_once(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = ObjectStore(quick(s3.endpoint), sleep=pytest.fail)
    objects.write("s3://bucket/full", b"x")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(FailedError, match=r"No space left on device; free disk space, .*scratch"):
        objects.download("s3://bucket/full", tmp_path / "copy")
