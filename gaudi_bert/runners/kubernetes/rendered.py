"""Write the manifests of a pipeline to a folder for `kubectl apply -k`, for `gaudi-bert run --render`.

    DIR/base       namespace, service account, volume claim, pipeline file, and the objects that training shares
    DIR/data       Jobs of the stages from prepare to verify
    DIR/training   the Job, MPIJob or TrainJob that trains
    DIR/finetuning Jobs of finetune and predict
    DIR/results    Jobs of evaluate and report

Each part includes the base. `kubectl apply -k DIR` starts all parts. With Gaudi cards or a queue it starts only the first
part, so that no cards are reserved for training before the data are ready. With a TrainJob it also starts only the first
part, because Kubeflow Trainer rejects a TrainJob whose TrainingRuntime does not exist yet.
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
    """Write the manifests of a pipeline to a folder.

    Args:
        settings: The settings of the pipeline.
        stages: The names of the stages whose steps are written.
        folder: The folder. It must be new or empty, or was written by `--render` before.
        overwrite: Whether to replace manifests that differ from what would be written.

    Returns:
        The names of the parts of the folder, in the order in which they must be applied.

    Raises:
        InputError: `folder` contains other files, it contains a manifest that differs and `overwrite` is not set, or several
            workers would share a volume that only one node can mount.
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
    """Return the files of the folder.

    Returns:
        The content of each file, by its path relative to the folder, and the names of the parts, in the order in which they
        must be applied.
    """
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
    # Kustomize rejects a base that is included twice, and every part includes it. So the top folder lists the files of the
    # parts instead of the parts.
    files |= _kustomized("", {}, ["base", *(file for part in together for file in parts[part])])
    return files, [*(["base"] if base_first else []), *parts]


def _named_by_content(manifests: Manifests) -> Manifests:
    """Return a copy of the manifests in which the name of the ConfigMap contains a digest of its content.

    If the pipeline file has changed, the pod template of a Job changes with the digest. `kubectl apply` then rejects the Job
    because it is immutable. Without the digest, it would keep an existing Job of the old pipeline without any message.
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
    """Return the files of one folder with its `kustomization.yaml`, by their paths.

    Args:
        part: The name of the folder, or "" for the top folder.
        items: The manifests of the folder, by file name.
        others: Further resources, which the kustomization lists before the manifests.
    """
    head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    kustomization = {**head, "resources": [*others, *items]}
    return {str(PurePosixPath(part, name)): item for name, item in {**items, "kustomization.yaml": kustomization}.items()}


class _Dumper(yaml.SafeDumper):
    """Writes YAML for human readers, without anchors and aliases, and with multi-line strings as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True, so that an object that occurs twice is written twice."""
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)
