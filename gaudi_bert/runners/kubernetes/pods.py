"""The pods of a step: containers, volumes, rights, where they run; all from the pipeline file.

A pod of a Job waits for its inputs, then runs one stage. An MPIJob has two kinds of pods: a launcher, which runs mpirun, and
workers, whose sshd starts the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gaudi_bert.common.launch import NODE_ADDRESS, NODE_VARIABLES
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.places import PodPlacement, PodResources, ResourceSettings
from gaudi_bert.runners.launch import EFA_SSH_PORT, ROOT_SSH_PORT, SSH_KEY, USER_SSH_PORT, card_variables, training_command
from gaudi_bert.runners.stage_table import STEPS, Stage, quantity_value, stage_engine, stage_image

Manifest = dict[str, Any]

APP_LABELS = {"app.kubernetes.io/name": "gaudi-bert", "app.kubernetes.io/managed-by": "gaudi-bert"}
STEP_LABEL = "app.kubernetes.io/component"
# Every Helm release sets the standard label `app.kubernetes.io/instance`, so only a label of our own domain tells which
# pipeline an object belongs to.
PIPELINE_LABEL = "gaudi-bert.io/pipeline"
CARD_RESOURCE = "habana.ai/gaudi"
_EFA_RESOURCE = "vpc.amazonaws.com/efa"
_HUGE_PAGES = "hugepages-2Mi"
_MEBIBYTE = 2**20
DATA_FOLDER = "/data"
_PIPELINE_FILE = "/etc/gaudi-bert/pipeline.yaml"
# Next to the pipeline in its ConfigMap, mounted as /etc/passwd.
USER_NAME_FILE = "passwd"
_IMAGE_USER = 1000
# Training has so long to save a checkpoint when it is stopped.
_GRACE_SECONDS = 120
_RECIPES = "/var/cache/gaudi-bert"
# Compiled graphs are stored on the node's own disk: their locks do not work on network file systems.
_CARD_VARIABLES = card_variables(_RECIPES)
_EFA_VARIABLES = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "HCCL_OVER_OFI": "1", "RDMAV_FORK_SAFE": "1"}
# What ranks on other pods get of the launcher's environment; `stop_ranks` writes out the names that exist.
_CREDENTIALS = ("AWS_*", "AZURE_*", "GOOGLE_*")
# The vendor's software runs as root, and sets scheduling priorities (SYS_NICE).
_ROOT = {"allowPrivilegeEscalation": False, "capabilities": {"add": ["SYS_NICE"]}}
_USER = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}


def own_labels(settings: PipelineSettings) -> dict[str, str]:
    """Return the labels that every object of a pipeline carries, and its pods.

    Not the standard label `app.kubernetes.io/instance`, by which the Service of a Helm release might select our pods.
    """
    return {**APP_LABELS, PIPELINE_LABEL: settings.name}


def stage_pod(settings: PipelineSettings, step: str, *, by_trainer: bool = False) -> Manifest:
    """Return the pod template of a step's Job; `by_trainer`: of a TrainJob, whose controller tells pods who they are."""
    stage = STEPS[step]
    on_nodes = step == "train" and settings.trains_on_nodes
    if stage.distributed and not on_nodes:
        # A Job of one pod is one worker with all of its cards, whatever the pipeline's MPIJob has.
        resources = settings.resources.model_copy(update={"workers": 1})
        kubernetes = settings.kubernetes.model_copy(update={"efa": 0})
        settings = settings.model_copy(update={"resources": resources, "kubernetes": kubernetes})
    cards = stage.trains and settings.resources.cards > 0
    spec: Manifest = {"restartPolicy": "Never", **_pod(settings, as_root=cards)}
    volumes = ["pipeline", "work", "scratch"]
    if stage.distributed:
        spec["terminationGracePeriodSeconds"] = _GRACE_SECONDS
        volumes += ["shared-memory"] + (["recipe-cache"] if cards else [])
    if cards:
        spec["hostIPC"] = True
    environment: list[Manifest] = [{"name": "HOME", "value": "/tmp"}]
    if on_nodes and not by_trainer:
        # The Job names its pods' hosts JOB-0, JOB-1, ...; the Service of this name makes these resolve.
        spec["subdomain"] = f"{settings.name}-train"
        environment += _node_variables(settings)
    if stage.distributed:
        environment = _environment(settings, environment, _CARD_VARIABLES if cards else {})
    container = {
        **_container("node" if by_trainer else stage.name, settings, stage, _command(settings, step), environment, volumes),
        "securityContext": _ROOT if cards else _USER,
        "resources": _resources(settings, stage),
    }
    spec |= {
        "initContainers": [_waiting(settings, step)],
        "containers": [container],
        "volumes": _storage(settings, volumes)[0],
    }
    placement = settings.kubernetes.data_pods
    if stage.trains:
        placement = _training_placement(settings) if stage.distributed else settings.kubernetes.training_pods
    return _placed(settings, step, spec, placement)


