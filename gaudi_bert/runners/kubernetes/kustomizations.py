"""Our own kustomizations, built without kustomize: resources, components and JSON patches (RFC 6902), and nothing else.

So the very manifests that `kubectl apply -k` takes are filled, on machines without kubectl too. What only overlays use
(name prefixes, image tags, generators) comes from the pipeline file instead.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]

_MANIFESTS = Path(__file__).parent / "manifests"
# Where PyYAML has libyaml, a hundred files are read in a tenth of a second.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def build(resources: Sequence[str], components: Sequence[str] = ()) -> list[Manifest]:
    """The objects of the kustomizations `resources`, patched by `components`; all are folders below `k8s/`."""
    objects = [item for folder in resources for item in _build_folder(_MANIFESTS / folder)]
    for component in components:
        _apply_patches(_MANIFESTS / component, objects)
    return objects


def _build_folder(folder: Path) -> list[Manifest]:
    kustomization = _read(folder / "kustomization.yaml")
    objects: list[Manifest] = []
    for name in kustomization.get("resources", ()):
        path = (folder / name).resolve()
        objects += _build_folder(path) if path.is_dir() else [_read(path)]
    for name in kustomization.get("components", ()):
        _apply_patches((folder / name).resolve(), objects)
    _apply_patches(folder, objects)
    return objects


def _apply_patches(folder: Path, objects: Sequence[Manifest]) -> None:
    """Apply the patches that `folder`'s kustomization lists to those of `objects` that they are meant for."""
    for patch in _read(folder / "kustomization.yaml").get("patches", ()):
        operations, target = _read(folder / patch["path"]), patch["target"]
        for item in objects:
            if item["kind"] == target["kind"] and re.fullmatch(target.get("name", ".*"), item["metadata"]["name"]):
                for operation in operations:
                    _apply_operation(item, operation)


def _apply_operation(item: Any, operation: Mapping[str, Any]) -> None:
    """One `add`, `replace` or `remove`; an index of a list is a number, and `-` is its end."""
    *parents, last = operation["path"].lstrip("/").split("/")
    for part in parents:
        item = item[int(part)] if isinstance(item, list) else item[part]
    value = copy.deepcopy(operation.get("value"))
    if operation["op"] == "remove":
        del item[int(last) if isinstance(item, list) else last]
    elif not isinstance(item, list):
        item[last] = value
    elif operation["op"] == "replace":
        item[int(last)] = value
    else:
        item.insert(len(item) if last == "-" else int(last), value)


def _read(path: Path) -> Any:
    return yaml.load(path.read_text(encoding="utf-8"), _LOADER)
