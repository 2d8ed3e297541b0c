"""The pipeline file as typed, frozen settings: the one place where a default lives.

A pipeline file is YAML; every key is optional. An unknown key or a wrong value is refused with the path of the key, what is
allowed and, for a misspelt key, the nearest right one. `--set packing.depth=4` changes one value after the file is read.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from gaudi_bert.common.errors import InputError, shortened, shown
from gaudi_bert.common.yaml_text import parse_yaml

__all__ = [
    "ALGORITHMS",
    "DockerSettings",
    "GaudiSettings",
    "ImageSettings",
    "KubernetesSettings",
    "MlperfSettings",
    "ModelSettings",
    "PackingSettings",
    "PipelineSettings",
    "PodPlacement",
    "PodResources",
    "PrepareSettings",
    "ResourceSettings",
    "Toleration",
    "TrainingSettings",
    "load_pipeline",
    "pipeline_from_mapping",
]

Algorithm = Literal["nnls", "optimal", "nnlshp", "ennlshp", "spfhp", "lpfhp", "greedy", "ffd", "none"]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)

_BYTE_UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def parse_bytes(value: object) -> object:
    """`1GiB`, `128MB` or a plain number of bytes, as an int; anything else is left for pydantic to refuse."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2] not in _BYTE_UNITS:
        raise ValueError(f"{value!r} is not a size in bytes; write a number with one of B, kB, MB, GB, KiB, MiB, GiB")
    return int(float(match[1]) * _BYTE_UNITS[match[2]])


def parse_quantity(value: object) -> object:
    """A Kubernetes quantity (`500m`, `2`, `409Gi`) as the string that manifests need; 2 and 0.5 without quotes are fine."""
    text = str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not re.fullmatch(r"\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?", text):
        raise ValueError(f"{value!r} is not a quantity; write for example 500m, 2 or 16Gi")
    return text


def parse_depth(value: object) -> object:
    """A whole number in its range, as it is or as text, or `max`; all else is refused in one piece."""
    number = int(value) if isinstance(value, str) and re.fullmatch(r"\d{1,9}", value) else value
    if number != "max" and (isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MOST_DEPTH):
        raise ValueError(f"give a whole number from 1 to {MOST_DEPTH:,}, or `max` for no limit")
    return number


Quantity = Annotated[str, BeforeValidator(parse_quantity)]
KubernetesName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
ImageName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._/:-]*[a-z0-9]$")]
EnvironmentName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
MOST_DEPTH = 1024
Depth = Annotated[Annotated[int, Field(ge=1, le=MOST_DEPTH)] | Literal["max"], BeforeValidator(parse_depth)]


class Settings(BaseModel):
    """Base of all settings: frozen, no unknown keys, finite numbers; their checks are built when they are first needed."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        """`true` is no 1: pydantic would take it for one."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and annotation is not bool and bool not in get_args(annotation):
            raise ValueError("give a value, not true or false")
        return value


class PrepareSettings(Settings):
    """Plain text to unpacked examples, or where the unpacked examples already are."""

    text: str | tuple[str, ...] | None = Field(
        "python-docs", description="files, folders or globs; or `python-docs`, `python-docstrings`"
    )
    records: str | None = Field(None, description="unpacked TFRecords that exist already: nothing is prepared")
    evaluation_records: str | None = Field(None, description="held-out unpacked TFRecords that exist already")
    vocab: str | None = Field(None, description="a vocab.txt; without it one of `train_vocab` tokens is trained")
    train_vocab: int = Field(8192, ge=64, le=1_000_000, description="tokens of the vocabulary trained from the text")
    lower_case: bool = Field(True, description="lower-case and strip accents, as uncased BERT does")
    max_sequence_length: int = Field(128, ge=8, le=8192)
    max_predictions: int = Field(20, ge=1, le=8192, description="most masked positions of one sequence")
    duplicates: int = Field(5, ge=1, le=1000, description="times each document is used with other masks and pairs")
    short_sequence_probability: float = Field(0.1, ge=0, le=1)
    masked_lm_probability: float = Field(0.15, gt=0, lt=1)
    whole_word_masking: bool = False
    evaluation_fraction: float = Field(0.1, ge=0, lt=1, description="share of documents held out before duplication")
    shards: int = Field(8, ge=1, le=100_000, description="files of training examples")
    seed: int = 12345


