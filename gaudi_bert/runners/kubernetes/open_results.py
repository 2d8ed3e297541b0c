"""Copy the report and the TensorBoard files of a run from the cluster to this machine, for `gaudi-bert k8s open`.

A small Job, derived from the Job of the stage `report`, mounts the work folder, writes a report about what exists so far,
and prints it together with the TensorBoard files to its log. `open_results` reads the log and unpacks the files. Sending
files through the log needs no open port, and no rights beyond those of a run.

A work folder in an object store is not supported here, because its files can be copied directly.
"""

from __future__ import annotations

import base64
import binascii
import copy
import hashlib
import io
import re
import sys
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from gaudi_bert.common.errors import FailedError, GaudiBertError, InputError
from gaudi_bert.common.files import atomic_file
from gaudi_bert.common.progress import Reporter, format_bytes
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.runners.kubernetes.client import Cluster
from gaudi_bert.runners.kubernetes.follow import follow, followed_container
from gaudi_bert.runners.kubernetes.manifests import render
from gaudi_bert.runners.kubernetes.pods import STEP_LABEL, Manifest, work_claim_name
from gaudi_bert.runners.kubernetes.reasons import pods_of
from gaudi_bert.runners.kubernetes.run import OPEN_COMPONENT, remove_and_wait

_RETENTION_SECONDS = 600


def open_results(settings: PipelineSettings, cluster: Cluster, out: Path, reporter: Reporter) -> dict[str, Path | None]:
    """Copy the report and the TensorBoard files of a run into the folder `out`.

    Returns:
        The path of the `report`, and the folder with the `tensorboard` files, or None if the run has none.

    Raises:
        InputError: The work folder is in an object store, or nothing has run yet.
        FailedError: The Job failed, or its log is incomplete.
    """
    if settings.kubernetes.store:
        page = f"{settings.kubernetes.store}/{settings.name}/report.html"
        raise InputError(f"{page}: the work folder is in a store, not on the cluster; copy it with the store's own tools")
    cluster.check_namespace()
    claim = work_claim_name(settings)
    if cluster.read("PersistentVolumeClaim", claim) is None:
        raise InputError(f"no claim {claim} in namespace {cluster.namespace}: nothing has run; see `gaudi-bert k8s status`")
    item = _sender(settings, cluster)
    remove_and_wait(cluster, settings, item["kind"], item["metadata"]["name"])
    cluster.create(item)
    reporter.say(f"{item['metadata']['name']}: a pod writes the page and sends it")
    try:
        follow(cluster, item, reporter, settings.kubernetes.start_seconds, shows_logs=False)
        done = [pod for pod in pods_of(cluster, item) if pod.get("status", {}).get("phase") == "Succeeded"]
        if not done:
            raise FailedError(f"the pod of {item['metadata']['name']} was removed before its log was read; run this again")
        log = cluster.log_lines(done[0]["metadata"]["name"], followed_container(done[0]) or "", follow=False)
        files = _received_files((line.partition(" ")[2] for line in log), out)
    finally:
        cluster.delete(item["kind"], item["metadata"]["name"])
    for path, data in files.items():
        with atomic_file(path) as handle:
            handle.write(data)
    boards = [folder for run in _RUNS if (folder := out / run / "tensorboard").is_dir()]
    return {"report": out / "report.html", "tensorboard": boards[0] if boards else None}


def _sender(settings: PipelineSettings, cluster: Cluster) -> Manifest:
    """Return the Job that prints the files. It is a copy of the Job of `report` with another command."""
    item = copy.deepcopy(render(settings, cluster.version()).steps["report"])
    item["metadata"]["name"] = f"{settings.name}-open"
    spec = item["spec"]
    spec["ttlSecondsAfterFinished"], spec["backoffLimit"] = _RETENTION_SECONDS, 0
    for labels in (item["metadata"]["labels"], spec["template"]["metadata"]["labels"]):
        labels[STEP_LABEL] = OPEN_COMPONENT
    pod = spec["template"]["spec"]
    del pod["initContainers"]
    (container,) = pod["containers"]
    # This Job does not read the pipeline file. The ConfigMap must not be mounted, because it has another name if the
    # pipeline was applied with `kubectl apply -k`.
    pod["volumes"] = [volume for volume in pod["volumes"] if "configMap" not in volume]
    mounted = {volume["name"] for volume in pod["volumes"]}
    container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] in mounted]
    container["command"] = ["python3", "-m", "gaudi_bert.runners.kubernetes.open_results", f"/work/{settings.name}"]
    return item


# --- sending, in the pod: `python3 -m gaudi_bert.runners.kubernetes.open_results WORKDIR`
#
# The files are sent as a compressed archive in lines of base64. The first line states the size and the SHA-256 of the
# archive, so that an incomplete log is noticed. Nodes usually keep 10 MiB of a log, so the TensorBoard files are left out if
# the archive would be too large.

_MOST_BYTES = 6 << 20
_LINE_BYTES = 6144
_FIRST = re.compile(r"-----BEGIN RESULTS (\d+) ([0-9a-f]{64})-----")
_LAST = "-----END RESULTS-----"
_RUNS = ("train", "finetune")


def _sent_lines(folder: Path, reporter: Reporter) -> Iterator[str]:
    """Yield the lines that contain the report, the metrics and the TensorBoard files of a work folder.

    Raises:
        FailedError: The report alone is too large for a log.
    """
    files = [folder / "report.html", *(folder / run / "metrics.jsonl" for run in _RUNS)]
    boards = [path for run in _RUNS for path in sorted((folder / run / "tensorboard").rglob("*"))]
    data = _archive(folder, [*files, *boards])
    if len(data) > _MOST_BYTES:
        reporter.say(f"{folder}: TensorBoard's files are too large for a log and not included; copy them with `kubectl cp`")
        data = _archive(folder, files)
    if len(data) > _MOST_BYTES:
        raise FailedError(f"{folder}: the page has {format_bytes(len(data))}, too much for a log; copy it with `kubectl cp`")
    yield f"-----BEGIN RESULTS {len(data)} {hashlib.sha256(data).hexdigest()}-----"
    for start in range(0, len(data), _LINE_BYTES):
        yield base64.b64encode(data[start : start + _LINE_BYTES]).decode("ascii")
    yield _LAST


def _received_files(lines: Iterable[str], folder: Path) -> dict[Path, bytes]:
    """Return the content of each file in the lines of a log, by its path below `folder`.

    Raises:
        FailedError: The lines are incomplete or damaged, or a file in the archive would be outside `folder`.
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
            members = [(PurePosixPath(member.name.lstrip("/")), member) for member in archive if member.isfile()]
            for inside, member in members:
                if not inside.parts or ".." in inside.parts:
                    raise tarfile.ReadError(f"{member.name!r} leads out of the folder")
            return {folder / inside: archive.extractfile(member).read() for inside, member in members}  # type: ignore[union-attr]
    except (tarfile.TarError, OSError, EOFError) as error:
        raise FailedError(
            f"the results in the pod's log cannot be unpacked ({error}); copy the work folder with `kubectl cp`"
        ) from error


def _archive(folder: Path, files: Iterable[Path]) -> bytes:
    """Return a tar.gz archive of the files that exist, with paths relative to `folder`."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for path in filter(Path.is_file, files):
            archive.add(path, str(path.relative_to(folder)))
    return content.getvalue()


def _send(folder: Path) -> int:
    """Write a report about what the work folder contains so far, print the files, and return the exit code."""
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
