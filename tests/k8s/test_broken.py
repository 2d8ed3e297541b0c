"""Each check refuses a copy of good manifests in which the one thing that it is for is broken."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import yaml

from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.kubernetes.manifests import render
from tests.k8s.cluster_settings import CARDS, MPIJOB, WORKERS
from tests.k8s.manifest_checks import VERSIONS, check_manifests, check_schema

Json = dict[str, Any]

LAUNCHER = "spec/mpiReplicaSpecs/Launcher/template/spec"
WORKER = "spec/mpiReplicaSpecs/Worker/template/spec"
POD = "spec/template/spec"
FIRST = f"{POD}/containers/0"
REMOVED = object()

# What is broken: the step, the place, the value put there, and what is said of it.
BROKEN_SEMANTICS: list[tuple[str, str, Any, str]] = [
    ("plan", "metadata/name", "Demo_Plan", "not a name of at most 57 characters"),
    ("plan", "metadata/name", "demo-write", "is there twice"),
    ("plan", "metadata/namespace", "elsewhere", "in several namespaces"),
    ("plan", f"{POD}/restartPolicy", "Always", "restartPolicy Always"),
    ("plan", "spec/selector", {"matchLabels": {"a": "b"}}, "has a selector of its own"),
    ("plan", "spec/template/metadata/labels/app.kubernetes.io~component", "verify", "another component label"),
    ("plan", "spec/ttlSecondsAfterFinished", REMOVED, "is kept for ever"),
    ("plan", "spec/backoffLimit", REMOVED, "needs either backoffLimit or backoffLimitPerIndex"),
    ("write", "spec/backoffLimit", 3, "2 pods share 3 retries"),
    ("plan", f"{POD}/volumes/2/emptyDir", {}, "is not the ephemeral storage that is asked for, 1Gi"),
    ("plan", f"{POD}/initContainers", [], "does not wait for what it needs"),
    ("plan", f"{POD}/initContainers/0/command/6", "verify", "waits as verify"),
    ("plan", f"{POD}/initContainers/0/command/8", "never", "waits without limit"),
    ("report", "spec/completionMode", "Indexed", "is Indexed, but not shared out"),
    ("write", "spec/completionMode", REMOVED, "is shared out, but not Indexed"),
    ("write", "spec/completions", 3, "completions 3, parallelism 2"),
    ("write", f"{FIRST}/command/10", "$(JOB_COMPLETION_INDEX)/4", "its pods do not say"),
    ("write", f"{FIRST}/command/8", "0", "uses as many processes as the node has cores"),
    ("plan", f"{POD}/volumes/0/name", "other", "volumeMount pipeline has no volume"),
    ("plan", f"{POD}/volumes/1/name", "pipeline", "a volume is defined twice"),
    ("plan", f"{FIRST}/volumeMounts/1/mountPath", "/tmp", "two volumes at one path"),
    ("plan", f"{POD}/volumes/0/configMap/name", "absent", "configMap absent is not there"),
    ("plan", f"{POD}/volumes/1/persistentVolumeClaim/claimName", "absent", "claim absent is not there"),
    ("plan", f"{POD}/serviceAccountName", "absent", "serviceAccount absent is not there"),
    ("plan", f"{FIRST}/resources/limits", {}, "has no memory limit"),
    ("plan", f"{FIRST}/resources/requests/memory", "4Gi", "requests more memory than its limit"),
    ("plan", f"{FIRST}/resources/requests/cpu", 1, "no quantity written as a string"),
    ("plan", f"{FIRST}/image", "gaudi-bert-data:latest", "has no fixed tag"),
    ("plan", f"{FIRST}/env/0/value", 3, "is not a string"),
    ("plan", f"{FIRST}/env/0/name", "1ST", "env name '1ST'"),
    ("plan", f"{FIRST}/env/0/name", "API_TOKEN", "looks like a secret"),
    ("plan", f"{FIRST}/command/3", 5, "5 is not a string"),
    ("plan", f"{FIRST}/securityContext/privileged", True, "is privileged"),
    ("plan", f"{FIRST}/securityContext/allowPrivilegeEscalation", True, "allows privilege escalation"),
    ("plan", f"{FIRST}/securityContext/capabilities", {"drop": ["ALL"], "add": ["SYS_ADMIN"]}, "adds capabilities"),
    ("plan", f"{FIRST}/securityContext/capabilities", {}, "keeps capabilities"),
    ("plan", f"{FIRST}/securityContext/readOnlyRootFilesystem", False, "may write into the image"),
    ("plan", f"{POD}/securityContext/runAsNonRoot", False, "does not insist on a user that is not root"),
    ("plan", f"{POD}/securityContext/runAsUser", REMOVED, "runs as whatever user the image names"),
    ("plan", f"{POD}/securityContext/seccompProfile", REMOVED, "has no seccomp profile"),
    ("plan", f"{POD}/automountServiceAccountToken", True, "mounts a token that it does not need"),
    ("plan", f"{POD}/hostPID", True, "sees the node's processes"),
    ("plan", f"{POD}/hostIPC", True, "hostIPC is for pods with cards"),
    (
        "plan",
        f"{POD}/volumes/0/secret",
        {"secretName": "x"},
        "mounts configMap, emptyDir, persistentVolumeClaim, secret: more than",
    ),
    ("plan", f"{POD}/hostNetwork", True, "without dnsPolicy ClusterFirstWithHostNet"),
    ("plan", f"{POD}/hostNetwork", True, "is on the node's network without cards"),
]
BROKEN_MPIJOBS: list[tuple[str, Any, str]] = [
    ("metadata/name", "5-train", "not a name of at most 50 characters"),
    ("spec/slotsPerWorker", 4, "slotsPerWorker 4 for 8 cards"),
    ("spec/mpiReplicaSpecs/Worker/replicas", 3, "mpirun -np 32 for 3 workers with 8 slots"),
    ("spec/mpiReplicaSpecs/Launcher/replicas", 2, "has not one launcher"),
    ("spec/mpiReplicaSpecs/Worker/restartPolicy", "Always", "restartPolicy Always"),
    ("spec/launcherCreationPolicy", "AtStartup", "does not wait until sshd listens"),
    ("spec/runPolicy/schedulingPolicy/minAvailable", 5, "minAvailable is not the number of workers"),
    (f"{LAUNCHER}/containers/0/command/7", "8", "mpirun -np 8 for 4 workers"),
    (f"{LAUNCHER}/containers/0/resources/limits/habana.ai~gaudi", "8", "its launcher holds cards"),
    (f"{LAUNCHER}/containers/0/command/2", "other", "mpirun kills its processes when they are asked to stop"),
    (f"{LAUNCHER}/containers/0/command/9", "other", "a lost rank ends the others after twice 1 s"),
    (f"{WORKER}/terminationGracePeriodSeconds", 5, "is killed 5 s after it is asked to stop"),
    (f"{WORKER}/containers/0/lifecycle", REMOVED, "a worker that is stopped kills its ranks before a checkpoint"),
    (f"{LAUNCHER}/containers/0/env/0/name", "NEW", "NEW does not reach the processes"),
    (f"{WORKER}/containers/0/readinessProbe/tcpSocket/port", 2022, "not of one port"),
    (f"{WORKER}/containers/0/resources/requests/habana.ai~gaudi", "4", "habana.ai/gaudi: requests 4, limits 8"),
    (f"{WORKER}/containers/0/resources/requests/hugepages-2Mi", "90000Mi", "hugepages-2Mi: requests 90000Mi"),
    (f"{WORKER}/containers/0/resources/limits/cpu", "96", "cpu: requests 95, limits 96"),
    (f"{WORKER}/hostNetwork", True, "sshd has the node's own port 22"),
    (f"{WORKER}/volumes/2/emptyDir/sizeLimit", "500Gi", "shared memory of 500Gi is more than the memory limit"),
]
# Typing mistakes that the schemas catch: the step, the place, the value.
BROKEN_SCHEMAS: list[tuple[str, str, Any]] = [
    ("plan", "spec/backofLimit", 3),
    ("plan", f"{FIRST}/resourcs", {}),
    ("train", "spec/slotPerWorker", 8),
    ("train", "spec/launcherCreationPolicy", "WhenReady"),
    ("train", "spec/mpiReplicaSpecs/Worker/restartPolicy", "Always"),
    ("train", f"{WORKER}/containers/0/imagePullPolicys", "Never"),
    ("train", "apiVersion", "kubeflow.org/v1"),
]


@functools.cache
def manifests(*overrides: str) -> dict[str, Json]:
    """Good manifests by step; what is shared stands under its kind."""
    rendered = render(load_pipeline(None, ["resources.data_workers=2", "kubernetes.failure_policy=false", *overrides]))
    shared = {item["kind"]: item for item in (rendered.namespace, *rendered.shared)}
    good = {**shared, **rendered.steps}
    assert check_manifests(list(good.values())) == []
    return good


def broken(good: dict[str, Json], step: str, place: str, value: Any) -> dict[str, Json]:
    """A deep copy with `value` at `place` of one step; `~` stands for a slash in a key."""
    copied = copy.deepcopy(good)
    item: Any = copied[step]
    *parents, last = (part.replace("~", "/") for part in place.split("/"))
    for part in parents:
        item = item[int(part)] if isinstance(item, list) else item[part]
    if value is REMOVED:
        del item[last]
    else:
        item[int(last) if isinstance(item, list) else last] = value
    return copied


@pytest.mark.parametrize(("step", "place", "value", "said"), BROKEN_SEMANTICS)
def test_what_is_broken_in_a_job_is_said(step: str, place: str, value: Any, said: str) -> None:
    problems = check_manifests(list(broken(manifests(), step, place, value).values()))
    assert [problem for problem in problems if said in problem] != [], problems


@pytest.mark.parametrize(("place", "value", "said"), BROKEN_MPIJOBS)
def test_what_is_broken_in_an_mpijob_is_said(place: str, value: Any, said: str) -> None:
    problems = check_manifests(list(broken(manifests(*CARDS, *MPIJOB), "train", place, value).values()))
    assert [problem for problem in problems if said in problem] != [], problems


def test_too_few_processes_for_the_cards_of_one_server_are_said() -> None:
    place = "spec/template/spec/containers/0/command/7"
    good = manifests(*CARDS, "training.engine=tensorflow")
    problems = check_manifests(list(broken(good, "train", place, "4").values()))
    assert problems == ["Job demo-train: starts 4 processes for 8 cards"]


@pytest.mark.parametrize(
    ("step", "place", "value", "said"),
    [
        ("train", "spec/parallelism", 3, "completions 4, parallelism 3"),
        ("train", "spec/completionMode", "NonIndexed", "its pods have no number"),
        ("train", "spec/backoffLimit", 10, "4 pods share 10 retries"),
        ("train", f"{POD}/subdomain", "elsewhere", "no Service elsewhere"),
        ("train", f"{FIRST}/env/3/value", "5", "PET_NNODES 5 for 4 pods"),
        ("train", f"{FIRST}/env/4/value", "4", "starts 4 processes for 8 cards"),
        ("train", f"{POD}/terminationGracePeriodSeconds", 5, "is killed 5 s after it is asked to stop"),
        ("Service", "spec/publishNotReadyAddresses", False, "its pods have no names before they have met"),
        ("Service", "spec/selector", {"job-name": "other"}, "names the pods of other"),
    ],
)
def test_what_is_broken_in_nodes_is_said(step: str, place: str, value: Any, said: str) -> None:
    problems = check_manifests(list(broken(manifests(*CARDS, *WORKERS), step, place, value).values()))
    assert [problem for problem in problems if said in problem] != [], problems


@pytest.mark.parametrize(("step", "place", "value"), BROKEN_SCHEMAS)
def test_a_typing_mistake_is_caught_by_the_schemas(step: str, place: str, value: Any) -> None:
    pytest.importorskip("kubernetes_validate")
    good, version = manifests(*CARDS, *MPIJOB), VERSIONS[len(place) % len(VERSIONS)]
    assert check_schema(good[step], version) == []
    assert check_schema(broken(good, step, place, value)[step], version) != []


def test_every_manifest_is_plain_yaml_without_duplicate_keys(repository: Path) -> None:
    class Strict(yaml.SafeLoader):
        pass

    def mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> Json:
        keys = [loader.construct_object(key) for key, _ in node.value]
        assert len(set(keys)) == len(keys), f"{node.start_mark}: a key is there twice"
        return yaml.SafeLoader.construct_mapping(loader, node, deep=True)

    Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    for path in (repository / "k8s").rglob("*.yaml"):
        list(yaml.load_all(path.read_text(), Strict))