class PackingSettings(Settings):
    """How sequences are packed into rows."""

    algorithm: Algorithm = "nnls"
    depth: Depth = Field(3, description="most sequences per pack, at most 1,024; or `max` for no limit")
    leftovers: Literal["best-fit", "complement"] = Field(
        "best-fit", description="nnls only: what the loop leaves over is packed by best fit, or padded as published"
    )
    masked_slots: int | None = Field(None, ge=1, description="Q, masked positions a pack; default max_predictions + depth")
    group_sequences: int = Field(500_000, ge=1, description="a group of files is packed within itself: at most this many")
    group_bytes: Bytes = Field(2**30, description="... and at most this many bytes")
    shard_multiple: int = Field(32, ge=1, le=4096, description="the number of shards of a group is a multiple of this")
    shard_bytes: Bytes = Field(128 * 10**6, description="a shard is at most this big")
    seed: int = 12345


class ModelSettings(Settings):
    """BERT's size, named as in Hugging Face's config.json."""

    vocab_size: int | None = Field(
        None, ge=1, description="default: the data's vocabulary, or BERT's 30522 if it is unknown"
    )
    hidden_size: int = Field(128, ge=1)
    num_hidden_layers: int = Field(2, ge=1)
    num_attention_heads: int = Field(2, ge=1)
    intermediate_size: int = Field(512, ge=1)
    hidden_act: Literal["gelu", "gelu_new", "relu"] = "gelu"
    hidden_dropout_prob: float = Field(0.1, ge=0, lt=1)
    attention_probs_dropout_prob: float = Field(0.1, ge=0, lt=1)
    max_position_embeddings: int | None = Field(None, ge=1, description="default: the data's max_sequence_length")
    type_vocab_size: int = Field(2, ge=1)
    initializer_range: float = Field(0.02, gt=0)
    layer_norm_eps: float = Field(1e-12, gt=0)
    attention: Literal["bidirectional", "causal"] = "bidirectional"

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelSettings:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}; "
                "choose a number of heads that divides it"
            )
        return self


class TrainingSettings(Settings):
    """How the model is trained."""

    device: Literal["auto", "cpu", "hpu"] = "auto"
    optimizer: Literal["adamw", "lamb"] = "adamw"
    learning_rate: float = Field(1.0e-3, gt=0)
    global_batch_sequences: int = Field(128, ge=1, description="sequences (not packs) of one update, over all workers")
    micro_batch_packs: int = Field(16, ge=1, description="packs of one forward and backward pass on one worker")
    updates: int = Field(1500, ge=1)
    warmup_updates: int = Field(100, ge=0)
    decay_power: float = Field(1.0, gt=0, description="polynomial decay to 0: 1 is linear, 0.5 the predecessor's for LAMB")
    decay_from: Literal["warmup", "start"] = Field(
        "warmup",
        description="the decay is counted from the end of the warm-up, without a step there; or from the first update, as "
        "published for LAMB: the rate falls where the warm-up ends",
    )
    weight_decay: float = Field(0.01, ge=0, description="decoupled; never of biases and layer norms")
    layer_adaptation: Literal["all", "decayed"] = Field(
        "all", description="lamb only: scale the update of all variables (as published), or of the decayed ones (MLPerf)"
    )
    beta_1: float = Field(0.9, ge=0, lt=1)
    beta_2: float = Field(0.999, ge=0, lt=1)
    epsilon: float = Field(1e-6, gt=0)
    clip_norm: float = Field(1.0, ge=0, description="largest global gradient norm, after accumulation; 0: no clipping")
    loss: Literal["token", "sequence"] = Field("token", description="masked-LM mean over tokens, or over sequences' means")
    precision: Literal["float32", "bfloat16"] = "float32"
    loss_normalization: Literal["global", "balanced", "local"] = Field(
        "global",
        description="losses are divided by what the whole update holds (any workers and micro-batches: one big batch), "
        "by what a batch holds on average, or by what each micro-batch holds (the predecessor's)",
    )
    packing_correction: Literal["batch", "betas"] = Field(
        "batch",
        description="batch: fewer packs an update, so that it stays global_batch_sequences; betas: as many packs as there "
        "would be sequences unpacked, both betas to the power of the packing factor, and fewer updates",
    )
    target_masked_lm_accuracy: float | None = Field(
        None, gt=0, le=1, description="stop when an evaluation reaches it (MLPerf: 0.72)"
    )
    init_checkpoint: str | None = Field(
        None, description="weights to start from: a checkpoint of ours, a Hugging Face folder, or a TF1 checkpoint"
    )
    save_every_updates: int = Field(500, ge=1)
    keep_checkpoints: int = Field(2, ge=1)
    evaluate_every_updates: int = Field(500, ge=1)
    evaluate_packs: int | None = Field(None, ge=1, description="packs of one evaluation during training; default: all")
    log_every_updates: int = Field(50, ge=1)
    measure_speedup: bool = Field(
        False, description="time passes over packed and unpacked rows first: the realized speed-up, for two more graphs"
    )
    threads: int | None = Field(None, ge=1, description="CPU threads of one operation; default: one a core")
    shuffle_packs: int = Field(4096, ge=1, description="buffer of the seeded shuffle while reading")
    fusion_bytes: Bytes = Field(64 * 2**20, description="several workers: gradients travel merged to at most this much")
    stall_seconds: float = Field(
        300,
        ge=1,
        description="several workers: one that shows no sign of work for so long (three times as long while it builds its "
        "graph or saves) ends the run, and is named",
    )
    watch_port: int = Field(0, ge=0, le=65_535, description="several workers: where rank 0 listens to the others; 0: any")
    seed: int = 12345


