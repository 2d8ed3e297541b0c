"""Run a pipeline on a Kubernetes cluster, for `gaudi-bert run --on kubernetes`.

`run_on_kubernetes` checks all objects first, then submits the steps one after another, and follows each step to its end.

Every submitted Job has an annotation with a digest of its manifest, the pipeline file and the volume. A run that is started
again uses it to continue: A Job with the same digest is followed if it still runs, and skipped if it is complete. Any other
Job that has ended is replaced. An active Job with another digest belongs to another run in the same work folder, so
the new run is rejected. The new run is also rejected if an object with the same name belongs to somebody else.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gaudi_bert.common.errors import FailedError, GaudiBertError, InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.runners.kubernetes.client import Cluster, ConflictError, Json, NotFoundError, title_of
from gaudi_bert.runners.kubernetes.follow import PodsStoppedError, follow
from gaudi_bert.runners.kubernetes.manifests import POD_LABELS, Manifests, check_paths, is_own, own_selector, render
from gaudi_bert.runners.kubernetes.pods import STEP_LABEL, Manifest
from gaudi_bert.runners.kubernetes.reasons import job_outcome
from gaudi_bert.runners.kubernetes.work_claim import find_work_claim, should_recreate_claim
from gaudi_bert.runners.stage_table import steps_of

_DIGEST = "gaudi-bert/manifest-sha256"
_REMOVAL_SECONDS = 120
# Existing objects of these kinds are replaced. A service account needs no change, and a volume claim cannot be changed.
_REPLACED = ("ConfigMap", "NetworkPolicy", "TrainingRuntime")
# The component of the Job of `k8s open`, which is not part of a run.
OPEN_COMPONENT = "open"
# What to do if a cluster does not serve a kind of object.
_TRAINER_REMEDY = "install Kubeflow Trainer 2 (docs/kubernetes.md), or set kubernetes.training to job, which needs nothing"
_OPERATOR_REMEDIES = {
    "MPIJob": "install the MPI operator (docs/kubernetes.md), or set training.engine to pytorch, or resources.workers to 1",
    "TrainJob": _TRAINER_REMEDY,
    "TrainingRuntime": _TRAINER_REMEDY,
}


def run_on_kubernetes(
    settings: PipelineSettings, stages: Sequence[str], reporter: Reporter, cluster: Cluster | None = None
) -> dict[str, Any]:
    """Run stages of a pipeline on a cluster, and follow each step to its end.

    If the run is interrupted, the submitted steps continue on the cluster.

    Args:
        settings: The settings of the pipeline.
        stages: The names of the stages.
        reporter: Shows progress and logs.
        cluster: The namespace to use. If it is None, connect to the cluster of the kubeconfig file, or to the cluster that
            this process runs in.

    Returns:
        For each step "done", or "skipped" if it was already complete.

    Raises:
        InputError: The settings do not suit the cluster, another run uses the work folder, or an object belongs to somebody
            else.
        FailedError: A step failed, or the cluster does not answer.
    """
    check_paths(settings)  # before the first request, because such a pipeline cannot run on any cluster
    if cluster is None:
        kubernetes = settings.kubernetes
        cluster = Cluster(kubernetes.namespace, outage_seconds=kubernetes.outage_seconds, say=reporter.say)
    cluster.check_namespace()
    manifests = render(settings, cluster.version())
    steps = {step: manifests.steps[step] for step in steps_of(stages)}
    claim = find_work_claim(cluster, settings)
    for _, _, problem in check_objects(cluster, settings, (*manifests.shared, *steps.values())):
        if problem is not None:
            raise problem
    _refuse_other_runs(cluster, settings, [_signed(item, manifests, _identity(settings, claim)) for item in steps.values()])
    if claim is not None and is_own(settings, claim) and should_recreate_claim(cluster, settings, claim):
        remove_and_wait(cluster, settings, "PersistentVolumeClaim", claim["metadata"]["name"])
    claim = _make_shared(cluster, settings, manifests) or claim
    summary = {}
    for step, unsigned in steps.items():
        item = _signed(unsigned, manifests, _identity(settings, claim))
        reporter.say(f"--- {step}: {title_of(item)} in namespace {cluster.namespace}")
        try:
            summary[step] = _run_step(cluster, settings, item, reporter)
        except KeyboardInterrupt:
            reporter.say(
                "what was submitted keeps running; run the same command to follow it, or stop it: gaudi-bert k8s delete"
            )
            raise
    return summary


def _run_step(cluster: Cluster, settings: PipelineSettings, item: Manifest, reporter: Reporter) -> str:
    """Submit a step and follow it to its end. Return "done", or "skipped" if it was already complete.

    A step that was stopped has saved its state, so it is submitted again each time.
    """
    while _submit(cluster, settings, item, reporter):
        try:
            follow(cluster, item, reporter, settings.kubernetes.start_seconds)
            return "done"
        except PodsStoppedError as error:
            reporter.say(f"{error}: submitting it again")
    return "skipped"


# --- checks before anything is created, so that a rejected run leaves no objects behind


def foreign_error(settings: PipelineSettings, item: Json, kind: str) -> InputError:
    """Return the error for an object that has the name of an object of the pipeline, but belongs to somebody else."""
    return InputError(
        f"{kind} {item['metadata']['name']} in namespace {settings.kubernetes.namespace} does not belong to this pipeline: "
        f"it lacks the labels {own_selector(settings)}; give this pipeline another name, or remove that object with kubectl"
    )


def check_is_own(settings: PipelineSettings, item: Json, kind: str) -> None:
    """Check that an object on the cluster belongs to the pipeline.

    Raises:
        InputError: It only has the same name, and belongs to somebody else.
    """
    if not is_own(settings, item):
        raise foreign_error(settings, item, kind)


def check_objects(
    cluster: Cluster, settings: PipelineSettings, items: Iterable[Manifest]
) -> Iterator[tuple[Manifest, Json | None, GaudiBertError | None]]:
    """Check by dry runs that the server would create or replace each object of a run.

    Yields:
        (the object, the existing object with its name or None, the error that the run would fail with or None).
    """
    has_runtime = True
    for item in items:
        kind, present = item["kind"], None
        problem: GaudiBertError | None = None
        try:
            present = cluster.read(kind, item["metadata"]["name"])
            if present is not None:
                if kind != "PersistentVolumeClaim":  # a claim that the user created with this name may be used
                    check_is_own(settings, present, kind)
                if kind in _REPLACED:
                    _replace(cluster, item, present, dry_run=True)
            elif kind != "TrainJob" or has_runtime:  # a webhook rejects a TrainJob if its TrainingRuntime does not exist yet
                cluster.create(item, dry_run=True)
        except ConflictError:
            pass  # somebody creates it at the same moment, so it is checked again when the run creates it
        except NotFoundError as error:
            remedy = _OPERATOR_REMEDIES.get(kind)
            problem = error if remedy is None else InputError(f"this cluster serves no {kind}s; {remedy}")
        except GaudiBertError as error:
            problem = error
        has_runtime &= kind != "TrainingRuntime" or present is not None
        yield item, present, problem


def _refuse_other_runs(cluster: Cluster, settings: PipelineSettings, steps: Sequence[Manifest]) -> None:
    """Check that no other run works in the same work folder.

    Raises:
        InputError: A Job of the pipeline is active, and its digest is not that of one of `steps`.
    """
    ours = {(item["kind"], item["metadata"]["name"]): _digest(item) for item in steps}
    used = {kind for kind, _ in ours}
    for kind in POD_LABELS:
        for job in cluster.find(kind, own_selector(settings), if_allowed=kind not in used):
            name = job["metadata"]["name"]
            if job["metadata"]["labels"].get(STEP_LABEL) == OPEN_COMPONENT or not is_own(settings, job):
                continue
            if job_outcome(job) is None and ours.get((kind, name)) != _digest(job):
                raise InputError(
                    f"{kind} {name} of another run works in the same work folder; wait for it (`gaudi-bert k8s status`), "
                    "stop it (`gaudi-bert k8s delete`), or give this pipeline another name"
                )


def _identity(settings: PipelineSettings, claim: Json | None) -> str:
    """Return a text that identifies the storage of the work folder: the URL of the store, or the UID of the claim.

    It is "" if the claim does not exist yet.
    """
    return settings.kubernetes.store or ("" if claim is None else str(claim["metadata"].get("uid", "")))


def _signed(item: Manifest, manifests: Manifests, work: str) -> Manifest:
    """Return an object with an annotation that contains a digest of everything that its result depends on.

    Args:
        item: The manifest of a step.
        manifests: All objects of the pipeline, of which the pipeline file and the TrainingRuntime are part of the digest.
        work: The identity of the storage of the work folder.
    """
    read = [each["data"] for each in manifests.of_kind("ConfigMap")]
    read += [each["spec"] for each in manifests.of_kind("TrainingRuntime") if item["kind"] == "TrainJob"]
    text = json.dumps([item, read, work], sort_keys=True)
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    metadata = {**item["metadata"], "annotations": {**item["metadata"].get("annotations", {}), _DIGEST: digest}}
    return {**item, "metadata": metadata}


def _digest(item: Manifest) -> str | None:
    """Return the digest in the annotations of an object, or None if it has none."""
    return (item["metadata"].get("annotations") or {}).get(_DIGEST)


# --- creating and replacing objects


def _make_shared(cluster: Cluster, settings: PipelineSettings, manifests: Manifests) -> Json | None:
    """Create or replace the shared objects, and return the claim of the work folder.

    The claim is None if the pipeline creates none, because its settings name a claim or a store.

    Raises:
        InputError: An existing object belongs to somebody else.
    """
    claim = None
    for item in manifests.shared:
        kind, name = item["kind"], item["metadata"]["name"]
        present = existing = cluster.read(kind, name)
        if existing is None:
            try:
                existing = cluster.create(item)
            except ConflictError:  # somebody created it at the same moment
                existing = cluster.read(kind, name)
                if existing is None:
                    raise
        if kind != "PersistentVolumeClaim":  # a claim that the user created with this name is used as it is
            check_is_own(settings, existing, kind)
        if present is not None and kind in _REPLACED:
            _replace(cluster, item, present)
        claim = existing if kind == "PersistentVolumeClaim" else claim
    return claim


def _replace(cluster: Cluster, item: Manifest, existing: Json, *, dry_run: bool = False) -> None:
    """Replace an existing object with `item`, or only check whether this is possible."""
    # Custom resources, such as a TrainingRuntime, can be replaced only if the version of the existing object is given.
    version = {"resourceVersion": existing["metadata"].get("resourceVersion")}
    cluster.replace({**item, "metadata": {**item["metadata"], **version}}, dry_run=dry_run)


def _submit(cluster: Cluster, settings: PipelineSettings, item: Manifest, reporter: Reporter) -> bool:
    """Submit a step, unless it was already submitted with the same digest.

    Returns:
        True if the step must be followed, and False if it is already complete.

    Raises:
        InputError: Another run submitted the step at the same time, or an object with its name belongs to somebody else.
        FailedError: Others keep creating an object with its name.
    """
    kind, name = item["kind"], item["metadata"]["name"]
    for _ in range(3):
        existing = cluster.read(kind, name)
        if existing is not None:
            check_is_own(settings, existing, kind)
            outcome = job_outcome(existing)
            if _digest(existing) == _digest(item) and outcome == "complete":
                reporter.say(f"{name}: complete already, nothing to do")
                return False
            if _digest(existing) == _digest(item) and outcome is None:
                reporter.say(f"{name}: submitted already, following it")
                return True
            if outcome is None:
                raise InputError(f"{kind} {name} was submitted by another run at the same time; run one at a time")
            remove_and_wait(cluster, settings, kind, name)
        try:
            cluster.create(item)
            return True
        except ConflictError:
            continue  # somebody created one at the same moment, so read it and check it
    raise FailedError(f"{kind} {name} keeps being created by others; run one pipeline of this name at a time")


def remove_and_wait(cluster: Cluster, settings: PipelineSettings, kind: str, name: str) -> None:
    """Delete an object of the pipeline if it exists, and wait until it is gone, so that its name can be used again.

    Raises:
        InputError: The object belongs to somebody else.
        FailedError: The object still exists after 2 minutes.
    """
    existing = cluster.read(kind, name)
    if existing is None:
        return
    check_is_own(settings, existing, kind)
    cluster.delete(kind, name)
    until = time.monotonic() + _REMOVAL_SECONDS
    while cluster.read(kind, name) is not None:
        if time.monotonic() >= until:
            raise FailedError(f"{kind} {name} is still there {_REMOVAL_SECONDS} s after its removal; see `kubectl get`")
        time.sleep(0.5)