def launcher_pod(settings: PipelineSettings) -> Manifest:
    """Return the pod template of the launcher of an MPIJob, which runs mpirun and may be on any node."""
    stage, cards = STEPS["train"], settings.resources.cards > 0
    of_cards = _CARD_VARIABLES | (_EFA_VARIABLES if settings.kubernetes.efa else {})
    given: list[Manifest] = [] if cards else [{"name": "HOME", "value": "/tmp"}]
    environment = _environment(settings, given, of_cards if cards else {})
    names = [variable["name"] for variable in environment]
    command = training_command(
        settings,
        _run(settings, "--stages", "train"),
        over_ssh=True,
        variables=(*names, *(_CREDENTIALS if settings.kubernetes.store else ())),
        ssh_port=_ssh_port(settings),
        ssh_key=None if cards else SSH_KEY,
    )
    container = {
        **_container("train", settings, stage, command, environment, ["scratch"]),
        "securityContext": {"allowPrivilegeEscalation": False} if cards else _USER,
        "resources": _with_scratch(settings, _of_pod(settings.resources.launcher)),
    }
    container["volumeMounts"] += _user_name(settings)
    spec = {
        **_pod(settings, as_root=cards),
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "initContainers": [_waiting(settings, "train")],
        "containers": [container],
        "volumes": _storage(settings, ["pipeline", "work", "scratch"])[0],
    }
    placement = _training_placement(settings).model_copy(update={"node_selector": {}, "affinity": {}, "runtime_class": None})
    return _placed(settings, "train", spec, placement)


def worker_pod(settings: PipelineSettings) -> Manifest:
    """Return the pod template of the workers of an MPIJob, where sshd listens and starts the ranks."""
    stage, cards = STEPS["train"], settings.resources.cards > 0
    volumes = ["pipeline", "work", "shared-memory", "scratch", *(["recipe-cache"] if cards else [])]
    environment = [] if cards else [{"name": "HOME", "value": "/tmp"}]
    container = {
        **_container("worker", settings, stage, ["/bin/sh", "-c", _sshd(settings)], environment, volumes),
        # sshd takes its ranks along when it is stopped: they save first.
        "lifecycle": {"preStop": {"exec": {"command": ["python3", "-m", "gaudi_bert.runners.stop_ranks", "here"]}}},
        "readinessProbe": {"tcpSocket": {"port": _ssh_port(settings)}, "periodSeconds": 2},
        "securityContext": _ROOT if cards else _USER,
        "resources": _resources(settings, stage),
    }
    del container["terminationMessagePolicy"]  # sshd's log tells nothing of the ranks
    container["volumeMounts"] += _user_name(settings)
    spec = {
        **_pod(settings, as_root=cards),
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "containers": [container],
        "volumes": _storage(settings, volumes)[0],
    }
    if cards:
        spec["hostIPC"] = True
    if settings.kubernetes.efa:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return _placed(settings, "train-worker", spec, _training_placement(settings))


# --- what pods have in common


def _pod(settings: PipelineSettings, *, as_root: bool) -> Manifest:
    """Account, rights and secrets of a pod. Stages read and write files only, so none mounts the account's token."""
    user = settings.kubernetes.user
    rights: Manifest = {"runAsUser": 0}
    if not as_root:
        rights = {"runAsNonRoot": True, "runAsUser": user, "runAsGroup": user, "fsGroup": user}
        rights["fsGroupChangePolicy"] = "OnRootMismatch"
    secret = settings.images.pull_secret
    return {
        "serviceAccountName": f"{settings.name}-stages",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {**rights, "seccompProfile": {"type": "RuntimeDefault"}},
        **({"imagePullSecrets": [{"name": secret}]} if secret else {}),
    }