class GaudiSettings(Settings):
    """The Gaudi runtime's variables, set before its module is loaded; what the environment sets already is left alone."""

    bfloat16_list: str | None = Field(
        None, description="TF_BF16_CONVERSION, for precision bfloat16: a JSON list of operations to convert; default: ours"
    )
    recipe_cache: str | None = Field(
        None, description="TF_RECIPE_CACHE_PATH: a folder on a local disk that keeps compiled graphs from run to run"
    )
    initial_workspace_MB: int | None = Field(
        None, ge=1, description="HABANA_INITIAL_WORKSPACE_SIZE_MB: device memory set aside for the graph when it starts"
    )
    cluster_size: int | None = Field(
        None,
        ge=1,
        description="TF_PRELIMINARY_CLUSTER_SIZE: operations compiled together; 1000 for BERT-base",
    )
    hccl_memory_MB: int = Field(
        1536, ge=0, description="TF_HCCL_MEMORY_ALLOWANCE_MB: device memory kept for communication between cards"
    )
    cpu_fallback: bool = Field(
        True, description="false: TF_CPU_RUNTIME_FALLBACK=forbid, an operation that the card cannot run is an error"
    )


class MlperfSettings(Settings):
    """The log of an MLPerf submission; needs the package mlperf-logging."""

    log: bool = Field(False, description="write train/mlperf.log")
    organization: str = Field("unnamed", min_length=1, description="who submits")
    platform: str = Field("unnamed", min_length=1, description="the machine")
    division: Literal["closed", "open"] = "closed"


class ImageSettings(Settings):
    """Container images."""

    data: ImageName = Field("gaudi-bert-data", description="image of every stage that needs no TensorFlow, without tag")
    train: ImageName = Field("gaudi-bert-train-cpu", description="image of train and evaluate, without tag")
    registry: str | None = Field(
        None,
        pattern=r"^[a-z0-9][A-Za-z0-9.:/_-]*[A-Za-z0-9]$",
        description="put before both names, e.g. registry.example/team",
    )
    tag: str | None = Field(
        None, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$", description="default: this program's version"
    )
    pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    pull_secret: KubernetesName | None = Field(None, description="a Secret of the namespace with the registry's credentials")


