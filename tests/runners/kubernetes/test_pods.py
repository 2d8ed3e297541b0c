"""The pods of steps: where they run, who they are told to be, what they start, and what they mount."""

from __future__ import annotations

import itertools

import pytest

from gaudi_bert.common.launch import NODE_ADDRESS, NODE_VARIABLES
from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.kubernetes.manifests import build_manifests
from gaudi_bert.runners.kubernetes.pods import _iterate_pod_templates, iterate_pod_specs
from tests.k8s.cluster_settings import PIPELINES, VARIANTS, cluster_settings, shared

TASKS = ["task.name=classification", "finetune.data=python-docstrings", "predict.data=python-docstrings"]
STORE = ["kubernetes.store=s3://bucket/prefix", "kubernetes.store_secret=mine"]


def test_pods_are_placed_and_marked_as_the_pipeline_says() -> None:
    steps = build_manifests(cluster_settings(PIPELINES[0], "placed")).steps
    prepare = steps["prepare"]["spec"]["template"]
    assert prepare["spec"]["tolerations"] == [{"operator": "Exists"}]
    assert prepare["spec"]["nodeSelector"] == {"disk": "fast"}
    assert prepare["metadata"]["labels"]["team"] == "text"
    assert prepare["metadata"]["labels"]["app.kubernetes.io/component"] == "prepare"
    assert prepare["spec"]["volumes"][2] == {"name": "scratch", "emptyDir": {"sizeLimit": "3Gi"}}
    assert prepare["spec"]["containers"][0]["resources"]["requests"]["ephemeral-storage"] == "3Gi"
    launcher, worker = _iterate_pod_templates(steps["train"])
    for template in (launcher, worker, *_iterate_pod_templates(steps["evaluate"])):
        assert template["spec"]["priorityClassName"] == "high"
        assert template["spec"]["tolerations"][0]["key"] == "gaudi"
        assert template["metadata"]["annotations"] == {"example.org/owner": "me"}
    assert worker["spec"]["runtimeClassName"] == "habana"
    assert "podAntiAffinity" in worker["spec"]["affinity"]
    assert not {"runtimeClassName", "affinity"} & launcher["spec"].keys(), "the launcher may run anywhere"
    assert "priorityClassName" not in prepare["spec"]


def test_every_container_has_the_requests_and_limits_of_its_settings() -> None:
    """So that a LimitRange with a minimum or a ratio, a quota of limits.cpu, or a queue without disks can be satisfied."""
    sections = {"data": 3, "training": 4, "waiting": 1, "launcher": 2}
    pods = [f"resources.{name}={{cpu: '{n}', cpu_limit: '{2 * n}', memory: {n}Gi}}" for name, n in sections.items()]
    expected = {
        name: {"requests": {"cpu": f"{n}", "memory": f"{n}Gi"}, "limits": {"cpu": f"{2 * n}", "memory": f"{n}Gi"}}
        for name, n in sections.items()
    }
    settings = cluster_settings(PIPELINES[0], "mpijob", *pods, "kubernetes.request_scratch=false")
    found = {
        (step, container["name"]): container["resources"]
        for step, item in build_manifests(settings).steps.items()
        for spec in iterate_pod_specs(item)
        for container in (*spec.get("initContainers", ()), *spec["containers"])
    }
    assert found["prepare", "prepare"] == expected["data"]
    assert found["train", "worker"] == found["evaluate", "evaluate"] == expected["training"]
    assert found["train", "train"] == expected["launcher"]
    waiting = [resources for (_, name), resources in found.items() if name == "wait"]
    assert waiting == [expected["waiting"]] * len(build_manifests(settings).steps)


def test_the_selector_of_nodes_that_train_is_for_them_alone() -> None:
    settings = load_pipeline(
        None, ["kubernetes.node_selector={kind: gaudi2}", "kubernetes.training_pods={node_selector: {zone: a}}"]
    )
    selected = {
        step: next(iterate_pod_specs(item)).get("nodeSelector") for step, item in build_manifests(settings).steps.items()
    }
    assert selected.pop("train") == {"kind": "gaudi2", "zone": "a"}
    assert selected.pop("evaluate") == {"zone": "a"}
    assert set(selected.values()) == {None}


def test_the_user_of_an_mpijob_has_a_name_in_its_pods() -> None:
    """The image has one for 1000 only, and neither ssh nor sshd works for a user without."""
    manifests = build_manifests(cluster_settings(PIPELINES[0], "mpijob of another user"))
    assert shared(manifests, "ConfigMap")["data"]["passwd"] == "gaudi-bert:x:4711:4711::/tmp:/bin/sh\n"
    for spec in iterate_pod_specs(manifests.steps["train"]):
        mounts = [mount for mount in spec["containers"][0]["volumeMounts"] if mount["mountPath"] == "/etc/passwd"]
        assert mounts == [{"name": "pipeline", "mountPath": "/etc/passwd", "subPath": "passwd", "readOnly": True}]
        assert spec["securityContext"]["runAsUser"] == 4711
    usual = shared(build_manifests(cluster_settings(PIPELINES[0], "mpijob")), "ConfigMap")
    assert list(usual["data"]) == ["pipeline.yaml"]


