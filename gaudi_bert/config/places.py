"""Settings of where a pipeline runs: container images, resources, Docker, Kubernetes and object stores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gaudi_bert.config.values import Bytes, EnvironmentName, ImageName, KubernetesName, Quantity, Settings, require_pattern


class ImageSettings(Settings):
    """The container images."""

    data: ImageName = Field(
        "gaudi-bert-data", description="image of the stages that need neither TensorFlow nor PyTorch, without tag"
    )
    train: ImageName | None = Field(
        None,
        description="image of train, evaluate, finetune and predict, without tag; default: gaudi-bert-train-cpu or, with "
        "cards, gaudi-bert-train-gaudi, followed by -pytorch if the engine is PyTorch",
    )
    registry: (
        Annotated[
            str,
            require_pattern(
                r"[a-z0-9][A-Za-z0-9.:/_-]*[A-Za-z0-9]", "a registry without https://, such as registry.example/team"
            ),
        ]
        | None
    ) = Field(None, description="registry that is put before both names, such as registry.example/team")
    tag: (
        Annotated[
            str,
            require_pattern(
                r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", "the tag of an image: at most 128 letters, digits and _ . -"
            ),
        ]
        | None
    ) = Field(None, description="tag of both images; default: the installed version of gaudi-bert")
    pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    pull_secret: KubernetesName | None = Field(
        None, description="name of a Secret in the namespace that contains the credentials of the registry"
    )


class PodResources(Settings):
    """Resources of a container that prepares, counts, plans, writes or verifies data.

    If only `memory` is set, it is also the limit.
    """

    cpu: Quantity = Field("80m", description="number of cores that are requested")
    cpu_limit: Quantity | None = Field(
        None,
        description="largest number of cores; by default, there is no limit, so that idle cores are used; containers that "
        "train on cards are always limited to `cpu`",
    )
    memory: Quantity = Field("256Mi", description="memory that is requested")
    memory_limit: Quantity | None = Field("2Gi", description="memory limit; default: `memory`, if that is set")

    @model_validator(mode="before")
    @classmethod
    def _use_memory_as_default_limit(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "memory" in values and "memory_limit" not in values:
            return {**values, "memory_limit": values["memory"]}
        return values


class TrainingPodResources(PodResources):
    """Resources of a container that trains."""

    cpu: Quantity = Field("200m", description="number of cores that are requested")
    memory: Quantity = Field("1Gi", description="memory that is requested")
    memory_limit: Quantity | None = Field(
        "4Gi", description="memory limit, which does not apply to training on cards; default: `memory`, if that is set"
    )


class WaitingPodResources(PodResources):
    """Resources of the container in which a pod waits for the inputs of its stage, before that stage starts."""

    cpu: Quantity = Field("50m", description="number of cores that are requested")
    memory: Quantity = Field("128Mi", description="memory that is requested")
    memory_limit: Quantity | None = Field("256Mi", description="memory limit; default: `memory`, if that is set")


class LauncherPodResources(WaitingPodResources):
    """Resources of the launcher of an MPIJob, which only starts the workers' processes."""

    memory_limit: Quantity | None = Field("512Mi", description="memory limit; default: `memory`, if that is set")


class ResourceSettings(Settings):
    """The number of workers and cards, and the resources that each container requests."""

    workers: int = Field(1, ge=1, le=1024, description="number of containers that train together")
    cards: Literal[0, 1, 2, 4, 8] = Field(
        0, description="number of Gaudi cards per worker, with one process per card; 0 trains on the CPU in one process"
    )
    data_workers: int = Field(
        1,
        ge=1,
        le=10_000,
        description="number of containers that share the work of preparing, counting, writing and verifying",
    )
    data_processes: int = Field(
        2, ge=1, le=1024, description="number of processes or threads in each of these containers; each needs memory"
    )
    data: PodResources = Field(default_factory=PodResources)
    training: TrainingPodResources = Field(default_factory=TrainingPodResources)
    waiting: WaitingPodResources = Field(default_factory=WaitingPodResources)
    launcher: LauncherPodResources = Field(default_factory=LauncherPodResources)
    hugepages_2Mi: Quantity = Field(
        "0", description="2 MiB huge pages per training worker, such as 95000Mi for 8 Gaudi2 cards"
    )
    shared_memory: Quantity = Field("256Mi", description="size of /dev/shm in a training worker, as a part of its memory")
    cores_per_process: int | None = Field(
        None, ge=1, description="bind each training process to this many cores; by default, processes are not bound"
    )
    mpi_prefix: Annotated[str, require_pattern(r"/[A-Za-z0-9._/-]+", "an absolute path")] | None = Field(
        None, description="folder of Open MPI in the training image; by default, Open MPI is found on the PATH"
    )
    environment: dict[EnvironmentName, str] = Field(
        {},
        description="additional environment variables for training; do not put secrets here, because everyone can read them",
    )

    @property
    def processes_per_worker(self) -> int:
        """The number of training processes per worker: one per Gaudi card, or one if there are no cards."""
        return max(self.cards, 1)


