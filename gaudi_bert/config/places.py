"""Settings of where stages run: images, resources, Docker, Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gaudi_bert.config.values import Bytes, EnvironmentName, ImageName, KubernetesName, Quantity, Settings, require_pattern


class ImageSettings(Settings):
    """Container images."""

    data: ImageName = Field("gaudi-bert-data", description="image of every stage that needs no TensorFlow, without tag")
    train: ImageName | None = Field(
        None,
        description="image of train, evaluate, finetune and predict, without tag; default: gaudi-bert-train-cpu, with cards "
        "gaudi-bert-train-gaudi, each with -pytorch after it where the engine is pytorch",
    )
    registry: (
        Annotated[
            str,
            require_pattern(
                r"[a-z0-9][A-Za-z0-9.:/_-]*[A-Za-z0-9]", "a registry without https://, e.g. registry.example/team"
            ),
        ]
        | None
    ) = Field(None, description="put before both names, e.g. registry.example/team")
    tag: (
        Annotated[
            str,
            require_pattern(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", "an image's tag: at most 128 letters, digits and _ . -"),
        ]
        | None
    ) = Field(None, description="default: this program's version")
    pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    pull_secret: KubernetesName | None = Field(None, description="a Secret of the namespace with the registry's credentials")


class PodResources(Settings):
    """Resources of a container that prepares, counts, plans, writes or verifies; `memory` alone is the limit, too."""

    cpu: Quantity = Field("80m", description="cores")
    cpu_limit: Quantity | None = Field(
        None, description="most cores; default: no limit, so idle cores are used; for training on cards always `cpu`"
    )
    memory: Quantity = "256Mi"
    memory_limit: Quantity | None = Field("2Gi", description="where `memory` is set: the same by default")

    @model_validator(mode="before")
    @classmethod
    def _set_default_memory_limit(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "memory" in values and "memory_limit" not in values:
            return {**values, "memory_limit": values["memory"]}
        return values


class TrainingPodResources(PodResources):
    """Resources of a container that trains."""

    cpu: Quantity = Field("200m", description="cores")
    memory: Quantity = "1Gi"
    memory_limit: Quantity | None = Field(
        "4Gi", description="where `memory` is set: the same by default; not for training on cards"
    )


class WaitingPodResources(PodResources):
    """Resources of the container in which a pod waits for the inputs of its stage, before that stage starts."""

    cpu: Quantity = Field("50m", description="cores")
    memory: Quantity = "128Mi"
    memory_limit: Quantity | None = Field("256Mi", description="where `memory` is set: the same by default")


class LauncherPodResources(WaitingPodResources):
    """Resources of the launcher of an MPIJob, which only starts the workers' processes."""

    memory_limit: Quantity | None = Field("512Mi", description="where `memory` is set: the same by default")


class ResourceSettings(Settings):
    """Workers, cards, and what each container requests."""

    workers: int = Field(1, ge=1, le=1024, description="containers that train together")
    cards: Literal[0, 1, 2, 4, 8] = Field(0, description="Gaudi cards per worker, one process for each; 0: CPU, one process")
    data_workers: int = Field(1, ge=1, le=10_000, description="containers that prepare, count, write and verify at once")
    data_processes: int = Field(2, ge=1, le=1024, description="processes or threads in each of them; each takes memory")
    data: PodResources = Field(default_factory=PodResources)
    training: TrainingPodResources = Field(default_factory=TrainingPodResources)
    waiting: WaitingPodResources = Field(default_factory=WaitingPodResources)
    launcher: LauncherPodResources = Field(default_factory=LauncherPodResources)
    hugepages_2Mi: Quantity = Field("0", description="2 MiB huge pages per training worker, e.g. 95000Mi for 8 Gaudi2 cards")
    shared_memory: Quantity = Field("256Mi", description="/dev/shm of a training worker; part of its memory")
    cores_per_process: int | None = Field(
        None, ge=1, description="bind each training process to this many cores; default: unbound"
    )
    mpi_prefix: Annotated[str, require_pattern(r"/[A-Za-z0-9._/-]+", "an absolute path")] | None = Field(
        None, description="where Open MPI is installed in the training image; default: on its PATH"
    )
    environment: dict[EnvironmentName, str] = Field(
        {}, description="more variables for training; no secrets: everyone can read them"
    )

    @property
    def processes_per_worker(self) -> int:
        """Training processes per worker: one per card, or one without cards."""
        return max(self.cards, 1)


