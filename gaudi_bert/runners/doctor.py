"""Check whether this machine, a cluster or an object store can run a pipeline, for `gaudi-bert doctor`.

Each check returns a `CheckResult`, which states what was found and how to fix it. The functions `examine_host`,
`examine_cluster` and `examine_store` run all checks of a machine, a cluster or an object store. They install and change
nothing. On a cluster they only use dry runs, and the one object that they write to a store is removed again.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gaudi_bert.artefacts.object_store import ObjectStore
from gaudi_bert.common.errors import EXTRAS, GaudiBertError, install_command, supports_tensorflow
from gaudi_bert.common.files import get_store_url
from gaudi_bert.common.processor import Processor, read_processor
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.values import EngineName
from gaudi_bert.runners.kubernetes.client import KINDS, Cluster, format_object_title
from gaudi_bert.runners.kubernetes.manifests import Manifests, build_manifests, check_pods_can_read_files
from gaudi_bert.runners.kubernetes.run import dry_run_objects
from gaudi_bert.runners.kubernetes.work_claim import find_work_volume_claim


@dataclass(frozen=True)
class CheckResult:
    """The result of one check of a machine, a cluster or an object store.

    Attributes:
        check: The name of the check.
        verdict: "ok", "warning" if the pipeline may still run, or "failed" if it cannot run before the problem is fixed.
        found: What the check found.
        remedy: How to fix the problem, or "" if there is none.
    """

    check: str
    verdict: Literal["ok", "warning", "failed"]
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.verdict:<7}  {self.check}: {self.found}{remedy}"

    def as_json(self) -> dict[str, str]:
        """Return the result as a dictionary that can be written as JSON."""
        return asdict(self)


def _make_failed_result(check_name: str, error: GaudiBertError) -> CheckResult:
    """Return a failed `CheckResult` for an error. The part of the message after the last semicolon becomes the remedy."""
    finding, _, remedy = str(error).rpartition("; ")
    return CheckResult(check_name, "failed", finding, remedy)


# --- an object store


def examine_store(url: str, settings: PipelineSettings) -> CheckResult:
    """Check an object store by writing, reading, listing and removing an object with a random name.

    Args:
        url: The URL of a folder in an object store.
        settings: The settings of the pipeline, which specify how to connect to the store.

    Returns:
        The result of the check. An error of the store makes it a failed result and is not raised.
    """
    folder = get_store_url(url)
    name, content = f"gaudi-bert-doctor-{os.urandom(8).hex()}", os.urandom(64)
    # The settings may allow retries for many minutes, but here a user waits for the answer. So allow at most three attempts.
    objects = ObjectStore(settings.store.model_copy(update={"attempts": min(settings.store.attempts, 3)}))
    written = False
    try:
        objects.write(f"{folder}/{name}", content)
        written = True
        if objects.read(f"{folder}/{name}") != content or name not in objects.list(folder, direct_only=True):
            return CheckResult(
                "store",
                "failed",
                f"{folder}: an object that was read back differs from what was written",
                "use another object store",
            )
        objects.remove(f"{folder}/{name}")
    except GaudiBertError as error:
        if written:
            with suppress(GaudiBertError):
                objects.remove(f"{folder}/{name}")
        return _make_failed_result("store", error)
    return CheckResult("store", "ok", f"{folder}: writing, reading, listing and removing an object work")


# --- this machine: Python, the engines and extras, the processor, the driver of Gaudi cards, the cards, the disk
#
# The kernel driver of the host and the plugin through which a framework uses the cards must be from the same release.

_COMMAND_SECONDS = 20
# Each engine's image contains this release of the Gaudi software. The numbers must match docker/train-gaudi.Dockerfile and
# docker/train-gaudi-pytorch.Dockerfile.
_IMAGE_RELEASES: Mapping[EngineName, str] = {"tensorflow": "1.14.0", "pytorch": "1.24.0"}
_BRIDGES: Mapping[EngineName, str] = {"tensorflow": "habana-tensorflow", "pytorch": "habana-torch-plugin"}
_TENSORFLOW = "2.15"
# Each of these libraries is installed by an extra of gaudi-bert. If the library is found, the extra counts as installed.
_LIBRARIES = ("tokenizers", "matplotlib", "docker", "kubernetes", "pyarrow")
# If the work folder is in an object store, a stage keeps up to this many groups of sequences on the local disk. `doctor`
# warns if they do not fit.
_GROUPS_ON_DISK = 3


@dataclass(frozen=True)
class _HostInfo:
    """Information about this machine that the checks use, such as versions, devices and free disk space.

    Attributes:
        hl_smi: The output of `hl-smi`, or "" if the command is missing or fails.
        device_nodes: The names of the cards' device files in /dev/accel, or of /dev/hl*, which older drivers create.
        python: The major and minor version of Python.
        packages: The installed version of each package. A package that is not installed has no entry.
        missing_extras: The extras of gaudi-bert that are not installed.
        disk: Free space in the current folder, in bytes.
        processor: The processor, or None if it was not examined.
        bfloat16_shares: For each batch shape, the time in bfloat16 divided by the time in float32. It is empty if nothing
            was measured.
    """

    hl_smi: str = ""
    device_nodes: tuple[str, ...] = ()
    python: tuple[int, int] = (3, 11)
    packages: Mapping[str, str] = field(default_factory=dict)
    missing_extras: tuple[str, ...] = ()
    disk: int = 2**50
    processor: Processor | None = None
    bfloat16_shares: Mapping[str, float] = field(default_factory=dict)

    def package_version(self, package: str) -> str:
        """Return the version of a package, or "" if it is not installed."""
        return self.packages.get(package, "")

    @property
    def driver_release(self) -> str:
        """The release of the Gaudi driver, such as `1.24.0`, or "" if `hl-smi` does not report it."""
        # Newer releases of `hl-smi` also print the version of the network driver, so match only at the beginning of a line.
        return _find_version_after_pattern(r"^\|?\s*Driver Version:\s*", self.hl_smi)

    @property
    def accelerator_models(self) -> list[str]:
        """The model names of the Gaudi cards that `hl-smi` lists, such as `HL-225`."""
        return re.findall(r"^\|\s*\d+\s+(HL-\S+)", self.hl_smi, re.MULTILINE)


class HostReport(NamedTuple):
    """The results of all checks of this machine, and the information that they are based on.

    Attributes:
        results: The result of each check. Problems should be fixed in this order.
        host: The information about the machine, as a dictionary that can be written as JSON.
    """

    results: list[CheckResult]
    host: dict[str, Any]


def examine_host(settings: PipelineSettings) -> HostReport:
    """Check whether this machine can run a pipeline. Return the check results and the information about the machine."""
    host = _collect_host_info()
    return HostReport(
        _check_host(host, settings), {**asdict(host), "driver": host.driver_release, "cards": host.accelerator_models}
    )


def _collect_host_info() -> _HostInfo:
    """Collect information about this machine. A field whose value cannot be determined is left empty."""
    # Newer drivers also create a control file for each card. The patterns must match only the files of the cards.
    nodes = [path.name for pattern in ("accel/accel[0-9]*", "hl[0-9]*") for path in sorted(Path("/dev").glob(pattern))]
    names = ("tensorflow-cpu", "tensorflow", "torch", "transformers", *_BRIDGES.values())
    try:
        done = subprocess.run(["hl-smi"], capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
        hl_smi = done.stdout if done.returncode == 0 else ""
    except (OSError, subprocess.TimeoutExpired):
        hl_smi = ""
    processor, shares = read_processor(), dict[str, float]()
    if processor.multiplies_bfloat16 and find_spec("torch") is not None:
        from gaudi_bert.tasks.predict import measure_bfloat16_time_ratios

        shares = measure_bfloat16_time_ratios()
    return _HostInfo(
        hl_smi=hl_smi,
        device_nodes=tuple(nodes),
        python=sys.version_info[:2],
        packages={
            each.metadata["Name"]: each.version for name in names for each in importlib.metadata.distributions(name=name)
        },
        missing_extras=tuple(EXTRAS[library] for library in _LIBRARIES if find_spec(library) is None),
        disk=shutil.disk_usage(".").free,
        processor=processor,
        bfloat16_shares=shares,
    )


def _check_host(host: _HostInfo, settings: PipelineSettings) -> list[CheckResult]:
    """Check whether a machine can run a pipeline, and return the result of each check.

    The driver and the cards are checked only if the machine has Gaudi cards or the pipeline requests them.

    Args:
        host: The versions, devices and free disk space of the machine.
        settings: The settings of the pipeline.
    """
    here = ", ".join(EXTRAS[name] for name in _LIBRARIES if EXTRAS[name] not in host.missing_extras) or "none"
    missing = ",".join(host.missing_extras)
    lacking = f"; not installed: {missing} (to add them: {install_command(missing)})" if missing else ""
    results = [_check_engines(host, settings), CheckResult("extras", "ok", f"installed: {here}{lacking}")]
    if host.processor is not None:
        results.append(_describe_processor(host.processor, host.bfloat16_shares))
    if settings.resources.cards or host.device_nodes or host.accelerator_models:
        results += [_check_driver_release(host, settings), _check_accelerator_count(host, settings)]
    else:
        results.append(CheckResult("cards", "ok", "this machine has no cards, and the pipeline requests none"))
    needed = _GROUPS_ON_DISK * settings.packing.group_bytes
    disk = CheckResult("disk", "ok", f"{host.disk / 2**30:.1f} GiB free in the current folder")
    if host.disk < needed:
        disk = replace(
            disk, verdict="warning", remedy=f"free at least {needed / 2**30:.1f} GiB, or lower packing.group_bytes"
        )
    return [*results, disk]


def _describe_processor(processor: Processor, bfloat16_time_ratios: Mapping[str, float]) -> CheckResult:
    """Report the name of the processor, its vector instructions and its speed in bfloat16 as a `CheckResult`."""
    if not processor.multiplies_bfloat16:
        gain = "this processor does not multiply in bfloat16, so `--precision bfloat16` computes in float32"
    elif bfloat16_time_ratios:
        times = " and ".join(
            f"{share:.2f} times as long as float32 for {shape}" for shape, share in bfloat16_time_ratios.items()
        )
        gain = f"`--precision bfloat16` takes {times}"
    else:
        gain = (
            "this processor multiplies in bfloat16; install PyTorch so that this command measures how much time that saves"
        )
    return CheckResult("processor", "ok", f"{processor.name}, {processor.instructions}: {gain}")


def _check_engines(host: _HostInfo, settings: PipelineSettings) -> CheckResult:
    """Check whether TensorFlow and PyTorch can run on this machine.

    The result states for both engines that they run, or why they do not. It is a warning if neither engine runs, or if the
    engine that the pipeline names does not run.
    """
    version = host.package_version("tensorflow-cpu") or host.package_version("tensorflow")
    problem = (
        "" if version.startswith(f"{_TENSORFLOW}.") else f"version {version} is installed, but {_TENSORFLOW} is required"
    )
    if not version and supports_tensorflow(host.python):
        problem = "not installed"
    elif not version:
        problem = f"{_TENSORFLOW} does not support this version of Python"
    reasons = {"tensorflow": problem, "pytorch": "" if host.package_version("torch") else "not installed"}
    for engine, package in _BRIDGES.items():
        if host.device_nodes and not reasons[engine] and not host.package_version(package):
            reasons[engine] = f"the cards need {package}, which is not installed"
    states = [f"{engine} does not run ({reason})" if reason else f"{engine} runs" for engine, reason in reasons.items()]
    finding = f"Python {'.'.join(map(str, host.python))}: {', '.join(states)}"
    named = settings.training.engine
    if all(reasons.values()) or reasons.get(named):
        engine = "pytorch" if named == "auto" else named  # TensorFlow 2.15 lacks wheels for newer versions of Python
        vendor_build = "install the vendor's build of the framework for the release of the driver"
        remedy = vendor_build if host.device_nodes else install_command(engine)
        return CheckResult("engines", "warning", finding, f"to train with {engine}: {remedy}; or use --on docker")
    return CheckResult("engines", "ok", finding)


def _find_version_after_pattern(pattern: str, text: str) -> str:
    """Return the version number, such as `1.24.0`, that follows `pattern` in `text`. Return "" if there is none."""
    match = re.search(rf"{pattern}(\d+\.\d+\.\d+)", text, re.MULTILINE)
    return match[1] if match else ""


def _check_driver_release(host: _HostInfo, settings: PipelineSettings) -> CheckResult:
    """Check that the Gaudi driver is from the same release as the Gaudi software of the engine.

    The release of the software is that of the installed framework plugin, or that of the engine's image if no plugin is
    installed. A difference in the last number of the version is only a warning.
    """
    bridges = {engine: host.package_version(package) for engine, package in _BRIDGES.items()}
    engine = settings.training.engine
    if engine == "auto":
        engine = "tensorflow" if bridges["tensorflow"] and not bridges["pytorch"] else "pytorch"
    software, driver = _find_version_after_pattern("^", bridges[engine]) or _IMAGE_RELEASES[engine], host.driver_release
    if not driver:
        remedy = f"install the Gaudi driver {software} (habanalabs-dkms)"
        return CheckResult("driver", "failed", "hl-smi is not installed or fails", remedy)
    if driver == software:
        return CheckResult("driver", "ok", f"the driver and the software of {engine} are both from release {driver}")
    finding = f"the driver is from release {driver}, but the software of {engine} is from release {software}"
    other = next((each for each, release in _IMAGE_RELEASES.items() if release == driver), None)
    remedy = (
        f"install driver {software} on the host, or build the image from the vendor's image of release {driver} (BASE_IMAGE)"
    )
    if other is not None:
        remedy = f"set training.engine to {other}, whose image contains release {driver}, or {remedy}"
    # The last number of a version counts bug-fix releases. If only this number differs, the check warns and does not fail.
    is_close = driver.split(".")[:2] == software.split(".")[:2]
    return CheckResult("driver", "warning" if is_close else "failed", finding, remedy)


def _check_accelerator_count(host: _HostInfo, settings: PipelineSettings) -> CheckResult:
    """Check that this machine has enough Gaudi cards for the pipeline, and that `hl-smi` lists all of them."""
    requested, nodes, listed = settings.resources.cards, len(host.device_nodes), len(host.accelerator_models)
    kinds = f" ({', '.join(sorted(set(host.accelerator_models)))})" if host.accelerator_models else ""
    finding = f"{nodes} device nodes exist, hl-smi lists {listed} cards{kinds}, and the pipeline requests {requested}"
    load = "load the driver (modprobe habanalabs), or pass the devices to the container"
    if listed and not nodes:
        return CheckResult("cards", "failed", finding, load)
    if nodes < requested:
        return CheckResult("cards", "failed", finding, f"{load}, or set resources.cards to {nodes}")
    if listed and listed < nodes:
        return CheckResult(
            "cards", "warning", finding, "see `hl-smi` and `dmesg`, because a card that does not start is not listed"
        )
    return CheckResult("cards", "ok", finding)


# --- a cluster: its version, the namespace, the permissions of the account, and a dry run of all objects and pods
#
# In a dry run the server applies all rules of the cluster, such as quotas and admission policies, and creates nothing.

_OLDEST_VERSION = (1, 24)


def examine_cluster(settings: PipelineSettings, reporter: Reporter, cluster: Cluster | None = None) -> list[CheckResult]:
    """Check whether a pipeline can run on the cluster that the kubeconfig file specifies.

    Args:
        settings: The settings of the pipeline.
        reporter: Shows a message when a request is retried.
        cluster: The client of the cluster. If it is None, a new client is created.

    Returns:
        The results. Problems should be fixed in this order. If the version or the namespace fails, only the first
        three results are returned.

    Raises:
        InputError: The pipeline names files that pods cannot read, or the cluster cannot be reached.
    """
    check_pods_can_read_files(settings)  # before the first request, because such a pipeline cannot run on any cluster
    if cluster is None:
        cluster = Cluster(settings.kubernetes.namespace, say=reporter.say)
    version, namespace = cluster.read_server_version(), CheckResult("namespace", "ok", cluster.namespace)
    manifests = build_manifests(settings, version)
    try:
        cluster.check_namespace()
    except GaudiBertError as error:
        namespace = _make_failed_result("namespace", error)
    needed = _list_required_permissions(manifests, uses_queue=settings.kubernetes.queue is not None)
    missing = [
        f"{permission.verb} {permission.resource}" for permission in needed if not cluster.has_permission(*permission)
    ]
    permissions = CheckResult("rights", "ok", f"the account has all {len(needed)} rights that a run uses")
    if missing:
        permissions = CheckResult(
            "rights",
            "failed",
            f"the account may not {', '.join(missing)}",
            "ask an administrator for the Role in k8s/in-cluster",
        )
    results = [_check_kubernetes_version(version, settings), namespace, permissions]
    if any(result.verdict == "failed" for result in results[:2]):
        return results
    for dry_run in dry_run_objects(cluster, settings, (*manifests.shared, *manifests.steps.values())):
        title = format_object_title(dry_run.manifest)
        state = "the server would create the object" if dry_run.existing is None else "already exists"
        ok = CheckResult(title, "ok", state)
        results.append(ok if dry_run.error is None else _make_failed_result(title, dry_run.error))
    return [*results, _check_volume_claims(cluster, settings), *_check_pod_creation(cluster, manifests)]


def _check_kubernetes_version(server_version: tuple[int, int], settings: PipelineSettings) -> CheckResult:
    """Check that the cluster's Kubernetes version (major, minor) is supported and not older than `kubernetes.version`."""
    shown = ".".join(map(str, server_version))
    if server_version < _OLDEST_VERSION:
        return CheckResult(
            "Kubernetes",
            "failed",
            shown,
            f"upgrade the cluster to {'.'.join(map(str, _OLDEST_VERSION))} or later, which Indexed Jobs require",
        )
    if server_version < settings.kubernetes.version_tuple:
        return CheckResult(
            "Kubernetes",
            "failed",
            f"{shown} is older than kubernetes.version, which is {settings.kubernetes.version}",
            f"set kubernetes.version to '{shown}'",
        )
    return CheckResult("Kubernetes", "ok", shown)


