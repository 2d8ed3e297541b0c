"""What the answers of a cluster mean for a pipeline; storage and room on the nodes have files to themselves."""

from __future__ import annotations

import re
from typing import Any

from gaudi_bert.artefacts.store.objects import scheme_of
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.runners.doctor.answers import ClusterAnswers, ask_cluster, named_classes
from gaudi_bert.runners.doctor.checks import CheckResult, failed, passed, warning
from gaudi_bert.runners.doctor.nodes import check_nodes
from gaudi_bert.runners.doctor.quotas import check_limits
from gaudi_bert.runners.doctor.storage import check_storage
from gaudi_bert.runners.kubernetes.client import Cluster
from gaudi_bert.runners.kubernetes.manifests import FAILURE_POLICY_SINCE
from gaudi_bert.runners.stage_table import STAGES, stage_image, stages_of
from gaudi_bert.runners.store_access import STORE_TOOLS

Json = dict[str, Any]

_OLDEST = (1, 24)


def examine_cluster(settings: PipelineSettings) -> list[CheckResult]:
    """What is right and wrong with the cluster that the kubeconfig file names."""
    return check_cluster(ask_cluster(Cluster(settings.kubernetes.namespace), settings), settings)


def check_cluster(answers: ClusterAnswers, settings: PipelineSettings) -> list[CheckResult]:
    """One result per check, in an order in which fixing makes sense."""
    checks = [_version, _namespace, _rights, check_storage, _images_on_nodes]
    if settings.resources.cards:
        checks.append(_device_plugin)
    if settings.trains_as_mpijob:
        checks.append(_mpi)
    if settings.kubernetes.queue:
        checks.append(_queue)
    if settings.kubernetes.store_secret:
        checks.append(_secret)
    results = [check(answers, settings) for check in checks] + _pod_classes(answers, settings)
    return results + check_limits(answers, settings) + check_nodes(answers, settings)


def _version(answers: ClusterAnswers, settings: PipelineSettings) -> CheckResult:
    shown = ".".join(map(str, answers.version))
    if answers.version < _OLDEST:
        return failed("Kubernetes", shown, f"Indexed Jobs need {'.'.join(map(str, _OLDEST))} or later: upgrade the cluster")
    if answers.version < settings.kubernetes.version_numbers:
        finding = f"{shown}, older than kubernetes.version: {settings.kubernetes.version}"
        return failed("Kubernetes", finding, f"set kubernetes.version to '{shown}'")
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
        return failed("namespace", f"{name} does not exist", f"kubectl create namespace {name}")
    level = answers.namespace["metadata"].get("labels", {}).get("pod-security.kubernetes.io/enforce")
    if level in ("baseline", "restricted") and settings.resources.cards:
        remedy = f"kubectl label namespace {name} pod-security.kubernetes.io/enforce=privileged --overwrite"
        return failed("namespace", f"{name} enforces pod security `{level}`, which forbids hostIPC", remedy)
    return passed("namespace", name)


def _rights(answers: ClusterAnswers, settings: PipelineSettings) -> CheckResult:
    if answers.missing_rights:
        return failed("rights", f"may not {', '.join(answers.missing_rights)}", "ask for the Role in k8s/in-cluster")
    return passed("rights", "all that a run needs")


def _images_on_nodes(answers: ClusterAnswers, settings: PipelineSettings) -> CheckResult:
    images = list(dict.fromkeys(stage_image(settings, STAGES[stage]) for stage in stages_of(settings)))
    if settings.images.registry or any("/" in image for image in images):
        return passed("images", f"{', '.join(images)}: nodes pull them ({settings.images.pull_policy})")
    if answers.nodes is None:
        return warning("images", f"{', '.join(images)} have no registry", "set images.registry, or load them on every node")
    for image in images:
        pattern = re.compile(rf"(^|/){re.escape(image)}$")
        lacking = [node["metadata"]["name"] for node in answers.nodes if not _has_image(node, pattern)]
        if lacking:
            remedy = "push it and set images.registry, or load it on every node"
            return warning("images", f"{image} has no registry and is not seen on {', '.join(lacking[:3])}", remedy)
    return passed("images", f"{', '.join(images)} are on every node")


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


def _pod_classes(answers: ClusterAnswers, settings: PipelineSettings) -> list[CheckResult]:
    """One check for each class that pods name: the API refuses a pod whose class does not exist."""
    checks = []
    for kind, key, name in named_classes(settings):
        existing = answers.pod_classes.get(kind)
        if existing is None:
            check = warning(kind, f"this account may not list the classes ({key} is {name})", f"ask whether {name} exists")
        elif name not in existing:
            check = failed(kind, f"no {kind} {name}", f"set {key} to one of: {', '.join(existing) or 'there are none'}")
        else:
            check = passed(kind, name)
        checks.append(check)
    return checks


def _queue(answers: ClusterAnswers, settings: PipelineSettings) -> CheckResult:
    name = str(settings.kubernetes.queue)
    if answers.local_queues is None:
        return warning("queue", "this account may not list localqueues", f"ask whether there is one called {name}")
    if name not in answers.local_queues:
        others = f"there are {', '.join(answers.local_queues)}" if answers.local_queues else "there is none at all"
        return failed("queue", f"no LocalQueue {name}, {others}", "correct kubernetes.queue, or ask who runs the cluster")
    return passed("queue", name)


def _secret(answers: ClusterAnswers, settings: PipelineSettings) -> CheckResult:
    """The Secret with the store's credentials must exist, and have what the store's library reads."""
    name, namespace = settings.kubernetes.store_secret, settings.kubernetes.namespace
    if answers.secret_keys is None:
        remedy = f"ask whether there is one called {name}; pods need it, a run does not read it"
        return warning("store secret", "this account may not get secrets", remedy)
    if not answers.secret_keys:
        remedy = (
            f"kubectl -n {namespace} create secret generic {name} --from-literal=NAME=VALUE ..., or correct store_secret"
        )
        return failed("store secret", f"no Secret {name}, or an empty one", remedy)
    tools = STORE_TOOLS.get(scheme_of(settings.kubernetes.store or ""))
    if tools and not any(key.startswith(tools.prefixes) for key in answers.secret_keys):
        names = f"it has {', '.join(answers.secret_keys)}, none of them {'* or '.join(tools.prefixes)}*"
        return warning("store secret", f"{name}: {names}", "name its keys as the store's own variables are called")
    return passed("store secret", f"{name}: {', '.join(answers.secret_keys)}")
