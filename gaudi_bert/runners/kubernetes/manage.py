"""What a pipeline has on a cluster, to look at, read, remove, fetch: `gaudi-bert k8s status | logs | delete | open`."""

from __future__ import annotations

import base64
import binascii
import copy
import hashlib
import io
import re
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.common.errors import FailedError, GaudiBertError, InputError
from gaudi_bert.common.files import atomic_file
from gaudi_bert.common.progress import Reporter, human_bytes
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.runners.kubernetes.client import Cluster
from gaudi_bert.runners.kubernetes.follow import follow, followed_container
from gaudi_bert.runners.kubernetes.manifests import PIPELINE_LABEL, POD_LABELS, render
from gaudi_bert.runners.kubernetes.pod_problems import worst_problem
from gaudi_bert.runners.kubernetes.pods import Manifest, work_claim_name
from gaudi_bert.runners.kubernetes.problems import (
    describe_suspension,
    is_suspended,
    job_outcome,
    log_reader,
    pods_of,
    problem_of,
    workloads_of,
)
from gaudi_bert.runners.kubernetes.run import remove_and_wait

_NOT_SUBMITTED = "not submitted"


@dataclass(frozen=True)
class _StepStatus:
    """How far a step is on the cluster.

    `state` is `not submitted`, `suspended`, `waiting`, `running`, `complete`, or `failed: <reason>`; `pods` counts the pods
    in each phase, and `problem` is what it waits for or what is wrong with its pods, with the remedy.
    """

    state: str
    pods: Mapping[str, int] = field(default_factory=dict)
    problem: str | None = None

    def as_json(self) -> dict[str, Any]:
        """For machines; of a step that is not submitted, the state alone."""
        everything = {"state": self.state, "pods": dict(self.pods), "problem": self.problem}
        return {"state": self.state} if self.state == _NOT_SUBMITTED else everything

    def lines(self, step: str) -> list[str]:
        """For people."""
        pods = ", ".join(f"{count} {phase}" for phase, count in self.pods.items())
        state = f"{step}: {self.state}" + (f" ({pods})" if pods else "")
        return [state, f"  {self.problem}"] if self.problem else [state]


def status(settings: PipelineSettings, cluster: Cluster) -> dict[str, _StepStatus]:
    """How far each step is."""
    cluster.check_namespace()
    return {step: _step_status(cluster, item) for step, item in render(settings).steps.items()}


def _step_status(cluster: Cluster, item: Manifest) -> _StepStatus:
    current = _submitted(cluster, item)
    if current is None:
        return _StepStatus(_NOT_SUBMITTED)
    pods = pods_of(cluster, current)
    phases = [pod.get("status", {}).get("phase", "Unknown") for pod in pods]
    counted = {phase: phases.count(phase) for phase in sorted(set(phases))}
    outcome = job_outcome(current)
    if outcome is None and is_suspended(current):
        return _StepStatus("suspended", counted, describe_suspension(current, workloads_of(cluster, current)))
    problem = None
    if outcome is None:
        problem = problem_of(cluster, current, pods, log_reader(cluster))
    elif outcome != "complete":
        problem = worst_problem(pods, log_reader(cluster))
    return _StepStatus(
        state=outcome or ("running" if "Running" in phases else "waiting"),
        pods=counted,
        problem=None if problem is None else str(problem),
    )


def _submitted(cluster: Cluster, item: Manifest) -> Manifest | None:
    """What was submitted for a step: of its kind, or of the kind that it was when the pipeline had other settings."""
    kinds = (item["kind"], *(kind for kind in POD_LABELS if kind != item["kind"]))
    trains = item["metadata"]["labels"].get("app.kubernetes.io/component") == "train"
    for kind in kinds if trains else kinds[:1]:
        current = cluster.read(kind, item["metadata"]["name"]) if kind == item["kind"] or cluster.serves(kind) else None
        if current is not None:
            return {**current, "kind": kind}
    return None


def show_logs(settings: PipelineSettings, step: str | None, cluster: Cluster, show: Callable[[str], None]) -> int:
    """Show the logs of all pods of `step`, or of all steps, line by line; how many pods there were."""
    cluster.check_namespace()
    steps = render(settings).steps
    if step is not None and step not in steps:
        raise InputError(f"--step {step}: no such step; steps are {', '.join(steps)}")
    shown = 0
    for name, item in steps.items():
        if step not in (None, name):
            continue
        for pod in pods_of(cluster, _submitted(cluster, item) or item):
            container = followed_container(pod)
            if container is not None and pod.get("status", {}).get("phase") != "Pending":
                shown += 1
                for line in cluster.log_lines(pod["metadata"]["name"], container, follow=False):
                    show(f"[{pod['metadata']['name']}] {line.partition(' ')[2]}")
    if not shown:
        raise InputError(f"no pod of {step or settings.name} has started in namespace {cluster.namespace}; see `k8s status`")
    return shown


