"""What must hold of manifests: Kubernetes' own schemas, and what is in no schema, of one pod and of all objects together."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

Json = dict[str, Any]

INDEXED = ("prepare", "histogram", "plan", "write", "verify")
CLUSTER_WIDE = ("Namespace",)


def check_manifests(objects: Sequence[Json], *, external: Sequence[str] = ()) -> list[str]:
    """All problems of a set of manifests that is applied together; `external` are claims that exist already."""
    kinds = ("ConfigMap", "PersistentVolumeClaim", "ServiceAccount")
    references = {kind: {item["metadata"]["name"] for item in objects if item["kind"] == kind} for kind in kinds}
    references["PersistentVolumeClaim"] |= set(external)
    problems = [*_names(objects), *_services(objects)]
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


def _names(objects: Sequence[Json]) -> Iterator[str]:
    seen = set()
    namespaces = {item["metadata"].get("namespace") for item in objects if item["kind"] not in CLUSTER_WIDE}
    if len(namespaces) != 1 or None in namespaces:
        yield f"objects are in several namespaces or in none: {sorted(map(str, namespaces))}"
    for item in objects:
        name = item["metadata"]["name"]
        if (item["kind"], name) in seen:
            yield f"{item['kind']} {name} is there twice"
        seen.add((item["kind"], name))
        # An index of up to five digits is added to the pods of an Indexed Job; their host names have 63 characters.
        longest = {"Job": 57, "MPIJob": 50}.get(item["kind"], 63)
        first = "[a-z]" if item["kind"] == "MPIJob" else "[a-z0-9]"
        if not re.fullmatch(f"{first}([a-z0-9-]*[a-z0-9])?", name) or len(name) > longest:
            yield f"{item['kind']} {name}: not a name of at most {longest} characters a-z, 0-9 and -"


def _job(item: Json) -> Iterator[str]:
    spec, step = item["spec"], step_of(item)
    pod = spec["template"]["spec"]
    if pod.get("restartPolicy") != "Never":
        yield f"restartPolicy {pod.get('restartPolicy')}: a Job that keeps the log of each attempt has Never"
    if "selector" in spec or "manualSelector" in spec:
        yield "has a selector of its own; the Job controller makes one"
    if spec["template"]["metadata"]["labels"].get("app.kubernetes.io/component") != step:
        yield "its pods have another component label"
    if "ttlSecondsAfterFinished" not in spec:
        yield "is kept for ever"
    if not ("backoffLimit" in spec) ^ ("backoffLimitPerIndex" in spec):
        yield "needs either backoffLimit or backoffLimitPerIndex"
    if spec.get("backoffLimitPerIndex") is not None and spec.get("completionMode") != "Indexed":
        yield "backoffLimitPerIndex is for Indexed Jobs"
    yield from _indexes(spec, pod, step)
    yield from _waiting(pod, step)
    cards = int(pod["containers"][0]["resources"]["limits"].get(CARDS, "0"))
    command = pod["containers"][0]["command"]
    if step in ("train", "finetune"):
        yield from _stopping(pod, command)
    starts = _processes(command) if "-np" in command else int(_told(pod).get("PET_NPROC_PER_NODE", cards))
    if step in ("train", "finetune") and cards > 1 and starts != cards:
        yield f"starts {starts} processes for {cards} cards"
    if "subdomain" in pod:
        yield from _nodes(spec, pod)


def _told(pod: Json) -> dict[str, str]:
    return {variable["name"]: variable.get("value", "") for variable in pod["containers"][0]["env"]}


def _nodes(spec: Json, pod: Json) -> Iterator[str]:
    """Pods that train together: all at once, each with a number and a name, and told how many there are."""
    pods = spec.get("completions")
    if pods != spec.get("parallelism"):
        yield f"completions {pods}, parallelism {spec.get('parallelism')}"
    if spec.get("completionMode") != "Indexed":
        yield "its pods have no number"
    if spec["backoffLimit"] < 10 * (pods or 1):
        yield f"{pods} pods share {spec['backoffLimit']} retries"
    if _told(pod).get("PET_NNODES") != str(pods):
        yield f"PET_NNODES {_told(pod).get('PET_NNODES')} for {pods} pods"


def _services(objects: Sequence[Json]) -> Iterator[str]:
    """Whether the pods that look for one another have names."""
    services = {item["metadata"]["name"]: item["spec"] for item in objects if item["kind"] == "Service"}
    for item in objects:
        subdomain = item["spec"]["template"]["spec"].get("subdomain") if item["kind"] == "Job" else None
        if subdomain is None:
            continue
        service = services.get(subdomain)
        if service is None:
            yield f"no Service {subdomain}, which would name the pods of {item['metadata']['name']}"
            continue
        if not service.get("publishNotReadyAddresses") or service.get("clusterIP") != "None":
            yield f"Service {subdomain}: its pods have no names before they have met"
        if service["selector"] != {"job-name": item["metadata"]["name"]}:
            yield f"Service {subdomain} names the pods of {service['selector'].get('job-name')}"


def _indexes(spec: Json, pod: Json, step: str) -> Iterator[str]:
    command = " ".join(map(str, pod["containers"][0]["command"]))
    if step in INDEXED:
        wanted = f"--shard $(JOB_COMPLETION_INDEX)/{spec.get('completions')}"
        if spec.get("completionMode") != "Indexed":
            yield "is shared out, but not Indexed"
        if spec.get("completions") != spec.get("parallelism"):
            yield f"completions {spec.get('completions')}, parallelism {spec.get('parallelism')}"
        if wanted not in command:
            yield f"its pods do not say `{wanted}`"
        if spec.get("backoffLimitPerIndex", 0) < 3 and spec.get("backoffLimit", 0) < 3 * spec.get("completions", 1):
            yield f"{spec.get('completions')} pods share {spec.get('backoffLimit')} retries"
    elif "JOB_COMPLETION_INDEX" in command or (spec.get("completionMode") and "subdomain" not in pod):
        yield "is Indexed, but not shared out"
    if step in INDEXED and not re.search(r"--workers [1-9]", command):
        yield "uses as many processes as the node has cores, whatever its memory limit"
    if step.removesuffix("-finish") not in command or ("--finish" in command) != step.endswith("-finish"):
        yield f"does not run the stage {step}"


def _waiting(pod: Json, step: str) -> Iterator[str]:
    waiters = [container for container in pod.get("initContainers", []) if container["name"] == "wait"]
    if len(waiters) != 1:
        yield "does not wait for what it needs"
        return
    command = waiters[0]["command"]
    if command[command.index("--for") + 1] != step:
        yield f"waits as {command[command.index('--for') + 1]}"
    if "--timeout" not in command or not str(command[-1]).isdigit():
        yield "waits without limit"


def _stopping(pod: Json, command: Sequence[str]) -> Iterator[str]:
    """Whether training has time to save a checkpoint when its pod is stopped."""
    grace = pod.get("terminationGracePeriodSeconds", 30)
    if grace < 60:
        yield f"is killed {grace} s after it is asked to stop, before a checkpoint is saved"
    if "-np" not in command:
        return
    if "gaudi_bert.runners.stop_ranks" not in command:
        yield "mpirun kills its processes when they are asked to stop, before a checkpoint is saved"
    seconds = command[command.index("odls_base_sigkill_timeout") + 1] if "odls_base_sigkill_timeout" in command else "1"
    if not 1 < int(seconds) <= 5:
        yield f"a lost rank ends the others after twice {seconds} s, not within 10 s"


def _processes(command: Sequence[str]) -> int:
    return int(command[command.index("-np") + 1]) if "-np" in command else 1


def _mpijob(item: Json) -> Iterator[str]:
    spec = item["spec"]
    launcher, worker = (spec["mpiReplicaSpecs"][role] for role in ("Launcher", "Worker"))
    pods = launcher["template"]["spec"], worker["template"]["spec"]
    slots, workers = spec.get("slotsPerWorker"), worker["replicas"]
    if launcher["replicas"] != 1:
        yield "has not one launcher"
    if spec.get("launcherCreationPolicy") != "WaitForWorkersReady" or "readinessProbe" not in pods[1]["containers"][0]:
        yield "its launcher does not wait until sshd listens on all workers"
    for role in (launcher, worker):
        if role.get("restartPolicy") not in ("Never", "OnFailure"):
            yield f"restartPolicy {role.get('restartPolicy')}"
    cards = int(pods[1]["containers"][0]["resources"]["limits"].get(CARDS, "0"))
    command = pods[0]["containers"][0]["command"]
    if slots != max(cards, 1):
        yield f"slotsPerWorker {slots} for {cards} cards"
    if _processes(command) != slots * workers:
        yield f"mpirun -np {_processes(command)} for {workers} workers with {slots} slots"
    if CARDS in pods[0]["containers"][0]["resources"]["limits"]:
        yield "its launcher holds cards"
    if spec["runPolicy"].get("schedulingPolicy", {}).get("minAvailable") != workers:
        yield "minAvailable is not the number of workers"
    yield from _ssh(pods[0], pods[1], command)
    yield from _stopping(pods[0], command)
    yield from _stopping(pods[1], ())
    hook = pods[1]["containers"][0].get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
    if hook[-2:] != ["gaudi_bert.runners.stop_ranks", "here"]:
        yield "a worker that is stopped kills its ranks before a checkpoint is saved"
    yield from _waiting(pods[0], "train")


def _ssh(launcher: Json, worker: Json, command: Sequence[str]) -> Iterator[str]:
    listens = re.search(r"sshd .*-p (\d+)", " ".join(worker["containers"][0]["command"]))
    asks = re.match(r"-p (\d+) ", command[command.index("plm_rsh_args") + 1])
    probed = worker["containers"][0]["readinessProbe"]["tcpSocket"]["port"]
    ports = {int(listens[1]) if listens else None, int(asks[1]) if asks else None, probed}
    if len(ports) != 1:
        yield f"sshd, mpirun and the readiness probe are not of one port: {ports}"
    if worker.get("hostNetwork") and 22 in ports:
        yield "sshd has the node's own port 22"
    passed = {command[index + 1] for index, word in enumerate(command) if word == "-x"}
    for variable in launcher["containers"][0].get("env", []):
        if variable["name"] not in passed:
            yield f"{variable['name']} does not reach the processes: no -x"


# --- one pod: volumes, resources, quantities, security; checks yield problems as text

QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
UNITS = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
CARDS = "habana.ai/gaudi"


def amount(quantity: str) -> float:
    number, unit = re.fullmatch(r"([\d.]+)([A-Za-z]*)", quantity).groups()  # type: ignore[union-attr]
    return float(number) * UNITS[unit]


def containers(spec: Json) -> list[Json]:
    return [*spec.get("initContainers", []), *spec["containers"]]


def check_pod(where: str, spec: Json, references: dict[str, set[str]]) -> Iterator[str]:
    """All checks of one pod spec; `references` holds the names of ConfigMaps, claims and accounts that exist."""
    for check in (_volumes, _shared_memory, _security, _network):
        for problem in check(spec):
            yield f"{where}: {problem}"
    for problem in _references(spec, references):
        yield f"{where}: {problem}"
    for container in containers(spec):
        for problem in (*_resources(container), *_texts(container), *_container_security(container, spec)):
            yield f"{where}, container {container['name']}: {problem}"


def _volumes(spec: Json) -> Iterator[str]:
    names = [volume["name"] for volume in spec.get("volumes", [])]
    for volume in spec.get("volumes", []):
        asked = spec["containers"][0]["resources"]["requests"].get("ephemeral-storage")
        if volume["name"] == "scratch" and volume["emptyDir"].get("sizeLimit", "none") != asked:
            yield f"scratch of {volume['emptyDir']} is not the ephemeral storage that is asked for, {asked}"
    if len(set(names)) != len(names):
        yield f"a volume is defined twice: {names}"
    used = set()
    for container in containers(spec):
        paths = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
        if len(set(paths)) != len(paths):
            yield f"two volumes at one path: {paths}"
        for mount in container.get("volumeMounts", []):
            used.add(mount["name"])
            if mount["name"] not in names:
                yield f"volumeMount {mount['name']} has no volume"
        read_only = container.get("securityContext", {}).get("readOnlyRootFilesystem")
        if read_only and "/tmp" not in paths:
            yield f"{container['name']} cannot write anywhere: no volume at /tmp"
    for name in set(names) - used:
        yield f"volume {name} is used by no container"


def _references(spec: Json, references: dict[str, set[str]]) -> Iterator[str]:
    if spec.get("serviceAccountName") not in references["ServiceAccount"]:
        yield f"serviceAccount {spec.get('serviceAccountName')} is not there"
    for volume in spec.get("volumes", []):
        if "configMap" in volume and volume["configMap"]["name"] not in references["ConfigMap"]:
            yield f"configMap {volume['configMap']['name']} is not there"
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        if claim and claim not in references["PersistentVolumeClaim"]:
            yield f"claim {claim} is not there"


def _shared_memory(spec: Json) -> Iterator[str]:
    sizes = [volume["emptyDir"]["sizeLimit"] for volume in spec.get("volumes", []) if "medium" in volume.get("emptyDir", {})]
    limits = [container["resources"]["limits"].get("memory", "0") for container in spec["containers"]]
    for size in sizes:
        if amount(size) > max(map(amount, limits)):
            yield f"shared memory of {size} is more than the memory limit"


def _resources(container: Json) -> Iterator[str]:
    requests, limits = (container.get("resources", {}).get(key, {}) for key in ("requests", "limits"))
    for name, value in (*requests.items(), *limits.items()):
        if not isinstance(value, str) or not QUANTITY.fullmatch(value):
            yield f"{name}: {value!r} is no quantity written as a string"
            return
    for name in ("cpu", "memory"):
        if name not in requests:
            yield f"requests no {name}"
            return
    if "memory" not in limits:
        yield "has no memory limit"
        return
    if amount(requests["memory"]) > amount(limits["memory"]):
        yield "requests more memory than its limit"
    exact = {name for name in (*requests, *limits) if "/" in name or name.startswith("hugepages-")}
    if CARDS in exact:
        exact |= {"cpu", "memory"}
    for name in sorted(exact):
        if requests.get(name) != limits.get(name):
            yield f"{name}: requests {requests.get(name)}, limits {limits.get(name)}: they must be equal"
    pages = requests.get("hugepages-2Mi")
    if pages and amount(pages) % (2 * 2**20):
        yield f"hugepages-2Mi: {pages} are not whole pages"


def _texts(container: Json) -> Iterator[str]:
    for word in (*container.get("command", []), *container.get("args", [])):
        if not isinstance(word, str):
            yield f"command: {word!r} is not a string"
    names = [variable["name"] for variable in container.get("env", [])]
    if len(set(names)) != len(names):
        yield f"a variable is set twice: {names}"
    for variable in container.get("env", []):
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable["name"]):
            yield f"env name {variable['name']!r}"
        if not isinstance(variable.get("value"), str) and "fieldRef" not in variable.get("valueFrom", {}):
            yield f"env {variable['name']}: {variable.get('value')!r} is not a string"
        if re.search(r"TOKEN|PASSWORD|SECRET|CREDENTIAL", variable["name"]):
            yield f"env {variable['name']} looks like a secret"
    tag = container["image"].rpartition(":")[2]
    if "/" in tag or tag in ("latest", container["image"]):
        yield f"image {container['image']} has no fixed tag"


def _container_security(container: Json, spec: Json) -> Iterator[str]:
    context = container.get("securityContext", {})
    if context.get("privileged"):
        yield "is privileged"
    if context.get("allowPrivilegeEscalation") is not False:
        yield "allows privilege escalation"
    added = set(context.get("capabilities", {}).get("add", []))
    if not added <= {"SYS_NICE"}:
        yield f"adds capabilities {sorted(added)}"
    root = spec["securityContext"].get("runAsUser") == 0
    if not root and context.get("readOnlyRootFilesystem") is not True:
        yield "may write into the image"
    if not root and context.get("capabilities", {}).get("drop") != ["ALL"]:
        yield "keeps capabilities"


def _security(spec: Json) -> Iterator[str]:
    context = spec.get("securityContext", {})
    if context.get("runAsUser") is None:
        yield "runs as whatever user the image names"
    elif context["runAsUser"] != 0 and not context.get("runAsNonRoot"):
        yield "does not insist on a user that is not root"
    if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "has no seccomp profile"
    if spec.get("automountServiceAccountToken") is not False:
        yield "mounts a token that it does not need"
    if spec.get("hostPID"):
        yield "sees the node's processes"
    if spec.get("hostIPC", False) != _has_cards(spec):
        yield "hostIPC is for pods with cards, and for all of them"
    kinds = {key for volume in spec.get("volumes", []) for key in volume} - {"name"}
    if not kinds <= {"configMap", "persistentVolumeClaim", "emptyDir"}:
        yield f"mounts {', '.join(sorted(kinds))}: more than a restricted namespace allows"


def _has_cards(spec: Json) -> bool:
    return any(CARDS in container.get("resources", {}).get("limits", {}) for container in spec["containers"])


def _network(spec: Json) -> Iterator[str]:
    if spec.get("hostNetwork") and not _has_cards(spec):
        yield "is on the node's network without cards"
    if spec.get("hostNetwork") and spec.get("dnsPolicy") != "ClusterFirstWithHostNet":
        yield "is on the node's network without dnsPolicy ClusterFirstWithHostNet, so it finds no services"


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