# Not every pipeline contains objects of these kinds. The account needs permissions for a kind only if the pipeline contains
# such objects.
_OPTIONAL_KINDS = frozenset({"MPIJob", "NetworkPolicy", "Service", "TrainJob", "TrainingRuntime"})


class _Permission(NamedTuple):
    """A permission to use an API verb, such as `create`, on a resource. The name of the core API group is ""."""

    group: str
    resource: str
    verb: str


def _list_required_permissions(manifests: Manifests, *, uses_queue: bool) -> list[_Permission]:
    """Return the permissions that an account needs to run a pipeline, sorted by API group and resource."""
    unused = _OPTIONAL_KINDS - {item["kind"] for item in (*manifests.shared, *manifests.steps.values())}
    unneeded = {KINDS[kind].plural for kind in (*unused, *(() if uses_queue else ("Workload",)))}
    permissions = {_Permission(kind.group, kind.plural, verb) for kind in KINDS.values() for verb in kind.verbs}
    permissions.add(_Permission("", "pods/log", "get"))
    return sorted(permission for permission in permissions if permission.resource not in unneeded)


def _check_volume_claims(cluster: Cluster, settings: PipelineSettings) -> CheckResult:
    """Check that the volume claims for the work folder and for the user's data are bound.

    If a claim is not bound, the result contains the cluster's last warning about it. A work folder claim that does not exist
    yet is fine, because the run creates it.
    """
    try:
        claims = [find_work_volume_claim(cluster, settings)]
        if settings.kubernetes.data_claim:
            claims.append(cluster.read_object("PersistentVolumeClaim", settings.kubernetes.data_claim))
    except GaudiBertError as error:
        return _make_failed_result("volume", error)
    for claim in claims:
        phase = (claim or {}).get("status", {}).get("phase", "not bound")
        if claim is not None and phase != "Bound":
            name = claim["metadata"]["name"]
            warning = cluster.read_last_warning(name) or "the cluster reports no reason"
            remedy = "if this lasts, correct kubernetes.storage_class or access_mode, and run `gaudi-bert k8s delete --data`"
            return CheckResult("volume", "warning", f"claim {name} is {phase}: {warning}", remedy)
    return CheckResult("volume", "ok", "the volume can be used" if any(claims) else "the run creates the volume claim")


def _check_pod_creation(cluster: Cluster, manifests: Manifests) -> list[CheckResult]:
    """Check with server-side dry runs that the cluster accepts the pods of every step.

    Without this check, a rejected pod would be noticed only when a Job tries to create it. If the account may not create
    pods, return no results.
    """
    if not cluster.has_permission("", "pods", "create"):
        return []
    results = []
    for step in manifests.steps:
        for number, spec in enumerate(manifests.pod_specs_of_step(step)):
            # The run has not created the service account yet, and the cluster would reject a pod whose account does not
            # exist. So leave the account out.
            own = {key: value for key, value in spec.items() if key not in ("serviceAccountName", "serviceAccount")}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"doctor-{step}-{number}"}, "spec": own}
            try:
                cluster.create_object(pod, dry_run=True)
            except GaudiBertError as error:
                results.append(_make_failed_result(f"pods of {step}", error))
    return results or [CheckResult("pods", "ok", "the server would create the pods of every step")]
