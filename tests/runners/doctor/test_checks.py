"""`doctor --store URL`: what can be done in an object store, and what is missing."""

from __future__ import annotations

from typing import Any

import pytest

from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.pipeline import PipelineSettings, load_pipeline
from gaudi_bert.runners.doctor.checks import examine_store
from tests.builders.command_line import run_command
from tests.builders.s3_server import S3Server, quick


def stored(endpoint: str, **changes: Any) -> PipelineSettings:
    return load_pipeline(None).model_copy(update={"store": quick(endpoint, **changes)})


def test_a_place_that_is_ready_is_left_as_it_was(s3: S3Server) -> None:
    assert examine_store("s3://bucket/ready/", stored(s3.endpoint)).verdict == "ok"
    assert Objects(quick(s3.endpoint)).list("s3://bucket/ready") == {}


def test_what_is_missing_is_named(s3: S3Server) -> None:
    bucket = examine_store("s3://no-such-bucket/x", stored(s3.endpoint))
    assert bucket.verdict == "failed"
    assert "no-such-bucket" in bucket.found
    away = examine_store("s3://bucket/x", stored("http://127.0.0.1:9", timeout_seconds=1))
    assert away.verdict == "failed"
    with pytest.raises(InputError, match="bucket/x"):
        examine_store("bucket/x", stored(s3.endpoint))


def test_the_command_fails_where_a_check_does(s3: S3Server) -> None:
    command = ("doctor", "--set", f"store.endpoint_url={s3.endpoint}", "--store")
    assert run_command(*command, "s3://bucket/x").returncode == 0
    assert run_command(*command, "s3://no-such-bucket/x").returncode == 1
