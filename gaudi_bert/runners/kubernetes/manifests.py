"""The manifests of `k8s/`, filled from a pipeline file: what `--on kubernetes` submits and `--render` writes.

Rendering is three files: `kustomize` reads the kustomizations, `jobs` fills the Job of each step, and this one fills what
the steps share and names everything. `k8s/overlays/` are the same manifests filled by kustomize for the demo; the tests hold
both to the same result.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from gaudi_bert.artefacts.store.location import in_store
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import read_file, write_text
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.runners.kubernetes.jobs import (
    DATA_FOLDER,
    USER_NAME_FILE,
    cache_bytes,
    fill_step,
    needs_user_name,
    pod_specs,
    user_name_file,
)
from gaudi_bert.runners.kubernetes.kustomize import Manifest, build
from gaudi_bert.runners.kubernetes.volumes import check_access_mode
from gaudi_bert.runners.requirements import named_paths
from gaudi_bert.runners.stage_table import KUSTOMIZATIONS, STAGES, stages_of, steps_of

PIPELINE_LABEL = "app.kubernetes.io/instance"
# The first version of Kubernetes that knows podFailurePolicy and backoffLimitPerIndex without being told to.
FAILURE_POLICY_SINCE = (1, 29)
# By which the MPI operator marks the pods of an MPIJob.
_MPIJOB_LABEL = "training.kubeflow.org/job-name"
# Paths that mean the same inside every container.
_MOUNTED = (DATA_FOLDER, "/work")


@dataclass(frozen=True)
class Manifests:
    """All objects of a pipeline.

    The Namespace is the cluster's, not the pipeline's; `shared` is what all stages use: ServiceAccount,
    PersistentVolumeClaim, ConfigMap, the NetworkPolicy of an MPIJob; `steps` are Jobs and MPIJobs in the pipeline's order.
    """

    namespace: Manifest
    shared: tuple[Manifest, ...]
    steps: dict[str, Manifest]


def render(settings: PipelineSettings, server_version: tuple[int, int] | None = None) -> Manifests:
    """Fill the manifests from `settings`, for a cluster of `server_version`; None for `kubernetes.version`."""
    _check_paths(settings)
    training = "training-mpijob" if settings.trains_as_mpijob else "training"
    network = ("training-network",) if settings.has_network_policy else ()
    tasks = ("finetuning",) if settings.finetunes else ()
    objects = build(("base", "data", training, *network, *tasks, "results"), _components(settings, server_version))
    jobs = {item["metadata"]["name"]: item for item in objects if item["kind"] in ("Job", "MPIJob")}
    steps = {step: jobs[step] for step in steps_of(stages_of(settings))}
    others = {item["kind"]: item for item in objects if item["kind"] not in ("Job", "MPIJob")}
    others["ConfigMap"] = _configuration(settings)
    for step, item in steps.items():
        fill_step(settings, step, item)
    _fill_claim(settings, others["PersistentVolumeClaim"])
    if "NetworkPolicy" in others:
        _fill_network_policy(settings, others["NetworkPolicy"])
    for item in (*others.values(), *steps.values()):
        _set_names(settings, item)
    namespace = others.pop("Namespace")
    if settings.kubernetes.work_claim or settings.kubernetes.store:
        del others["PersistentVolumeClaim"]
    return Manifests(namespace, tuple(others.values()), steps)


def _components(settings: PipelineSettings, server_version: tuple[int, int] | None) -> list[str]:
    policy = settings.kubernetes.failure_policy
    if policy == "auto":
        policy = (server_version or settings.kubernetes.version_numbers) >= FAILURE_POLICY_SINCE
    components = {
        "components/evaluate-as-root": settings.resources.cards,
        "components/gaudi": settings.resources.cards,
        "components/efa": settings.kubernetes.efa,
        "components/failure-policy": policy,
        "components/scratch": True,
    }
    return [component for component, needed in components.items() if needed]


def _check_paths(settings: PipelineSettings) -> None:
    if settings.finetunes and settings.kubernetes.store:
        raise InputError(
            f"kubernetes.store = {settings.kubernetes.store}: the stages finetune and predict have their work folder on "
            "a volume; leave it out (rows and weights may be URLs)"
        )
    for key, path in named_paths(settings):
        if in_store(path):
            continue
        if not any(PurePosixPath(path).is_relative_to(folder) for folder in _MOUNTED):
            raise InputError(
                f"{key} = {path}: no such path in a container; put it on a volume, name that volume's claim in "
                f"kubernetes.data_claim, and write the path as {DATA_FOLDER}/..."
            )
        if PurePosixPath(path).is_relative_to(DATA_FOLDER) and not settings.kubernetes.data_claim:
            raise InputError(f"{key} = {path}: needs a volume at {DATA_FOLDER}; name its claim in kubernetes.data_claim")


def _configuration(settings: PipelineSettings) -> Manifest:
    """The ConfigMap with the pipeline file; only what was set is written, so that it reads like the file."""
    values = settings.model_dump(mode="json", exclude_unset=True)
    if settings.kubernetes.store and cache_bytes(settings) < settings.store.cache_bytes:
        values["store"] = {**values.get("store", {}), "cache_bytes": cache_bytes(settings)}
    text = yaml.safe_dump(values, sort_keys=False, default_flow_style=None)
    more = {USER_NAME_FILE: user_name_file(settings)} if needs_user_name(settings) else {}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "pipeline", "labels": {"app.kubernetes.io/name": "gaudi-bert"}},
        "data": {"pipeline.yaml": text} | more,
    }


def _set_names(settings: PipelineSettings, item: Manifest) -> None:
    metadata = item["metadata"]
    metadata["labels"][PIPELINE_LABEL] = settings.name
    if item["kind"] == "Namespace":
        metadata["name"] = settings.kubernetes.namespace
        return
    metadata["name"] = f"{settings.name}-{metadata['name']}"
    metadata["namespace"] = settings.kubernetes.namespace


def _fill_claim(settings: PipelineSettings, item: Manifest) -> None:
    spec = item["spec"]
    spec["accessModes"] = [settings.kubernetes.access_mode]
    spec["resources"]["requests"]["storage"] = settings.kubernetes.storage
    if settings.kubernetes.storage_class:
        spec["storageClassName"] = settings.kubernetes.storage_class


def _fill_network_policy(settings: PipelineSettings, item: Manifest) -> None:
    """Name the MPIJob whose pods may reach one another; its figures are open to anyone."""
    (rule,) = item["spec"]["ingress"]
    for selector in (item["spec"]["podSelector"], *(source["podSelector"] for source in rule["from"])):
        selector["matchLabels"][_MPIJOB_LABEL] = f"{settings.name}-{selector['matchLabels'][_MPIJOB_LABEL]}"
    if settings.training.metrics_port is not None:
        item["spec"]["ingress"].append({"ports": [{"port": settings.training.metrics_port, "protocol": "TCP"}]})


# --- `run --render`: a folder that `kubectl apply -k` takes
#
#     DIR/base       namespace, account, volume, pipeline file
#     DIR/data       Jobs from prepare to verify
#     DIR/training   the Job or MPIJob that trains
#     DIR/finetuning finetune and predict
#     DIR/results    evaluate and report
#
# Without cards, `kubectl apply -k DIR` starts everything. With cards or a queue it starts the data only, so that nothing is
# held for training while data are packed; `kubectl apply -k DIR/training`, and so on, follow.


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

    A Job that exists already is then never taken for one that runs the pipeline as it is now, but refused as immutable.
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
