"""`gaudi-bert doctor --store URL`: what can be done there, and what is missing."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.pipeline import PipelineSettings, load_pipeline
from gaudi_bert.runners.doctor.checks import examine_store
from tests.builders.s3_server import S3Server, quick


def stored(endpoint: str, **changes: Any) -> PipelineSettings:
    return load_pipeline(None).model_copy(update={"store": quick(endpoint, **changes)})


def test_a_place_that_is_ready_is_left_as_it_was(s3: S3Server) -> None:
    found = examine_store("s3://bucket/ready/", stored(s3.endpoint))
    assert str(found) == "ok       store: s3://bucket/ready: write, read, list and remove"
    assert Objects(quick(s3.endpoint)).list("s3://bucket/ready") == {}


def test_what_is_missing_is_named(s3: S3Server) -> None:
    bucket = examine_store("s3://no-such-bucket/x", stored(s3.endpoint))
    assert (bucket.verdict, bucket.remedy) == ("failed", "create it, or check the URL")
    assert "no such bucket" in bucket.found
    away = examine_store("s3://bucket/x", stored("http://127.0.0.1:9", timeout_seconds=1))
    assert away.verdict == "failed"
    assert "(3 attempts)" in away.found
    with pytest.raises(InputError, match="is not an object-store URL"):
        examine_store("bucket/x", stored(s3.endpoint))


def test_from_the_command_line(s3: S3Server) -> None:
    command = [sys.executable, "-m", "gaudi_bert", "doctor", "--set", f"store.endpoint_url={s3.endpoint}", "--store"]
    ready = subprocess.run([*command, "s3://bucket/x"], capture_output=True, text=True, check=False)
    assert (ready.returncode, ready.stderr) == (0, "")
    missing = subprocess.run([*command, "s3://no-such-bucket/x"], capture_output=True, text=True, check=False)
    assert missing.returncode == 1
    assert "create it, or check the URL" in missing.stdout