class Toleration(Settings):
    """A taint of nodes that pods tolerate."""

    key: str | None = Field(None, description="default: any")
    operator: Literal["Equal", "Exists"] = "Equal"
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(None, description="default: any")

    @model_validator(mode="after")
    def _check_operator(self) -> Toleration:
        if self.operator == "Exists" and self.value is not None:
            raise ValueError("operator Exists takes no value; leave one of the two out")
        if self.operator == "Equal" and self.key is None:
            raise ValueError("operator Equal needs a key; give one, or set operator to Exists")
        return self


class PodPlacement(Settings):
    """Placement and marks of pods."""

    node_selector: dict[str, str] = Field({}, description="labels of the nodes")
    tolerations: tuple[Toleration, ...] = Field((), description="taints that the pods tolerate")
    affinity: dict[str, Any] = Field({}, description="as in a pod's manifest")
    priority_class: str | None = Field(None, description="a PriorityClass of the cluster")
    runtime_class: str | None = Field(None, description="a RuntimeClass of the cluster")
    labels: dict[str, str] = Field({}, description="more labels of the pods")
    annotations: dict[str, str] = Field({}, description="annotations of the pods")


class KubernetesSettings(Settings):
    """A pipeline on a Kubernetes cluster."""

    namespace: KubernetesName = "gaudi-bert"
    training: Literal["auto", "job", "mpijob", "trainjob"] = Field(
        "auto",
        description="job: one Job, whose pods meet by themselves; trainjob: run by Kubeflow Trainer, mpijob: by the MPI "
        "operator; auto: job, but mpijob for several workers of TensorFlow",
    )
    queue: KubernetesName | None = Field(
        None, description="a LocalQueue of Kueue in the namespace: every Job, MPIJob and TrainJob waits until it admits them"
    )
    version: str = Field(
        "1.24",
        pattern=r"^1\.(2[4-9]|[3-9]\d)$",
        description="of Kubernetes: rendered manifests hold nothing that it does not know; a run asks the server",
    )
    failure_policy: bool | Literal["auto"] = Field(
        "auto",
        description="podFailurePolicy and backoffLimitPerIndex: evictions cost no retry, and each part of a stage has its "
        "own retries; auto: from Kubernetes 1.29 on",
    )
    storage: Quantity = Field("10Gi", description="size of the volume with the work folder")
    storage_class: KubernetesName | None = Field(None, description="default: the cluster's default class")
    access_mode: Literal["ReadWriteOnce", "ReadWriteMany"] = Field(
        "ReadWriteOnce", description="ReadWriteMany where pods run on several nodes"
    )
    work_claim: KubernetesName | None = Field(
        None, description="an existing claim for the work folder, instead of a new one"
    )
    store: (
        Annotated[
            str,
            require_pattern(r"[a-z][a-z0-9+.-]*://[^\s@?#]*[^\s@?#/]", "a URL without a / at its end: s3://bucket/prefix"),
        ]
        | None
    ) = Field(
        None, description="s3://bucket/prefix: the work folder is there, and no volume is needed; pods work in their scratch"
    )
    store_secret: KubernetesName | None = Field(
        None, description="a Secret of the namespace with the store's credentials, as environment of the pods"
    )
    data_claim: KubernetesName | None = Field(None, description="an existing claim with text or records, read-only at /data")
    user: int = Field(1000, ge=1, description="user and group of all pods that need not be root; they must be able to write")
    node_selector: dict[str, str] = Field({}, description="labels of the nodes that train; see also training_pods")
    data_pods: PodPlacement = Field(default_factory=PodPlacement)
    training_pods: PodPlacement = Field(default_factory=PodPlacement)
    scratch: Quantity = Field("1Gi", description="size of a pod's /tmp, requested from the node as ephemeral storage")
    request_scratch: bool = Field(
        True, description="request `scratch` as ephemeral-storage; false where a ClusterQueue of Kueue does not cover that"
    )
    efa: int = Field(0, ge=0, le=16, description="EFA network devices per worker (AWS); implies the node's network")
    network_policy: bool = Field(
        True, description="let only pods that train together reach one another; not for pods on the node's network (efa)"
    )
    network_interface: Annotated[str, require_pattern(r"[A-Za-z0-9._,/-]+", "an interface such as eth0")] = Field(
        "eth0", description="the network interface between the workers"
    )
    wait_seconds: int = Field(86_400, ge=1, description="how long a stage waits for its inputs")
    start_seconds: int = Field(600, ge=1, description="how long a pod may wait for a node, a volume or an image")
    outage_seconds: int = Field(
        3600, ge=1, description="how long an unreachable API server is retried while a run is followed"
    )
    keep_seconds: int = Field(604_800, ge=60, description="a finished Job is removed after this long")

    @property
    def version_tuple(self) -> tuple[int, int]:
        """The version of Kubernetes, for comparisons: (1, 24)."""
        major, minor = self.version.split(".")
        return int(major), int(minor)


