"""Runs a pipeline on a cluster: fills the manifests, submits step by step, and follows each step to its end.

Or writes the manifests (`--render`). Both refuse several workers whose volume one node alone can mount.

Running again continues. A Job that carries the same digest (of its manifest, the pipeline file and the volume) is followed
if it still runs and skipped if it is complete; a finished one with another digest, or a failed one, is replaced, and then
the stage itself skips what its work folder holds already. An active Job with another digest is another run of the same
work folder, and stays as it is.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import read_file, write_text
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.runners.kubernetes.client import Cluster, ConflictError, Connection, Json, title_of
from gaudi_bert.runners.kubernetes.follow import PodsDisruptedError, follow
from gaudi_bert.runners.kubernetes.manifests import PIPELINE_LABEL, POD_LABELS, Manifests, render
from gaudi_bert.runners.kubernetes.pods import Manifest, work_claim_name
from gaudi_bert.runners.kubernetes.problems import job_outcome
from gaudi_bert.runners.stage_table import KUSTOMIZATIONS, STAGES, steps_of

_DIGEST = "gaudi-bert/manifest-sha256"
_REMOVAL_SECONDS = 120
# How often a step is submitted again whose pods the cluster took away before they could save.
_RESUBMISSIONS = 3
# What to do where a cluster does not serve a kind of object.
OPERATOR_REMEDIES = {
    "MPIJob": "install the MPI operator (docs/kubernetes.md), or set training.engine to pytorch, or resources.workers to 1",
    "TrainJob": "install Kubeflow Trainer 2 (docs/kubernetes.md), or set kubernetes.training to job, which needs nothing",
}


def run_on_kubernetes(
    settings: PipelineSettings, stages: Sequence[str], reporter: Reporter, cluster: Cluster | None = None
) -> dict[str, Any]:
    """Run `stages` on the cluster that the kubeconfig file names, or that this process runs in.

    The result is `done` or `skipped` for each step.
    """
    render(settings)  # What no cluster can run is refused before the first request.
    if cluster is None:
        cluster = Cluster(settings.kubernetes.namespace, Connection(settings.kubernetes.outage_seconds, reporter.say))
    cluster.check_namespace()
    manifests = render(settings, cluster.version())
    _check_operators(cluster, {manifests.steps[step]["kind"] for step in steps_of(stages)})
    work = _prepare_shared(cluster, settings, manifests)
    steps = {step: _signed(manifests.steps[step], manifests.shared, work) for step in steps_of(stages)}
    _refuse_other_runs(cluster, settings, steps)
    _make_shared(cluster, manifests)
    summary = {}
    for step, item in steps.items():
        reporter.say(f"--- {step}: {title_of(item)} in namespace {cluster.namespace}")
        try:
            summary[step] = _run_step(cluster, item, reporter, settings.kubernetes.start_seconds)
        except KeyboardInterrupt:
            reporter.say(
                "what was submitted keeps running; run the same command to follow it, or stop it: gaudi-bert k8s delete"
            )
            raise
    return summary


def _run_step(cluster: Cluster, item: Manifest, reporter: Reporter, start_seconds: float) -> str:
    """Submit a step and follow it; where the cluster takes it away, submit it again."""
    attempts = 0
    while _submit(cluster, item, reporter):
        try:
            follow(cluster, item, reporter, start_seconds)
            return "done"
        except PodsDisruptedError as error:
            # Pods that saved have progressed, and did not fail.
            attempts += not error.saved
            if attempts > _RESUBMISSIONS:
                raise
            reporter.say(f"{error}: submitting it again")
    return "skipped"


def _prepare_shared(cluster: Cluster, settings: PipelineSettings, manifests: Manifests) -> str:
    """Check the claims that the pipeline names, and create its own; the identity of the work folder's storage."""
    kubernetes = settings.kubernetes
    for key, name in (("work_claim", kubernetes.work_claim), ("data_claim", kubernetes.data_claim)):
        if name and cluster.read("PersistentVolumeClaim", name) is None:
            raise InputError(f"kubernetes.{key}: no claim {name} in namespace {cluster.namespace}; see `kubectl get pvc`")
    if kubernetes.store:
        return kubernetes.store
    name = work_claim_name(settings)
    existing = cluster.read("PersistentVolumeClaim", name)
    _check_claim(cluster, settings, existing)
    claim = existing or _create(cluster, manifests.shared["PersistentVolumeClaim"])
    phase = claim.get("status", {}).get("phase")
    if phase == "Lost":
        raise InputError(f"volume claim {name} has lost its volume; remove it with `gaudi-bert k8s delete PIPELINE --data`")
    return str(claim["metadata"].get("uid", ""))


