"""Build the pod templates of a step: containers, volumes, security settings, resources and placement.

A pod of a Job or a TrainJob first waits for its inputs in an init container, and then runs one stage. An MPIJob has two
kinds of pods: a launcher, which runs mpirun, and workers, which run sshd so that mpirun can start ranks in them. All
functions depend only on the settings of the pipeline, and do not communicate with a cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gaudi_bert.common.launch import NODE_ADDRESS, NODE_VARIABLES
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.places import PodPlacement, PodResources, ResourceSettings
from gaudi_bert.runners.stage_table import STEPS, Stage, parse_quantity, stage_engine, stage_image_name
from gaudi_bert.runners.training_processes import (
    EFA_SSH_PORT,
    ROOT_SSH_PORT,
    SSH_KEY,
    USER_SSH_PORT,
    build_accelerator_environment,
    build_training_command,
)

Manifest = dict[str, Any]

APP_LABELS = {"app.kubernetes.io/name": "gaudi-bert", "app.kubernetes.io/managed-by": "gaudi-bert"}
STEP_LABEL = "app.kubernetes.io/component"
# A Helm release may use the same value of the standard label `app.kubernetes.io/instance`, so that label does not identify
# our objects. This label does, because only gaudi-bert uses its prefix.
PIPELINE_LABEL = "gaudi-bert.io/pipeline"
ACCELERATOR_RESOURCE = "habana.ai/gaudi"
_EFA_RESOURCE = "vpc.amazonaws.com/efa"
_HUGE_PAGES = "hugepages-2Mi"
_MEBIBYTE = 2**20
DATA_FOLDER = "/data"
_PIPELINE_FILE = "/etc/gaudi-bert/pipeline.yaml"
# ssh works only for users that are listed in /etc/passwd. If the image does not list the pod's user, the pod mounts this
# file of the ConfigMap as /etc/passwd.
USER_NAME_FILE = "passwd"
_IMAGE_USER = 1000
# A stopped training process needs time to save a checkpoint, so it is killed only after this time.
_GRACE_SECONDS = 120
_RECIPES = "/var/cache/gaudi-bert"
# The cache of compiled graphs uses file locks, which do not work on network file systems. So keep the cache on the node's
# disk.
_ACCELERATOR_VARIABLES = build_accelerator_environment(_RECIPES)
_EFA_VARIABLES = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "HCCL_OVER_OFI": "1", "RDMAV_FORK_SAFE": "1"}
# The launcher forwards object store credentials to ranks in other pods. A secret defines the variables, so their names are
# not known here. `stop_ranks` therefore replaces each pattern with the names of matching variables in the launcher's pod.
_CREDENTIALS = ("AWS_*", "AZURE_*", "GOOGLE_*")
# The vendor's software must run as root. It also requires the capability SYS_NICE to set scheduling priorities.
_ROOT = {"allowPrivilegeEscalation": False, "capabilities": {"add": ["SYS_NICE"]}}
_USER = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}


def pipeline_labels(settings: PipelineSettings) -> dict[str, str]:
    """Return the labels that every object and every pod of a pipeline has.

    The standard label `app.kubernetes.io/instance` is left out, because with this label the Service of a Helm release could
    select our pods.
    """
    return {**APP_LABELS, PIPELINE_LABEL: settings.name}


def build_stage_pod_template(settings: PipelineSettings, step: str, *, for_trainjob: bool = False) -> Manifest:
    """Return the pod template of a step that runs as a Job or a TrainJob.

    Args:
        settings: The settings of the pipeline.
        step: The name of the step.
        for_trainjob: Whether the pod belongs to a TrainJob, whose controller sets the rendezvous variables itself.
    """
    stage = STEPS[step]
    on_nodes = step == "train" and settings.training_pods_start_own_processes
    if stage.is_distributed and not on_nodes:
        # The settings may configure several workers for an MPIJob, but this Job has only one pod, which is one worker.
        resources = settings.resources.model_copy(update={"workers": 1})
        kubernetes = settings.kubernetes.model_copy(update={"efa": 0})
        settings = settings.model_copy(update={"resources": resources, "kubernetes": kubernetes})
    cards = stage.runs_model and settings.resources.cards > 0
    spec: Manifest = {"restartPolicy": "Never", **_build_common_pod_spec(settings, as_root=cards)}
    volumes = ["pipeline", "work", "scratch"]
    if stage.is_distributed:
        spec["terminationGracePeriodSeconds"] = _GRACE_SECONDS
        volumes += ["shared-memory"] + (["recipe-cache"] if cards else [])
    if cards:
        spec["hostIPC"] = True
    environment: list[Manifest] = [{"name": "HOME", "value": "/tmp"}]
    if on_nodes and not for_trainjob:
        # The pods connect to each other by the host names JOB-0, JOB-1 and so on. These names resolve only if the subdomain
        # is the name of the Service.
        spec["subdomain"] = f"{settings.name}-train"
        environment += _build_rendezvous_variables(settings)
    if stage.is_distributed:
        environment = _build_environment(settings, environment, _ACCELERATOR_VARIABLES if cards else {})
    container = {
        **_build_container(
            "node" if for_trainjob else stage.name,
            settings,
            stage,
            _build_step_command(settings, step),
            environment,
            volumes,
        ),
        "securityContext": _ROOT if cards else _USER,
        "resources": _build_stage_resources(settings, stage),
    }
    spec |= {
        "initContainers": [_build_wait_container(settings, step)],
        "containers": [container],
        "volumes": _build_volumes(settings, volumes).volumes,
    }
    placement = settings.kubernetes.data_pods
    if stage.runs_model:
        placement = _training_pod_placement(settings) if stage.is_distributed else settings.kubernetes.training_pods
    return _build_pod_template(settings, step, spec, placement)


def build_launcher_pod_template(settings: PipelineSettings) -> Manifest:
    """Return the pod template for the launcher of an MPIJob. The launcher runs mpirun and can be placed on any node."""
    stage, cards = STEPS["train"], settings.resources.cards > 0
    variables = _ACCELERATOR_VARIABLES | (_EFA_VARIABLES if settings.kubernetes.efa else {})
    given: list[Manifest] = [] if cards else [{"name": "HOME", "value": "/tmp"}]
    environment = _build_environment(settings, given, variables if cards else {})
    names = [variable["name"] for variable in environment]
    command = build_training_command(
        settings,
        _build_run_command(settings, "--stages", "train"),
        over_ssh=True,
        forwarded_variables=(*names, *(_CREDENTIALS if settings.kubernetes.store else ())),
        ssh_port=_sshd_port(settings),
        ssh_key=None if cards else SSH_KEY,
    )
    container = {
        **_build_container("train", settings, stage, command, environment, ["scratch"]),
        "securityContext": {"allowPrivilegeEscalation": False} if cards else _USER,
        "resources": _add_ephemeral_storage_request(settings, _build_cpu_and_memory_resources(settings.resources.launcher)),
    }
    container["volumeMounts"] += _build_passwd_mounts(settings)
    spec = {
        **_build_common_pod_spec(settings, as_root=cards),
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "initContainers": [_build_wait_container(settings, "train")],
        "containers": [container],
        "volumes": _build_volumes(settings, ["pipeline", "work", "scratch"]).volumes,
    }
    placement = _training_pod_placement(settings).model_copy(
        update={"node_selector": {}, "affinity": {}, "runtime_class": None}
    )
    return _build_pod_template(settings, "train", spec, placement)


def build_worker_pod_template(settings: PipelineSettings) -> Manifest:
    """Return the pod template for the workers of an MPIJob. A worker runs sshd, so that mpirun can start ranks in it."""
    stage, cards = STEPS["train"], settings.resources.cards > 0
    volumes = ["pipeline", "work", "shared-memory", "scratch", *(["recipe-cache"] if cards else [])]
    environment = [] if cards else [{"name": "HOME", "value": "/tmp"}]
    container = {
        **_build_container(
            "worker", settings, stage, ["/bin/sh", "-c", _build_sshd_command(settings)], environment, volumes
        ),
        # When sshd is stopped, it kills the ranks that it started. This hook runs first, so that they can save a checkpoint.
        "lifecycle": {"preStop": {"exec": {"command": ["python3", "-m", "gaudi_bert.runners.stop_ranks", "here"]}}},
        "readinessProbe": {"tcpSocket": {"port": _sshd_port(settings)}, "periodSeconds": 2},
        "securityContext": _ROOT if cards else _USER,
        "resources": _build_stage_resources(settings, stage),
    }
    del container["terminationMessagePolicy"]  # the log of sshd contains nothing about the ranks
    container["volumeMounts"] += _build_passwd_mounts(settings)
    spec = {
        **_build_common_pod_spec(settings, as_root=cards),
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "containers": [container],
        "volumes": _build_volumes(settings, volumes).volumes,
    }
    if cards:
        spec["hostIPC"] = True
    if settings.kubernetes.efa:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return _build_pod_template(settings, "train-worker", spec, _training_pod_placement(settings))


# --- common parts of all pods


def _build_common_pod_spec(settings: PipelineSettings, *, as_root: bool) -> Manifest:
    """Build the fields that all pod specs share, such as the service account and the security context.

    The token of the account is not mounted, because stages send no requests to the cluster.

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


