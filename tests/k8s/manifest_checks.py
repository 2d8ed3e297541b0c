"""What must hold of manifests: Kubernetes' own schemas, and what is in no schema, of one pod and of all objects together."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

Json = dict[str, Any]

INDEXED = ("prepare", "histogram", "write", "verify")
CARDS = "habana.ai/gaudi"
UNITS = {"": 1.0, "m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def check_manifests(objects: Sequence[Json], *, external: Sequence[str] = ()) -> list[str]:
    """All problems of a set of manifests that is applied together; `external` are claims that exist already."""
    kinds = ("ConfigMap", "PersistentVolumeClaim", "ServiceAccount")
    references = {kind: {item["metadata"]["name"] for item in objects if item["kind"] == kind} for kind in kinds}
    references["PersistentVolumeClaim"] |= set(external)
    problems = []
    if len({(item["kind"], item["metadata"]["name"]) for item in objects}) != len(objects):
        problems.append("two objects have one name")
    if len({item["metadata"].get("namespace") for item in objects if item["kind"] != "Namespace"}) != 1:
        problems.append("objects are in several namespaces")
    for item in objects:
        where = f"{item['kind']} {item['metadata']['name']}"
        if item["kind"] == "TrainingRuntime":
            (job,) = item["spec"]["template"]["spec"]["replicatedJobs"]
            problems += check_pod(where, job["template"]["spec"]["template"]["spec"], references)
        if item["kind"] == "Job":
            problems += [f"{where}: {problem}" for problem in _job(item)]
            problems += check_pod(where, item["spec"]["template"]["spec"], references)
        elif item["kind"] == "MPIJob":
            problems += [f"{where}: {problem}" for problem in _mpijob(item)]
            for role, replica in item["spec"]["mpiReplicaSpecs"].items():
                problems += check_pod(f"{where} {role}", replica["template"]["spec"], references)
    return problems


def step_of(item: Json) -> str:
    return item["metadata"]["labels"]["app.kubernetes.io/component"]


def _job(item: Json) -> Iterator[str]:
    spec, step = item["spec"], step_of(item)
    pod = spec["template"]["spec"]
    command = pod["containers"][0]["command"]
    pods = spec.get("completions", 1)
    if pods != spec.get("parallelism", 1):
        yield f"completions {pods}, parallelism {spec.get('parallelism')}"
    is_shared = step in INDEXED and spec.get("completionMode") == "Indexed"
    if is_shared and f"--shard $(JOB_COMPLETION_INDEX)/{pods}" not in " ".join(command):
        yield "its pods do not say which part is theirs"
    if step.removesuffix("-finish") not in command or ("--finish" in command) != step.endswith("-finish"):
        yield f"does not run the stage {step}"
    if step in ("train", "finetune") and pod.get("terminationGracePeriodSeconds", 30) < 60:
        yield "is killed before a checkpoint is saved"


def _mpijob(item: Json) -> Iterator[str]:
    spec = item["spec"]
    launcher, worker = (spec["mpiReplicaSpecs"][role] for role in ("Launcher", "Worker"))
    pods = launcher["template"]["spec"], worker["template"]["spec"]
    slots, workers = spec["slotsPerWorker"], worker["replicas"]
    cards = int(pods[1]["containers"][0]["resources"]["limits"].get(CARDS, "0"))
    command = pods[0]["containers"][0]["command"]
    processes = int(command[command.index("-np") + 1])
    if slots != max(cards, 1) or processes != slots * workers:
        yield f"mpirun -np {processes} for {workers} workers with {slots} slots and {cards} cards"
    if CARDS in pods[0]["containers"][0]["resources"]["limits"]:
        yield "its launcher holds cards"
    if spec["runPolicy"]["schedulingPolicy"]["minAvailable"] != workers:
        yield "minAvailable is not the number of workers"
    listens = re.search(r"sshd .*-p (\d+)", " ".join(pods[1]["containers"][0]["command"]))
    asks = re.match(r"-p (\d+) ", command[command.index("plm_rsh_args") + 1])
    probed = pods[1]["containers"][0]["readinessProbe"]["tcpSocket"]["port"]
    if listens is None or asks is None or {int(listens[1]), int(asks[1])} != {probed}:
        yield f"sshd, mpirun and the readiness probe are not of one port: {listens}, {asks}, {probed}"
    if pods[1].get("hostNetwork") and probed == 22:
        yield "sshd has the node's own port 22"
    passed = {command[index + 1] for index, word in enumerate(command) if word == "-x"}
    for variable in pods[0]["containers"][0].get("env", []):
        if variable["name"] not in passed:
            yield f"{variable['name']} does not reach the processes: no -x"
    if any(pod.get("terminationGracePeriodSeconds", 30) < 60 for pod in pods):
        yield "is killed before a checkpoint is saved"


# --- one pod: volumes, resources, security; checks yield problems as text


def amount(quantity: str) -> float:
    number, unit = re.fullmatch(r"([\d.]+)([A-Za-z]*)", quantity).groups()  # type: ignore[union-attr]
    return float(number) * UNITS[unit]


def containers(spec: Json) -> list[Json]:
    return [*spec.get("initContainers", []), *spec["containers"]]


def check_pod(where: str, spec: Json, references: dict[str, set[str]]) -> Iterator[str]:
    """All checks of one pod spec; `references` holds the names of ConfigMaps, claims and accounts that exist."""
    for check in (_volumes, _security):
        for problem in check(spec):
            yield f"{where}: {problem}"
    for problem in _references(spec, references):
        yield f"{where}: {problem}"
    for container in containers(spec):
        for problem in (*_resources(container), *_container_security(container, spec)):
            yield f"{where}, container {container['name']}: {problem}"


def _volumes(spec: Json) -> Iterator[str]:
    names = [volume["name"] for volume in spec.get("volumes", [])]
    used = {mount["name"] for container in containers(spec) for mount in container.get("volumeMounts", [])}
    if used != set(names):
        yield f"volumes {names}, mounted {sorted(used)}"
    for container in containers(spec):
        paths = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
        if container["securityContext"].get("readOnlyRootFilesystem") and "/tmp" not in paths:
            yield f"{container['name']} cannot write anywhere: no volume at /tmp"


def _references(spec: Json, references: dict[str, set[str]]) -> Iterator[str]:
    if spec.get("serviceAccountName") not in references["ServiceAccount"]:
        yield f"serviceAccount {spec.get('serviceAccountName')} is not there"
    for volume in spec.get("volumes", []):
        if "configMap" in volume and volume["configMap"]["name"] not in references["ConfigMap"]:
            yield f"configMap {volume['configMap']['name']} is not there"
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        if claim and claim not in references["PersistentVolumeClaim"]:
            yield f"claim {claim} is not there"


def _resources(container: Json) -> Iterator[str]:
    requests, limits = container["resources"]["requests"], container["resources"]["limits"]
    if "cpu" not in requests or amount(requests["memory"]) > amount(limits["memory"]):
        yield f"requests {requests}, limits {limits}"
    exact = {name for name in (*requests, *limits) if "/" in name or name.startswith("hugepages-")}
    for name in sorted(exact | ({"cpu", "memory"} if CARDS in exact else set())):
        if requests.get(name) != limits.get(name):
            yield f"{name}: requests {requests.get(name)}, limits {limits.get(name)}: they must be equal"
    if container["image"].rpartition(":")[2] in ("latest", container["image"]):
        yield f"image {container['image']} has no fixed tag"


def _container_security(container: Json, spec: Json) -> Iterator[str]:
    context = container["securityContext"]
    if context.get("privileged") or context.get("allowPrivilegeEscalation") is not False:
        yield "may get more rights than it has"
    if not set(context.get("capabilities", {}).get("add", [])) <= {"SYS_NICE"}:
        yield f"adds capabilities: {context}"
    root = spec["securityContext"].get("runAsUser") == 0
    if not root and not context.get("readOnlyRootFilesystem"):
        yield "may write into the image"
    if not root and context.get("capabilities", {}).get("drop") != ["ALL"]:
        yield "keeps capabilities"


def _security(spec: Json) -> Iterator[str]:
    context = spec["securityContext"]
    if context.get("runAsUser") is None or (context["runAsUser"] != 0 and not context.get("runAsNonRoot")):
        yield "runs as whatever user the image names"
    if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "has no seccomp profile"
    if spec.get("automountServiceAccountToken") is not False:
        yield "mounts a token that it does not need"
    cards = any(CARDS in container["resources"]["limits"] for container in spec["containers"])
    if spec.get("hostPID") or spec.get("hostIPC", False) != cards or (spec.get("hostNetwork") and not cards):
        yield "shares the node's processes, IPC or network without cards, or IPC not with them"
    if spec.get("hostNetwork") and spec.get("dnsPolicy") != "ClusterFirstWithHostNet":
        yield "is on the node's network, where it finds no services"
    kinds = {key for volume in spec.get("volumes", []) for key in volume} - {"name"}
    if not kinds <= {"configMap", "persistentVolumeClaim", "emptyDir"}:
        yield f"mounts {', '.join(sorted(kinds))}: more than a restricted namespace allows"


# --- schemas: Kubernetes' own for its objects, in strict mode; for those of Kubeflow a small one of ours

# The oldest that nodes with Gaudi software 1.14 run, one between, and the newest.
VERSIONS = ("1.25", "1.31", "1.36")


# What the CRDs of Kubeflow say of the fields that are used here, and the definitions that these share.
KUBEFLOW = yaml.safe_load(Path(__file__).with_name("kubeflow.yaml").read_text())


@functools.cache
def _validator() -> Any:
    """`kubernetes_validate`, which would read its files of a megabyte again for every object."""
    import kubernetes_validate
    from kubernetes_validate import utils

    utils.schema_contents = functools.cache(utils.schema_contents)
    return kubernetes_validate


def check_schema(item: Json, version: str) -> list[str]:
    """What the schemas of a Kubernetes version say against `item`."""
    where = f"{item['kind']} {item['metadata']['name']}"
    if item["kind"] in KUBEFLOW:
        return _check_kubeflow(item, where) or [
            problem for inner in _inner_objects(item) for problem in check_schema(inner, version)
        ]
    kubernetes_validate = _validator()
    try:
        kubernetes_validate.validate(item, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{where}: {error.message} at {'.'.join(map(str, error.path))}"]
    return []


def _check_kubeflow(item: Json, where: str) -> list[str]:
    import jsonschema

    schema = {"$defs": KUBEFLOW["$defs"], **KUBEFLOW[item["kind"]]}
    return [f"{where}: {error.message}" for error in jsonschema.Draft202012Validator(schema).iter_errors(item)]


def _inner_objects(item: Json) -> Iterator[Json]:
    """The pods of an MPIJob and the Jobs of a runtime, as Kubernetes' own objects."""
    if item["kind"] == "MPIJob":
        for role, replica in item["spec"]["mpiReplicaSpecs"].items():
            spec = replica["template"]["spec"]
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": role.lower()}, "spec": spec}
    if item["kind"] == "TrainingRuntime":
        (node,) = item["spec"]["template"]["spec"]["replicatedJobs"]
        metadata = {"name": node["name"], **node["template"].get("metadata", {})}
        yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": node["template"]["spec"]}