def delete(settings: PipelineSettings, cluster: Cluster, *, data: bool) -> list[str]:
    """Remove all Jobs of the pipeline and what they share; with `data`, the work folder too: its volume, or its objects.

    The result lists what was removed, as `Kind name`. The Jobs go first: they are gone where the store then refuses.
    """
    cluster.check_namespace()
    names = []
    # Those that kubectl applied carry a digest in their name.
    for kind in (*reversed(POD_LABELS), "ConfigMap"):
        for item in cluster.find_if_allowed(kind, f"{PIPELINE_LABEL}={settings.name}"):
            names.append((kind, item["metadata"]["name"]))
    for kind, item in render(settings).shared.items():
        if kind != "ConfigMap" and (kind != "PersistentVolumeClaim" or data):
            names.append((kind, item["metadata"]["name"]))
    removed = [f"{kind} {name}" for kind, name in names if cluster.delete(kind, name)]
    if data and settings.kubernetes.store:
        removed += _delete_objects(settings, f"{settings.kubernetes.store}/{settings.name}")
    return removed


def _delete_objects(settings: PipelineSettings, url: str) -> list[str]:
    """Remove what is below `url`, the work folder of this pipeline, and nothing else of the bucket."""
    objects = Objects(settings.store)
    urls = [f"{url}/{name}" for name in objects.list(url)]
    with ThreadPoolExecutor(settings.store.connections) as pool:
        for _ in pool.map(objects.remove, urls):
            pass
    return [f"{len(urls):,} objects below {url}"] if urls else []


# --- `k8s open`: what a run has to look at, brought to this machine
#
# A small Job, derived from that of the stage `report`, mounts the work folder, writes the page as far as the run has come,
# and sends it with TensorBoard's files through its log: that needs no other right than a run has, and no port.

_RETENTION_SECONDS = 600


@dataclass(frozen=True)
class _OpenedResults:
    """What is on this machine now.

    `tensorboard` is for `tensorboard --logdir`; None where nothing was trained, or it was too large.
    """

    report: Path
    tensorboard: Path | None

    def lines(self) -> list[str]:
        """For people."""
        curves = [] if self.tensorboard is None else [f"curves: tensorboard --logdir {self.tensorboard}"]
        return [f"page: {self.report}", *curves]


def open_results(settings: PipelineSettings, cluster: Cluster, out: Path, reporter: Reporter) -> _OpenedResults:
    """Bring the page and TensorBoard's files of a run into the folder `out`."""
    if settings.kubernetes.store:
        page = f"{settings.kubernetes.store}/{settings.name}/report.html"
        raise InputError(f"{page}: the work folder is in a store, not on the cluster; copy it with the store's own tools")
    cluster.check_namespace()
    claim = work_claim_name(settings)
    if cluster.read("PersistentVolumeClaim", claim) is None:
        raise InputError(f"no claim {claim} in namespace {cluster.namespace}: nothing has run; see `gaudi-bert k8s status`")
    item = _sender(settings, cluster)
    remove_and_wait(cluster, item["kind"], item["metadata"]["name"])
    cluster.create(item)
    reporter.say(f"{item['metadata']['name']}: a pod writes the page and sends it")
    try:
        follow(cluster, item, reporter, settings.kubernetes.start_seconds, shows_logs=False)
        files = _received_files(_log_of(cluster, item), out)
    finally:
        cluster.delete(item["kind"], item["metadata"]["name"])
    for path, data in files.items():
        with atomic_file(path) as handle:
            handle.write(data)
    boards = (out / run / "tensorboard" for run in ("train", "finetune"))
    return _OpenedResults(out / "report.html", next(filter(Path.is_dir, boards), None))


def _log_of(cluster: Cluster, item: Manifest) -> Iterator[str]:
    """The lines of the pod that has done the work, without their times."""
    for pod in pods_of(cluster, item):
        if pod.get("status", {}).get("phase") == "Succeeded":
            log = cluster.log_lines(pod["metadata"]["name"], followed_container(pod) or "", follow=False)
            return (line.partition(" ")[2] for line in log)
    raise FailedError(f"the pod of {item['metadata']['name']} was removed before its log was read; run this again")