def _build_container(
    name: str,
    settings: PipelineSettings,
    stage: Stage,
    command: Sequence[str],
    environment: Sequence[Manifest],
    volume_names: Sequence[str],
) -> Manifest:
    """Build a container spec. The caller adds the security context and the resources.

    If the command uses a work folder, the container also gets the variables in the secret `kubernetes.store_secret`.

    Args:
        name: The name of the container.
        settings: The settings of the pipeline.
        stage: The stage, which determines the image.
        command: The command line.
        environment: The environment variables, as in a manifest.
        volume_names: The names of the volumes to mount. `_build_volumes` defines them.
    """
    secret = settings.kubernetes.store_secret
    return {
        "name": name,
        "image": stage_image_name(settings, stage),
        "imagePullPolicy": settings.images.pull_policy,
        "command": list(command),
        **({"env": list(environment)} if environment else {}),
        **({"envFrom": [{"secretRef": {"name": secret}}]} if secret and "--work" in command else {}),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _build_volumes(settings, volume_names).mounts,
    }


def _build_wait_container(settings: PipelineSettings, step: str) -> Manifest:
    """Build an init container that mounts the work folder read-only and waits until the inputs of a step exist."""
    words = ["gaudi-bert", "wait", _PIPELINE_FILE, "--work", _work_root_in_pod(settings), "--for", step]
    command = [*words, "--timeout", str(settings.kubernetes.wait_seconds)]
    home, volumes = [{"name": "HOME", "value": "/tmp"}], ["pipeline", "work", "scratch"]
    container = _build_container("wait", settings, STEPS[step], command, home, volumes)
    for mount in container["volumeMounts"]:
        if mount["name"] == "work":
            mount["readOnly"] = True
    return {**container, "securityContext": _USER, "resources": _build_cpu_and_memory_resources(settings.resources.waiting)}