def _container(
    name: str,
    settings: PipelineSettings,
    stage: Stage,
    command: Sequence[str],
    environment: Sequence[Manifest],
    volumes: Sequence[str],
) -> Manifest:
    """A container of a pod with these `volumes`; what reads the work folder in a store has the store's credentials."""
    secret = settings.kubernetes.store_secret
    return {
        "name": name,
        "image": stage_image(settings, stage),
        "imagePullPolicy": settings.images.pull_policy,
        "command": list(command),
        **({"env": list(environment)} if environment else {}),
        **({"envFrom": [{"secretRef": {"name": secret}}]} if secret and "--work" in command else {}),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _storage(settings, volumes)[1],
    }


def _waiting(settings: PipelineSettings, step: str) -> Manifest:
    words = ["gaudi-bert", "wait", _PIPELINE_FILE, "--work", _work(settings), "--for", step]
    command = [*words, "--timeout", str(settings.kubernetes.wait_seconds)]
    home, volumes = [{"name": "HOME", "value": "/tmp"}], ["pipeline", "work", "scratch"]
    container = _container("wait", settings, STEPS[step], command, home, volumes)
    for mount in container["volumeMounts"]:
        if mount["name"] == "work":
            mount["readOnly"] = True
    return {**container, "securityContext": _USER, "resources": _of_pod(settings.resources.waiting)}


def _work(settings: PipelineSettings) -> str:
    return settings.kubernetes.store or "/work"


def _run(settings: PipelineSettings, *options: str) -> list[str]:
    return ["gaudi-bert", "run", _PIPELINE_FILE, "--work", _work(settings), *options]


def _command(settings: PipelineSettings, step: str) -> list[str]:
    stage, resources = STEPS[step], settings.resources
    command = _run(settings, "--stages", stage.name)
    if step != stage.name:
        return [*command, "--finish"]
    if stage.parallel:
        # As many as a pod's memory is meant for, however many cores the node has.
        command += ["--workers", str(resources.data_processes)]
    if stage.shared:
        command += ["--shard", f"$(JOB_COMPLETION_INDEX)/{resources.data_workers}"]
    if step == "finetune":
        command += ["--set", "resources.workers=1", "--set", "kubernetes.efa=0"]
    starts_itself = step == "train" and settings.trains_on_nodes
    if stage.distributed and not starts_itself and stage_engine(settings, stage) == "tensorflow":
        return training_command(settings, command, over_ssh=False)
    return command


# With cards, requests equal limits in everything: extended resources and huge pages allow nothing else, and a pod with
# reserved cores and memory is evicted last. Without cards, cores are only requested unless `cpu_limit` is set, so that idle
# cores are used.


def _resources(settings: PipelineSettings, stage: Stage) -> Manifest:
    resources = settings.resources
    if stage.trains and resources.cards:
        requests = _of_all_cards(settings) if stage.distributed else _of_one_card(resources)
        return _with_scratch(settings, {"requests": requests, "limits": dict(requests)})
    return _with_scratch(settings, _of_pod(resources.training if stage.trains else resources.data))


def _of_pod(pod: PodResources) -> Manifest:
    """Return the requests and limits of a container without cards."""
    limits = {"cpu": pod.cpu_limit} if pod.cpu_limit else {}
    return {
        "requests": {"cpu": pod.cpu, "memory": pod.memory},
        "limits": {**limits, "memory": pod.memory_limit or pod.memory},
    }


def _of_all_cards(settings: PipelineSettings) -> dict[str, str]:
    resources = settings.resources
    requests = {"cpu": resources.training.cpu, "memory": resources.training.memory, CARD_RESOURCE: str(resources.cards)}
    if quantity_value(resources.hugepages_2Mi):
        requests[_HUGE_PAGES] = resources.hugepages_2Mi
    if settings.kubernetes.efa:
        requests[_EFA_RESOURCE] = str(settings.kubernetes.efa)
    return requests