def _create(cluster: Cluster, item: Manifest) -> Manifest:
    """Create `item`, or return the one that somebody created at the same moment."""
    try:
        return cluster.create(item)
    except ConflictError:
        existing = cluster.read(item["kind"], item["metadata"]["name"])
        if existing is None:
            raise
        return existing


def _make_shared(cluster: Cluster, manifests: Manifests) -> None:
    for kind, item in manifests.shared.items():
        metadata = item["metadata"]
        if kind == "PersistentVolumeClaim":
            continue
        existing = cluster.read(kind, metadata["name"])
        if existing is None:
            _create(cluster, item)
        elif kind == "Service" and (existing.get("spec") or {}).get("selector") != item["spec"]["selector"]:
            raise InputError(
                f"Service {metadata['name']} exists in namespace {cluster.namespace}, and is not of this pipeline; "
                "remove it, or give this pipeline another name"
            )
        elif kind in ("ConfigMap", "NetworkPolicy", "TrainingRuntime"):
            version = existing["metadata"].get("resourceVersion")  # objects of other groups are replaced by their version
            cluster.replace({**item, "metadata": {**metadata, "resourceVersion": version}})


def _signed(item: Manifest, shared: dict[str, Manifest], work: str) -> Manifest:
    """`item` with the digest of all that its result depends on."""
    read = [shared["ConfigMap"]["data"]] + ([shared["TrainingRuntime"]["spec"]] if item["kind"] == "TrainJob" else [])
    text = json.dumps([item, read, work], sort_keys=True)
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    metadata = {**item["metadata"], "annotations": {**item["metadata"].get("annotations", {}), _DIGEST: digest}}
    return {**item, "metadata": metadata}


def _digest(item: Manifest) -> str | None:
    return (item["metadata"].get("annotations") or {}).get(_DIGEST)


def _check_operators(cluster: Cluster, kinds: set[str]) -> None:
    """Refuse what nobody on the cluster would run, before anything is created there."""
    for kind in kinds & OPERATOR_REMEDIES.keys():
        if cluster.serves(kind) is False:
            raise InputError(f"this cluster serves no {kind}s; {OPERATOR_REMEDIES[kind]}")


def _refuse_other_runs(cluster: Cluster, settings: PipelineSettings, steps: dict[str, Manifest]) -> None:
    ours = {(item["kind"], item["metadata"]["name"]): _digest(item) for item in steps.values()}
    for kind in POD_LABELS:
        for job in cluster.find_if_allowed(kind, f"{PIPELINE_LABEL}={settings.name}"):
            name = job["metadata"]["name"]
            if job_outcome(job) is None and ours.get((kind, name)) != _digest(job):
                raise InputError(
                    f"{kind} {name} of another run works in the same work folder; wait for it (`gaudi-bert k8s status`), "
                    "stop it (`gaudi-bert k8s delete`), or give this pipeline another name"
                )


def _submit(cluster: Cluster, item: Manifest, reporter: Reporter) -> bool:
    """Submit `item` unless that was done already; False where it is complete."""
    kind, name = item["kind"], item["metadata"]["name"]
    for _ in range(3):
        existing = cluster.read(kind, name)
        if existing is not None:
            outcome = job_outcome(existing)
            if _digest(existing) == _digest(item) and outcome == "complete":
                reporter.say(f"{name}: complete already, nothing to do")
                return False
            if _digest(existing) == _digest(item) and outcome is None:
                reporter.say(f"{name}: submitted already, following it")
                return True
            if outcome is None:
                raise InputError(f"{kind} {name} was submitted by another run at the same time; run one at a time")
            remove_and_wait(cluster, kind, name)
        try:
            cluster.create(item)
            return True
        except ConflictError:
            continue  # Somebody created one at the same moment: look at it.
    raise FailedError(f"{kind} {name} keeps being created by others; run one pipeline of this name at a time")


def remove_and_wait(cluster: Cluster, kind: str, name: str) -> None:
    """Remove a Job, where there is one, and wait until its name is free."""
    cluster.delete(kind, name)
    until = time.monotonic() + _REMOVAL_SECONDS
    while cluster.read(kind, name) is not None:
        if time.monotonic() >= until:
            raise FailedError(f"{kind} {name} is still there {_REMOVAL_SECONDS} s after its removal; see `kubectl get`")
        time.sleep(0.5)


