"""Run a pipeline on a Kubernetes cluster, for `gaudi-bert run --on kubernetes`.

`run_on_kubernetes` first checks all objects. It then submits the steps one after another and waits for each step to end.

Every submitted Job has an annotation with a digest of its manifest, the pipeline file and the volume. A run that is started
again compares the digests. A Job with the same digest is followed if it is active, and skipped if it is complete. Any other
Job that has ended is replaced. An active Job with another digest belongs to another run in the same work folder, so the new
run is rejected. The new run is also rejected if an object with the same name belongs to somebody else.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from gaudi_bert.common.errors import FailedError, GaudiBertError, InputError
from gaudi_bert.common.files import hash_json
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.runners.kubernetes.client import Cluster, ConflictError, Json, NotFoundError, format_object_title
from gaudi_bert.runners.kubernetes.follow import PodsStoppedError, follow_step
from gaudi_bert.runners.kubernetes.manifests import (
    POD_LABELS,
    Manifests,
    build_manifests,
    check_pods_can_read_files,
    is_pipeline_object,
    pipeline_label_selector,
)
from gaudi_bert.runners.kubernetes.pods import STEP_LABEL, Manifest
from gaudi_bert.runners.kubernetes.reasons import read_job_outcome
from gaudi_bert.runners.kubernetes.work_claim import find_work_volume_claim, should_recreate_claim
from gaudi_bert.runners.stage_table import list_steps_of_stages

StepResult = Literal["done", "skipped"]
_DIGEST_ANNOTATION = "gaudi-bert/manifest-sha256"
_REMOVAL_SECONDS = 120
# If an object of one of these kinds exists, the run replaces it, because the settings may have changed. The other shared
# objects are kept, because a service account does not depend on the settings and a volume claim cannot be changed.
_REPLACED_KINDS = ("ConfigMap", "NetworkPolicy", "TrainingRuntime")
# The value of the step label on the Job that `gaudi-bert k8s open` creates. This Job is not part of a run.
OPEN_COMPONENT = "open"
# A cluster supports MPIJobs and TrainJobs only if an operator for them is installed. Otherwise, suggest these remedies.
_TRAINER_REMEDY = (
    "install Kubeflow Trainer 2 (docs/kubernetes.md), or set kubernetes.training to job, which needs no operator"
)
_OPERATOR_REMEDIES = {
    "MPIJob": "install the MPI operator (docs/kubernetes.md), or set training.engine to pytorch, or resources.workers to 1",
    "TrainJob": _TRAINER_REMEDY,
    "TrainingRuntime": _TRAINER_REMEDY,
}


def run_on_kubernetes(
    settings: PipelineSettings, stages: Sequence[str], reporter: Reporter, cluster: Cluster | None = None
) -> dict[str, StepResult]:
    """Run stages of a pipeline on a Kubernetes cluster, and wait for each of their steps to end.

    If the run is interrupted, the submitted steps continue on the cluster.

    Args:
        settings: The settings of the pipeline.
        stages: The names of the stages.
        reporter: Shows progress and logs.
        cluster: The client for the namespace. If it is None, a new client is created.

    Returns:
        For each step "done", or "skipped" if it was already complete.

    Raises:
        InputError: The settings do not suit the cluster, another run uses the work folder, or an object belongs to somebody
            else.
        FailedError: A step failed, or the cluster does not answer.
    """
    check_pods_can_read_files(settings)  # before the first request, because such a pipeline cannot run on any cluster
    if cluster is None:
        kubernetes = settings.kubernetes
        cluster = Cluster(kubernetes.namespace, outage_seconds=kubernetes.outage_seconds, say=reporter.say)
    cluster.check_namespace()
    manifests = build_manifests(settings, cluster.read_server_version())
    steps = {step: manifests.steps[step] for step in list_steps_of_stages(stages)}
    claim = find_work_volume_claim(cluster, settings)
    for dry_run in dry_run_objects(cluster, settings, (*manifests.shared, *steps.values())):
        if dry_run.error is not None:
            raise dry_run.error
    _check_no_other_run_is_active(
        cluster,
        settings,
        [
            _annotate_job_with_input_digest(item, manifests, _get_store_url_or_claim_uid(settings, claim))
            for item in steps.values()
        ],
    )
    if claim is not None and is_pipeline_object(settings, claim) and should_recreate_claim(cluster, settings, claim):
        delete_and_wait(cluster, settings, "PersistentVolumeClaim", claim["metadata"]["name"])
    claim = _create_shared_objects(cluster, settings, manifests) or claim
    storage_id = _get_store_url_or_claim_uid(settings, claim)
    summary: dict[str, StepResult] = {}
    for step, unsigned in steps.items():
        item = _annotate_job_with_input_digest(unsigned, manifests, storage_id)
        reporter.say(f"--- {step}: {format_object_title(item)} in namespace {cluster.namespace}")
        try:
            summary[step] = _run_step(cluster, settings, item, reporter)
        except KeyboardInterrupt:
            reporter.say(
                "the submitted steps keep running; run the same command to follow them, or stop them with `gaudi-bert k8s "
                "delete`"
            )
            raise
    return summary


def _run_step(cluster: Cluster, settings: PipelineSettings, job: Manifest, reporter: Reporter) -> StepResult:
    """Submit a step, wait until it is complete and return "done". If it was complete before, return "skipped".

    If the step is stopped, it is submitted again, because it continues from what it has saved.
    """
    while _submit_unless_complete(cluster, settings, job, reporter):
        try:
            follow_step(cluster, job, reporter, settings.kubernetes.start_seconds)
            return "done"
        except PodsStoppedError as error:
            reporter.say(f"{error}; submitting the step again")
    return "skipped"


# --- checks before anything is created, so that a rejected run leaves no objects behind


def foreign_object_error(settings: PipelineSettings, existing: Json, kind: str) -> InputError:
    """Return the error for an object that belongs to somebody else but has the name of one of the pipeline's objects."""
    title = f"{kind} {existing['metadata']['name']} in namespace {settings.kubernetes.namespace}"
    return InputError(
        f"{title} does not belong to this pipeline, because it lacks the labels {pipeline_label_selector(settings)}; give "
        "this pipeline another name, or delete that object with kubectl"
    )


