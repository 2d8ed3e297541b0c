"""Copy the report and the TensorBoard files of a run from the cluster to this machine, for `gaudi-bert k8s open`.

`copy_results` creates a small Job that mounts the work folder. It is derived from the Job of the stage `report`. The Job
writes a report about the present content of the folder, and prints the report and the TensorBoard files to its log.
`copy_results` reads the log and unpacks the files. This needs no open port, and no permissions beyond those of a run.

A work folder in an object store is not supported, because its files can be copied directly.
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
from typing import NamedTuple

from gaudi_bert.common.errors import FailedError, GaudiBertError, InputError
from gaudi_bert.common.files import atomic_file
from gaudi_bert.common.progress import Reporter, format_bytes
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.runners.kubernetes.client import Cluster
from gaudi_bert.runners.kubernetes.follow import follow_step, select_container_for_logs
from gaudi_bert.runners.kubernetes.manifests import build_manifests
from gaudi_bert.runners.kubernetes.pods import STEP_LABEL, Manifest, work_claim_name
from gaudi_bert.runners.kubernetes.reasons import list_job_pods
from gaudi_bert.runners.kubernetes.run import OPEN_COMPONENT, delete_and_wait

_RETENTION_SECONDS = 600


class CopiedResults(NamedTuple):
    """The files of a run that were copied to this machine.

    Attributes:
        report: The path of the report.
        tensorboard: The folder with the TensorBoard files, or None if the run has none.
    """

    report: Path
    tensorboard: Path | None


def copy_results(settings: PipelineSettings, cluster: Cluster, output_folder: Path, reporter: Reporter) -> CopiedResults:
    """Copy the report and the TensorBoard files of a run from the cluster to `output_folder`.

    Raises:
        InputError: The work folder is in an object store, or nothing has run yet.
        FailedError: The Job failed, or its log is incomplete.
    """
    if settings.kubernetes.store:
        page = f"{settings.kubernetes.store}/{settings.name}/report.html"
        raise InputError(
            f"{page}: the work folder is in an object store and not on the cluster; copy the page with the tools of the "
            "store"
        )
    cluster.check_namespace()
    claim = work_claim_name(settings)
    if cluster.read_object("PersistentVolumeClaim", claim) is None:
        raise InputError(
            f"volume claim {claim} does not exist in namespace {cluster.namespace}, so nothing has run; see `gaudi-bert k8s "
            "status`"
        )
    job = _build_job_that_prints_results(settings, cluster)
    delete_and_wait(cluster, settings, job["kind"], job["metadata"]["name"])
    cluster.create_object(job)
    reporter.say(f"{job['metadata']['name']}: a pod writes the report and prints it to its log")
    try:
        follow_step(cluster, job, reporter, settings.kubernetes.start_seconds, show_logs=False)
        done = [pod for pod in list_job_pods(cluster, job) if pod.get("status", {}).get("phase") == "Succeeded"]
        if not done:
            raise FailedError(
                f"the pod of {job['metadata']['name']} was deleted before its log was read; run the same command again"
            )
        log = cluster.read_log_lines(done[0]["metadata"]["name"], select_container_for_logs(done[0]) or "", follow=False)
        files = _decode_results_from_log((line.partition(" ")[2] for line in log), output_folder)
    finally:
        cluster.delete_object(job["kind"], job["metadata"]["name"])
    for path, data in files.items():
        with atomic_file(path) as handle:
            handle.write(data)
    boards = [folder for run in _RUNS if (folder := output_folder / run / "tensorboard").is_dir()]
    return CopiedResults(output_folder / "report.html", boards[0] if boards else None)


def _build_job_that_prints_results(settings: PipelineSettings, cluster: Cluster) -> Manifest:
    """Build a Job that prints the result files of a run to its log, based on the Job of the stage `report`."""
    job = copy.deepcopy(build_manifests(settings, cluster.read_server_version()).steps["report"])
    job["metadata"]["name"] = f"{settings.name}-open"
    spec = job["spec"]
    spec["ttlSecondsAfterFinished"], spec["backoffLimit"] = _RETENTION_SECONDS, 0
    for labels in (job["metadata"]["labels"], spec["template"]["metadata"]["labels"]):
        labels[STEP_LABEL] = OPEN_COMPONENT
    pod = spec["template"]["spec"]
    del pod["initContainers"]
    (container,) = pod["containers"]
    # `kubectl apply -k` gives the ConfigMap another name, so the pod of this Job could not mount it. The pod does not need
    # the pipeline file in the ConfigMap, so leave the volume out.
    pod["volumes"] = [volume for volume in pod["volumes"] if "configMap" not in volume]
    mounted = {volume["name"] for volume in pod["volumes"]}
    container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] in mounted]
    container["command"] = ["python3", "-m", "gaudi_bert.runners.kubernetes.open_results", f"/work/{settings.name}"]
    return job


# --- sending, in the pod: `python3 -m gaudi_bert.runners.kubernetes.open_results WORKDIR`
#
# The files are sent as a compressed archive in base64 lines. The first line contains the size and the SHA-256 of the
# archive, so that an incomplete log is noticed. Nodes usually keep 10 MiB of a log, so the TensorBoard files are left out if
# the archive would be too large.

_MOST_BYTES = 6 << 20
_LINE_BYTES = 6144
_FIRST = re.compile(r"-----BEGIN RESULTS (\d+) ([0-9a-f]{64})-----")
_LAST = "-----END RESULTS-----"
_RUNS = ("train", "finetune")


def _iterate_results_as_base64_lines(work_folder: Path, reporter: Reporter) -> Iterator[str]:
    """Pack the report, the metrics and the TensorBoard files of a work folder into an archive, and yield it as base64 lines.

    Raises:
        FailedError: The report alone is too large for a log.
    """
    files = [work_folder / "report.html", *(work_folder / run / "metrics.jsonl" for run in _RUNS)]
    boards = [path for run in _RUNS for path in sorted((work_folder / run / "tensorboard").rglob("*"))]
    data = _create_tar_gz(work_folder, [*files, *boards])
    if len(data) > _MOST_BYTES:
        reporter.say(
            f"{work_folder}: the TensorBoard files are too large for a log, so they are left out; copy them with `kubectl "
            "cp`"
        )
        data = _create_tar_gz(work_folder, files)
    if len(data) > _MOST_BYTES:
        raise FailedError(
            f"{work_folder}: the report is too large for a log ({format_bytes(len(data))}); copy it with `kubectl cp`"
        )
    yield f"-----BEGIN RESULTS {len(data)} {hashlib.sha256(data).hexdigest()}-----"
    for start in range(0, len(data), _LINE_BYTES):
        yield base64.b64encode(data[start : start + _LINE_BYTES]).decode("ascii")
    yield _LAST


def _decode_results_from_log(log_lines: Iterable[str], output_folder: Path) -> dict[Path, bytes]:
    """Decode the files that `_iterate_results_as_base64_lines` wrote to a log.

    Return the content of each file, by its path in `output_folder`.

    Raises:
        FailedError: The lines are incomplete or damaged, or a file in the archive would be outside `output_folder`.
    """
    rest = iter(log_lines)
    first = next((match for line in rest if (match := _FIRST.fullmatch(line))), None)
    if first is None:
        raise FailedError(
            "the log of the pod contains no results; see `kubectl logs`, and copy the work folder with `kubectl cp`"
        )
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
        raise FailedError("the results in the log of the pod are incomplete; copy the work folder with `kubectl cp`")
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
            members = [(PurePosixPath(member.name.lstrip("/")), member) for member in archive if member.isfile()]
            for inside, member in members:
                if not inside.parts or ".." in inside.parts:
                    raise tarfile.ReadError(f"{member.name!r} is outside the folder")
            return {output_folder / inside: archive.extractfile(member).read() for inside, member in members}  # type: ignore[union-attr]
    except (tarfile.TarError, OSError, EOFError) as error:
        raise FailedError(
            f"the results in the log of the pod cannot be unpacked ({error}); copy the work folder with `kubectl cp`"
        ) from error


def _create_tar_gz(folder: Path, files: Iterable[Path]) -> bytes:
    """Return a tar.gz archive of the files that exist. The paths in the archive are relative to `folder`."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for path in filter(Path.is_file, files):
            archive.add(path, str(path.relative_to(folder)))
    return content.getvalue()


def _write_and_print_results(work_folder: Path) -> int:
    """Write a report about the work folder, print the encoded result files, and return the exit code."""
    from gaudi_bert.reporting.report import report

    try:
        report(work_folder)
        for line in _iterate_results_as_base64_lines(work_folder, Reporter()):
            sys.stdout.write(line + "\n")
    except GaudiBertError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(_write_and_print_results(Path(sys.argv[1])))
