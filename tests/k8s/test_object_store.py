"""A cluster without a volume: what the pods get of a bucket; `test_commands.py` runs their commands."""

from __future__ import annotations

import pytest
import yaml

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.kubernetes.manifests import pod_specs, render

STORE = ["kubernetes.store=s3://bucket/prefix", "kubernetes.store_secret=mine"]


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
        (["kubernetes.store=s3://bucket", "kubernetes.work_claim=ours"], "kubernetes.work_claim exclude each other"),
        (["kubernetes.store_secret=mine"], "store_secret needs a store"),
        (["kubernetes.store=bucket/prefix"], "kubernetes.store"),
        (["kubernetes.store=s3://key:secret@bucket/prefix"], "kubernetes.store"),
        (["store.endpoint_url=https://key:secret@host"], "store.endpoint_url"),
    ],
)
def test_what_does_not_fit_is_refused(given: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_pipeline(None, given)