def _of_one_card(resources: ResourceSettings) -> dict[str, str]:
    """Return one card and its share of a training worker, for evaluation."""
    memory = int(quantity_value(resources.training.memory) / resources.cards / _MEBIBYTE)
    cores = int(quantity_value(resources.training.cpu) * 1000 / resources.cards)
    requests = {
        "cpu": str(cores // 1000) if cores >= 1000 else f"{max(cores, 1)}m",
        "memory": f"{memory}Mi",
        CARD_RESOURCE: "1",
    }
    # An integer number of pages of 2 MiB.
    huge_pages = int(quantity_value(resources.hugepages_2Mi) / resources.cards / (2 * _MEBIBYTE)) * 2
    if huge_pages:
        requests[_HUGE_PAGES] = f"{huge_pages}Mi"
    return requests


def _with_scratch(settings: PipelineSettings, resources: Manifest) -> Manifest:
    """Ask for the node's disk that a pod's /tmp may take, so that a full node is not chosen."""
    if not settings.kubernetes.request_scratch:
        return resources
    return {**resources, "requests": {**resources["requests"], "ephemeral-storage": settings.kubernetes.scratch}}


def _environment(settings: PipelineSettings, variables: Sequence[Manifest], more: Mapping[str, str]) -> list[Manifest]:
    """`variables` and `more`; those that the pipeline sets itself replace them."""
    given = settings.resources.environment
    all_variables = [*variables, *({"name": name, "value": value} for name, value in more.items())]
    remaining = [variable for variable in all_variables if variable["name"] not in given]
    return remaining + [{"name": name, "value": value} for name, value in given.items()]


def _node_variables(settings: PipelineSettings) -> list[Manifest]:
    """Variables that tell a pod of several which one it is, how many there are, and where they meet: at the first."""
    rank, count, processes, address, port = (*NODE_VARIABLES[:3], NODE_ADDRESS, "PET_MASTER_PORT")
    fields = {"JOB_NAME": "metadata.labels['job-name']"}
    fields[rank] = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    resources = settings.resources
    values = {count: str(resources.workers), processes: str(resources.processes_per_worker)}
    values |= {address: "$(JOB_NAME)-0.$(JOB_NAME)", port: "29500"}
    from_fields = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()]
    return [*from_fields, *({"name": name, "value": value} for name, value in values.items())]


# --- volumes


def work_claim_name(settings: PipelineSettings) -> str:
    """The claim of the volume that holds the work folder: the one that the pipeline names, or its own."""
    return settings.kubernetes.work_claim or f"{settings.name}-work"


def _storage(settings: PipelineSettings, names: Sequence[str]) -> tuple[list[Manifest], list[Manifest]]:
    """The volumes called `names` and the one with the user's data, and their mounts; a work folder in a store needs none."""
    kubernetes = settings.kubernetes
    places: dict[str, tuple[str, Manifest]] = {
        "pipeline": ("/etc/gaudi-bert", {"configMap": {"name": f"{settings.name}-pipeline"}}),
        "work": ("/work", {"persistentVolumeClaim": {"claimName": work_claim_name(settings)}}),
        "scratch": ("/tmp", {"emptyDir": {"sizeLimit": kubernetes.scratch}}),
        "shared-memory": ("/dev/shm", {"emptyDir": {"medium": "Memory", "sizeLimit": settings.resources.shared_memory}}),
        "recipe-cache": (_RECIPES, {"emptyDir": {}}),
        "data": (DATA_FOLDER, {"persistentVolumeClaim": {"claimName": kubernetes.data_claim, "readOnly": True}}),
    }
    mounted = [name for name in names if name != "work" or not kubernetes.store]
    mounted += ["data"] if kubernetes.data_claim else []
    mounts: list[Manifest] = [{"name": name, "mountPath": places[name][0]} for name in mounted]
    for mount in mounts:
        mount |= {"readOnly": True} if mount["name"] in ("pipeline", "data") else {}
    return [{"name": name, **places[name][1]} for name in mounted], mounts


# --- sshd of the workers of an MPIJob


def _ssh_port(settings: PipelineSettings) -> int:
    if not settings.resources.cards:
        return USER_SSH_PORT
    return EFA_SSH_PORT if settings.kubernetes.efa else ROOT_SSH_PORT


