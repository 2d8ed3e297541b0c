"""Pods that keep the work folder in an object store: no volume, but scratch on the node, and credentials from a Secret.

The scratch is what pods have at /tmp (`kubernetes.scratch`). The component `k8s/components/object-store` does the same for
kubectl.
"""

from __future__ import annotations

from gaudi_bert.config import PipelineSettings
from gaudi_bert.runners.kubernetes.kustomize import Manifest
from gaudi_bert.runners.kubernetes.pods import pod_specs
from gaudi_bert.runners.pod_resources import quantity_value

__all__ = ["cache_bytes", "use_store"]

_WORK = "work"


def use_store(settings: PipelineSettings, item: Manifest) -> None:
    """Let the pods of a Job or MPIJob work in `kubernetes.store`."""
    store, secret = settings.kubernetes.store, settings.kubernetes.store_secret
    if store is None:
        return
    for spec in pod_specs(item):
        spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] != _WORK]
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            if "volumeMounts" in container:
                container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] != _WORK]
            command = container["command"]
            if "--work" in command:
                command[command.index("--work") + 1] = store
                if secret:
                    container["envFrom"] = [{"secretRef": {"name": secret}}]


def cache_bytes(settings: PipelineSettings) -> int:
    """How much of a training pod's scratch packed shards may take: no more than half."""
    return min(settings.store.cache_bytes, int(quantity_value(settings.kubernetes.scratch)) // 2)
