"""`run --render`: the rendered manifests as a folder that `kubectl apply -k` takes.

    DIR/base       namespace, account, volume, pipeline file
    DIR/data       Jobs from prepare to verify
    DIR/training   the Job or MPIJob that trains
    DIR/finetuning finetune and predict
    DIR/results    evaluate and report

Without cards, `kubectl apply -k DIR` starts everything. With cards or a queue it starts the data only, so that nothing is
reserved for training while data are packed; `kubectl apply -k DIR/training`, and so on, follow.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import read_file, write_text
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.runners.kubernetes.manifests import Manifests, pod_specs, render
from gaudi_bert.runners.kubernetes.volumes import check_access_mode
from gaudi_bert.runners.stage_table import KUSTOMIZATIONS, STAGES, steps_of


def write_rendered(settings: PipelineSettings, stages: Sequence[str], folder: Path, overwrite: bool = False) -> list[str]:
    """Write the manifests of `stages` below `folder`; the names of its parts, in the order in which they are applied.

    Raises:
        InputError: `folder` holds other files, or a manifest that differs from what would be written, and not `overwrite`;
            or several workers would share a volume that one node alone can mount.
    """
    check_access_mode(settings)
    manifests = _named_by_content(render(settings))
    if folder.exists() and any(folder.iterdir()) and not (folder / "kustomization.yaml").exists():
        raise InputError(f"{folder}: holds other files; choose an empty folder, or one that --render wrote")
    base = {f"{item['kind'].lower()}.yaml": item for item in (manifests.namespace, *manifests.shared)}
    files = _kustomized("base", base, [])
    parts: dict[str, list[str]] = {}
    for part in KUSTOMIZATIONS:
        steps = steps_of(name for name in stages if STAGES[name].kustomization == part)
        if steps:
            files |= _kustomized(part, {f"{step}.yaml": manifests.steps[step] for step in steps}, ["../base"])
            parts[part] = [f"{part}/{step}.yaml" for step in steps]
    # Kustomize takes a base once only, so the top lists the files of its parts.
    together = list(parts)[: 1 if settings.resources.cards or settings.kubernetes.queue else None]
    files |= _kustomized("", {}, ["base", *(file for part in together for file in parts[part])])
    texts = {folder / name: yaml.safe_dump(item, sort_keys=False, width=120) for name, item in files.items()}
    changed = [path for path, text in texts.items() if path.exists() and read_file(path) != text.encode()]
    if changed and not overwrite:
        raise InputError(
            f"{changed[0]}: differs from what --render would write (edited, or rendered from other settings); "
            "choose another folder, or pass --overwrite to replace it"
        )
    for path, text in texts.items():
        write_text(path, text)
    return list(parts)


def _named_by_content(manifests: Manifests) -> Manifests:
    """`manifests` with a digest in the name of the ConfigMap and in all pods that mount it, as kustomize's generator has it.

    An existing Job is then refused as immutable, and never treated as one that runs the pipeline as it is now.
    """
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


def _kustomized(part: str, items: dict[str, Any], others: Sequence[str]) -> dict[str, Any]:
    """The files of the folder `part`, by their paths: `items`, and the kustomization that lists them after `others`."""
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [*others, *items],
    }
    return {str(PurePosixPath(part, name)): item for name, item in {**items, "kustomization.yaml": kustomization}.items()}