def _work_root_in_pod(settings: PipelineSettings) -> str:
    """Return the parent folder of all work folders in a pod, which is an object store URL or a path on a volume."""
    return settings.kubernetes.store or "/work"


def _build_run_command(settings: PipelineSettings, *options: str) -> list[str]:
    """Return a `gaudi-bert run` command line for a container, and append the given options."""
    return ["gaudi-bert", "run", _PIPELINE_FILE, "--work", _work_root_in_pod(settings), *options]


def _build_step_command(settings: PipelineSettings, step: str) -> list[str]:
    """Return the command line that runs a step in a pod of a Job or a TrainJob."""
    stage, resources = STEPS[step], settings.resources
    command = _build_run_command(settings, "--stages", stage.name)
    if step != stage.name:
        return [*command, "--finish"]
    if stage.uses_data_processes:
        # By default, a stage starts one worker per core of the node, which could exceed the memory limit of the pod. So pass
        # a number of workers that suits the limit.
        command += ["--workers", str(resources.data_processes)]
    if stage.is_shardable:
        command += ["--shard", f"$(JOB_COMPLETION_INDEX)/{resources.data_workers}"]
    if step == "finetune":
        command += ["--set", "resources.workers=1", "--set", "kubernetes.efa=0"]
    starts_itself = step == "train" and settings.training_pods_start_own_processes
    if stage.is_distributed and not starts_itself and stage_engine(settings, stage) == "tensorflow":
        return build_training_command(settings, command, over_ssh=False)
    return command