# --- whether the workers of an MPIJob, which may run on several nodes, can all mount the volume of a pipeline
#
# A claim cannot be changed, and holds the packed data when training needs it. So this is settled before it is created.

SHARED, ALONE = "ReadWriteMany", "ReadWriteOnce"
# Network file systems that attach nothing to a node, so that any number of nodes mount a claim, whatever its mode.
_SHARING = (
    *("nfs.csi.k8s.io", "nfs-subdir-external-provisioner", "efs.csi.aws.com", "fsx.csi.aws.com", "file.csi.azure.com"),
    *("kubernetes.io/azure-file", "filestore.csi.storage.gke.io", "csi.juicefs.com"),
)


def has_several_workers(settings: PipelineSettings) -> bool:
    """Whether training needs a volume that several nodes mount."""
    return settings.pretrains and settings.resources.workers > 1 and settings.kubernetes.store is None


def check_access_mode(settings: PipelineSettings) -> None:
    """Refuse settings that no cluster of several nodes can run; the modes of a claim that exists are not known here."""
    if has_several_workers(settings) and settings.kubernetes.access_mode == ALONE and not settings.kubernetes.work_claim:
        raise InputError(_refusal(settings, "kubernetes.access_mode", [ALONE], exists=False))


def _check_claim(cluster: Cluster, settings: PipelineSettings, claim: Json | None) -> None:
    """Refuse a claim that exists, or that would be created, if the workers may not all mount it."""
    spec = claim.get("spec", {}) if claim is not None else {}
    modes = spec.get("accessModes") or [settings.kubernetes.access_mode]
    if not has_several_workers(settings) or SHARED in modes:
        return
    if len(cluster.find_everywhere("Node") or ()) < 2:
        return  # One node, or an account that may not list them.
    classes = cluster.find_everywhere("StorageClass") or ()
    if not shares_volumes(find_class(classes, spec.get("storageClassName") or settings.kubernetes.storage_class)):
        raise InputError(_refusal(settings, f"volume claim {work_claim_name(settings)}", modes, exists=claim is not None))


def find_class(classes: Sequence[Json], name: str | None) -> Json | None:
    """The storage class of that name, or the default class; None if there is none."""
    by_name = {item["metadata"]["name"]: item for item in classes}
    if name:
        return by_name.get(name)
    default = {"storageclass.kubernetes.io/is-default-class": "true"}
    return next((item for item in classes if default.items() <= (item["metadata"].get("annotations") or {}).items()), None)


def shares_volumes(storage_class: Json | None) -> bool:
    """Whether volumes of a class are known to be mounted by several nodes, whatever the access mode of their claim."""
    return storage_class is not None and str(storage_class.get("provisioner")).endswith(_SHARING)


def sharing_remedy(settings: PipelineSettings, *, exists: bool) -> str:
    """How to get a volume that all nodes can mount; a claim that `exists` has to be removed first."""
    if settings.kubernetes.work_claim:
        return f"set kubernetes.work_claim to a claim that has {SHARED}"
    remedy = f"set kubernetes.access_mode to {SHARED} and kubernetes.storage_class to a class that offers it"
    if exists:
        return f"{remedy}, and remove this claim with its data: gaudi-bert k8s delete PIPELINE --data"
    return f"{remedy}, or kubernetes.work_claim to a claim that all workers can mount"


def _refusal(settings: PipelineSettings, where: str, modes: Sequence[str], *, exists: bool) -> str:
    workers = f"the {settings.resources.workers} workers may run on several nodes"
    return f"{where}: {', '.join(modes)}, but {workers}; {sharing_remedy(settings, exists=exists)}"


# --- `run --render`: the manifests as a folder that `kubectl apply -k` takes
#
#     DIR/base       namespace, account, volume, pipeline file
#     DIR/data       Jobs from prepare to verify
#     DIR/training   the Job or MPIJob that trains
#     DIR/finetuning finetune and predict
#     DIR/results    evaluate and report
#
# Without cards, `kubectl apply -k DIR` starts everything. With cards or a queue it starts the data only, so that nothing is
# reserved for training while data are packed; `kubectl apply -k DIR/training`, and so on, follow.


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
    base = {f"{item['kind'].lower()}.yaml": item for item in (manifests.namespace, *manifests.shared.values())}
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
    configuration = renamed.shared["ConfigMap"]
    digest = hashlib.sha256(json.dumps(configuration["data"], sort_keys=True).encode("utf-8")).hexdigest()
    configuration["metadata"]["name"] += f"-{digest[:10]}"
    for step in renamed.steps:
        for spec in renamed.pod_specs(step):
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
