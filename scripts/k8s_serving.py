"""Build the Kubernetes manifests that serve a model. `make k8s` writes them to the folder `serving/` of an overlay, based on
the pod that trains in this overlay.
"""

from __future__ import annotations

import copy
from typing import Any

Json = dict[str, Any]

PORT = 8080
# A replica uses one card, so it requests one eighth of the resources of a server.
ONE_CARD = {"cpu": "11", "memory": "48Gi", "habana.ai/gaudi": "1", "hugepages-2Mi": "11000Mi"}
CORES = {"requests": {"cpu": "1", "memory": "2Gi", "ephemeral-storage": "1Gi"}, "limits": {"memory": "4Gi"}}
WAITING = {"type": "AverageValue", "averageValue": "64"}
QUEUE = {"type": "Pods", "pods": {"metric": {"name": "te_queue_size"}, "target": WAITING}}
BUSY = {"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 70}}}


def serving(train: Json, claim: Json, image: str) -> dict[str, Json]:
    """Return the manifests by file name.

    Args:
        train: The training Job, whose pod specifies what the device needs.
        claim: The volume claim of the work folder that contains the model.
        image: The container image that serves the model.
    """
    namespace, instance = train["metadata"]["namespace"], train["metadata"]["labels"]["app.kubernetes.io/instance"]
    name, has_cards = f"{instance}-serve", "train-gaudi" in image
    selector = {"app.kubernetes.io/name": "gaudi-bert", "app.kubernetes.io/component": "serve"}
    selector["app.kubernetes.io/instance"] = instance

    def item(kind: str, version: str, spec: Json) -> Json:
        metadata = {"name": name, "namespace": namespace, "labels": dict(selector)}
        return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}

    scaling = {"scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name}}
    scaling |= {"minReplicas": 2, "maxReplicas": 8, "metrics": [QUEUE if has_cards else BUSY]}
    port = {"name": "http", "port": PORT, "targetPort": "http"}
    inside = {"from": [{"podSelector": {}}], "ports": [{"port": PORT, "protocol": "TCP"}]}
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "automountServiceAccountToken": False}
    files = {
        "serviceaccount.yaml": {**account, "metadata": {"name": name, "namespace": namespace, "labels": dict(selector)}},
        "deployment.yaml": item("Deployment", "apps/v1", _deployment(train, claim, image, name, selector)),
        "service.yaml": item("Service", "v1", {"selector": dict(selector), "ports": [port]}),
        "poddisruptionbudget.yaml": item(
            "PodDisruptionBudget", "policy/v1", {"maxUnavailable": 1, "selector": {"matchLabels": dict(selector)}}
        ),
        "networkpolicy.yaml": item(
            "NetworkPolicy",
            "networking.k8s.io/v1",
            {"podSelector": {"matchLabels": dict(selector)}, "policyTypes": ["Ingress"], "ingress": [inside]},
        ),
        "horizontalpodautoscaler.yaml": item("HorizontalPodAutoscaler", "autoscaling/v2", scaling),
    }
    # The metric of the queue needs an adapter for Prometheus, so the autoscaler for cards is not listed. Add it if the
    # cluster has such an adapter.
    listed = [file for file in files if not (has_cards and file.startswith("horizontal"))]
    kustomization = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": listed}
    return {**files, "kustomization.yaml": kustomization}


def _deployment(train: Json, claim: Json, image: str, name: str, selector: Json) -> Json:
    """Return the specification of the Deployment."""
    has_cards, instance = "train-gaudi" in image, selector["app.kubernetes.io/instance"]
    pod = copy.deepcopy(train["spec"]["template"]["spec"])
    (trainer,) = pod["containers"]
    for key in ("initContainers", "restartPolicy"):
        pod.pop(key, None)
    unused = {"pipeline"}
    mounts = [mount for mount in trainer["volumeMounts"] if mount["name"] not in unused]
    mounts = [{**mount, "readOnly": True} if mount["name"] == "work" else mount for mount in mounts]

    def probe(seconds: int, failures: int) -> Json:
        return {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": seconds, "failureThreshold": failures}

    container = {
        "name": "serve",
        "image": image,
        "imagePullPolicy": trainer["imagePullPolicy"],
        "command": [
            "gaudi-bert",
            "serve",
            "--model",
            f"/work/{instance}/finetune",
            "--host",
            "0.0.0.0",
            "--port",
            str(PORT),
        ],
        "env": trainer["env"],
        "ports": [{"name": "http", "containerPort": PORT}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
        "securityContext": trainer["securityContext"],
        "resources": {"requests": {**ONE_CARD, "ephemeral-storage": "1Gi"}, "limits": ONE_CARD} if has_cards else CORES,
        "startupProbe": probe(5, 180),
        "readinessProbe": probe(5, 1),
        "livenessProbe": probe(10, 6),
        # Until every node knows that this pod is stopping, new connections still arrive, so wait before the server is
        # stopped.
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "5"]}}},
    }
    pod |= {"serviceAccountName": name, "terminationGracePeriodSeconds": 40, "containers": [container]}
    pod["volumes"] = [volume for volume in pod["volumes"] if volume["name"] not in unused]
    if claim["spec"]["accessModes"] == ["ReadWriteOnce"]:
        # Only one node can mount the claim, so all replicas have to run on the same node.
        together = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": dict(selector)}}
        pod["affinity"] = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [together]}}
    template = {"metadata": {"labels": dict(selector)}, "spec": pod}
    # Stop an old replica only when a new replica is ready.
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    return {"replicas": 2, "selector": {"matchLabels": dict(selector)}, "strategy": rolling, "template": template}