def check_belongs_to_pipeline(settings: PipelineSettings, existing: Json, kind: str) -> None:
    """Check that an object on the cluster belongs to the pipeline.

    Raises:
        InputError: The object belongs to somebody else and only has the same name.
    """
    if not is_pipeline_object(settings, existing):
        raise foreign_object_error(settings, existing, kind)


class DryRun(NamedTuple):
    """The outcome of a server-side dry run for one object of a pipeline.

    Attributes:
        manifest: The object that a run would create or replace.
        existing: The object on the cluster that already has this kind and name, or None if there is none.
        error: The error that the run would raise, or None if the server accepts the object.
    """

    manifest: Manifest
    existing: Json | None
    error: GaudiBertError | None


def dry_run_objects(cluster: Cluster, settings: PipelineSettings, manifests: Iterable[Manifest]) -> Iterator[DryRun]:
    """Check by dry runs whether the server would create or replace each of these objects, and yield the outcomes."""
    has_runtime = True
    for manifest in manifests:
        kind, existing = manifest["kind"], None
        problem: GaudiBertError | None = None
        try:
            existing = cluster.read_object(kind, manifest["metadata"]["name"])
            if existing is not None:
                if kind != "PersistentVolumeClaim":  # a claim that the user created with this name may be used
                    check_belongs_to_pipeline(settings, existing, kind)
                if kind in _REPLACED_KINDS:
                    _replace_object(cluster, manifest, existing, dry_run=True)
            elif kind != "TrainJob" or has_runtime:  # a webhook rejects a TrainJob if its TrainingRuntime does not exist yet
                cluster.create_object(manifest, dry_run=True)
        except ConflictError:
            pass  # somebody creates it at the same moment, so it is checked again when the run creates it
        except NotFoundError as error:
            remedy = _OPERATOR_REMEDIES.get(kind)
            problem = (
                error if remedy is None else InputError(f"this cluster does not serve objects of kind {kind}; {remedy}")
            )
        except GaudiBertError as error:
            problem = error
        has_runtime &= kind != "TrainingRuntime" or existing is not None
        yield DryRun(manifest, existing, problem)


def _check_no_other_run_is_active(cluster: Cluster, settings: PipelineSettings, jobs: Sequence[Manifest]) -> None:
    """Check that no other run uses the same work folder.

    Raises:
        InputError: The pipeline has an active Job on the cluster whose digest differs from that of the Job in `jobs`.
    """
    ours = {(item["kind"], item["metadata"]["name"]): _read_digest_annotation(item) for item in jobs}
    used = {kind for kind, _ in ours}
    for kind in POD_LABELS:
        for job in cluster.list_objects(kind, pipeline_label_selector(settings), empty_if_forbidden=kind not in used):
            name = job["metadata"]["name"]
            if job["metadata"]["labels"].get(STEP_LABEL) == OPEN_COMPONENT or not is_pipeline_object(settings, job):
                continue
            if read_job_outcome(job) is None and ours.get((kind, name)) != _read_digest_annotation(job):
                raise InputError(
                    f"{kind} {name} of another run uses the same work folder; wait until it ends (`gaudi-bert k8s status`), "
                    "stop it (`gaudi-bert k8s delete`), or give this pipeline another name"
                )


def _get_store_url_or_claim_uid(settings: PipelineSettings, claim: Json | None) -> str:
    """Return a text that identifies the storage of the work folder.

    This is the URL of the object store if the work folder is in one. Otherwise, it is the UID of the volume claim, or "" if
    the claim does not exist yet.
    """
    return settings.kubernetes.store or ("" if claim is None else str(claim["metadata"].get("uid", "")))


