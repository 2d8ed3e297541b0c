"""What containers get for object stores: log-ins and certificates, a network, scratch on the disk; and nothing without."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import StoreSettings, pipeline_from_mapping
from gaudi_bert.runners.docker import run as docker_run
from gaudi_bert.runners.docker.containers import DockerRun, stage_containers
from gaudi_bert.runners.docker.store_access import StoreAccess, portable_settings, store_access
from tests.runners.docker.test_run import FakeEngine

SECRETS = {"AWS_ACCESS_KEY_ID": "name", "AWS_SECRET_ACCESS_KEY": "the-secret", "GOOGLE_API_KEY": "other", "EDITOR": "vi"}
FAR = "https://minio.example:9000"


def made(folder: Path, mapping: dict[str, Any], work: str, **environment: str) -> DockerRun:
    settings = pipeline_from_mapping({"name": "tiny", **mapping}, "a test")
    scratch = folder / "scratch"
    (scratch / "files").mkdir(parents=True, exist_ok=True)
    caller = {**SECRETS, "HOME": str(folder / "home"), **environment}
    return DockerRun(settings, Path(work), folder / "tiny.yaml", "12:34", "0badcafe", scratch=scratch, environment=caller)


def targets(container: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    return {mount["Target"]: (mount["Source"], mount["ReadOnly"]) for mount in container["mounts"]}


def test_work_in_a_bucket_brings_the_stores_variables_and_scratch_and_no_work_folder(tmp_path: Path) -> None:
    run = made(tmp_path, {"store": {"endpoint_url": FAR}}, "s3://bucket/work")
    (container,) = stage_containers(run, "write")
    files = str(tmp_path / "scratch" / "files")
    assert container["environment"] == {
        "HOME": "/tmp",
        "AWS_ACCESS_KEY_ID": "name",
        "AWS_SECRET_ACCESS_KEY": "the-secret",
        "TMPDIR": files,
    }
    settings_file = str(tmp_path / "scratch" / "pipeline.yaml")
    assert targets(container) == {files: (files, False), str(tmp_path / "tiny.yaml"): (settings_file, True)}
    command = container["entrypoint"]
    assert command[command.index("--work") + 1] == "s3://bucket/work"
    assert container["labels"]["gaudi-bert.work"] == "s3://bucket/work/tiny"
    assert "network_mode" not in container
    assert container["read_only"] is True
    assert "the-secret" not in repr(run) + repr(run.access("write")) + repr(command)


def test_a_stage_that_reads_no_store_gets_nothing_of_it(tmp_path: Path) -> None:
    run = made(tmp_path, {"prepare": {"text": "s3://bucket/text"}}, str(tmp_path / "work"))
    (prepare,), (plan,) = stage_containers(run, "prepare"), stage_containers(run, "plan")
    assert prepare["environment"]["AWS_SECRET_ACCESS_KEY"] == "the-secret"
    assert str(tmp_path / "work" / "tiny") in targets(prepare)
    assert run.access("plan") == StoreAccess()
    assert plan["environment"] == {"HOME": "/tmp"}


def test_files_that_variables_name_are_shown_and_named_where_they_are_inside(tmp_path: Path) -> None:
    for name in ("home/.aws/config", "token", "ca.pem", "other.pem"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    caller = {
        "HOME": str(tmp_path / "home"),
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"),
        "AWS_CA_BUNDLE": str(tmp_path / "other.pem"),
    }
    store = StoreSettings(endpoint_url=FAR, ca_file=str(tmp_path / "ca.pem"))
    access = store_access(["s3://bucket/x"], store, tmp_path / "scratch", caller)
    shown = {mount["Target"]: mount["Source"] for mount in access.mounts if mount["ReadOnly"]}
    assert shown[access.environment["AWS_WEB_IDENTITY_TOKEN_FILE"]] == str(tmp_path / "token")
    assert shown[access.environment["AWS_CA_BUNDLE"]] == str(tmp_path / "ca.pem")
    assert shown["/tmp/.aws"] == str(tmp_path / "home" / ".aws")
    assert len(shown) == len(access.mounts) - 1
    with pytest.raises(InputError, match=r"store.ca_file = /nowhere/ca.pem: no such file; check the path"):
        store_access(["s3://bucket/x"], StoreSettings(ca_file="/nowhere/ca.pem"), tmp_path, {})


def test_other_stores_get_their_own_variables(tmp_path: Path) -> None:
    caller = {**SECRETS, "AZURE_STORAGE_ACCOUNT_KEY": "key", "FSSPEC_GS_PROJECT": "mine", "https_proxy": "http://proxy:3128"}
    kept = {
        scheme: sorted(store_access([f"{scheme}://bucket/x"], StoreSettings(), tmp_path, caller).environment)
        for scheme in ("gs", "az", "memory")
    }
    common = ["FSSPEC_GS_PROJECT", "TMPDIR", "https_proxy"]
    assert kept == {
        "gs": sorted([*common, "GOOGLE_API_KEY"]),
        "az": sorted([*common, "AZURE_STORAGE_ACCOUNT_KEY"]),
        "memory": common,
    }


@pytest.mark.parametrize("url", ["http://127.0.0.1:9000", "https://localhost:9000", "http://[::1]:9000"])
def test_a_server_on_loopback_is_reached_through_the_hosts_network(tmp_path: Path, url: str) -> None:
    for mapping, variables in (({"store": {"endpoint_url": url}}, {}), ({}, {"AWS_ENDPOINT_URL": url})):
        (container,) = stage_containers(made(tmp_path, mapping, "s3://bucket/work", **variables), "train")
        assert container["network_mode"] == "host"
    several = made(tmp_path, {"store": {"endpoint_url": url}, "resources": {"workers": 2}}, "s3://bucket/work")
    assert "network_mode" in stage_containers(several, "write")[0]
    with pytest.raises(InputError, match=r"2 training containers have a network of their own.*set resources.workers to 1"):
        stage_containers(several, "train")


def test_this_machines_places_are_left_out_of_the_settings(tmp_path: Path) -> None:
    store = {"endpoint_url": FAR, "scratch": str(tmp_path), "ca_file": str(tmp_path / "ca.pem"), "attempts": 3}
    settings = portable_settings(pipeline_from_mapping({"store": store}, "a test"))
    assert settings.store.model_dump(exclude_unset=True) == {"endpoint_url": FAR, "attempts": 3}
    unchanged = pipeline_from_mapping({}, "a test")
    assert portable_settings(unchanged) is unchanged


def test_a_run_in_a_bucket_leaves_nothing_here_and_shows_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seen = FakeEngine(), []
    monkeypatch.setattr(docker_run, "Engine", lambda: engine)
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    scratch = tmp_path / "scratch"
    engine.on_start = lambda part: seen.extend(path.read_text() for path in scratch.rglob("*") if path.is_file())
    said = io.StringIO()
    settings = pipeline_from_mapping(
        {"name": "tiny", "store": {"endpoint_url": FAR, "scratch": str(scratch)}, "resources": {"workers": 2}}, "a test"
    )
    work = Path("s3://bucket/work")
    docker_run.run_on_docker(settings, ["plan", "write"], tmp_path / "tiny.yaml", work, Reporter(said))
    assert [container["labels"]["gaudi-bert.work"] for container in engine.created] == ["s3://bucket/work/tiny"] * 2
    assert len(seen) == 2
    assert "endpoint_url" in seen[0]
    assert "the-secret" not in "".join(seen) + said.getvalue()
    assert [path for path in tmp_path.rglob("*") if path != scratch] == []