class PodResources(Settings):
    """What one container asks for."""

    cpu: Quantity = Field("100m", description="cores; a limit only for training on cards, where request and limit are equal")
    memory: Quantity = "256Mi"
    memory_limit: Quantity | None = Field(None, description="default: the same as `memory`; not for training on cards")


class ResourceSettings(Settings):
    """Workers, cards, and what each container asks for."""

    workers: int = Field(1, ge=1, le=1024, description="containers that train together")
    cards: Literal[0, 1, 2, 4, 8] = Field(0, description="Gaudi cards a worker, one process each; 0: CPU, one process")
    data_workers: int = Field(1, ge=1, le=10_000, description="containers that prepare, count and write side by side")
    data_processes: int = Field(2, ge=1, le=1024, description="processes or threads of each of them; each takes memory")
    data: PodResources = Field(default_factory=lambda: PodResources(memory_limit="2Gi"))
    training: PodResources = Field(default_factory=lambda: PodResources(cpu="200m", memory="1Gi", memory_limit="4Gi"))
    hugepages_2Mi: Quantity = Field("0", description="2 MiB huge pages a training worker, e.g. 95000Mi for 8 Gaudi2 cards")
    shared_memory: Quantity = Field("256Mi", description="/dev/shm of a training worker; part of its memory")
    cores_per_process: int | None = Field(
        None, ge=1, description="bind each training process to so many cores; default: unbound"
    )
    mpi_prefix: str | None = Field(
        None, pattern=r"^/[A-Za-z0-9._/-]+$", description="where Open MPI lies in the training image; default: on its PATH"
    )
    environment: dict[EnvironmentName, str] = Field(
        {}, description="more variables for training; no secrets, all can read them"
    )

    @property
    def processes_per_worker(self) -> int:
        """Training processes of one worker: one a card, one without cards."""
        return max(self.cards, 1)


class Toleration(Settings):
    """A taint of nodes that pods may be put on all the same."""

    key: str | None = Field(None, description="default: any")
    operator: Literal["Equal", "Exists"] = "Equal"
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(None, description="default: any")

    @model_validator(mode="after")
    def _is_whole(self) -> Toleration:
        if self.operator == "Exists" and self.value is not None:
            raise ValueError("operator Exists takes no value; leave one of the two out")
        if self.operator == "Equal" and self.key is None:
            raise ValueError("operator Equal needs a key; give one, or set operator to Exists")
        return self

    def as_manifest(self) -> dict[str, str]:
        """As a pod spec has it."""
        return self.model_dump(exclude_none=True)

    def tolerates(self, taint: Mapping[str, Any]) -> bool:
        """Whether a pod with this toleration may be put on a node with `taint`."""
        same_key = self.key in (None, taint["key"])
        same_effect = self.effect in (None, taint["effect"])
        return same_key and same_effect and (self.operator == "Exists" or (self.value or "") == (taint.get("value") or ""))


class PodPlacement(Settings):
    """Where pods may run, and how they are marked."""

    node_selector: dict[str, str] = Field({}, description="labels of the nodes")
    tolerations: tuple[Toleration, ...] = Field((), description="taints of nodes that may be used all the same")
    affinity: dict[str, Any] = Field({}, description="as in a pod's manifest")
    priority_class: str | None = Field(None, description="a PriorityClass of the cluster")
    runtime_class: str | None = Field(None, description="a RuntimeClass of the cluster")
    labels: dict[str, str] = Field({}, description="more labels of the pods")
    annotations: dict[str, str] = Field({}, description="annotations of the pods")