class DockerSettings(Settings):
    """A pipeline in containers on one machine. Keys for Gaudi apply only to stages with cards."""

    cpus: float | None = Field(None, gt=0, description="most cores per container; default: all")
    runtime: Annotated[str, require_pattern(r"[a-z0-9._-]+", "a runtime that Docker knows: a to z, 0 to 9 and . _ -")] = (
        Field("habana", description="Gaudi: the container runtime that brings the cards")
    )
    visible_devices: Annotated[str, require_pattern(r"all|[0-9]+(,[0-9]+)*", "all, or numbers such as 0,1")] = Field(
        "all", description="Gaudi: HABANA_VISIBLE_DEVICES"
    )
    host_network: bool = Field(False, description="Gaudi: use the host's network, as the vendor's own examples do")
    unlimited_memory_lock: bool = Field(
        False, description="Gaudi: --ulimit memlock=-1, where the driver needs it and the host allows it"
    )


class StoreSettings(Settings):
    """Access to object stores. Credentials are never here: each store's own variables and files hold them."""

    endpoint_url: (
        Annotated[str, require_pattern(r"https?://[^\s@/?#]+/?", "http:// or https:// and a host, without a path")] | None
    ) = Field(None, description="s3: your own server, e.g. https://minio.example:9000; default: AWS_ENDPOINT_URL, or AWS")
    ca_file: str | None = Field(None, description="s3: the certificates to trust, a PEM file; default: AWS_CA_BUNDLE")
    attempts: int = Field(8, ge=1, le=100, description="how often a request is tried before the command fails")
    first_pause_seconds: float = Field(
        0.5, gt=0, le=60, description="pause after the first attempt; each later pause is twice as long"
    )
    longest_pause_seconds: float = Field(30.0, gt=0, le=3600, description="the longest pause between two attempts")
    timeout_seconds: float = Field(60.0, gt=0, le=3600, description="s3: how long to wait for a silent server")
    connections: int = Field(4, ge=1, le=64, description="objects transferred at the same time")
    cache_bytes: Bytes = Field(64 * 2**30, description="training: most bytes of packed shards on the local disk")
    scratch: str | None = Field(None, description="the scratch folder; default: TMPDIR, or /tmp")
