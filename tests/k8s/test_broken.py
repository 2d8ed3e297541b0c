"""The checks themselves: each refuses a copy of good manifests in which one thing that it is for is broken."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest

from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.kubernetes.manifests import render
from tests.k8s.cluster_settings import CARDS, MPIJOB, WORKERS
from tests.k8s.manifest_checks import VERSIONS, check_manifests, check_schema

Json = dict[str, Any]

ONE_POD, MPI, ON_NODES = (), (*CARDS, *MPIJOB), (*CARDS, *WORKERS)
LAUNCHER = "spec/mpiReplicaSpecs/Launcher/template/spec"
WORKER = "spec/mpiReplicaSpecs/Worker/template/spec"
POD = "spec/template/spec"
FIRST = f"{POD}/containers/0"
REMOVED = object()

# What is broken: the settings, the step, the place, the value put there, and what is said of it. One or two of each check.
BROKEN: list[tuple[tuple[str, ...], str, str, Any, str]] = [
    (ONE_POD, "plan", "metadata/name", "demo-write", "is there twice"),
    (ONE_POD, "plan", "metadata/namespace", "elsewhere", "in several namespaces"),
    (ONE_POD, "plan", "spec/ttlSecondsAfterFinished", REMOVED, "is kept for ever"),
    (ONE_POD, "plan", "spec/backoffLimit", REMOVED, "needs either backoffLimit or backoffLimitPerIndex"),
    (ONE_POD, "write", "spec/backoffLimit", 3, "2 pods share 3 retries"),
    (ONE_POD, "write", f"{FIRST}/command/10", "$(JOB_COMPLETION_INDEX)/4", "its pods do not say"),
    (ONE_POD, "plan", f"{POD}/initContainers/0/command/6", "verify", "waits as verify"),
    (ONE_POD, "plan", f"{POD}/volumes/2/emptyDir", {}, "is not the ephemeral storage that is asked for, 1Gi"),
    (ONE_POD, "plan", f"{POD}/volumes/0/name", "other", "volumeMount pipeline has no volume"),
    (ONE_POD, "plan", f"{POD}/volumes/1/persistentVolumeClaim/claimName", "absent", "claim absent is not there"),
    (ONE_POD, "plan", f"{FIRST}/resources/limits", {}, "has no memory limit"),
    (ONE_POD, "plan", f"{FIRST}/image", "gaudi-bert-data:latest", "has no fixed tag"),
    (ONE_POD, "plan", f"{FIRST}/env/0/name", "API_TOKEN", "looks like a secret"),
    (ONE_POD, "plan", f"{FIRST}/securityContext/capabilities", {}, "keeps capabilities"),
    (ONE_POD, "plan", f"{POD}/securityContext/runAsUser", REMOVED, "runs as whatever user the image names"),
    (ONE_POD, "plan", f"{POD}/hostIPC", True, "hostIPC is for pods with cards"),
    (ONE_POD, "plan", f"{POD}/hostNetwork", True, "is on the node's network without cards"),
    (MPI, "train", "spec/slotsPerWorker", 4, "slotsPerWorker 4 for 8 cards"),
    (MPI, "train", f"{LAUNCHER}/containers/0/command/7", "8", "mpirun -np 8 for 4 workers"),
    (MPI, "train", f"{LAUNCHER}/containers/0/command/2", "other", "mpirun kills its processes when they are asked to stop"),
    (MPI, "train", f"{WORKER}/containers/0/lifecycle", REMOVED, "a worker that is stopped kills its ranks before"),
    (MPI, "train", f"{LAUNCHER}/containers/0/env/0/name", "NEW", "NEW does not reach the processes"),
    (MPI, "train", f"{WORKER}/containers/0/readinessProbe/tcpSocket/port", 2022, "not of one port"),
    (MPI, "train", f"{WORKER}/containers/0/resources/limits/cpu", "96", "cpu: requests 95, limits 96"),
    (MPI, "train", f"{WORKER}/volumes/2/emptyDir/sizeLimit", "500Gi", "shared memory of 500Gi is more than the memory"),
    (ON_NODES, "train", f"{FIRST}/env/3/value", "5", "PET_NNODES 5 for 4 pods"),
    (ON_NODES, "train", f"{FIRST}/env/4/value", "4", "starts 4 processes for 8 cards"),
    (ON_NODES, "Service", "spec/selector", {"job-name": "other"}, "names the pods of other"),
]
# Typing mistakes that the schemas catch, of Kubernetes and of Kubeflow.
MISTYPED: list[tuple[str, str, Any]] = [
    ("plan", f"{FIRST}/resourcs", {}),
    ("train", "spec/slotPerWorker", 8),
    ("train", f"{WORKER}/containers/0/imagePullPolicys", "Never"),
]


@functools.cache
def manifests(*overrides: str) -> dict[str, Json]:
    """Good manifests by step; what is shared stands under its kind."""
    rendered = render(load_pipeline(None, ["resources.data_workers=2", "kubernetes.failure_policy=false", *overrides]))
    good = {"Namespace": rendered.namespace, **rendered.shared, **rendered.steps}
    assert check_manifests(list(good.values())) == []
    return good


def broken(good: dict[str, Json], step: str, place: str, value: Any) -> dict[str, Json]:
    """A deep copy with `value` at `place` of one step."""
    copied = copy.deepcopy(good)
    item: Any = copied[step]
    *parents, last = place.split("/")
    for part in parents:
        item = item[int(part)] if isinstance(item, list) else item[part]
    if value is REMOVED:
        del item[last]
    else:
        item[int(last) if isinstance(item, list) else last] = value
    return copied


@pytest.mark.parametrize(("settings", "step", "place", "value", "said"), BROKEN)
def test_what_is_broken_is_said(settings: tuple[str, ...], step: str, place: str, value: Any, said: str) -> None:
    problems = check_manifests(list(broken(manifests(*settings), step, place, value).values()))
    assert [problem for problem in problems if said in problem] != [], problems


@pytest.mark.parametrize(("step", "place", "value"), MISTYPED)
def test_a_typing_mistake_is_caught_by_the_schemas(step: str, place: str, value: Any) -> None:
    pytest.importorskip("kubernetes_validate")
    good, version = manifests(*MPI), VERSIONS[len(place) % len(VERSIONS)]
    assert check_schema(good[step], version) == []
    assert check_schema(broken(good, step, place, value)[step], version) != []
