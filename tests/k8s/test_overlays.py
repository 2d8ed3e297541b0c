"""The overlays: kustomize and our own builder make them, schemas and our checks accept them, and the runner submits them."""

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
from gaudi_bert.runners.kubernetes import manifests as module
from gaudi_bert.runners.kubernetes.manifests import _MANIFESTS, _build, render
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
def test_an_overlay_passes_the_schemas_and_our_own_checks(overlay: str, built: dict[str, list[Json]]) -> None:
    pytest.importorskip("kubernetes_validate")
    for version in VERSIONS:
        assert [problem for item in built[overlay] for problem in check_schema(item, version)] == []
    assert check_manifests(built[overlay]) == []


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_what_the_runner_submits(overlay: str, repository: Path, built: dict[str, list[Json]]) -> None:
    manifests = render(overlay_settings(repository, overlay))
    rendered = [manifests.namespace, *manifests.shared, *manifests.steps.values()]
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


@pytest.mark.parametrize("overlay", [overlay for overlay in OVERLAYS if "mpijob" in overlay or "nodes" in overlay])
def test_training_on_several_nodes_has_the_claim_of_its_data(overlay: str, built: dict[str, list[Json]]) -> None:
    """A claim cannot be changed: kubectl refuses another mode when the data are done."""
    modes = {
        each: [item["spec"]["accessModes"] for item in built[each] if item["kind"] == "PersistentVolumeClaim"]
        for each in (overlay, f"{overlay.partition('/')[0]}/data")
    }
    assert list(modes.values()) == [[["ReadWriteMany"]]] * 2


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


def test_the_overlays_have_the_images_of_this_version(built: dict[str, list[Json]]) -> None:
    for objects in built.values():
        images = set(re.findall(r'"image": "([^"]+)"', json.dumps(objects)))
        assert images
        names = ("data", "train-cpu", "train-cpu-pytorch", "train-gaudi", "train-gaudi-pytorch")
        assert images <= {f"gaudi-bert-{name}:{__version__}" for name in names}


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


# --- our own small builder of kustomizations


def write(folder: Path, name: str, content: object) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "_MANIFESTS", tmp_path)
    for name in ("one", "two"):
        write(tmp_path, f"base/{name}.yaml", {"kind": "Job", "metadata": {"name": name}, "spec": {"list": ["a", "b"]}})
    write(tmp_path, "base/kustomization.yaml", {"resources": ["one.yaml", "two.yaml"]})
    return tmp_path


def patched(folder: Path, target: dict[str, str], *operations: dict[str, object]) -> list[dict[str, object]]:
    write(folder, "change/patch.yaml", list(operations))
    write(folder, "change/kustomization.yaml", {"patches": [{"path": "patch.yaml", "target": target}]})
    return [item["spec"] for item in _build(["base"], ["change"])]


def test_the_manifests_of_the_package_are_those_of_the_repository(repository: Path) -> None:
    assert _MANIFESTS.resolve() == (repository / "k8s").resolve()


def test_resources_come_in_the_order_in_which_they_are_listed(folder: Path) -> None:
    write(folder, "all/kustomization.yaml", {"resources": ["../base", "three.yaml"]})
    write(folder, "all/three.yaml", {"kind": "Job", "metadata": {"name": "three"}})
    assert [item["metadata"]["name"] for item in _build(["all"])] == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("operation", "result"),
    [
        ({"op": "add", "path": "/spec/new", "value": 1}, {"list": ["a", "b"], "new": 1}),
        ({"op": "add", "path": "/spec/list/-", "value": "c"}, {"list": ["a", "b", "c"]}),
        ({"op": "add", "path": "/spec/list/0", "value": "c"}, {"list": ["c", "a", "b"]}),
        ({"op": "replace", "path": "/spec/list/1", "value": "c"}, {"list": ["a", "c"]}),
        ({"op": "replace", "path": "/spec/list", "value": []}, {"list": []}),
        ({"op": "remove", "path": "/spec/list/0"}, {"list": ["b"]}),
        ({"op": "remove", "path": "/spec/list"}, {}),
    ],
)
def test_each_operation_does_what_the_standard_says(folder: Path, operation: dict[str, object], result: object) -> None:
    assert patched(folder, {"kind": "Job"}, operation) == [result, result]


@pytest.mark.parametrize(
    ("target", "changed"),
    [
        ({"kind": "Job"}, [True, True]),
        ({"kind": "Job", "name": "two"}, [False, True]),
        ({"kind": "Job", "name": "one|two"}, [True, True]),
        ({"kind": "Job", "name": "on"}, [False, False]),
        ({"kind": "MPIJob"}, [False, False]),
    ],
)
def test_a_patch_changes_only_what_it_is_for(folder: Path, target: dict[str, str], changed: list[bool]) -> None:
    specs = patched(folder, target, {"op": "add", "path": "/spec/new", "value": 1})
    assert ["new" in spec for spec in specs] == changed


def test_values_are_not_shared_between_objects(folder: Path) -> None:
    one, two = patched(folder, {"kind": "Job"}, {"op": "add", "path": "/spec/new", "value": {"deep": [1]}})
    one["new"]["deep"].append(2)  # type: ignore[index]
    assert two["new"] == {"deep": [1]}
