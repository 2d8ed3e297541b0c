"""Schemas: Kubernetes' own for its objects, in strict mode; for MPIJobs a small one of ours, whose pods are Kubernetes'."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]

# The oldest that nodes with Gaudi software 1.14 run, one between, and the newest.
VERSIONS = ("1.25", "1.31", "1.36")


def _object(properties: Json, required: Sequence[str] = ()) -> Json:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


_COUNT = {"type": "integer", "minimum": 0}
_REPLICA = _object(
    {
        "replicas": {"type": "integer", "minimum": 1},
        "restartPolicy": {"enum": ["Never", "OnFailure"]},
        "template": _object({"metadata": {"type": "object"}, "spec": {"type": "object"}}, ["spec"]),
    },
    ["replicas", "restartPolicy", "template"],
)
_RUN_POLICY = _object(
    {
        "cleanPodPolicy": {"enum": ["None", "Running", "All"]},
        "ttlSecondsAfterFinished": _COUNT,
        "activeDeadlineSeconds": _COUNT,
        "backoffLimit": _COUNT,
        "suspend": {"type": "boolean"},
        "schedulingPolicy": _object({"minAvailable": _COUNT, "queue": {"type": "string"}}),
    }
)
MPIJOB = _object(
    {
        "apiVersion": {"const": "kubeflow.org/v2beta1"},
        "kind": {"const": "MPIJob"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": _object(
            {
                "slotsPerWorker": {"type": "integer", "minimum": 1},
                "runLauncherAsWorker": {"type": "boolean"},
                "sshAuthMountPath": {"type": "string"},
                "launcherCreationPolicy": {"enum": ["AtStartup", "WaitForWorkersReady"]},
                "mpiImplementation": {"enum": ["OpenMPI", "Intel", "MPICH"]},
                "runPolicy": _RUN_POLICY,
                "mpiReplicaSpecs": _object({"Launcher": _REPLICA, "Worker": _REPLICA}, ["Launcher", "Worker"]),
            },
            ["mpiReplicaSpecs"],
        ),
    },
    ["apiVersion", "kind", "metadata", "spec"],
)


@functools.cache
def _validator() -> Any:
    """`kubernetes_validate`, which would read its files of a megabyte again for every object."""
    import kubernetes_validate
    from kubernetes_validate import utils

    utils.schema_contents = functools.cache(utils.schema_contents)
    return kubernetes_validate


def check_schema(item: Json, version: str) -> list[str]:
    """What the schemas of a Kubernetes version say against `item`."""
    import jsonschema

    kubernetes_validate = _validator()
    where = f"{item['kind']} {item['metadata']['name']}"
    if item["kind"] != "MPIJob":
        try:
            kubernetes_validate.validate(item, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            return [f"{where}: {error.message} at {'.'.join(map(str, error.path))}"]
        return []
    problems = [f"{where}: {error.message}" for error in jsonschema.Draft202012Validator(MPIJOB).iter_errors(item)]
    if problems:
        return problems
    for role, replica in item["spec"]["mpiReplicaSpecs"].items():
        template = replica["template"]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": role.lower()}, "spec": template["spec"]}
        problems += check_schema(pod, version)
    return problems