class KubernetesSettings(Settings):
    """Where and how a pipeline runs on a cluster."""

    namespace: KubernetesName = "gaudi-bert"
    training: Literal["auto", "job", "mpijob"] = Field("auto", description="auto: a Job for one worker, an MPIJob for more")
    failure_policy: bool | Literal["auto"] = Field(
        "auto",
        description="podFailurePolicy and backoffLimitPerIndex, for Kubernetes 1.29 and later: evictions cost no retry, and "
        "each part of a stage has retries of its own; auto asks the server, and is true in rendered manifests",
    )
    storage: Quantity = Field("10Gi", description="size of the volume with the work folder")
    storage_class: KubernetesName | None = Field(None, description="default: the cluster's default class")
    access_mode: Literal["ReadWriteOnce", "ReadWriteMany"] = Field(
        "ReadWriteOnce", description="ReadWriteMany where pods run on several nodes"
    )
    work_claim: KubernetesName | None = Field(
        None, description="an existing claim for the work folder, instead of a new one"
    )
    data_claim: KubernetesName | None = Field(None, description="an existing claim with text or records, read-only at /data")
    user: int = Field(1000, ge=1, description="user and group of all pods that need not be root; they must be able to write")
    node_selector: dict[str, str] = Field({}, description="labels of the nodes that train; see also training_pods")
    data_pods: PodPlacement = Field(default_factory=PodPlacement)
    training_pods: PodPlacement = Field(default_factory=PodPlacement)
    scratch: Quantity = Field("1Gi", description="what a pod's /tmp may hold; it is asked of the node as ephemeral storage")
    efa: int = Field(0, ge=0, le=16, description="EFA network devices a worker (AWS); implies the node's network")
    network_interface: str = Field(
        "eth0", pattern=r"^[A-Za-z0-9._,/-]+$", description="what the workers reach one another by"
    )
    wait_seconds: int = Field(86_400, ge=1, description="how long a stage waits for what it needs")
    start_seconds: int = Field(600, ge=1, description="how long a pod may wait for a node, a volume or an image")
    outage_seconds: int = Field(
        3600, ge=1, description="how long an API server that is away is asked again while a run is followed"
    )
    keep_seconds: int = Field(604_800, ge=60, description="a finished Job is removed after this long")


class DockerSettings(Settings):
    """How a pipeline runs in containers of one machine. What is for Gaudi applies only to stages with cards."""

    cpus: float | None = Field(None, gt=0, description="cores of one container at the most; default: all")
    runtime: str = Field(
        "habana", pattern=r"^[a-z0-9._-]+$", description="Gaudi: the container runtime that brings the cards"
    )
    visible_devices: str = Field("all", pattern=r"^(all|\d+(,\d+)*)$", description="Gaudi: HABANA_VISIBLE_DEVICES")
    host_network: bool = Field(False, description="Gaudi: use the host's network, as the vendor's own examples do")
    unlimited_memory_lock: bool = Field(
        False, description="Gaudi: --ulimit memlock=-1, where the driver asks for it and the host allows it"
    )


