"""A cluster without a volume: what the pods get of a bucket, and that their commands make there what a disk would have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.kubernetes.jobs import pod_specs
from gaudi_bert.runners.kubernetes.kustomize import Manifest
from gaudi_bert.runners.kubernetes.manifests import render
from tests.builders.command_line import run_command
from tests.builders.s3_server import S3Server, contents, quick
from tests.k8s.test_commands import TEXT

STORE = ["kubernetes.store=s3://bucket/prefix", "kubernetes.store_secret=mine"]
STEPS = ("prepare", "histogram", "plan", "write", "write-finish", "verify")
LOCAL_STAGES = ("prepare", "histogram", "plan", "write", "verify")


@pytest.mark.parametrize("workers", [1, 3])
def test_no_pod_has_a_volume_for_the_work_folder(workers: int) -> None:
    manifests = render(load_pipeline(None, [*STORE, f"resources.workers={workers}"]))
    assert [item["kind"] for item in manifests.shared if item["kind"] == "PersistentVolumeClaim"] == []
    for item in manifests.steps.values():
        for spec in pod_specs(item):
            assert "work" not in {volume["name"] for volume in spec["volumes"]}
            for container in (*spec.get("initContainers", ()), *spec["containers"]):
                assert "work" not in {mount["name"] for mount in container.get("volumeMounts", ())}
                command = container["command"]
                if "--work" in command:
                    assert command[command.index("--work") + 1] == "s3://bucket/prefix"
                    assert container["envFrom"] == [{"secretRef": {"name": "mine"}}]
                else:
                    assert container["name"] == "worker"


def test_ranks_on_other_pods_get_the_credentials_by_name() -> None:
    manifests = render(load_pipeline(None, [*STORE, "resources.workers=3"]))
    launcher, _ = pod_specs(manifests.steps["train"])
    command = launcher["containers"][0]["command"]
    assert [command[n + 1] for n, word in enumerate(command) if word == "-x" and command[n + 1].endswith("*")] == [
        *("AWS_*", "AZURE_*", "GOOGLE_*")
    ]


def test_shards_that_training_keeps_fit_the_scratch() -> None:
    text = ["kubernetes.scratch=6Gi", "store.connections=2"]
    manifests = render(load_pipeline(None, [*STORE, *text]))
    (configuration,) = (item for item in manifests.shared if item["kind"] == "ConfigMap")
    written = yaml.safe_load(configuration["data"]["pipeline.yaml"])
    assert written["store"] == {"connections": 2, "cache_bytes": 3 * 2**30}


def test_data_in_a_bucket_needs_no_claim() -> None:
    render(load_pipeline(None, ["prepare.text=s3://bucket/text", "prepare.vocab=gs://bucket/vocab.txt"]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["kubernetes.store=s3://bucket", "kubernetes.work_claim=ours"], "store and work_claim exclude each other"),
        (["kubernetes.store_secret=mine"], "store_secret needs a store"),
        (["kubernetes.store=bucket/prefix"], "kubernetes.store"),
        (["kubernetes.store=s3://key:secret@bucket/prefix"], "kubernetes.store"),
        (["store.endpoint_url=https://key:secret@host"], "store.endpoint_url"),
    ],
)
def test_what_does_not_fit_is_refused(given: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_pipeline(None, given)


def run_container(command: list[str], pipeline: Path) -> None:
    """A container of pod 0, with the pipeline file where it is."""
    words = [str(word).replace("$(JOB_COMPLETION_INDEX)", "0") for word in command[1:]]
    words = [str(pipeline) if word == "/etc/gaudi-bert/pipeline.yaml" else word for word in words]
    environment = {**os.environ, "NUMBA_NUM_THREADS": "1"}
    done = run_command(*words, environment=environment)
    assert done.returncode == 0, done.stderr


def containers_of(item: Manifest) -> list[list[str]]:
    """The commands of a step; only one that waits for parts is run before it, the steps being in order here."""
    spec = next(pod_specs(item))
    waits = [one["command"] for one in spec["initContainers"] if "write-finish" in one["command"]]
    return [*waits, spec["containers"][0]["command"]]


@pytest.mark.slow
def test_the_commands_of_the_pods_make_in_the_bucket_what_a_disk_would_have(s3: S3Server, tmp_path: Path) -> None:
    objects = Objects(quick(s3.endpoint))
    objects.write("s3://bucket/corpus/text.txt", TEXT.encode())
    (tmp_path / "text.txt").write_text(TEXT)
    pipeline = {
        "name": "tiny",
        "prepare": {"text": "s3://bucket/corpus/text.txt", "train_vocab": 200, "duplicates": 2, "shards": 3},
        "packing": {"shard_multiple": 4, "group_sequences": 200},
        "kubernetes": {"store": "s3://bucket/prefix"},
        "store": {"endpoint_url": s3.endpoint},
    }
    (tmp_path / "pipeline.yaml").write_text(yaml.safe_dump(pipeline))
    steps = render(load_pipeline(tmp_path / "pipeline.yaml")).steps
    for step in STEPS:
        for command in containers_of(steps[step]):
            run_container(command, tmp_path / "pipeline.yaml")
    local = ["run", tmp_path / "pipeline.yaml", "--work", tmp_path / "work", "--stages", ",".join(LOCAL_STAGES)]
    assert run_command(*local, "--set", f"prepare.text={tmp_path / 'text.txt'}").returncode == 0
    made, folder = contents("s3://bucket/prefix/tiny", objects), tmp_path / "work" / "tiny"
    wanted = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    # Pods count parts of the histogram; and hidden files are locks.
    parts = {name for name in made | wanted if name.startswith(("histogram", ".")) or "/." in name}
    assert {name: made[name] for name in made if name not in parts} == {
        name: wanted[name] for name in wanted if name not in parts
    }
