"""What a pipeline file means in Docker's terms, without Docker."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from gaudi_bert import __version__
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import pipeline_from_mapping
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.runners.docker import run as run_module
from gaudi_bert.runners.docker.containers import (
    DockerRun,
    StoreAccess,
    _bind_mount,
    _input_mounts,
    _store_access,
    portable_settings,
    rendezvous_container,
    stage_containers,
)
from tests.runners.docker.test_run import FakeEngine

CARDS = {"cards": 8, "training": {"cpu": "95", "memory": "409Gi"}, "mpi_prefix": "/opt/amazon/openmpi"}


def docker_run(folder: Path, mapping: dict[str, Any] | None = None, flags: tuple[str, ...] = ()) -> DockerRun:
    settings = pipeline_from_mapping({"name": "tiny", **(mapping or {})}, "a test")
    return DockerRun(settings, folder / "work", folder / "pipelines" / "tiny.yaml", "1234:567", "0badcafe", flags)


def targets(container: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    return {mount["Target"]: (mount["Source"], mount["ReadOnly"]) for mount in container["mounts"]}


def test_a_data_stage_gets_its_image_its_folder_and_nothing_else(tmp_path: Path) -> None:
    (container,) = stage_containers(docker_run(tmp_path, {"resources": {"data_processes": 3}}), "write")
    work = str(tmp_path / "work" / "tiny")
    pipeline = str(tmp_path / "pipelines" / "tiny.yaml")
    confined = {"user": "1234:567", "read_only": True, "cap_drop": ["ALL"], "security_opt": ["no-new-privileges"]}
    limits = {"mem_limit": 2 * 2**30, "memswap_limit": 2 * 2**30, "cpu_shares": 81}
    assert {**confined, **limits, "image": f"gaudi-bert-data:{__version__}"}.items() <= container.items()
    assert targets(container) == {work: (work, False), pipeline: (f"{work}/.pipeline-in-docker.yaml", True)}
    assert container["labels"] == {"gaudi-bert.work": work, "gaudi-bert.run": "0badcafe", "gaudi-bert.stage": "write"}
    command = ["gaudi-bert", "run", pipeline, "--work", str(tmp_path / "work"), "--stages", "write"]
    assert container["entrypoint"] == [*command, "--workers", "3"]
    absent = {"runtime", "ipc_mode", "cap_add", "privileged", "ulimits", "network_mode", "nano_cpus", "network", "devices"}
    assert not absent & container.keys()
    assert "HABANA_VISIBLE_DEVICES" not in container["environment"]


def test_training_without_cards_gets_shared_memory_and_the_training_resources(tmp_path: Path) -> None:
    mapping = {
        "images": {"train": "own-train", "registry": "registry.example/team", "tag": "7"},
        "resources": {"training": {"cpu": "1500m", "memory": "1Gi"}, "shared_memory": "64Mi", "environment": {"A": "b"}},
        "docker": {"cpus": 0.5},
    }
    (container,) = stage_containers(docker_run(tmp_path, mapping, ("--overwrite",)), "train")
    limits = {"mem_limit": 2**30, "shm_size": 64 * 2**20, "cpu_shares": 1536, "nano_cpus": 500_000_000}
    assert {**limits, "image": "registry.example/team/own-train:7"}.items() <= container.items()
    assert container["environment"] == {"HOME": "/tmp", "A": "b"}
    assert container["entrypoint"][-2:] == ["train", "--overwrite"]
    assert "runtime" not in container


def test_cards_bring_the_runtime_the_hosts_ipc_and_mpirun_and_no_privilege(tmp_path: Path) -> None:
    named = {"training": {"engine": "tensorflow"}, "docker": {"visible_devices": "0,1"}}
    run = docker_run(tmp_path, {"resources": CARDS, **named})
    (container,), (without,) = stage_containers(run, "train"), stage_containers(run, "plan")
    assert without["user"] == "1234:567"
    assert not {"runtime", "ipc_mode", "cap_add"} & without.keys()
    as_the_vendor_asks = {"runtime": "habana", "user": "0:0", "ipc_mode": "host", "cap_add": ["SYS_NICE"]}
    assert {**as_the_vendor_asks, "nano_cpus": 95 * 10**9}.items() <= container.items()
    assert container["environment"]["HABANA_VISIBLE_DEVICES"] == "0,1"
    assert container["environment"]["OMPI_MCA_btl_vader_single_copy_mechanism"] == "none"
    caches = [container["environment"][name] for name in ("TF_RECIPE_CACHE_PATH", "PT_HPU_RECIPE_CACHE_CONFIG")]
    assert [cache.split(",")[0] for cache in caches] == ["/tmp/gaudi-bert-recipes"] * 2
    launcher = ["python3", "-m", "gaudi_bert.runners.stop_ranks", "/opt/amazon/openmpi/bin/mpirun"]
    assert container["entrypoint"][:4] == launcher
    assert container["entrypoint"][container["entrypoint"].index("-np") + 1] == "8"
    (by_itself,) = stage_containers(docker_run(tmp_path, {"resources": CARDS}), "train")
    assert by_itself["entrypoint"][:2] == ["gaudi-bert", "run"], "ranks of PyTorch need no mpirun"
    assert not {"privileged", "ulimits", "network_mode", "shm_size"} & container.keys()


def test_the_vendors_memory_lock_and_network_are_there_for_who_asks(tmp_path: Path) -> None:
    docker = {"unlimited_memory_lock": True, "host_network": True, "runtime": "other"}
    (container,) = stage_containers(docker_run(tmp_path, {"resources": CARDS, "docker": docker}), "evaluate")
    assert container["ulimits"] == [{"Name": "memlock", "Soft": -1, "Hard": -1}]
    assert container["network_mode"] == "host"
    assert container["runtime"] == "other"
    assert container["entrypoint"][0] == "gaudi-bert"


@pytest.mark.parametrize(("engine", "horovod"), [("pytorch", False), ("auto", True)])
def test_three_workers_are_three_containers_that_know_their_rank(engine: str, horovod: bool, tmp_path: Path) -> None:
    """Those of PyTorch meet at the first of them, those of Horovod at a further container."""
    run = docker_run(tmp_path, {"resources": {"workers": 3}, "training": {"engine": engine}})
    containers, rendezvous = stage_containers(run, "train"), rendezvous_container(run)
    assert len({container["name"] for container in containers}) == 3
    assert {container["network"] for container in containers} == {rendezvous["network"]}
    assert len(stage_containers(run, "evaluate")) == 1
    suffix = "-pytorch" if engine == "pytorch" else ""
    assert {container["image"] for container in containers} == {f"gaudi-bert-train-cpu{suffix}:{__version__}"}
    for rank, container in enumerate(containers):
        torch = {"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "29500"}
        assert {**torch, "MASTER_ADDR": containers[0]["name"]}.items() <= container["environment"].items()
        told = {"HOROVOD_RANK": str(rank), "HOROVOD_SIZE": "3", "HOROVOD_GLOO_RENDEZVOUS_ADDR": rendezvous["name"]}
        assert (told.items() <= container["environment"].items()) == ("HOROVOD_RANK" in container["environment"]) == horovod
    assert run.needs_rendezvous("train") == horovod


def test_several_workers_with_cards_are_for_a_cluster(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="use --on kubernetes"):
        stage_containers(docker_run(tmp_path, {"resources": {**CARDS, "workers": 2}}), "train")


def mounts_of(folder: Path, mapping: dict[str, Any], stage: str = "histogram") -> dict[str, str]:
    """What a stage sees, by where it sees it; the pipeline file lies in `folder`."""
    mounts = _input_mounts(pipeline_from_mapping(mapping, "a test"), stage, folder)
    assert all(mount["ReadOnly"] for mount in mounts)
    return {mount["Target"]: mount["Source"] for mount in mounts}


def test_what_the_pipeline_names_is_shown_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "pipelines" / "text").mkdir(parents=True)
    (tmp_path / "books" / "a").mkdir(parents=True)
    (tmp_path / "books" / "a" / "one.txt").write_text("x")
    (tmp_path / "vocab.txt").write_text("x")
    text = ["text", str(tmp_path / "books" / "*" / "*.txt"), "python-docs"]
    mounts = mounts_of(tmp_path / "pipelines", {"prepare": {"text": text, "vocab": "../vocab.txt"}}, "prepare")
    assert mounts.keys() == {str(tmp_path / name) for name in ("pipelines/text", "books", "vocab.txt")}


def test_a_linked_folder_is_shown_under_the_name_that_the_pipeline_uses(tmp_path: Path) -> None:
    (tmp_path / "far" / "records").mkdir(parents=True)
    (tmp_path / "records").symlink_to(tmp_path / "far" / "records")
    mounts = mounts_of(tmp_path, {"prepare": {"records": "records"}})
    assert mounts == {str(tmp_path / "records"): str(tmp_path / "far" / "records")}


def test_one_mount_serves_what_lies_inside_another(tmp_path: Path) -> None:
    (tmp_path / "data" / "evaluation").mkdir(parents=True)
    mounts = mounts_of(tmp_path, {"prepare": {"records": "data", "evaluation_records": "data/evaluation"}})
    assert list(mounts) == [str(tmp_path / "data")]


def test_a_missing_path_is_named_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"prepare\.records = .*nowhere: no such file or folder"):
        mounts_of(tmp_path, {"prepare": {"records": "nowhere"}})


def test_a_stage_sees_what_it_reads_only(tmp_path: Path) -> None:
    (tmp_path / "books").mkdir()
    (tmp_path / "earlier").mkdir()
    (tmp_path / "earlier" / "model.ckpt-7.index").write_text("x")
    mapping = {"prepare": {"text": "books"}, "training": {"init_checkpoint": str(tmp_path / "earlier" / "model.ckpt-7")}}
    seen = {stage: list(mounts_of(tmp_path, mapping, stage)) for stage in ("prepare", "plan", "train")}
    assert seen == {"prepare": [str(tmp_path / "books")], "plan": [], "train": [str(tmp_path / "earlier")]}


def test_the_vocabulary_beside_records_comes_with_them(tmp_path: Path) -> None:
    (tmp_path / "examples" / "train").mkdir(parents=True)
    (tmp_path / "examples" / "vocab.txt").write_text("x")
    mounts = mounts_of(tmp_path, {"prepare": {"records": "examples/train"}})
    assert list(mounts) == [str(tmp_path / "examples" / name) for name in ("train", "vocab.txt")]


@pytest.mark.parametrize("place", ["/", "/usr/share/books", "/opt", "/etc", "/tmp"])
def test_nothing_of_the_host_hides_the_images_own_files(place: str) -> None:
    with pytest.raises(InputError, match=r"prepare\.text = "):
        _bind_mount(Path(place), "prepare.text")


def test_the_stages_of_tasks_train_and_see_their_rows_and_weights(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "new.jsonl", "bert/model.safetensors", "bert/config.json", "names.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    weights = str(tmp_path / "bert" / "model.safetensors")
    mapping = {
        "task": {"name": "classification", "labels": "../names.txt"},
        "finetune": {"data": "../rows.jsonl", "evaluation_data": "python-docstrings", "init_checkpoint": weights},
        "predict": {"data": "../new.jsonl"},
        "resources": {"workers": 3},
    }
    (tmp_path / "pipelines").mkdir()
    run = docker_run(tmp_path, mapping)
    containers = stage_containers(run, "finetune")
    assert len(containers) == 3
    assert [container["name"] for container in containers] == [run.name(f"finetune-{rank}") for rank in range(3)]
    assert {container["image"] for container in containers} == {f"gaudi-bert-train-cpu:{__version__}"}
    seen = {target for target, (_, read_only) in targets(containers[0]).items() if read_only}
    assert seen == {str(tmp_path / name) for name in ("rows.jsonl", "names.txt", "bert", "pipelines/tiny.yaml")}
    (container,) = stage_containers(run, "predict")
    assert str(tmp_path / "new.jsonl") in targets(container)
    assert "--workers" not in container["entrypoint"]


# What containers get for object stores: log-ins and certificates, a network, scratch on the disk; and nothing without.

SECRETS = {"AWS_ACCESS_KEY_ID": "name", "AWS_SECRET_ACCESS_KEY": "the-secret", "GOOGLE_API_KEY": "other", "EDITOR": "vi"}
FAR = "https://minio.example:9000"


def made(folder: Path, mapping: dict[str, Any], work: str, **environment: str) -> DockerRun:
    settings = pipeline_from_mapping({"name": "tiny", **mapping}, "a test")
    scratch = folder / "scratch"
    (scratch / "files").mkdir(parents=True, exist_ok=True)
    caller = {**SECRETS, "HOME": str(folder / "home"), **environment}
    return DockerRun(settings, Path(work), folder / "tiny.yaml", "12:34", "0badcafe", scratch=scratch, environment=caller)


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
    access = _store_access(["s3://bucket/x"], store, tmp_path / "scratch", caller)
    shown = {mount["Target"]: mount["Source"] for mount in access.mounts if mount["ReadOnly"]}
    assert shown[access.environment["AWS_WEB_IDENTITY_TOKEN_FILE"]] == str(tmp_path / "token")
    assert shown[access.environment["AWS_CA_BUNDLE"]] == str(tmp_path / "ca.pem")
    assert shown["/tmp/.aws"] == str(tmp_path / "home" / ".aws")
    assert len(shown) == len(access.mounts) - 1
    with pytest.raises(InputError, match=r"store.ca_file = /nowhere/ca.pem: no such file; check the path"):
        _store_access(["s3://bucket/x"], StoreSettings(ca_file="/nowhere/ca.pem"), tmp_path, {})


def test_other_stores_get_their_own_variables(tmp_path: Path) -> None:
    caller = {**SECRETS, "AZURE_STORAGE_ACCOUNT_KEY": "key", "FSSPEC_GS_PROJECT": "mine", "https_proxy": "http://proxy:3128"}
    kept = {
        scheme: sorted(_store_access([f"{scheme}://bucket/x"], StoreSettings(), tmp_path, caller).environment)
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
    monkeypatch.setattr(run_module, "Daemon", lambda: engine)
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    scratch = tmp_path / "scratch"
    engine.on_start = lambda part: seen.extend(path.read_text() for path in scratch.rglob("*") if path.is_file())
    said = io.StringIO()
    settings = pipeline_from_mapping(
        {"name": "tiny", "store": {"endpoint_url": FAR, "scratch": str(scratch)}, "resources": {"workers": 2}}, "a test"
    )
    work = Path("s3://bucket/work")
    run_module.run_on_docker(settings, ["plan", "write"], tmp_path / "tiny.yaml", work, Reporter(said))
    assert [container["labels"]["gaudi-bert.work"] for container in engine.created] == ["s3://bucket/work/tiny"] * 2
    assert len(seen) == 2
    assert "endpoint_url" in seen[0]
    assert "the-secret" not in "".join(seen) + said.getvalue()
    assert [path for path in tmp_path.rglob("*") if path != scratch] == []