# The requests of a container with Gaudi cards equal its limits. Kubernetes requires this for cards and huge pages, and
# evicts such a pod last. A container without cards can use idle cores of the node, unless `cpu_limit` is set.


def _build_stage_resources(settings: PipelineSettings, stage: Stage) -> Manifest:
    """Return the resource requests and limits of a stage's main container."""
    resources = settings.resources
    if stage.runs_model and resources.cards:
        requests = (
            _build_resource_requests_for_all_accelerators(settings)
            if stage.is_distributed
            else _build_resource_requests_for_one_accelerator(resources)
        )
        return _add_ephemeral_storage_request(settings, {"requests": requests, "limits": dict(requests)})
    return _add_ephemeral_storage_request(
        settings, _build_cpu_and_memory_resources(resources.training if stage.runs_model else resources.data)
    )


def _build_cpu_and_memory_resources(pod_resources: PodResources) -> Manifest:
    """Return the CPU and memory requests and limits of a container that uses no accelerators."""
    limits = {"cpu": pod_resources.cpu_limit} if pod_resources.cpu_limit else {}
    return {
        "requests": {"cpu": pod_resources.cpu, "memory": pod_resources.memory},
        "limits": {**limits, "memory": pod_resources.memory_limit or pod_resources.memory},
    }


def _build_resource_requests_for_all_accelerators(settings: PipelineSettings) -> dict[str, str]:
    """Return the resource requests of a training worker, which uses all accelerators (Gaudi cards) that it has."""
    resources = settings.resources
    requests = {
        "cpu": resources.training.cpu,
        "memory": resources.training.memory,
        ACCELERATOR_RESOURCE: str(resources.cards),
    }
    if parse_quantity(resources.hugepages_2Mi):
        requests[_HUGE_PAGES] = resources.hugepages_2Mi
    if settings.kubernetes.efa:
        requests[_EFA_RESOURCE] = str(settings.kubernetes.efa)
    return requests