def _annotate_job_with_input_digest(job: Manifest, manifests: Manifests, storage_id: str) -> Manifest:
    """Return a copy of a step's Job, annotated with a digest of everything that can change the step's result.

    The digest covers the manifest, the pipeline file, the storage and, for a TrainJob, the TrainingRuntime.

    Args:
        job: The Job, MPIJob or TrainJob of the step.
        manifests: All objects of the pipeline.
        storage_id: The result of `_get_store_url_or_claim_uid`.
    """
    inputs = [each["data"] for each in manifests.list_objects_shared_by_steps("ConfigMap")]
    inputs += [
        each["spec"] for each in manifests.list_objects_shared_by_steps("TrainingRuntime") if job["kind"] == "TrainJob"
    ]
    digest = {_DIGEST_ANNOTATION: hash_json([job, inputs, storage_id])}
    return {**job, "metadata": {**job["metadata"], "annotations": {**job["metadata"].get("annotations", {}), **digest}}}


def _read_digest_annotation(job: Manifest) -> str | None:
    """Return the digest that `_annotate_job_with_input_digest` stored in the annotations of an object, or None."""
    return (job["metadata"].get("annotations") or {}).get(_DIGEST_ANNOTATION)


# --- creating and replacing objects


def _create_shared_objects(cluster: Cluster, settings: PipelineSettings, manifests: Manifests) -> Json | None:
    """Create or replace the objects that the steps share, and return the volume claim for the work folder.

    Return None if the pipeline creates no claim, because its settings name a claim or an object store.

    Raises:
        InputError: An existing object belongs to somebody else.
    """
    claim = None
    for manifest in manifests.shared:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        present = existing = cluster.read_object(kind, name)
        if existing is None:
            try:
                existing = cluster.create_object(manifest)
            except ConflictError:  # somebody created it at the same moment
                existing = cluster.read_object(kind, name)
                if existing is None:
                    raise
        if kind != "PersistentVolumeClaim":  # a claim that the user created with this name is used as it is
            check_belongs_to_pipeline(settings, existing, kind)
        if present is not None and kind in _REPLACED_KINDS:
            _replace_object(cluster, manifest, present)
        claim = existing if kind == "PersistentVolumeClaim" else claim
    return claim


def _replace_object(cluster: Cluster, manifest: Manifest, existing: Json, *, dry_run: bool = False) -> None:
    """Replace an existing object with `manifest`. If `dry_run` is set, only check whether this is possible."""
    # The server replaces a custom resource, such as a TrainingRuntime, only if the request contains its current version.
    version = {"resourceVersion": existing["metadata"].get("resourceVersion")}
    cluster.replace_object({**manifest, "metadata": {**manifest["metadata"], **version}}, dry_run=dry_run)


def _submit_unless_complete(cluster: Cluster, settings: PipelineSettings, job: Manifest, reporter: Reporter) -> bool:
    """Submit the Job of a step, unless a Job with the same digest is already active or complete.

    Returns:
        True if the step must be followed, and False if it is already complete.

    Raises:
        InputError: Another run submitted the step at the same time, or an object with its name belongs to somebody else.
        FailedError: Others keep creating an object with its name.
    """
    kind, name = job["kind"], job["metadata"]["name"]
    for _ in range(3):
        existing = cluster.read_object(kind, name)
        if existing is not None:
            check_belongs_to_pipeline(settings, existing, kind)
            outcome = read_job_outcome(existing)
            if _read_digest_annotation(existing) == _read_digest_annotation(job) and outcome == "complete":
                reporter.say(f"{name}: already complete, nothing to do")
                return False
            if _read_digest_annotation(existing) == _read_digest_annotation(job) and outcome is None:
                reporter.say(f"{name}: already submitted, this run follows it")
                return True
            if outcome is None:
                raise InputError(
                    f"{kind} {name} was submitted by another run at the same time; run only one pipeline of this name at a "
                    "time"
                )
            delete_and_wait(cluster, settings, kind, name)
        try:
            cluster.create_object(job)
            return True
        except ConflictError:
            continue  # somebody created one at the same moment, so read it and check it
    raise FailedError(f"another run keeps recreating {kind} {name}; run only one pipeline of this name at a time")


def delete_and_wait(cluster: Cluster, settings: PipelineSettings, kind: str, name: str) -> None:
    """Delete an object of the pipeline if it exists, and wait until its name can be used again.

    Raises:
        InputError: The object belongs to somebody else.
        FailedError: The object still exists after 2 minutes.
    """
    existing = cluster.read_object(kind, name)
    if existing is None:
        return
    check_belongs_to_pipeline(settings, existing, kind)
    cluster.delete_object(kind, name)
    until = time.monotonic() + _REMOVAL_SECONDS
    while cluster.read_object(kind, name) is not None:
        if time.monotonic() >= until:
            raise FailedError(f"{kind} {name} still exists {_REMOVAL_SECONDS} s after it was deleted; see `kubectl get`")
        time.sleep(0.5)
