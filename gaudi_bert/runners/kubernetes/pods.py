"""Build the pod templates of a step: containers, volumes, security settings, resources and placement.

A pod of a Job or a TrainJob first waits for its inputs in an init container, and then runs one stage. An MPIJob has two
kinds of pods: a launcher, which runs mpirun, and workers, which run sshd so that mpirun can start ranks in them. Everything
is derived from the settings of the pipeline, and nothing here communicates with a cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gaudi_bert.common.launch import NODE_ADDRESS, NODE_VARIABLES
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.places import PodPlacement, PodResources, ResourceSettings
from gaudi_bert.runners.stage_table import STEPS, Stage, quantity_value, stage_engine, stage_image
from gaudi_bert.runners.training_processes import (
    EFA_SSH_PORT,
    ROOT_SSH_PORT,
    SSH_KEY,
    USER_SSH_PORT,
    card_variables,
    training_command,
)

Manifest = dict[str, Any]

APP_LABELS = {"app.kubernetes.io/name": "gaudi-bert", "app.kubernetes.io/managed-by": "gaudi-bert"}
STEP_LABEL = "app.kubernetes.io/component"
# Every Helm release sets the standard label `app.kubernetes.io/instance`, so it cannot identify the pipeline that an object
# belongs to. Only a label with our own prefix can.
PIPELINE_LABEL = "gaudi-bert.io/pipeline"
CARD_RESOURCE = "habana.ai/gaudi"
_EFA_RESOURCE = "vpc.amazonaws.com/efa"
_HUGE_PAGES = "hugepages-2Mi"
_MEBIBYTE = 2**20
DATA_FOLDER = "/data"
_PIPELINE_FILE = "/etc/gaudi-bert/pipeline.yaml"
# The ConfigMap with the pipeline file also contains this file, which is mounted as /etc/passwd.
USER_NAME_FILE = "passwd"
_IMAGE_USER = 1000
# A training process that is stopped has this long to save a checkpoint before it is killed.
_GRACE_SECONDS = 120
_RECIPES = "/var/cache/gaudi-bert"
# File locks on compiled graphs do not work on network file systems, so the graphs are cached on the disk of the node.
_CARD_VARIABLES = card_variables(_RECIPES)
_EFA_VARIABLES = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "HCCL_OVER_OFI": "1", "RDMAV_FORK_SAFE": "1"}
# Patterns of the variables with store credentials, which the launcher passes on to ranks in other pods. `stop_ranks`
# replaces each pattern by the names of the variables that are set.
_CREDENTIALS = ("AWS_*", "AZURE_*", "GOOGLE_*")
# The vendor's software must run as root, and needs SYS_NICE to set scheduling priorities.
_ROOT = {"allowPrivilegeEscalation": False, "capabilities": {"add": ["SYS_NICE"]}}
_USER = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}


def own_labels(settings: PipelineSettings) -> dict[str, str]:
    """Return the labels of every object and every pod of a pipeline.

    The standard label `app.kubernetes.io/instance` is left out, because the Service of a Helm release could select our pods
    by it.
    """
    return {**APP_LABELS, PIPELINE_LABEL: settings.name}


def stage_pod(settings: PipelineSettings, step: str, *, by_trainer: bool = False) -> Manifest:
    """Return the pod template of a step that is a Job or a TrainJob.

    Args:
        settings: The settings of the pipeline.
        step: The name of the step.
        by_trainer: Whether the pod belongs to a TrainJob, whose controller sets the rendezvous variables itself.
    """
    stage = STEPS[step]
    on_nodes = step == "train" and settings.training_pods_start_ranks
    if stage.distributed and not on_nodes:
        # A Job with one pod can only be a single worker, even if the settings ask for an MPIJob with several workers.
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
        # The host names of the pods are JOB-0, JOB-1 and so on. They resolve only through the Service with this name.
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
    """Return the pod template of the launcher of an MPIJob. It runs mpirun, and can run on any node."""
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
    """Return the pod template of the workers of an MPIJob. They run sshd, through which mpirun starts the ranks."""
    stage, cards = STEPS["train"], settings.resources.cards > 0
    volumes = ["pipeline", "work", "shared-memory", "scratch", *(["recipe-cache"] if cards else [])]
    environment = [] if cards else [{"name": "HOME", "value": "/tmp"}]
    container = {
        **_container("worker", settings, stage, ["/bin/sh", "-c", _sshd(settings)], environment, volumes),
        # sshd kills its ranks when it is stopped, so this hook tells them to save first.
        "lifecycle": {"preStop": {"exec": {"command": ["python3", "-m", "gaudi_bert.runners.stop_ranks", "here"]}}},
        "readinessProbe": {"tcpSocket": {"port": _ssh_port(settings)}, "periodSeconds": 2},
        "securityContext": _ROOT if cards else _USER,
        "resources": _resources(settings, stage),
    }
    del container["terminationMessagePolicy"]  # the log of sshd contains nothing about the ranks
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


# --- common parts of all pods


def _pod(settings: PipelineSettings, *, as_root: bool) -> Manifest:
    """Return the part of a pod spec with its service account, security context and image pull secrets.

    Stages only read and write files, so the token of the account is not mounted.

    Args:
        settings: The settings of the pipeline.
        as_root: Whether the containers run as root. Otherwise they run as `kubernetes.user`.
    """
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
    """Return a container without security context and resources.

    If the command uses a work folder, the container also gets the variables of the secret `kubernetes.store_secret`.

    Args:
        name: The name of the container.
        settings: The settings of the pipeline.
        stage: The stage, which determines the image.
        command: The command line.
        environment: The environment variables, as in a manifest.
        volumes: The names of the volumes to mount, which are keys of the table in `_storage`.
    """
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
    """Return the init container that waits for the inputs of a step. It mounts the work folder read-only."""
    words = ["gaudi-bert", "wait", _PIPELINE_FILE, "--work", _work(settings), "--for", step]
    command = [*words, "--timeout", str(settings.kubernetes.wait_seconds)]
    home, volumes = [{"name": "HOME", "value": "/tmp"}], ["pipeline", "work", "scratch"]
    container = _container("wait", settings, STEPS[step], command, home, volumes)
    for mount in container["volumeMounts"]:
        if mount["name"] == "work":
            mount["readOnly"] = True
    return {**container, "securityContext": _USER, "resources": _of_pod(settings.resources.waiting)}


def _work(settings: PipelineSettings) -> str:
    """Return the URL or the mounted folder that contains the work folders."""
    return settings.kubernetes.store or "/work"


def _run(settings: PipelineSettings, *options: str) -> list[str]:
    """Return the command line that runs the pipeline in a container."""
    return ["gaudi-bert", "run", _PIPELINE_FILE, "--work", _work(settings), *options]


def _command(settings: PipelineSettings, step: str) -> list[str]:
    """Return the command line of a step in a pod of a Job or a TrainJob."""
    stage, resources = STEPS[step], settings.resources
    command = _run(settings, "--stages", stage.name)
    if step != stage.name:
        return [*command, "--finish"]
    if stage.parallel:
        # Each process uses memory, so the number must suit the memory limit of the pod and not the cores of the node.
        command += ["--workers", str(resources.data_processes)]
    if stage.shared:
        command += ["--shard", f"$(JOB_COMPLETION_INDEX)/{resources.data_workers}"]
    if step == "finetune":
        command += ["--set", "resources.workers=1", "--set", "kubernetes.efa=0"]
    starts_itself = step == "train" and settings.training_pods_start_ranks
    if stage.distributed and not starts_itself and stage_engine(settings, stage) == "tensorflow":
        return training_command(settings, command, over_ssh=False)
    return command


# With cards, all requests equal the limits, because extended resources and huge pages require it, and because a pod with
# reserved cores and memory is evicted last. Without cards, cores have no limit unless `cpu_limit` is set, so that idle cores
# of the node can be used.


def _resources(settings: PipelineSettings, stage: Stage) -> Manifest:
    """Return the resource requests and limits of the main container of a stage."""
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
    """Return the resource requests of a training worker with all of its cards."""
    resources = settings.resources
    requests = {"cpu": resources.training.cpu, "memory": resources.training.memory, CARD_RESOURCE: str(resources.cards)}
    if quantity_value(resources.hugepages_2Mi):
        requests[_HUGE_PAGES] = resources.hugepages_2Mi
    if settings.kubernetes.efa:
        requests[_EFA_RESOURCE] = str(settings.kubernetes.efa)
    return requests


def _of_one_card(resources: ResourceSettings) -> dict[str, str]:
    """Return the resource requests of a container with one card: one card's share of the resources of a training worker."""
    memory = int(quantity_value(resources.training.memory) / resources.cards / _MEBIBYTE)
    cores = int(quantity_value(resources.training.cpu) * 1000 / resources.cards)
    requests = {
        "cpu": str(cores // 1000) if cores >= 1000 else f"{max(cores, 1)}m",
        "memory": f"{memory}Mi",
        CARD_RESOURCE: "1",
    }
    # Huge pages have 2 MiB, so the size must be a multiple of it.
    huge_pages = int(quantity_value(resources.hugepages_2Mi) / resources.cards / (2 * _MEBIBYTE)) * 2
    if huge_pages:
        requests[_HUGE_PAGES] = f"{huge_pages}Mi"
    return requests


def _with_scratch(settings: PipelineSettings, resources: Manifest) -> Manifest:
    """Add a request for the disk space of /tmp, so that the pod is not scheduled on a node whose disk is full.

    If `kubernetes.request_scratch` is off, return the resources unchanged.
    """
    if not settings.kubernetes.request_scratch:
        return resources
    return {**resources, "requests": {**resources["requests"], "ephemeral-storage": settings.kubernetes.scratch}}


def _environment(settings: PipelineSettings, variables: Sequence[Manifest], more: Mapping[str, str]) -> list[Manifest]:
    """Return environment variables as in a manifest. Those in `resources.environment` override the others.

    Args:
        settings: The settings of the pipeline.
        variables: Variables as in a manifest.
        more: Further variables by name.
    """
    given = settings.resources.environment
    all_variables = [*variables, *({"name": name, "value": value} for name, value in more.items())]
    remaining = [variable for variable in all_variables if variable["name"] not in given]
    return remaining + [{"name": name, "value": value} for name, value in given.items()]


def _node_variables(settings: PipelineSettings) -> list[Manifest]:
    """Return the rendezvous variables of a pod that trains together with other pods.

    They contain the number of the pod, the number of pods, the number of processes per pod, and the address and port of the
    first pod, where all processes connect.
    """
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
    """Return the name of the volume claim that contains the work folder.

    This is the claim that `kubernetes.work_claim` names, or the claim that the pipeline creates.
    """
    return settings.kubernetes.work_claim or f"{settings.name}-work"


def _storage(settings: PipelineSettings, names: Sequence[str]) -> tuple[list[Manifest], list[Manifest]]:
    """Return the volumes of a pod, and their mounts in a container.

    The volume with the user's data is added if `kubernetes.data_claim` is set. The volume `work` is left out if the work
    folder is in an object store.

    Args:
        settings: The settings of the pipeline.
        names: The names of the volumes.

    Returns:
        The volumes and the mounts, as in a manifest.
    """
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
    """Return the port of sshd in the workers."""
    if not settings.resources.cards:
        return USER_SSH_PORT
    return EFA_SSH_PORT if settings.kubernetes.efa else ROOT_SSH_PORT


def _sshd(settings: PipelineSettings) -> str:
    """Return the shell command of a worker, which runs sshd.

    The host keys are created when the container starts, so that no image contains private keys. Processes started by ssh do
    not inherit the environment of the container, so sshd sets some variables for them: which cards of a shared server belong
    to the container, and for which processor the kernels in the image were compiled.
    """
    port = _ssh_port(settings)
    if settings.resources.cards:
        return (
            f"mkdir -p /run/sshd && ssh-keygen -A && exec /usr/sbin/sshd -De -p {port} -o StrictModes=no "
            '${HABANA_VISIBLE_MODULES:+-o "SetEnv=HABANA_VISIBLE_MODULES=$HABANA_VISIBLE_MODULES"}'
        )
    # Without root, sshd can only use a high port, and only the user that runs sshd can log in.
    return (
        'rm -f /tmp/ssh_host_key* && ssh-keygen -q -t ed25519 -N "" -f /tmp/ssh_host_key && '
        f"exec /usr/sbin/sshd -De -f /dev/null -p {port} -h /tmp/ssh_host_key "
        "-o AuthorizedKeysFile=/etc/gaudi-bert-ssh/authorized_keys -o PasswordAuthentication=no "
        "-o KbdInteractiveAuthentication=no -o UsePAM=no -o StrictModes=no -o PidFile=none "
        '${NUMBA_CPU_NAME:+-o "SetEnv=NUMBA_CPU_NAME=$NUMBA_CPU_NAME NUMBA_CPU_FEATURES=$NUMBA_CPU_FEATURES '
        'NUMBA_CACHE_DIR=$NUMBA_CACHE_DIR"}'
    )


def needs_user_name(settings: PipelineSettings) -> bool:
    """Return whether pods need a file that gives their user a name.

    ssh and sshd do not work for a user without a name, and the image only has a name for its default user.
    """
    return settings.trains_with_mpijob and not settings.resources.cards and settings.kubernetes.user != _IMAGE_USER


def _user_name(settings: PipelineSettings) -> list[Manifest]:
    """Return the mount of the file with the user name, or an empty list if it is not needed."""
    mount = {"name": "pipeline", "mountPath": "/etc/passwd", "subPath": USER_NAME_FILE, "readOnly": True}
    return [mount] if needs_user_name(settings) else []


# --- where pods run


def _training_placement(settings: PipelineSettings) -> PodPlacement:
    """Return the placement of pods that train, including `kubernetes.node_selector`, which applies only to them."""
    placement = settings.kubernetes.training_pods
    selector = {**settings.kubernetes.node_selector, **placement.node_selector}
    return placement.model_copy(update={"node_selector": selector})


def _placed(settings: PipelineSettings, component: str, spec: Manifest, placement: PodPlacement) -> Manifest:
    """Return a pod template with labels, annotations and the settings that decide on which nodes the pod may run.

    Args:
        settings: The settings of the pipeline.
        component: The value of the step label, which is the step or `train-worker`.
        spec: The pod spec without placement.
        placement: The placement. It may add labels, but it cannot replace ours.
    """
    values: Manifest = {
        "nodeSelector": dict(placement.node_selector),
        "affinity": dict(placement.affinity),
        "tolerations": [toleration.model_dump(exclude_none=True) for toleration in placement.tolerations],
        "priorityClassName": placement.priority_class,
        "runtimeClassName": placement.runtime_class,
    }
    # Pods are selected by our own labels, so the user's labels must not replace them.
    metadata: Manifest = {"labels": {**placement.labels, **own_labels(settings), STEP_LABEL: component}}
    if placement.annotations:
        metadata["annotations"] = dict(placement.annotations)
    return {"metadata": metadata, "spec": {**spec, **{key: value for key, value in values.items() if value}}}


def _pod_templates(item: Manifest) -> Iterator[Manifest]:
    """Yield the pod templates of a Job, an MPIJob (launcher, then worker) or a TrainingRuntime.

    Objects of other kinds, including a TrainJob, contain no pod templates.
    """
    if item["kind"] == "TrainingRuntime":
        yield from (job["template"]["spec"]["template"] for job in item["spec"]["template"]["spec"]["replicatedJobs"])
    elif item["kind"] == "MPIJob":
        for replica in ("Launcher", "Worker"):
            yield item["spec"]["mpiReplicaSpecs"][replica]["template"]
    elif item["kind"] == "Job":
        yield item["spec"]["template"]


def pod_specs(item: Manifest) -> Iterator[Manifest]:
    """Yield the pod specs in an object. See `_pod_templates` for the kinds of objects that contain pods."""
    for template in _pod_templates(item):
        yield template["spec"]
