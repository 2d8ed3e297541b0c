"""Brings what a run on a cluster has to look at to this machine: `gaudi-bert k8s open`.

A small Job, made of that of the stage `report`, mounts the work folder, writes the page as far as the run has come, and
sends it with TensorBoard's files through its log: that needs no right that a run does not have, and no port to be reached.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import atomic_file
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import PipelineSettings
from gaudi_bert.runners.kubernetes.client import Cluster
from gaudi_bert.runners.kubernetes.follow import follow, pods_of
from gaudi_bert.runners.kubernetes.kustomize import Manifest
from gaudi_bert.runners.kubernetes.logs import followed_container
from gaudi_bert.runners.kubernetes.manifests import PIPELINE_LABEL, render
from gaudi_bert.runners.kubernetes.pods import work_claim_name
from gaudi_bert.runners.kubernetes.run import remove_and_wait
from gaudi_bert.runners.send_results import received_files

__all__ = ["OpenedResults", "open_results"]

KEPT_SECONDS = 600


@dataclass(frozen=True)
class OpenedResults:
    """What is on this machine now.

    Attributes:
        report: the page.
        tensorboard: the folder for `tensorboard --logdir`; None where nothing was trained, or it was too large.
    """

    report: Path
    tensorboard: Path | None

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {"report": str(self.report), "tensorboard": None if self.tensorboard is None else str(self.tensorboard)}


def open_results(settings: PipelineSettings, cluster: Cluster, out: Path, reporter: Reporter) -> OpenedResults:
    """Bring the page and TensorBoard's files of a run into the folder `out`.

    Raises:
        InputError: there is no work folder on the cluster, or nothing in it.
        FailedError: the Job cannot start or fails, or its log is not whole.
    """
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
        files = received_files(_log_of(cluster, item))
    finally:
        cluster.delete(item["kind"], item["metadata"]["name"])
    for name, data in files.items():
        with atomic_file(out / name) as handle:
            handle.write(data)
    boards = (out / run / "tensorboard" for run in ("train", "finetune"))
    return OpenedResults(out / "report.html", next(filter(Path.is_dir, boards), None))


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
    # It is no part of a run, and a run that begins meanwhile shall not take it for one.
    del item["metadata"]["labels"][PIPELINE_LABEL]
    spec = item["spec"]
    spec["ttlSecondsAfterFinished"], spec["backoffLimit"] = KEPT_SECONDS, 0
    for labels in (item["metadata"]["labels"], spec["template"]["metadata"]["labels"]):
        labels["app.kubernetes.io/component"] = "open"
    pod = spec["template"]["spec"]
    del pod["initContainers"]
    command = pod["containers"][0]["command"]
    work = command[command.index("--work") + 1]
    pod["containers"][0]["command"] = ["python3", "-m", "gaudi_bert.runners.send_results", f"{work}/{settings.name}"]
    return item
