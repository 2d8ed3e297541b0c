"""What must hold of a pod and is in no schema: volumes, resources, quantities, security. Checks yield problems as text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]

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
        if not isinstance(variable.get("value"), str):
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
    with_cards = any(CARDS in container.get("resources", {}).get("limits", {}) for container in spec["containers"])
    if spec.get("hostIPC", False) != with_cards:
        yield "hostIPC is for pods with cards, and for all of them"
    if any("secret" in volume for volume in spec.get("volumes", [])):
        yield "mounts a secret"


def _network(spec: Json) -> Iterator[str]:
    if spec.get("hostNetwork") and spec.get("dnsPolicy") != "ClusterFirstWithHostNet":
        yield "is on the node's network without dnsPolicy ClusterFirstWithHostNet, so it finds no services"
