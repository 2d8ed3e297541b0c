"""Runs a pipeline on a cluster: fills the manifests, submits step by step, and follows each step to its end.

Running again continues. A Job that carries the same digest (of its manifest, the pipeline file and the volume) is followed
if it still runs and skipped if it is complete; a finished one with another digest, or a failed one, is replaced, and then
the stage itself skips what its work folder holds already. An active Job with another digest is another run of the same
work folder, and stays as it is.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from typing import Any

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.runners.kubernetes.client import Cluster, ConflictError, Connection
from gaudi_bert.runners.kubernetes.follow import PodsDisruptedError, follow
from gaudi_bert.runners.kubernetes.kustomize import Manifest
from gaudi_bert.runners.kubernetes.manifests import PIPELINE_LABEL, Manifests, render
from gaudi_bert.runners.kubernetes.problems import job_outcome
from gaudi_bert.runners.kubernetes.volumes import check_claim
from gaudi_bert.runners.stage_table import steps_of

DIGEST = "gaudi-bert/manifest-sha256"
_REMOVAL_SECONDS = 120
# How often a step is submitted again whose pods the cluster took away before they could save.
_RESUBMISSIONS = 3


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
    work = _prepare_shared(cluster, settings, manifests)
    steps = {step: _signed(manifests.steps[step], manifests.shared, work) for step in steps_of(stages)}
    _refuse_other_runs(cluster, settings, steps)
    _make_shared(cluster, manifests)
    summary = {}
    for step, item in steps.items():
        reporter.say(f"--- {step}: {item['kind']} {item['metadata']['name']} in namespace {cluster.namespace}")
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
            # Pods that saved have made progress, and did not fail.
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
    own = [item for item in manifests.shared if item["kind"] == "PersistentVolumeClaim"]
    name = own[0]["metadata"]["name"] if own else str(kubernetes.work_claim)
    existing = cluster.read("PersistentVolumeClaim", name)
    check_claim(cluster, settings, existing)
    claim = existing or _create(cluster, own[0])
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
    for item in manifests.shared:
        if item["kind"] == "PersistentVolumeClaim":
            continue
        if cluster.read(item["kind"], item["metadata"]["name"]) is None:
            _create(cluster, item)
        elif item["kind"] in ("ConfigMap", "NetworkPolicy"):
            cluster.replace(item)


def _signed(item: Manifest, shared: Sequence[Manifest], work: str) -> Manifest:
    """`item` with the digest of all that its result depends on."""
    pipeline = [one["data"] for one in shared if one["kind"] == "ConfigMap"]
    text = json.dumps([item, pipeline, work], sort_keys=True)
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    metadata = {**item["metadata"], "annotations": {**item["metadata"].get("annotations", {}), DIGEST: digest}}
    return {**item, "metadata": metadata}


def _digest(item: Manifest) -> str | None:
    return (item["metadata"].get("annotations") or {}).get(DIGEST)


def _refuse_other_runs(cluster: Cluster, settings: PipelineSettings, steps: dict[str, Manifest]) -> None:
    ours = {(item["kind"], item["metadata"]["name"]): _digest(item) for item in steps.values()}
    for kind in ("Job", "MPIJob"):
        for job in cluster.find(kind, f"{PIPELINE_LABEL}={settings.name}"):
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
