"""The pods of an Indexed Job as Kubeflow Trainer takes them: a TrainJob has their number, a TrainingRuntime their template.

Trainer makes a JobSet of them, and sets the variables by which they meet in the container `node`.
"""

from __future__ import annotations

import copy

from gaudi_bert.common.launch import NODE_ADDRESS, NODE_VARIABLES
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.runners.kubernetes.kustomizations import Manifest

_TRAINER = "trainer.kubeflow.org"


def as_trainjob(settings: PipelineSettings, job: Manifest) -> tuple[Manifest, Manifest]:
    """The TrainJob and its TrainingRuntime that run the pods of `job`."""
    metadata, spec = job["metadata"], copy.deepcopy(job["spec"])
    for key in ("completions", "parallelism", "completionMode", "ttlSecondsAfterFinished"):
        del spec[key]
    pod = spec["template"]["spec"]
    del pod["subdomain"]
    container = pod["containers"][0]
    container["name"] = "node"
    theirs = ("JOB_NAME", NODE_ADDRESS, *NODE_VARIABLES)
    container["env"] = [variable for variable in container["env"] if variable["name"] not in theirs]
    node = {"metadata": {"labels": {f"{_TRAINER}/trainjob-ancestor-step": "trainer"}}, "spec": spec}
    workers, processes = settings.resources.workers, settings.resources.processes_per_worker
    runtime = {
        "apiVersion": f"{_TRAINER}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {**metadata, "labels": {**metadata["labels"], f"{_TRAINER}/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": workers, "torch": {}},
            "template": {"spec": {"replicatedJobs": [{"name": "node", "template": node}]}},
        },
    }
    train_job = {
        "apiVersion": f"{_TRAINER}/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": {
            "runtimeRef": {"apiGroup": _TRAINER, "kind": "TrainingRuntime", "name": metadata["name"]},
            "trainer": {"numNodes": workers, "numProcPerNode": processes},
        },
    }
    return train_job, runtime
