"""The overlays: what kustomize builds of them is what the runner submits."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gaudi_bert import __version__
from gaudi_bert.config.pipeline import PipelineSettings, load_pipeline, pipeline_from_mapping
from gaudi_bert.runners.kubernetes.manifests import _MANIFESTS, render
from gaudi_bert.runners.kubernetes.pods import pod_specs
from tests.k8s.manifest_checks import VERSIONS, amount, check_manifests, check_pod, check_schema, containers

Json = dict[str, Any]

KINDS = ("ServiceAccount", "ConfigMap", "PersistentVolumeClaim")
SHARED = ["kubernetes.access_mode=ReadWriteMany"]
MPIJOB = ["resources.workers=2", *SHARED]
DL1 = ["kubernetes.efa=4", "resources.training={cpu: '95', memory: 690Gi}", "resources.hugepages_2Mi=42000Mi"]
# Each overlay and what it sets beyond its pipeline file.
OVERLAYS: dict[str, list[str]] = {
    "cpu": [],
    "cpu/data": SHARED,
    "cpu/training-mpijob": MPIJOB,
    "cpu/training-nodes": [*MPIJOB, "training.engine=pytorch"],
    "finetuning": [],
    "object-store": [],
    "gaudi": [],
    "gaudi/data": SHARED,
    "gaudi/training": [],
    "gaudi/training-mpijob": MPIJOB,
    "gaudi/training-mpijob-efa": [*MPIJOB, *DL1],
    "gaudi-pytorch": [],
    "gaudi-pytorch/data": SHARED,
    "gaudi-pytorch/training": [],
    "gaudi-pytorch/training-nodes": MPIJOB,
}


def overlay_settings(repository: Path, overlay: str) -> PipelineSettings:
    device = overlay.partition("/")[0]
    pipeline = repository / "k8s" / "overlays" / device / "settings" / "pipeline.yaml"
    # Gaudi's last software with TensorFlow runs on Kubernetes 1.24 and 1.25, so the overlays are without.
    return load_pipeline(pipeline, [*OVERLAYS[overlay], "kubernetes.failure_policy=false"])


def without_digests(objects: list[Json]) -> list[Json]:
    """The objects, with the name of the ConfigMap as the runner has it."""
    text = re.sub(r'"demo-pipeline-[a-z0-9]{10}"', '"demo-pipeline"', json.dumps(objects))
    named: list[Json] = json.loads(text)
    return named


def test_every_overlay_is_known(repository: Path) -> None:
    folder = repository / "k8s" / "overlays"
    found = {str(path.parent.relative_to(folder)) for path in folder.rglob("kustomization.yaml")}
    assert {name for name in found if not name.endswith("settings")} == set(OVERLAYS)


@pytest.fixture(scope="module")
def built(repository: Path, kustomize: Callable[[Path], list[Json]]) -> dict[str, list[Json]]:
    """The objects of each overlay."""
    return {overlay: kustomize(repository / "k8s" / "overlays" / overlay) for overlay in OVERLAYS}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_what_the_runner_submits(overlay: str, repository: Path, built: dict[str, list[Json]]) -> None:
    """So it suits the schemas as what is rendered does; and nothing that it refers to is left out."""
    assert check_manifests(built[overlay]) == []
    manifests = render(overlay_settings(repository, overlay))
    rendered = [manifests.namespace, *manifests.shared.values(), *manifests.steps.values()]
    by_name = {(item["kind"], item["metadata"]["name"]): item for item in rendered}
    for item in without_digests(built[overlay]):
        ours = by_name[item["kind"], item["metadata"]["name"]]
        if item["kind"] == "ConfigMap":
            written = pipeline_from_mapping(yaml.safe_load(ours["data"]["pipeline.yaml"]), overlay)
            assert written == overlay_settings(repository, overlay)
            applied = yaml.safe_load(item["data"]["pipeline.yaml"])
            kept = {**applied, "kubernetes": {**applied.get("kubernetes", {}), "failure_policy": False}}
            assert pipeline_from_mapping(kept, overlay) == overlay_settings(repository, overlay.partition("/")[0])
            ours = {**ours, "data": item["data"]}
        assert item == ours


@pytest.mark.parametrize("overlay", ["cpu", "gaudi/training-mpijob"])
def test_after_an_edit_every_step_is_another(
    overlay: str, repository: Path, tmp_path: Path, kustomize: Callable[[Path], list[Json]]
) -> None:
    shutil.copytree(repository / "k8s", tmp_path / "k8s")
    before = steps_by_name(kustomize(tmp_path / "k8s" / "overlays" / overlay))
    for pipeline in (tmp_path / "k8s" / "overlays").rglob("pipeline.yaml"):
        pipeline.write_text(pipeline.read_text().replace("depth: 3", "depth: 5"))
    after = steps_by_name(kustomize(tmp_path / "k8s" / "overlays" / overlay))
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] == after[name]] == []


def steps_by_name(objects: list[Json]) -> dict[str, Json]:
    return {item["metadata"]["name"]: item for item in objects if item["kind"] in ("Job", "MPIJob")}


def test_the_gaudi_overlay_holds_no_card_while_data_are_packed(built: dict[str, list[Json]]) -> None:
    assert "habana.ai/gaudi" not in json.dumps(built["gaudi"])


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


def test_the_pytorch_overlays_train_in_its_image_with_what_the_vendor_requires(built: dict[str, list[Json]]) -> None:
    """As on the vendor's Kubernetes page: huge pages, SYS_NICE, the host's IPC; ranks are started without mpirun."""
    for overlay in ("gaudi-pytorch/training", "gaudi-pytorch/training-nodes"):
        (job,) = (item for item in built[overlay] if item["kind"] == "Job" and item["metadata"]["name"] == "demo-train")
        (spec,) = pod_specs(job)
        (container,) = spec["containers"]
        assert container["image"] == f"gaudi-bert-train-gaudi-pytorch:{__version__}"
        assert container["resources"]["limits"].items() >= {"habana.ai/gaudi": "8", "hugepages-2Mi": "95000Mi"}.items()
        assert container["securityContext"]["capabilities"] == {"add": ["SYS_NICE"]}
        assert spec["hostIPC"] is True
        environment = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert environment["PT_HPU_LAZY_MODE"] == "0"
        assert environment["PT_HPU_RECIPE_CACHE_CONFIG"].split(",")[0] == "/var/cache/gaudi-bert"
        assert "/var/cache/gaudi-bert" in {mount["mountPath"] for mount in container["volumeMounts"]}
        assert container["command"][:2] == ["gaudi-bert", "run"]
        assert environment.get("PET_NPROC_PER_NODE", "8") == "8"


def write_demo(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = repository / "scripts" / "write_k8s_demo.py"
    return subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, check=False)


def test_the_copies_of_the_demo_are_as_they_are_written(repository: Path) -> None:
    done = write_demo(repository, "--check")
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


def test_a_change_of_the_demo_reaches_all_its_copies(repository: Path, tmp_path: Path) -> None:
    shutil.copytree(repository / "pipelines", tmp_path / "pipelines")
    shutil.copytree(repository / "k8s", tmp_path / "k8s")
    demo = tmp_path / "pipelines" / "demo.yaml"
    demo.write_text(demo.read_text().replace("depth: 3", "depth: 5"))
    stale = write_demo(repository, "--check", str(tmp_path))
    assert stale.returncode == 1
    assert len(stale.stdout.splitlines()) == 5, "the finetuning overlay is of another file"
    assert write_demo(repository, str(tmp_path)).returncode == 0
    assert write_demo(repository, "--check", str(tmp_path)).returncode == 0
    written = load_pipeline(demo)
    for copy in ("overlays/cpu/settings", "overlays/gaudi/settings", "overlays/gaudi-pytorch/settings", "in-cluster"):
        settings = load_pipeline(tmp_path / "k8s" / copy / "pipeline.yaml")
        assert settings.packing.depth == 5
        for part in ("prepare", "packing", "model"):
            assert getattr(settings, part) == getattr(written, part)


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


def test_an_overlay_with_the_failure_policy(
    repository: Path, tmp_path: Path, kustomize: Callable[[Path], list[Json]]
) -> None:
    shutil.copytree(repository / "k8s", tmp_path / "k8s")
    file = tmp_path / "k8s" / "overlays" / "cpu" / "kustomization.yaml"
    file.write_text(file.read_text().replace("components:\n", "components:\n  - ../../components/failure-policy\n"))
    settings = load_pipeline(repository / "k8s/overlays/cpu/settings/pipeline.yaml", ["kubernetes.failure_policy=true"])
    steps = render(settings).steps
    jobs = [item for item in without_digests(kustomize(file.parent)) if item["kind"] == "Job"]
    assert len(jobs) == len(steps)
    for item in jobs:
        assert item == steps[item["metadata"]["labels"]["app.kubernetes.io/component"]]
        assert "podFailurePolicy" in item["spec"]


def test_the_manifests_of_the_package_are_those_of_the_repository(repository: Path) -> None:
    assert _MANIFESTS.resolve() == (repository / "k8s").resolve()


def test_every_manifest_is_plain_yaml_without_duplicate_keys(repository: Path) -> None:
    class Strict(yaml.SafeLoader):
        pass

    def mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> Json:
        keys = [loader.construct_object(key) for key, _ in node.value]
        assert len(set(keys)) == len(keys), f"{node.start_mark}: a key is there twice"
        return yaml.SafeLoader.construct_mapping(loader, node, deep=True)

    Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    for path in (repository / "k8s").rglob("*.yaml"):
        list(yaml.load_all(path.read_text(), Strict))
