"""What packs a folder holds, on a disk and in a bucket: records, a table, one that was begun and not finished, none."""

from __future__ import annotations

from pathlib import Path

import pytest

from gaudi_bert.artefacts.base import NOTES_NAME
from gaudi_bert.artefacts.pack_kinds import files_that_tell_kinds, pack_kind
from gaudi_bert.artefacts.store.mirrored_folder import fetch, mirrored
from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.common.errors import InputError
from tests.builders.packing_case import make_case
from tests.builders.s3_server import S3Server, quick, upload


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_case(tmp_path_factory.mktemp("kinds"), files=2, sequences_per_file=7).packed


def kind_in_bucket(folder: Path, s3: S3Server) -> str | None:
    settings, url = quick(s3.endpoint), f"s3://bucket/kinds/{folder.parent.name}"
    upload(folder, url, Objects(settings))
    with mirrored(url, settings) as copy:
        fetch(*files_that_tell_kinds(copy))
        return pack_kind(copy)


def test_packed_records(packed: Path, s3: S3Server) -> None:
    assert pack_kind(packed) == "records"
    assert kind_in_bucket(packed, s3) == "records"


def test_a_packed_table(packed: Path, tmp_path: Path, s3: S3Server) -> None:
    notes = tmp_path / "table" / NOTES_NAME
    notes.mkdir(parents=True)
    (notes / "metadata.json").write_bytes((packed / "metadata.json").read_bytes())
    assert pack_kind(notes.parent) == "table"
    assert kind_in_bucket(notes.parent, s3) == "table"


def test_packs_that_were_begun_and_not_finished_are_refused(packed: Path, tmp_path: Path, s3: S3Server) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    for path in packed.iterdir():
        if path.name != "metadata.json":
            (begun / path.name).write_bytes(path.read_bytes())
    for ask in (pack_kind, lambda folder: kind_in_bucket(folder, s3)):
        with pytest.raises(InputError, match="gaudi-bert write"):
            ask(begun)


def test_a_folder_without_packs(tmp_path: Path, s3: S3Server) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "some.txt").write_text("some text\n")
    assert pack_kind(tmp_path / "other") is None
    assert kind_in_bucket(tmp_path / "other", s3) is None
