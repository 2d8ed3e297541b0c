"""`run --render`: the manifests of a pipeline as a folder that `kubectl apply -k` takes.

    DIR/base       namespace, account, volume, pipeline file, and what training shares
    DIR/data       Jobs from prepare to verify
    DIR/training   the Job, MPIJob or TrainJob that trains
    DIR/finetuning finetune and predict
    DIR/results    evaluate and report

Each part takes the base along. `kubectl apply -k DIR` starts everything; with cards or a queue the data only, so that
nothing is reserved for training meanwhile, and with a TrainJob, which Kubeflow Trainer refuses before its TrainingRuntime.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import read_file, write_text
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.runners.kubernetes.manifests import Manifests, render
from gaudi_bert.runners.kubernetes.pods import Manifest
from gaudi_bert.runners.kubernetes.run import check_access_mode
from gaudi_bert.runners.stage_table import KUSTOMIZATIONS, STAGES, steps_of

_FIRST_LINE = "# Rendered by `gaudi-bert run --render`; an edit is lost when it is rendered again."


def write_rendered(settings: PipelineSettings, stages: Sequence[str], folder: Path, overwrite: bool = False) -> list[str]:
    """Write the manifests of `stages` below `folder`; the names of its parts, in the order in which they are applied.

    Raises:
        InputError: `folder` holds other files, or a manifest that differs from what would be written, and not `overwrite`;
            or several workers would share a volume that one node alone can mount.
    """
    check_access_mode(settings)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file; choose another folder")
    if folder.exists() and any(folder.iterdir()) and not (folder / "kustomization.yaml").exists():
        raise InputError(f"{folder}: holds other files; choose another folder, an empty one or one that --render wrote")
    files, parts = _files(settings, stages)
    texts = {
        folder / name: f"{_FIRST_LINE}\n{yaml.dump(item, Dumper=_Dumper, sort_keys=False, width=120)}"
        for name, item in files.items()
    }
    changed = [path for path, text in texts.items() if os.path.lexists(path) and read_file(path) != text.encode()]
    linked = [path for path in (*texts, *(path.parent for path in texts if path.parent != folder)) if path.is_symlink()]
    foreign = [path for path in changed if not read_file(path).startswith(_FIRST_LINE.encode())]
    if linked or foreign:
        raise InputError(f"{(linked or foreign)[0]}: is not a manifest that --render wrote; choose another folder")
    if changed and not overwrite:
        raise InputError(
            f"{changed[0]}: differs from what --render would write (edited, or rendered from other settings); "
            "choose another folder, or pass --overwrite to replace it"
        )
    for path, text in texts.items():
        write_text(path, text)
    return parts


def _files(settings: PipelineSettings, stages: Sequence[str]) -> tuple[dict[str, Manifest], list[str]]:
    """The content of each file by its path in the folder, and the parts in the order in which they are applied."""
    manifests = _named_by_content(render(settings))
    base = {f"{item['kind'].lower()}.yaml": item for item in (manifests.namespace, *manifests.shared)}
    files = _kustomized("base", base, [])
    parts: dict[str, list[str]] = {}
    for part in KUSTOMIZATIONS:
        steps = steps_of(name for name in stages if STAGES[name].kustomization == part)
        if steps:
            files |= _kustomized(part, {f"{step}.yaml": manifests.steps[step] for step in steps}, ["../base"])
            parts[part] = [f"{part}/{step}.yaml" for step in steps]
    base_first = bool(manifests.of_kind("TrainingRuntime"))
    together = list(parts)
    if settings.resources.cards or settings.kubernetes.queue or base_first:
        together = [part for part in parts if not (base_first and part == "training")][:1]
    # Kustomize takes a base once only, so the top lists the files of its parts.
    files |= _kustomized("", {}, ["base", *(file for part in together for file in parts[part])])
    return files, [*(["base"] if base_first else []), *parts]


def _named_by_content(manifests: Manifests) -> Manifests:
    """`manifests` with a digest in the name of the ConfigMap and in all pods that mount it.

    An existing Job is then refused as immutable, and never treated as one that runs the pipeline as it is now.
    """
    renamed = copy.deepcopy(manifests)
    (configuration,) = renamed.of_kind("ConfigMap")
    digest = hashlib.sha256(json.dumps(configuration["data"], sort_keys=True).encode("utf-8")).hexdigest()
    configuration["metadata"]["name"] += f"-{digest[:10]}"
    for step in renamed.steps:
        for spec in renamed.pod_specs(step):
            for volume in spec["volumes"]:
                if "configMap" in volume:
                    volume["configMap"]["name"] = configuration["metadata"]["name"]
    return renamed


def _kustomized(part: str, items: dict[str, Manifest], others: Sequence[str]) -> dict[str, Manifest]:
    """The files of the folder `part`, by their paths: `items`, and the kustomization that lists them after `others`."""
    head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    kustomization = {**head, "resources": [*others, *items]}
    return {str(PurePosixPath(part, name)): item for name, item in {**items, "kustomization.yaml": kustomization}.items()}


class _Dumper(yaml.SafeDumper):
    """YAML as people write it: every object in full, and texts of several lines as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)