def _sender(settings: PipelineSettings, cluster: Cluster) -> Manifest:
    """The Job that sends: what `report` is, with another command and a short life."""
    item = copy.deepcopy(render(settings, cluster.version()).steps["report"])
    item["metadata"]["name"] = f"{settings.name}-open"
    # It is not a part of a run, and a run that begins meanwhile shall not take it for one.
    del item["metadata"]["labels"][PIPELINE_LABEL]
    spec = item["spec"]
    spec["ttlSecondsAfterFinished"], spec["backoffLimit"] = _RETENTION_SECONDS, 0
    for labels in (item["metadata"]["labels"], spec["template"]["metadata"]["labels"]):
        labels["app.kubernetes.io/component"] = "open"
    pod = spec["template"]["spec"]
    del pod["initContainers"]
    (container,) = pod["containers"]
    command = container["command"]
    work = command[command.index("--work") + 1]
    # It reads no pipeline file, whose ConfigMap `kubectl apply -k` names by its content.
    pod["volumes"] = [volume for volume in pod["volumes"] if "configMap" not in volume]
    mounted = {volume["name"] for volume in pod["volumes"]}
    container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] in mounted]
    container["command"] = ["python3", "-m", "gaudi_bert.runners.kubernetes.manage", f"{work}/{settings.name}"]
    return item


# --- sending, in the pod: `python3 -m gaudi_bert.runners.kubernetes.manage WORKDIR`
#
# The files go as a compressed archive in lines of base64, with their size and SHA-256 before them, so that a log that was
# cut short is never treated as complete. A node keeps 10 MiB of a log, as a rule: TensorBoard's files are omitted where they
# would not fit.

_MOST_BYTES = 6 << 20
_LINE_BYTES = 6144
_FIRST = re.compile(r"-----BEGIN RESULTS (\d+) ([0-9a-f]{64})-----")
_LAST = "-----END RESULTS-----"
_RUNS = ("train", "finetune")


def _sent_lines(folder: Path, reporter: Reporter) -> Iterator[str]:
    """The lines that carry the results of a work folder."""
    files = [folder / "report.html", *(folder / run / "metrics.jsonl" for run in _RUNS)]
    boards = [path for run in _RUNS for path in sorted((folder / run / "tensorboard").rglob("*"))]
    data = _archive(folder, [*files, *boards])
    if len(data) > _MOST_BYTES:
        reporter.say(f"{folder}: TensorBoard's files are too large for a log and not included; copy them with `kubectl cp`")
        data = _archive(folder, files)
    if len(data) > _MOST_BYTES:
        raise FailedError(f"{folder}: the page has {human_bytes(len(data))}, too much for a log; copy it with `kubectl cp`")
    yield f"-----BEGIN RESULTS {len(data)} {hashlib.sha256(data).hexdigest()}-----"
    for start in range(0, len(data), _LINE_BYTES):
        yield base64.b64encode(data[start : start + _LINE_BYTES]).decode("ascii")
    yield _LAST


def _received_files(lines: Iterable[str], folder: Path) -> dict[Path, bytes]:
    """The files that the lines of a log carry, by their paths below `folder`.

    Raises:
        FailedError: the lines are incomplete or damaged, or a name in the archive would lead out of `folder`.
    """
    rest = iter(lines)
    first = next((match for line in rest if (match := _FIRST.fullmatch(line))), None)
    if first is None:
        raise FailedError("the pod's log holds no results; see `kubectl logs`, and copy the work folder with `kubectl cp`")
    coded = []
    for line in rest:
        if line == _LAST:
            break
        coded.append(line)
    try:
        data = b"".join(base64.b64decode(line, validate=True) for line in coded)
    except binascii.Error:
        data = b""
    if len(data) != int(first[1]) or hashlib.sha256(data).hexdigest() != first[2]:
        raise FailedError("the results in the pod's log are incomplete; copy the work folder with `kubectl cp`")
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
            members = [(folder / _name_inside(member.name), member) for member in archive if member.isfile()]
            return {path: archive.extractfile(member).read() for path, member in members}  # type: ignore[union-attr]
    except (tarfile.TarError, OSError, EOFError) as error:
        raise FailedError(
            f"the results in the pod's log cannot be unpacked ({error}); copy the work folder with `kubectl cp`"
        ) from error


def _name_inside(name: str) -> PurePosixPath:
    """The name of a file in an archive, from which no `..` and no `/` at its beginning may lead out of the folder."""
    inside = PurePosixPath(name.lstrip("/"))
    if not inside.parts or ".." in inside.parts:
        raise tarfile.ReadError(f"{name!r} leads out of the folder")
    return inside


def _archive(folder: Path, files: Iterable[Path]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for path in filter(Path.is_file, files):
            archive.add(path, str(path.relative_to(folder)))
    return content.getvalue()


def _send(folder: Path) -> int:
    """Write the page again, as far as the run has come, and send it."""
    from gaudi_bert.reporting.report import report

    try:
        report(folder)
        for line in _sent_lines(folder, Reporter()):
            sys.stdout.write(line + "\n")
    except GaudiBertError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(_send(Path(sys.argv[1])))
