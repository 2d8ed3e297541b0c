"""Packed folders: which format of packs a folder contains, on a disk and in a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest

from gaudi_bert.artefacts.completion import Signature
from gaudi_bert.artefacts.mirrored_folder import download_missing_files, mirror_folder
from gaudi_bert.artefacts.object_store import ObjectStore
from gaudi_bert.artefacts.packed import detect_pack_format, list_format_detection_files
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import write_json
from tests.builders.s3_server import S3Server, quick, upload


def kind_in_bucket(folder: Path, s3: S3Server) -> str | None:
    settings, url = quick(s3.endpoint), f"s3://bucket/kinds/{folder.parent.name}"
    upload(folder, url, ObjectStore(settings))
    with mirror_folder(url, settings) as copy:
        download_missing_files(*list_format_detection_files(copy))
        return detect_pack_format(copy)


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (["metadata.json"], "records"),
        (["__gaudi_bert__/metadata.json"], "table"),
        (["metadata.json", "__gaudi_bert__/metadata.json"], "table"),
        (["packed-00000.parquet", "other.json"], None),
        (["examples.tfrecord", "settings.json"], None),  # the user's own settings
        ([], None),
    ],
)
def test_what_packs_a_folder_holds_is_decided_by_its_metadata(
    tmp_path: Path, s3: S3Server, files: list[str], kind: str | None
) -> None:
    for name in files:
        write_json(tmp_path / "folder" / name, {})
    assert detect_pack_format(tmp_path / "folder") == kind
    assert kind_in_bucket(tmp_path / "folder", s3) == kind


@pytest.mark.parametrize(("settings", "stage"), [("settings.json", "write"), ("__gaudi_bert__/settings.json", "pack-table")])
def test_packs_that_were_begun_and_not_finished_are_refused(tmp_path: Path, s3: S3Server, settings: str, stage: str) -> None:
    write_json(tmp_path / "folder" / settings, Signature(stage, {}, {}).as_json())
    for ask in (detect_pack_format, lambda folder: kind_in_bucket(folder, s3)):
        with pytest.raises(InputError, match="packing has not finished"):
            ask(tmp_path / "folder")
