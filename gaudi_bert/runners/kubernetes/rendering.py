"""Writes what `--on kubernetes` would submit to a folder that `kubectl apply -k` takes.

    DIR/base       namespace, account, volume, pipeline file
    DIR/data       Jobs from prepare to verify
    DIR/training   the Job or MPIJob that trains
    DIR/finetuning finetune and predict
    DIR/results    evaluate and report

The ConfigMap with the pipeline file is named after what it holds, as kustomize's own generator does, and the Jobs name it: a
Job that is there already is then never taken for one that runs the pipeline as it is now, but refused as immutable.

Without cards, `kubectl apply -k DIR` starts everything. With cards or a queue it starts the data
only, so that nothing is held for training while data are packed; `kubectl apply -k DIR/training`, and so on, follow.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import write_text
from gaudi_bert.config import PipelineSettings
from gaudi_bert.runners.kubernetes.manifests import Manifests, render
from gaudi_bert.runners.kubernetes.pods import pod_specs
from gaudi_bert.runners.stage_table import KUSTOMIZATIONS, STAGES, steps_of

__all__ = ["write_rendered"]


def write_rendered(settings: PipelineSettings, stages: Sequence[str], folder: Path) -> list[str]:
    """Write the manifests of `stages` below `folder`; the names of its parts, in the order in which they are applied.

    Raises:
        InputError: the folder holds something else already, or the settings do not suit a cluster.
    """
    manifests = _named_by_content(render(settings))
    if folder.exists() and any(folder.iterdir()) and not (folder / "kustomization.yaml").exists():
        raise InputError(f"{folder}: holds other files; choose an empty folder, or one that --render wrote")
    base = {f"{item['kind'].lower()}.yaml": item for item in (manifests.namespace, *manifests.shared)}
    _write_folder(folder / "base", base, [])
    parts: dict[str, list[str]] = {}
    for part in KUSTOMIZATIONS:
        steps = steps_of(name for name in stages if STAGES[name].kustomization == part)
        if steps:
            _write_folder(folder / part, {f"{step}.yaml": manifests.steps[step] for step in steps}, ["../base"])
            parts[part] = [f"{part}/{step}.yaml" for step in steps]
    # Kustomize takes a base once only, so the top lists the files of its parts.
    together = list(parts)[: 1 if settings.resources.cards or settings.kubernetes.queue else None]
    _write_folder(folder, {}, ["base", *(file for part in together for file in parts[part])])
    return list(parts)


def _named_by_content(manifests: Manifests) -> Manifests:
    """`manifests` with a digest in the name of the ConfigMap, and in all pods that mount it."""
    renamed = copy.deepcopy(manifests)
    configuration = next(item for item in renamed.shared if item["kind"] == "ConfigMap")
    digest = hashlib.sha256(json.dumps(configuration["data"], sort_keys=True).encode("utf-8")).hexdigest()
    configuration["metadata"]["name"] += f"-{digest[:10]}"
    for item in renamed.steps.values():
        for spec in pod_specs(item):
            for volume in spec["volumes"]:
                if "configMap" in volume:
                    volume["configMap"]["name"] = configuration["metadata"]["name"]
    return renamed


def _write_folder(folder: Path, items: dict[str, Any], others: Sequence[str]) -> None:
    """Write `items` and a kustomization that lists `others` and them."""
    for name, item in items.items():
        write_text(folder / name, _as_yaml(item))
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [*others, *items],
    }
    write_text(folder / "kustomization.yaml", _as_yaml(kustomization))


def _as_yaml(item: Any) -> str:
    return yaml.safe_dump(item, sort_keys=False, width=120)