class PipelineSettings(Settings):
    """A pipeline file, whole."""

    name: str = Field("demo", pattern=r"^[a-z]([a-z0-9-]{0,40}[a-z0-9])?$", description="also the work folder's name")
    prepare: PrepareSettings = Field(default_factory=PrepareSettings)
    packing: PackingSettings = Field(default_factory=PackingSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    training: TrainingSettings = Field(default_factory=TrainingSettings)
    gaudi: GaudiSettings = Field(default_factory=GaudiSettings)
    mlperf: MlperfSettings = Field(default_factory=MlperfSettings)
    images: ImageSettings = Field(default_factory=ImageSettings)
    resources: ResourceSettings = Field(default_factory=ResourceSettings)
    docker: DockerSettings = Field(default_factory=DockerSettings)
    kubernetes: KubernetesSettings = Field(default_factory=KubernetesSettings)

    @property
    def trains_as_mpijob(self) -> bool:
        """Whether training on a cluster takes an MPIJob, not a Job."""
        return self.kubernetes.training == "mpijob" or (self.kubernetes.training == "auto" and self.resources.workers > 1)

    @model_validator(mode="after")
    def _training_fits_the_cluster(self) -> PipelineSettings:
        if self.resources.workers > 1 and not self.trains_as_mpijob:
            raise ValueError(
                f"kubernetes.training is `job`, which is one worker, but resources.workers is {self.resources.workers}; "
                "set kubernetes.training to mpijob or auto"
            )
        if self.kubernetes.efa and not (self.resources.cards and self.trains_as_mpijob):
            raise ValueError(
                "kubernetes.efa is for an MPIJob on cards; set resources.cards and resources.workers, or efa to 0"
            )
        return self


def load_pipeline(path: Path | str | None, overrides: Iterable[str] = ()) -> PipelineSettings:
    """Read a pipeline file and apply `--set` overrides (`key.path=value`, the value read as YAML).

    Args:
        path: the YAML file; None for all defaults.
        overrides: what `--set` was given.

    Raises:
        InputError: the file is missing or not YAML, a key is unknown, a value is not allowed.
    """
    source = str(path) if path is not None else "the defaults"
    mapping: Any = {}
    if path is not None:
        try:
            mapping = parse_yaml(Path(path).read_text(encoding="utf-8"), str(path))
        except OSError as error:
            raise InputError(f"{path}: cannot read the pipeline file: {error.strerror}; check the path") from error
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: not a YAML file: {error}") from error
        if mapping is None:
            mapping = {}
        if not isinstance(mapping, dict):
            raise InputError(f"{path}: a pipeline file holds `key: value` pairs, not a {type(mapping).__name__}")
    for override in overrides:
        _apply_override(mapping, override)
    return pipeline_from_mapping(mapping, source)


def pipeline_from_mapping(mapping: Mapping[str, Any], source: str) -> PipelineSettings:
    """Validate `mapping`; `source` names where it came from in errors.

    Raises:
        InputError: as `load_pipeline`.
    """
    try:
        return PipelineSettings.model_validate(mapping)
    except ValidationError as error:
        raise InputError(f"{source}: {_first_problem(error)}") from error


def _apply_override(mapping: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise InputError(f"--set {shortened(override)}: write it as key.path=value, for example packing.depth=4")
    *parents, last = key.strip().split(".")
    for parent in parents:
        if mapping.get(parent) is None:
            mapping[parent] = {}
        mapping = mapping[parent]
        if not isinstance(mapping, dict):
            raise InputError(f"--set {shortened(override)}: {shortened(parent)} is a single value, it has no keys below it")
    value = parse_yaml(text, f"--set {shortened(override)}")
    # A version such as 9.90 is a number or a date to YAML, but a text to us.
    is_text = isinstance(value, int | float | date) and not isinstance(value, bool) and _takes_text(parents, last)
    mapping[last] = text.strip() if is_text else value


def _takes_text(parents: Sequence[str], last: str) -> bool:
    """Whether a key's values are texts, and never numbers."""
    model: Any = PipelineSettings
    for part in (*parents, last):
        field = getattr(model, "model_fields", {}).get(part)
        if field is None:
            return False
        model = field.annotation
    kinds = _plain_types(model)
    return str in kinds and not kinds & {int, float}


def _plain_types(annotation: Any) -> set[Any]:
    """The types that an annotation allows, without what is said of them: `Annotated[str, ...] | None` as str and None."""
    if get_origin(annotation) is Annotated:
        return _plain_types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return {kind for one in get_args(annotation) for kind in _plain_types(one)}
    return {annotation}


def _first_problem(error: ValidationError) -> str:
    """One line for the first problem, with the nearest right key for an unknown one."""
    problem = error.errors()[0]
    location = [str(part) for part in problem["loc"]]
    place = shortened(".".join(part for part in location if part != "constrained-int" and not part.startswith("literal[")))
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if problem["type"] == "extra_forbidden":
        known = _keys_at(location[:-1])
        near = difflib.get_close_matches(location[-1][:80], known, n=1, cutoff=0.5)
        hint = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(known)}"
        return f"unknown key `{place}`; {hint}{more}"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "string_type" and isinstance(problem["input"], int | float | date):
        message += "; put it in quotes"
    if problem["type"] == "literal_error" and isinstance(problem["input"], str):
        choices = [choice.strip("' ") for choice in re.findall(r"'[^']*'", problem["ctx"]["expected"])]
        near = difflib.get_close_matches(problem["input"][:80], choices, n=1, cutoff=0.5)
        message += f"; did you mean `{near[0]}`?" if near else ""
    return f"`{place}` = {shown(problem['input'])}: {message}{more}"


def _keys_at(location: list[str]) -> list[str]:
    """The keys allowed at a place in the pipeline file."""
    model: Any = PipelineSettings
    for part in location:
        model = model.model_fields[part].annotation
    return list(model.model_fields)
