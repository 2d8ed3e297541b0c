"""What `k8s/` holds: overlays as they are rendered, which kubectl builds, and the run inside the cluster."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.k8s.manifest_checks import VERSIONS, amount, check_manifests, check_pod, check_schema, containers

Json = dict[str, Any]

KINDS = ("ServiceAccount", "ConfigMap", "PersistentVolumeClaim")
OVERLAYS = (
    *("cpu", "cpu-nodes", "cpu-mpijob", "finetuning", "object-store", "gaudi", "gaudi-mpijob", "gaudi-mpijob-efa"),
    *("gaudi-pytorch", "gaudi-pytorch-nodes"),
)


def write_demo(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = repository / "scripts" / "write_k8s_demo.py"
    return subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, check=False)


def test_the_overlays_are_as_they_are_rendered(repository: Path) -> None:
    done = write_demo(repository, "--check")
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    for overlay in OVERLAYS:
        for path in (repository / "k8s" / "overlays" / overlay).rglob("*.yaml"):
            by = "make k8s" if path.parent.name == "serving" else "gaudi-bert run --render"
            assert path.read_text().startswith(f"# Rendered by `{by}`")


@pytest.fixture(scope="module")
def built(repository: Path, kustomize: Callable[[Path], list[Json]]) -> dict[str, list[Json]]:
    """The objects of each overlay, and those of training alone."""
    folders = [*OVERLAYS, *(f"{overlay}/training" for overlay in OVERLAYS)]
    return {folder: kustomize(repository / "k8s" / "overlays" / folder) for folder in folders}


def test_every_overlay_can_be_applied(built: dict[str, list[Json]]) -> None:
    """Nothing that it refers to is left out; `test_manifests.py` holds what is rendered to the schemas."""
    for overlay, objects in built.items():
        assert (overlay, check_manifests(objects)) == (overlay, [])


def test_all_pods_of_the_cpu_overlay_fit_a_node_of_two_cores(built: dict[str, list[Json]]) -> None:
    """They all start at once and wait, so what they ask for adds up."""
    cores = memory = 0.0
    for item in built["cpu"]:
        if item["kind"] == "Job":
            pods = item["spec"].get("parallelism", 1)
            asked = [container["resources"]["requests"] for container in containers(item["spec"]["template"]["spec"])]
            cores += pods * max(amount(one["cpu"]) for one in asked)
            memory += pods * max(amount(one["memory"]) for one in asked)
    assert round(cores, 6) <= 1.5
    assert memory <= 6 * 2**30


def test_the_run_inside_the_cluster_is_sound_and_has_few_rights(
    repository: Path, kustomize: Callable[[Path], list[Json]]
) -> None:
    pytest.importorskip("kubernetes_validate")
    objects = kustomize(repository / "k8s" / "in-cluster")
    for version in VERSIONS:
        assert [problem for item in objects for problem in check_schema(item, version)] == []
    assert {item["kind"] for item in objects} == {"ServiceAccount", "Role", "RoleBinding", "ConfigMap", "Job"}
    job = next(item for item in objects if item["kind"] == "Job")
    references = {kind: {item["metadata"]["name"] for item in objects if item["kind"] == kind} for kind in KINDS}
    problems = list(check_pod("runner", job["spec"]["template"]["spec"], references))
    assert problems == ["runner: mounts a token that it does not need"], "this pod alone needs its token"
    role = next(item for item in objects if item["kind"] == "Role")
    assert not any("*" in text for rule in role["rules"] for text in (*rule["resources"], *rule["verbs"]))
    assert not any("secrets" in rule["resources"] for rule in role["rules"])


@pytest.mark.parametrize("overlay", ["cpu", "gaudi-pytorch"])
def test_a_model_is_served_with_probes_a_budget_and_a_policy(
    repository: Path, kustomize: Callable[[Path], list[Json]], overlay: str
) -> None:
    pytest.importorskip("kubernetes_validate")
    objects = {item["kind"]: item for item in kustomize(repository / "k8s" / "overlays" / overlay / "serving")}
    for version in VERSIONS:
        assert [problem for item in objects.values() for problem in check_schema(item, version)] == []
    kinds = {"ServiceAccount", "Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", "HorizontalPodAutoscaler"}
    assert set(objects) == kinds - ({"HorizontalPodAutoscaler"} if overlay == "gaudi-pytorch" else set())
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert objects["Service"]["spec"]["selector"].items() <= labels.items()
    spec = objects["Deployment"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}
    options = container["command"]
    assert options[:4] == ["gaudi-bert", "serve", "--model", "/work/demo/finetune"], "what the overlay finetuning makes"
    (volume,) = (each["persistentVolumeClaim"] for each in spec["volumes"] if each["name"] == "work")
    assert volume["claimName"] == "demo-work"
    (together,) = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert together["labelSelector"]["matchLabels"].items() <= labels.items(), "one node alone mounts a ReadWriteOnce claim"
    assert together["topologyKey"] == "kubernetes.io/hostname"
    rolling = objects["Deployment"]["spec"]["strategy"]["rollingUpdate"]
    assert rolling == {"maxUnavailable": 0, "maxSurge": 1}, "no replica ends before its successor answers"
    assert options[options.index("--port") + 1] == str(container["ports"][0]["containerPort"])
    assert spec["terminationGracePeriodSeconds"] > 25 + 5, "the grace period of serve, and that of new connections"
    assert spec["automountServiceAccountToken"] is False
    assert {mount["name"]: mount.get("readOnly") for mount in container["volumeMounts"]}["work"] is True
