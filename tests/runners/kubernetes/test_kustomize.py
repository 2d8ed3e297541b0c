"""The small builder of our own kustomizations. That it equals kustomize is tested on every overlay in tests/k8s."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from gaudi_bert.runners.kubernetes import kustomize
from gaudi_bert.runners.kubernetes.kustomize import MANIFESTS, build


def write(folder: Path, name: str, content: object) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kustomize, "MANIFESTS", tmp_path)
    for name in ("one", "two"):
        write(tmp_path, f"base/{name}.yaml", {"kind": "Job", "metadata": {"name": name}, "spec": {"list": ["a", "b"]}})
    write(tmp_path, "base/kustomization.yaml", {"resources": ["one.yaml", "two.yaml"]})
    return tmp_path


def patched(folder: Path, target: dict[str, str], *operations: dict[str, object]) -> list[dict[str, object]]:
    write(folder, "change/patch.yaml", list(operations))
    write(folder, "change/kustomization.yaml", {"patches": [{"path": "patch.yaml", "target": target}]})
    return [item["spec"] for item in build(["base"], ["change"])]


def test_the_manifests_of_the_package_are_those_of_the_repository(repository: Path) -> None:
    assert MANIFESTS.resolve() == (repository / "k8s").resolve()


def test_resources_come_in_the_order_in_which_they_are_listed(folder: Path) -> None:
    write(folder, "all/kustomization.yaml", {"resources": ["../base", "three.yaml"]})
    write(folder, "all/three.yaml", {"kind": "Job", "metadata": {"name": "three"}})
    assert [item["metadata"]["name"] for item in build(["all"])] == ["one", "two", "three"]


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
