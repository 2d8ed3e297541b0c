"""Checks of a cluster against what a pipeline asks: version, rights, cards, huge pages, MPI operator, storage, images."""

from __future__ import annotations

import re
from typing import Any

from gaudi_bert.config import PipelineSettings
from gaudi_bert.runners.doctor.check_result import CheckResult, failed, passed, warning
from gaudi_bert.runners.doctor.cluster_answers import ClusterAnswers
from gaudi_bert.runners.doctor.node_checks import check_nodes
from gaudi_bert.runners.doctor.storage_checks import check_secret, check_storage
from gaudi_bert.runners.images import image_reference
from gaudi_bert.runners.kubernetes.manifests import FAILURE_POLICY_SINCE

__all__ = ["check_cluster"]

Json = dict[str, Any]

OLDEST = (1, 24)


def check_cluster(answers: ClusterAnswers, settings: PipelineSettings) -> list[CheckResult]:
    """One result per check, in an order in which mending makes sense."""
    checks = [_version, _namespace, _rights, check_storage, _images_found]
    if settings.resources.cards:
        checks.append(_device_plugin)
    if settings.trains_as_mpijob:
        checks.append(_mpi)
    if settings.kubernetes.queue:
        checks.append(_queue)
    if settings.kubernetes.store_secret:
        checks.append(check_secret)
    return [check(answers, settings) for check in checks] + check_nodes(answers, settings)


def _version(answers: ClusterAnswers, settings: PipelineSettings) -> CheckResult:
    shown = ".".join(map(str, answers.version))
    if answers.version < OLDEST:
        return failed("Kubernetes", shown, f"Indexed Jobs need {'.'.join(map(str, OLDEST))} or later: upgrade the cluster")
    policy = settings.kubernetes.failure_policy
    if policy is True and answers.version < FAILURE_POLICY_SINCE:
        return failed("Kubernetes", f"{shown}, too old for podFailurePolicy", "set kubernetes.failure_policy to auto")
    if policy is False and answers.version >= FAILURE_POLICY_SINCE:
        return warning("Kubernetes", shown, "kubernetes.failure_policy: auto makes evictions cost no retry")
    return passed("Kubernetes", shown)


def _namespace(answers: ClusterAnswers, settings: PipelineSettings) -> CheckResult:
    name = settings.kubernetes.namespace
    if answers.namespace_is_hidden:
        remedy = "ask which level of pod security it enforces; Gaudi needs `privileged`"
        return warning("namespace", f"this account may not look at {name} itself", remedy)
    if answers.namespace is None:
        return failed("namespace", f"{name} is not there", f"kubectl create namespace {name}")
    level = answers.namespace["metadata"].get("labels", {}).get("pod-security.kubernetes.io/enforce")
    if level in ("baseline", "restricted") and settings.resources.cards:
        remedy = f"kubectl label namespace {name} pod-security.kubernetes.io/enforce=privileged --overwrite"
        return failed("namespace", f"{name} enforces pod security `{level}`, which forbids hostIPC", remedy)
    return passed("namespace", name)


def _rights(answers: ClusterAnswers, settings: PipelineSettings) -> CheckResult:
    if answers.missing_rights:
        return failed("rights", f"may not {', '.join(answers.missing_rights)}", "ask for the Role in k8s/in-cluster")
    return passed("rights", "all that a run needs")


def _images_found(answers: ClusterAnswers, settings: PipelineSettings) -> CheckResult:
    wanted = [image_reference(settings.images, name) for name in (settings.images.data, settings.images.train)]
    if settings.images.registry or any("/" in name for name in (settings.images.data, settings.images.train)):
        return passed("images", f"{', '.join(wanted)}: nodes pull them ({settings.images.pull_policy})")
    if answers.nodes is None:
        return warning("images", f"{', '.join(wanted)} have no registry", "set images.registry, or load them on every node")
    for image in wanted:
        pattern = re.compile(rf"(^|/){re.escape(image)}$")
        lacking = [node["metadata"]["name"] for node in answers.nodes if not _has_image(node, pattern)]
        if lacking:
            remedy = "push it and set images.registry, or load it on every node"
            return warning("images", f"{image} has no registry and is not seen on {', '.join(lacking[:3])}", remedy)
    return passed("images", f"{', '.join(wanted)} are on every node")


def _has_image(node: Json, pattern: re.Pattern[str]) -> bool:
    return any(pattern.search(name) for image in node["status"].get("images") or () for name in image.get("names") or ())


def _device_plugin(answers: ClusterAnswers, settings: PipelineSettings) -> CheckResult:
    if answers.plugin_pods is None:
        return warning("device plugin", "this account may not list pods of other namespaces", "see the next line instead")
    if not answers.plugin_pods:
        return failed(
            "device plugin", "no pod of the Gaudi device plugin", "install habana-k8s-device-plugin on the cluster"
        )
    bad = [pod["metadata"]["name"] for pod in answers.plugin_pods if pod["status"].get("phase") != "Running"]
    if bad:
        return failed("device plugin", f"{', '.join(bad[:3])} not running", "see `kubectl logs` of that pod, and the driver")
    return passed("device plugin", f"runs on {len(answers.plugin_pods)} nodes")


def _mpi(answers: ClusterAnswers, settings: PipelineSettings) -> CheckResult:
    if answers.serves_mpijobs is False:
        remedy = "install the MPI operator 0.4 or later, or set kubernetes.training to job with one worker"
        return failed("MPI operator", "kubeflow.org/v2beta1 is not served", remedy)
    if not answers.mpi_operator:
        known = "MPIJobs are known, but the operator's pod" if answers.serves_mpijobs else "the operator"
        return warning("MPI operator", f"{known} is not seen by this account", "ask whether it runs")
    match = re.search(r":v?(\d+)\.(\d+)", answers.mpi_operator)
    oldest, why = ((0, 8), "Kueue") if settings.kubernetes.queue else ((0, 4), "launcherCreationPolicy")
    if match and (int(match[1]), int(match[2])) < oldest:
        needed = ".".join(map(str, oldest))
        return failed("MPI operator", answers.mpi_operator, f"{why} needs {needed} or later: upgrade it")
    return passed("MPI operator", answers.mpi_operator)


def _queue(answers: ClusterAnswers, settings: PipelineSettings) -> CheckResult:
    wanted = str(settings.kubernetes.queue)
    if answers.local_queues is None:
        return warning("queue", "this account may not list localqueues", f"ask whether there is one called {wanted}")
    if wanted not in answers.local_queues:
        there = f"there are {', '.join(answers.local_queues)}" if answers.local_queues else "there is none at all"
        return failed("queue", f"no LocalQueue {wanted}, {there}", "correct kubernetes.queue, or ask who runs the cluster")
    return passed("queue", wanted)