class Toleration(Settings):
    """A node taint that pods tolerate, in the notation of Kubernetes."""

    key: str | None = Field(None, description="default: any key")
    operator: Literal["Equal", "Exists"] = "Equal"
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(None, description="default: any effect")

    @model_validator(mode="after")
    def _check_operator(self) -> Toleration:
        if self.operator == "Exists" and self.value is not None:
            raise ValueError("operator Exists cannot be combined with a value; set only one of them")
        if self.operator == "Equal" and self.key is None:
            raise ValueError("operator Equal requires a key; set key, or set operator to Exists")
        return self


class PodPlacement(Settings):
    """The nodes on which pods run, and the labels and annotations of the pods."""

    node_selector: dict[str, str] = Field({}, description="labels that the nodes must have")
    tolerations: tuple[Toleration, ...] = Field((), description="taints of nodes that the pods tolerate")
    affinity: dict[str, Any] = Field({}, description="affinity, as in the manifest of a pod")
    priority_class: str | None = Field(None, description="name of a PriorityClass of the cluster")
    runtime_class: str | None = Field(None, description="name of a RuntimeClass of the cluster")
    labels: dict[str, str] = Field({}, description="additional labels of the pods")
    annotations: dict[str, str] = Field({}, description="annotations of the pods")


class KubernetesSettings(Settings):
    """How the pipeline runs on a Kubernetes cluster."""

    namespace: KubernetesName = "gaudi-bert"
    training: Literal["auto", "job", "mpijob", "trainjob"] = Field(
        "auto",
        description="kind of the object that trains: `job` is a Job whose pods connect to each other, `trainjob` is run by "
        "Kubeflow Trainer, and `mpijob` by the MPI operator; `auto` is mpijob for several workers of TensorFlow, and "
        "otherwise job",
    )
    queue: KubernetesName | None = Field(
        None,
        description="name of a LocalQueue of Kueue in the namespace; every Job, MPIJob and TrainJob waits until Kueue "
        "admits it",
    )
    version: str = Field(
        "1.24",
        pattern=r"^1\.(2[4-9]|[3-9]\d)$",
        description="oldest version of Kubernetes that must accept the rendered manifests; a run uses the version of the "
        "server instead",
    )
    failure_policy: bool | Literal["auto"] = Field(
        "auto",
        description="use podFailurePolicy and backoffLimitPerIndex, so that evictions cost no retry and each part of a "
        "stage has its own retries; `auto` does so from Kubernetes 1.29 on",
    )
    storage: Quantity = Field("10Gi", description="size of the volume that contains the work folder")
    storage_class: KubernetesName | None = Field(
        None, description="StorageClass of the volume; default: the default class of the cluster"
    )
    access_mode: Literal["ReadWriteOnce", "ReadWriteMany"] = Field(
        "ReadWriteOnce", description="access mode of the volume; pods on several nodes need ReadWriteMany"
    )
    work_claim: KubernetesName | None = Field(
        None, description="name of an existing claim for the work folder, which replaces the volume"
    )
    store: (
        Annotated[
            str,
            require_pattern(
                r"[a-z][a-z0-9+.-]*://[^\s@?#]*[^\s@?#/]", "a URL without a / at its end, such as s3://bucket/prefix"
            ),
        ]
        | None
    ) = Field(
        None,
        description="URL in an object store, such as s3://bucket/prefix, for the work folder; no volume is needed in this "
        "case, and pods work in their scratch folders",
    )
    store_secret: KubernetesName | None = Field(
        None,
        description="name of a Secret in the namespace with the credentials of the store, which pods get as environment "
        "variables",
    )
    data_claim: KubernetesName | None = Field(
        None, description="name of an existing claim with text or records, which is mounted read-only at /data"
    )
    user: int = Field(
        1000,
        ge=1,
        description="user and group id of all pods that need not run as root; it must have write access to the work folder",
    )
    node_selector: dict[str, str] = Field(
        {}, description="labels that the nodes for training must have; see also training_pods"
    )
    data_pods: PodPlacement = Field(default_factory=PodPlacement)
    training_pods: PodPlacement = Field(default_factory=PodPlacement)
    scratch: Quantity = Field(
        "1Gi", description="size of /tmp in a pod, which is requested as ephemeral storage of the node"
    )
    request_scratch: bool = Field(
        True,
        description="request `scratch` as ephemeral-storage; set it to false if a ClusterQueue of Kueue does not cover this "
        "resource",
    )
    efa: int = Field(
        0, ge=0, le=16, description="number of EFA network devices per worker (AWS); such pods use the network of the node"
    )
    network_policy: bool = Field(
        True,
        description="allow only pods that train together to connect to each other; does not apply to pods on the network of "
        "the node (efa)",
    )
    network_interface: Annotated[str, require_pattern(r"[A-Za-z0-9._,/-]+", "an interface such as eth0")] = Field(
        "eth0", description="network interface that connects the workers"
    )
    wait_seconds: int = Field(86_400, ge=1, description="how long a stage waits for its inputs")
    start_seconds: int = Field(600, ge=1, description="how long a pod may wait for a node, a volume or an image")
    outage_seconds: int = Field(
        3600, ge=1, description="how long a command that follows a run keeps retrying if the API server cannot be reached"
    )
    keep_seconds: int = Field(604_800, ge=60, description="how long a finished Job is kept")

    @property
    def version_tuple(self) -> tuple[int, int]:
        """The major and minor version of Kubernetes as a tuple of integers, such as (1, 24)."""
        major, minor = self.version.split(".")
        return int(major), int(minor)


