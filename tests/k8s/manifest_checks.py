"""What must hold of all manifests together and is in no schema: names, references, indexes, waiting, slots and cards."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from tests.k8s.pod_checks import CARDS, check_pod

Json = dict[str, Any]

INDEXED = ("prepare", "histogram", "plan", "write")
PARALLEL = (*INDEXED, "verify")
CLUSTER_WIDE = ("Namespace",)


def check_manifests(objects: Sequence[Json], *, external: Sequence[str] = ()) -> list[str]:
    """All problems of a set of manifests that is applied together; `external` are claims that exist already."""
    kinds = ("ConfigMap", "PersistentVolumeClaim", "ServiceAccount")
    references = {kind: {item["metadata"]["name"] for item in objects if item["kind"] == kind} for kind in kinds}
    references["PersistentVolumeClaim"] |= set(external)
    problems = [*_names(objects)]
    for item in objects:
        where = f"{item['kind']} {item['metadata']['name']}"
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
    if step in ("train", "finetune") and cards > 1 and _processes(command) != cards:
        yield f"starts {_processes(command)} processes for {cards} cards"


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
    elif "JOB_COMPLETION_INDEX" in command or spec.get("completionMode"):
        yield "is Indexed, but not shared out"
    if step in PARALLEL and not re.search(r"--workers [1-9]", command):
        yield "uses as many processes as the node has cores, whatever its memory limit"
    if step not in command and step != "write-finish":
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