def test_the_pods_of_nodes_are_told_who_they_are_and_where_they_meet() -> None:
    """Kubernetes puts the Job's name and the pod's index where `$(JOB_NAME)` and the two fields stand."""
    manifests = build_manifests(cluster_settings(PIPELINES[0], "nodes and cards"), (1, 31))
    job, service = manifests.steps["train"], shared(manifests, "Service")
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    assert (spec["backoffLimit"], spec["podReplacementPolicy"]) == (40, "Failed")
    (pod,) = iterate_pod_specs(job)
    assert pod["subdomain"] == service["metadata"]["name"] == job["metadata"]["name"]
    assert service["spec"] == {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"job-name": job["metadata"]["name"]},
    }
    told = {variable["name"]: variable for variable in pod["containers"][0]["env"]}
    fields = {name: told[name]["valueFrom"]["fieldRef"]["fieldPath"] for name in ("JOB_NAME", "PET_NODE_RANK")}
    assert fields == {
        "JOB_NAME": "metadata.labels['job-name']",
        "PET_NODE_RANK": "metadata.annotations['batch.kubernetes.io/job-completion-index']",
    }
    values = {name: variable["value"] for name, variable in told.items() if name.startswith("PET_") and "value" in variable}
    assert values == {
        "PET_NNODES": "4",
        "PET_NPROC_PER_NODE": "8",
        "PET_MASTER_ADDR": "$(JOB_NAME)-0.$(JOB_NAME)",
        "PET_MASTER_PORT": "29500",
    }
    assert list(told).index("JOB_NAME") < list(told).index("PET_MASTER_ADDR"), "a variable is known after it is set"


def test_a_trainjob_runs_the_pods_of_the_job_and_lets_trainer_tell_them_who_they_are() -> None:
    job = next(iterate_pod_specs(build_manifests(cluster_settings(PIPELINES[0], "nodes and cards")).steps["train"]))
    manifests = build_manifests(cluster_settings(PIPELINES[0], "trainjob"))
    train = manifests.steps["train"]
    runtime = shared(manifests, "TrainingRuntime")
    assert manifests.list_objects_shared_by_steps("Service") == []
    assert train["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"] == train["metadata"]["name"]
    (pod,) = manifests.pod_specs_of_step("train")
    ours, theirs = job["containers"][0], pod["containers"][0]
    set_by_trainer = [variable for variable in ours["env"] if variable not in theirs["env"]]
    assert {variable["name"] for variable in set_by_trainer} == {"JOB_NAME", NODE_ADDRESS, *NODE_VARIABLES}
    same = {**ours, "name": "node", "env": [variable for variable in ours["env"] if variable not in set_by_trainer]}
    assert pod == {**{key: value for key, value in job.items() if key != "subdomain"}, "containers": [same]}


def test_fine_tuning_on_a_cluster_is_one_worker_with_all_its_cards() -> None:
    """However many workers train the model: an update is said in sequences, so their number changes nothing of it."""
    steps = build_manifests(load_pipeline(None, [*TASKS, *VARIANTS["cards and mpijob"]])).steps
    assert (steps["train"]["kind"], steps["finetune"]["kind"], steps["predict"]["kind"]) == ("MPIJob", "Job", "Job")
    (template,) = _iterate_pod_templates(steps["finetune"])
    command = template["spec"]["containers"][0]["command"]
    assert command[command.index("-np") + 1] == "8"
    nodes = build_manifests(load_pipeline(None, [*TASKS, *VARIANTS["nodes and cards"]])).steps
    assert next(iterate_pod_specs(nodes["finetune"]))["containers"][0]["command"] == command[command.index("gaudi-bert") :]
    assert nodes["finetune"]["spec"].get("completions") is None
    assert command[-6:] == ["--stages", "finetune", "--set", "resources.workers=1", "--set", "kubernetes.efa=0"]
    (spec,) = iterate_pod_specs(steps["predict"])
    assert spec["containers"][0]["resources"]["limits"]["habana.ai/gaudi"] == "1"


def test_evaluation_takes_one_card_and_its_share_of_a_worker() -> None:
    settings = cluster_settings(PIPELINES[0], "cards", "resources.training={cpu: 95, memory: 409Gi}")
    (spec,) = iterate_pod_specs(build_manifests(settings).steps["evaluate"])
    share = {"cpu": "11", "memory": "52352Mi", "habana.ai/gaudi": "1", "hugepages-2Mi": "11874Mi"}
    assert spec["containers"][0]["resources"]["limits"] == share
    assert spec["containers"][0]["securityContext"]["capabilities"] == {"add": ["SYS_NICE"]}, "as the vendor asks"


# --- a cluster without a volume: what the pods get of a bucket; `test_commands.py` runs their commands


@pytest.mark.parametrize("workers", [1, 3])
def test_no_pod_has_a_volume_for_the_work_folder(workers: int) -> None:
    manifests = build_manifests(load_pipeline(None, [*STORE, f"resources.workers={workers}"]))
    assert manifests.list_objects_shared_by_steps("PersistentVolumeClaim") == []
    for item in manifests.steps.values():
        for spec in iterate_pod_specs(item):
            assert "work" not in {volume["name"] for volume in spec["volumes"]}
            for container in (*spec.get("initContainers", ()), *spec["containers"]):
                assert "work" not in {mount["name"] for mount in container.get("volumeMounts", ())}
                command = container["command"]
                if "--work" in command:
                    assert command[command.index("--work") + 1] == "s3://bucket/prefix"
                    assert container["envFrom"] == [{"secretRef": {"name": "mine"}}]
                else:
                    assert container["name"] == "worker"


def test_ranks_on_other_pods_get_the_credentials_by_name() -> None:
    manifests = build_manifests(load_pipeline(None, [*STORE, "resources.workers=3"]))
    launcher, _ = iterate_pod_specs(manifests.steps["train"])
    command = launcher["containers"][0]["command"]
    passed = [following for word, following in itertools.pairwise(command) if word == "-x"]
    assert [name for name in passed if name.endswith("*")] == ["AWS_*", "AZURE_*", "GOOGLE_*"]