def _sshd(settings: PipelineSettings) -> str:
    """The command of a worker.

    Host keys are created when the container starts, so that no image holds any. What the container or the image alone knows
    (which cards of a shared server are ours; which processor kernels were compiled for), sshd passes on.
    """
    port = _ssh_port(settings)
    if settings.resources.cards:
        return (
            f"mkdir -p /run/sshd && ssh-keygen -A && exec /usr/sbin/sshd -De -p {port} -o StrictModes=no "
            '${HABANA_VISIBLE_MODULES:+-o "SetEnv=HABANA_VISIBLE_MODULES=$HABANA_VISIBLE_MODULES"}'
        )
    # Nothing is root: sshd lets in the user that runs it, on a high port.
    return (
        'rm -f /tmp/ssh_host_key* && ssh-keygen -q -t ed25519 -N "" -f /tmp/ssh_host_key && '
        f"exec /usr/sbin/sshd -De -f /dev/null -p {port} -h /tmp/ssh_host_key "
        "-o AuthorizedKeysFile=/etc/gaudi-bert-ssh/authorized_keys -o PasswordAuthentication=no "
        "-o KbdInteractiveAuthentication=no -o UsePAM=no -o StrictModes=no -o PidFile=none "
        '${NUMBA_CPU_NAME:+-o "SetEnv=NUMBA_CPU_NAME=$NUMBA_CPU_NAME NUMBA_CPU_FEATURES=$NUMBA_CPU_FEATURES '
        'NUMBA_CACHE_DIR=$NUMBA_CACHE_DIR"}'
    )


def needs_user_name(settings: PipelineSettings) -> bool:
    """Whether pods run ssh as a user without a name in the image, for whom neither ssh nor sshd works."""
    return settings.trains_as_mpijob and not settings.resources.cards and settings.kubernetes.user != _IMAGE_USER


def _user_name(settings: PipelineSettings) -> list[Manifest]:
    mount = {"name": "pipeline", "mountPath": "/etc/passwd", "subPath": USER_NAME_FILE, "readOnly": True}
    return [mount] if needs_user_name(settings) else []


# --- where pods run


def _training_placement(settings: PipelineSettings) -> PodPlacement:
    """Placement of training pods; `kubernetes.node_selector` is for those that train alone."""
    placement = settings.kubernetes.training_pods
    selector = {**settings.kubernetes.node_selector, **placement.node_selector}
    return placement.model_copy(update={"node_selector": selector})


def _placed(settings: PipelineSettings, component: str, spec: Manifest, placement: PodPlacement) -> Manifest:
    """The pod template of `spec`, with where it may run and how it is marked."""
    values: Manifest = {
        "nodeSelector": dict(placement.node_selector),
        "affinity": dict(placement.affinity),
        "tolerations": [toleration.model_dump(exclude_none=True) for toleration in placement.tolerations],
        "priorityClassName": placement.priority_class,
        "runtimeClassName": placement.runtime_class,
    }
    # Our own labels, by which pods are selected, cannot be replaced.
    metadata: Manifest = {"labels": {**placement.labels, **own_labels(settings), STEP_LABEL: component}}
    if placement.annotations:
        metadata["annotations"] = dict(placement.annotations)
    return {"metadata": metadata, "spec": {**spec, **{key: value for key, value in values.items() if value}}}


def _pod_templates(item: Manifest) -> Iterator[Manifest]:
    """The pod templates of a Job, a TrainingRuntime or an MPIJob (launcher, then workers); a TrainJob has none itself."""
    if item["kind"] == "TrainingRuntime":
        yield from (job["template"]["spec"]["template"] for job in item["spec"]["template"]["spec"]["replicatedJobs"])
    elif item["kind"] == "MPIJob":
        for replica in ("Launcher", "Worker"):
            yield item["spec"]["mpiReplicaSpecs"][replica]["template"]
    elif item["kind"] == "Job":
        yield item["spec"]["template"]


def pod_specs(item: Manifest) -> Iterator[Manifest]:
    """The pod specs of what has pod templates."""
    for template in _pod_templates(item):
        yield template["spec"]