def _build_resource_requests_for_one_accelerator(resources: ResourceSettings) -> dict[str, str]:
    """Return the resource requests of a container that uses a single accelerator (Gaudi card).

    They are the resources of a training worker, divided by the number of its cards.
    """
    memory = int(parse_quantity(resources.training.memory) / resources.cards / _MEBIBYTE)
    cores = int(parse_quantity(resources.training.cpu) * 1000 / resources.cards)
    requests = {
        "cpu": str(cores // 1000) if cores >= 1000 else f"{max(cores, 1)}m",
        "memory": f"{memory}Mi",
        ACCELERATOR_RESOURCE: "1",
    }
    # Kubernetes rejects an amount that is not a multiple of the huge page size, so round it down to a multiple of 2 MiB.
    huge_pages = int(parse_quantity(resources.hugepages_2Mi) / resources.cards / (2 * _MEBIBYTE)) * 2
    if huge_pages:
        requests[_HUGE_PAGES] = f"{huge_pages}Mi"
    return requests


def _add_ephemeral_storage_request(settings: PipelineSettings, resources: Manifest) -> Manifest:
    """Add the disk space of /tmp, which Kubernetes calls ephemeral storage, to the resource requests of a container.

    Nothing is added if `kubernetes.request_scratch` is false. With this request, the pod is not scheduled on a node whose
    disk is full.
    """
    if not settings.kubernetes.request_scratch:
        return resources
    return {**resources, "requests": {**resources["requests"], "ephemeral-storage": settings.kubernetes.scratch}}


def _build_environment(
    settings: PipelineSettings, manifest_variables: Sequence[Manifest], more_variables: Mapping[str, str]
) -> list[Manifest]:
    """Return the environment variables of a container in manifest format.

    Variables in `resources.environment` override all others.

    Args:
        settings: The settings of the pipeline.
        manifest_variables: Environment variables in the format of a manifest.
        more_variables: Further environment variables by name.
    """
    overrides = settings.resources.environment
    all_variables = [*manifest_variables, *({"name": name, "value": value} for name, value in more_variables.items())]
    remaining = [variable for variable in all_variables if variable["name"] not in overrides]
    return remaining + [{"name": name, "value": value} for name, value in overrides.items()]


def _build_rendezvous_variables(settings: PipelineSettings) -> list[Manifest]:
    """Return the environment variables that processes in several training pods need to connect to each other.

    They contain the rank of the pod, the number of pods, the number of processes per pod, and the address and the port of
    the first pod, where all processes connect.
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
    """Return the name of the volume claim for the work folder.

    This is the claim that `kubernetes.work_claim` names, or else the claim that the pipeline creates.
    """
    return settings.kubernetes.work_claim or f"{settings.name}-work"


class _PodVolumes(NamedTuple):
    """The volumes in a pod spec, and the mounts of these volumes in a container spec."""

    volumes: list[Manifest]
    mounts: list[Manifest]


def _build_volumes(settings: PipelineSettings, volume_names: Sequence[str]) -> _PodVolumes:
    """Return the named volumes for a pod spec, and their mounts for a container spec.

    A volume with the user's data is added if `kubernetes.data_claim` is set. The volume `work` is left out if the work
    folder is in an object store.
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
    mounted = [name for name in volume_names if name != "work" or not kubernetes.store]
    mounted += ["data"] if kubernetes.data_claim else []
    mounts: list[Manifest] = [{"name": name, "mountPath": places[name][0]} for name in mounted]
    for mount in mounts:
        mount |= {"readOnly": True} if mount["name"] in ("pipeline", "data") else {}
    return _PodVolumes([{"name": name, **places[name][1]} for name in mounted], mounts)


# --- sshd of the workers of an MPIJob


def _sshd_port(settings: PipelineSettings) -> int:
    """Return the port on which sshd listens in the workers of an MPIJob."""
    if not settings.resources.cards:
        return USER_SSH_PORT
    return EFA_SSH_PORT if settings.kubernetes.efa else ROOT_SSH_PORT


def _build_sshd_command(settings: PipelineSettings) -> str:
    """Return the shell command that starts sshd in a worker of an MPIJob.

    The host keys are created when the container starts, so that no image contains private keys. Processes that are started
    over ssh do not inherit the environment of the container, so sshd sets the variables that they need. These variables
    specify which Gaudi cards of a server the container may use, and for which processor the kernels in the image were
    compiled.
    """
    port = _sshd_port(settings)
    if settings.resources.cards:
        return (
            f"mkdir -p /run/sshd && ssh-keygen -A && exec /usr/sbin/sshd -De -p {port} -o StrictModes=no "
            '${HABANA_VISIBLE_MODULES:+-o "SetEnv=HABANA_VISIBLE_MODULES=$HABANA_VISIBLE_MODULES"}'
        )
    # Without cards, sshd does not run as root. It therefore needs a port above 1023, and only its own user can log in.
    return (
        'rm -f /tmp/ssh_host_key* && ssh-keygen -q -t ed25519 -N "" -f /tmp/ssh_host_key && '
        f"exec /usr/sbin/sshd -De -f /dev/null -p {port} -h /tmp/ssh_host_key "
        "-o AuthorizedKeysFile=/etc/gaudi-bert-ssh/authorized_keys -o PasswordAuthentication=no "
        "-o KbdInteractiveAuthentication=no -o UsePAM=no -o StrictModes=no -o PidFile=none "
        '${NUMBA_CPU_NAME:+-o "SetEnv=NUMBA_CPU_NAME=$NUMBA_CPU_NAME NUMBA_CPU_FEATURES=$NUMBA_CPU_FEATURES '
        'NUMBA_CACHE_DIR=$NUMBA_CACHE_DIR"}'
    )


def needs_passwd_file(settings: PipelineSettings) -> bool:
    """Return whether pods need an /etc/passwd file that lists their user.

    ssh and sshd work only for users in this file, and the file in the image contains only the image's default user.
    """
    return settings.trains_with_mpijob and not settings.resources.cards and settings.kubernetes.user != _IMAGE_USER


def _build_passwd_mounts(settings: PipelineSettings) -> list[Manifest]:
    """Return a list with the volume mount for /etc/passwd. The list is empty if pods do not need this file."""
    mount = {"name": "pipeline", "mountPath": "/etc/passwd", "subPath": USER_NAME_FILE, "readOnly": True}
    return [mount] if needs_passwd_file(settings) else []


# --- where pods run


def _training_pod_placement(settings: PipelineSettings) -> PodPlacement:
    """Return the placement settings of training pods, including the node labels in `kubernetes.node_selector`."""
    placement = settings.kubernetes.training_pods
    selector = {**settings.kubernetes.node_selector, **placement.node_selector}
    return placement.model_copy(update={"node_selector": selector})


def _build_pod_template(settings: PipelineSettings, step_label: str, spec: Manifest, placement: PodPlacement) -> Manifest:
    """Build a pod template from a pod spec by adding labels, annotations and placement settings.

    Args:
        settings: The settings of the pipeline.
        step_label: The value of the step label, which is the name of the step or `train-worker`.
        spec: The pod spec without placement.
        placement: The placement settings. They may add labels, but they cannot replace ours.
    """
    values: Manifest = {
        "nodeSelector": dict(placement.node_selector),
        "affinity": dict(placement.affinity),
        "tolerations": [toleration.model_dump(exclude_none=True) for toleration in placement.tolerations],
        "priorityClassName": placement.priority_class,
        "runtimeClassName": placement.runtime_class,
    }
    # The labels of the pipeline identify its pods, so the user's labels must not replace them.
    metadata: Manifest = {"labels": {**placement.labels, **pipeline_labels(settings), STEP_LABEL: step_label}}
    if placement.annotations:
        metadata["annotations"] = dict(placement.annotations)
    return {"metadata": metadata, "spec": {**spec, **{key: value for key, value in values.items() if value}}}


def _iterate_pod_templates(manifest: Manifest) -> Iterator[Manifest]:
    """Yield the pod templates in a Job, an MPIJob or a TrainingRuntime. An MPIJob has a launcher and a worker template.

    Objects of other kinds, including a TrainJob, contain no pod templates.
    """
    if manifest["kind"] == "TrainingRuntime":
        yield from (job["template"]["spec"]["template"] for job in manifest["spec"]["template"]["spec"]["replicatedJobs"])
    elif manifest["kind"] == "MPIJob":
        for replica in ("Launcher", "Worker"):
            yield manifest["spec"]["mpiReplicaSpecs"][replica]["template"]
    elif manifest["kind"] == "Job":
        yield manifest["spec"]["template"]


def iterate_pod_specs(manifest: Manifest) -> Iterator[Manifest]:
    """Yield the pod specs in a Job, an MPIJob or a TrainingRuntime."""
    for template in _iterate_pod_templates(manifest):
        yield template["spec"]