class DockerSettings(Settings):
    """How the pipeline runs in Docker containers on one machine. Keys marked `Gaudi` apply only to runs on accelerators."""

    cpus: float | None = Field(None, gt=0, description="largest number of cores per container; default: all")
    runtime: Annotated[str, require_pattern(r"[a-z0-9._-]+", "a runtime that Docker knows: a to z, 0 to 9 and . _ -")] = (
        Field("habana", description="Gaudi: container runtime that makes the cards available")
    )
    visible_devices: Annotated[str, require_pattern(r"all|[0-9]+(,[0-9]+)*", "all, or numbers such as 0,1")] = Field(
        "all", description="Gaudi: HABANA_VISIBLE_DEVICES"
    )
    host_network: bool = Field(False, description="Gaudi: use the network of the host, as the vendor's examples do")
    unlimited_memory_lock: bool = Field(
        False, description="Gaudi: pass --ulimit memlock=-1, if the driver needs it and the host allows it"
    )


class StoreSettings(Settings):
    """How object stores are accessed. Credentials do not belong here, but in the environment variables or files that each
    store uses.
    """

    endpoint_url: (
        Annotated[str, require_pattern(r"https?://[^\s@/?#]+/?", "http:// or https:// and a host, without a path")] | None
    ) = Field(
        None, description="s3: URL of your own server, such as https://minio.example:9000; default: AWS_ENDPOINT_URL, or AWS"
    )
    ca_file: str | None = Field(
        None, description="s3: PEM file with the certificates that are trusted; default: AWS_CA_BUNDLE"
    )
    attempts: int = Field(8, ge=1, le=100, description="how often a request is tried before the command fails")
    first_pause_seconds: float = Field(
        0.5, gt=0, le=60, description="pause after the first attempt; each later pause is twice as long"
    )
    longest_pause_seconds: float = Field(30.0, gt=0, le=3600, description="longest pause between two attempts")
    timeout_seconds: float = Field(
        60.0, gt=0, le=3600, description="s3: how long to wait for a server that does not respond"
    )
    connections: int = Field(4, ge=1, le=64, description="number of objects that are transferred at the same time")
    cache_bytes: Bytes = Field(64 * 2**30, description="training: largest total size of the packed shards on the local disk")
    scratch: str | None = Field(None, description="folder for temporary files; default: TMPDIR, or /tmp")
