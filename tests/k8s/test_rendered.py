"""What `--render` writes for every pipeline and variant: kustomize builds it, schemas and our own checks accept it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.launch import NODE_ADDRESS, NODE_VARIABLES
from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.kubernetes.manifests import Manifests, render
from gaudi_bert.runners.kubernetes.pods import pod_specs, pod_templates
from gaudi_bert.runners.kubernetes.rendered import write_rendered
from gaudi_bert.runners.stage_table import stages_of
from tests.builders.effort import LONG
from tests.k8s.cluster_settings import MAIN_VARIANTS, PIPELINES, VARIANTS, cluster_settings, existing_claims
from tests.k8s.manifest_checks import VERSIONS, check_manifests, check_schema

Json = dict[str, Any]


def all_objects(manifests: Manifests) -> list[Json]:
    return [manifests.namespace, *manifests.shared, *manifests.steps.values()]


def shared(manifests: Manifests, kind: str) -> Json:
    """The one object of a kind that the steps share."""
    (item,) = manifests.of_kind(kind)
    return item


# The demo in every variant, every other pipeline in those that change most.
CASES = [(path, variant) for path in PIPELINES for variant in VARIANTS if path.stem == "demo" or variant in MAIN_VARIANTS]


@pytest.mark.repeated
@pytest.mark.parametrize(("pipeline", "variant"), CASES, ids=[f"{path.stem}, {variant}" for path, variant in CASES])
def test_the_manifests_of_every_pipeline_are_sound(pipeline: Path, variant: str) -> None:
    """The demo's main variants are held to all versions, the others to one of them each; in the long form all to all."""
    pytest.importorskip("kubernetes_validate")
    settings, number = cluster_settings(pipeline, variant), CASES.index((pipeline, variant)) % len(VERSIONS)
    all_versions = LONG or (pipeline.stem == "demo" and variant in MAIN_VARIANTS)
    for version in VERSIONS if all_versions else VERSIONS[number : number + 1]:
        major, minor = map(int, version.split("."))
        objects = all_objects(render(settings, (major, minor)))
        assert [problem for item in objects for problem in check_schema(item, version)] == []
        assert check_manifests(objects, external=existing_claims(settings)) == []


@pytest.mark.parametrize("pipeline", [path for path in PIPELINES if "demo" in path.stem], ids=lambda path: path.stem)
def test_the_failure_policy_is_known_from_1_29_on(pipeline: Path) -> None:
    pytest.importorskip("kubernetes_validate")
    settings = cluster_settings(pipeline, "as it is")
    objects = all_objects(render(settings, (1, 29)))
    named = cluster_settings(pipeline, "as it is", "kubernetes.version=1.29")
    assert render(named).steps == render(settings, (1, 29)).steps
    for version in ("1.29", "1.36"):
        assert [problem for item in objects for problem in check_schema(item, version)] == []
    assert check_manifests(objects, external=existing_claims(settings)) == []
    assert [problem for item in objects for problem in check_schema(item, "1.25")] != []
    rules = [item["spec"]["podFailurePolicy"]["rules"] for item in objects if item["kind"] == "Job"]
    taken_away = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert all(taken_away in each for each in rules), "an eviction costs no retry"


@pytest.mark.parametrize("variant", MAIN_VARIANTS)
def test_rendered_manifests_suit_the_oldest_version_unless_the_pipeline_names_a_later_one(variant: str) -> None:
    """1.25 and 1.26 require `onPodConditions` of every rule; there are no schemas of 1.24, which knows no such policy."""
    pytest.importorskip("kubernetes_validate")
    objects = all_objects(render(cluster_settings(PIPELINES[0], variant)))
    for version in ("1.25", "1.26", "1.29", "1.37"):
        assert [problem for item in objects for problem in check_schema(item, version)] == []


# Pipelines as they are, one that pretrains and one of a task, or in the long form all; the demos with cards too.
EXAMPLES = ("demo", "finetune-demo", "mlperf", "squad")
BUILT = [(path, variant) for path, variant in CASES if variant == "as it is" and (LONG or path.stem in EXAMPLES)]
BUILT += [(path, "cards and mpijob") for path in PIPELINES if "demo" in path.stem]


@pytest.mark.repeated
@pytest.mark.parametrize(("pipeline", "variant"), BUILT, ids=[f"{path.stem}, {variant}" for path, variant in BUILT])
def test_kustomize_builds_it(variant: str, pipeline: Path, tmp_path: Path, kustomize: Callable[[Path], list[Json]]) -> None:
    settings = cluster_settings(pipeline, variant)
    manifests = render(settings)
    parts = ["data", "training"] if settings.pretrains else []
    parts += ["finetuning", "results"] if settings.finetunes else ["results"]
    assert write_rendered(settings, stages_of(settings), tmp_path) == parts
    built = {part: kustomize(tmp_path / part) for part in (".", *parts)}
    for part in parts:
        assert check_manifests(built[part], external=existing_claims(settings)) == []
    jobs = [item for part in parts for item in built[part] if "Job" in item["kind"]]
    configuration = next(_name(item) for item in built[parts[0]] if item["kind"] == "ConfigMap")
    assert re.fullmatch(f"{settings.name}-pipeline-[0-9a-f]{{10}}", configuration)
    plainly_named = json.loads(json.dumps(jobs).replace(configuration, f"{settings.name}-pipeline"))
    assert sorted(plainly_named, key=_name) == sorted(manifests.steps.values(), key=_name)
    everything = {(item["kind"], _name(item)) for part in parts for item in built[part]}
    together = {(item["kind"], _name(item)) for item in built["."]}
    with_cards = settings.resources.cards > 0
    assert together == ({(item["kind"], _name(item)) for item in built[parts[0]]} if with_cards else everything)


def _name(item: Json) -> str:
    return item["metadata"]["name"]


def test_some_stages_only_are_rendered(tmp_path: Path) -> None:
    assert write_rendered(load_pipeline(None), ["plan", "report"], tmp_path / "out") == ["data", "results"]
    assert sorted(path.name for path in (tmp_path / "out" / "data").iterdir()) == ["kustomization.yaml", "plan.yaml"]


def test_manifests_of_a_changed_pipeline_name_another_configuration(tmp_path: Path) -> None:
    mounted = []
    for name, overrides in (("before", []), ("after", ["packing.depth=5"]), ("again", [])):
        write_rendered(load_pipeline(None, overrides), ["plan"], tmp_path / name)
        job = yaml.safe_load((tmp_path / name / "data" / "plan.yaml").read_text())
        volumes = job["spec"]["template"]["spec"]["volumes"]
        mounted += [volume["configMap"]["name"] for volume in volumes if "configMap" in volume]
    before, after, again = mounted
    assert before == again != after


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(InputError, match="holds other files"):
        write_rendered(load_pipeline(None), stages_of(load_pipeline(None)), tmp_path)


TASKS = ["task.name=classification", "finetune.data=python-docstrings", "predict.data=python-docstrings"]
STORE = ["kubernetes.store=s3://bucket/prefix", "kubernetes.store_secret=mine"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["resources.workers=2", "kubernetes.training=job"], "is `job`, but TensorFlow's workers .2. need an MPIJob; set"),
        (
            ["kubernetes.training=trainjob"],
            "is `trainjob`, but TensorFlow's workers .1. need an MPIJob; .*engine to pytorch",
        ),
        (["kubernetes.training=mpijob", "training.engine=pytorch"], "images of PyTorch have neither sshd nor Open MPI; set"),
        (["resources.cards=8", "kubernetes.training=mpijob"], "images of PyTorch have neither sshd nor Open MPI; set"),
        (["kubernetes.efa=4"], "kubernetes.efa is for an MPIJob on cards"),
        (["resources.cards=3"], "resources.cards"),
        (["resources.training.memory=lots"], "must be a quantity as Kubernetes writes it, for example 500m, 2 or 16Gi"),
        (["kubernetes.namespace=My Space"], "kubernetes.namespace"),
        (["name=" + "x" * 60], "name"),
        (["kubernetes={version: 1.30}"], "`kubernetes.version`: must be text; put it in quotes"),
        (["kubernetes.version=1.23"], "kubernetes.version"),
        (["kubernetes.data_pods.tolerations=[{operator: Exists, key: a, value: b}]"], "operator Exists takes no value"),
        (["kubernetes.data_pods.tolerations=[{value: b}]"], "operator Equal needs a key"),
        (["kubernetes.data_pods.tolerations=[{key: a, effect: Never}]"], "effect"),
        (["kubernetes.store=s3://bucket", "kubernetes.work_claim=ours"], "kubernetes.work_claim exclude each other"),
        (["kubernetes.store_secret=mine"], "store_secret needs a store"),
        (["kubernetes.store=bucket/prefix"], "kubernetes.store"),
        (["kubernetes.store=s3://key:secret@bucket/prefix"], "kubernetes.store"),
        (["store.endpoint_url=https://key:secret@host"], "store.endpoint_url"),
        (TASKS[1:2], "finetune.data is set, but no task; set task.name"),
        ([TASKS[0], TASKS[2]], "predict.data needs a model that this pipeline fine-tunes"),
        # Accepted elsewhere, but no container of a cluster has that path.
        (["prepare.text=../corpus"], r"prepare.text = \.\./corpus: no such path in a container; .*data_claim"),
        (["prepare.text=/data/corpus"], r"prepare.text = /data/corpus: needs a volume at /data"),
        (["prepare.records=/home/me/records"], "prepare.records = /home/me/records: no such path"),
        (["training.init_checkpoint=old"], "training.init_checkpoint = old: no such path"),
        ([*TASKS, STORE[0]], "kubernetes.store = s3://bucket/prefix: the stages finetune and predict have their work"),
    ],
)
def test_settings_that_cannot_be_are_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        render(load_pipeline(None, overrides))


def test_pods_are_placed_and_marked_as_the_pipeline_says() -> None:
    steps = render(cluster_settings(PIPELINES[0], "placed")).steps
    prepare = steps["prepare"]["spec"]["template"]
    assert prepare["spec"]["tolerations"] == [{"operator": "Exists"}]
    assert prepare["spec"]["nodeSelector"] == {"disk": "fast"}
    assert prepare["metadata"]["labels"]["team"] == "text"
    assert prepare["metadata"]["labels"]["app.kubernetes.io/component"] == "prepare"
    assert prepare["spec"]["volumes"][2] == {"name": "scratch", "emptyDir": {"sizeLimit": "3Gi"}}
    assert prepare["spec"]["containers"][0]["resources"]["requests"]["ephemeral-storage"] == "3Gi"
    launcher, worker = pod_templates(steps["train"])
    for template in (launcher, worker, *pod_templates(steps["evaluate"])):
        assert template["spec"]["priorityClassName"] == "high"
        assert template["spec"]["tolerations"][0]["key"] == "gaudi"
        assert template["metadata"]["annotations"] == {"example.org/owner": "me"}
    assert worker["spec"]["runtimeClassName"] == "habana"
    assert "podAntiAffinity" in worker["spec"]["affinity"]
    assert not {"runtimeClassName", "affinity"} & launcher["spec"].keys(), "the launcher may run anywhere"
    assert "priorityClassName" not in prepare["spec"]


def test_the_selector_of_nodes_that_train_is_for_them_alone() -> None:
    settings = load_pipeline(
        None, ["kubernetes.node_selector={kind: gaudi2}", "kubernetes.training_pods={node_selector: {zone: a}}"]
    )
    selected = {step: next(pod_specs(item)).get("nodeSelector") for step, item in render(settings).steps.items()}
    assert selected.pop("train") == {"kind": "gaudi2", "zone": "a"}
    assert selected.pop("evaluate") == {"zone": "a"}
    assert set(selected.values()) == {None}


def test_the_user_of_an_mpijob_has_a_name_in_its_pods() -> None:
    """The image has one for 1000 only, and neither ssh nor sshd works for a user without."""
    manifests = render(cluster_settings(PIPELINES[0], "mpijob of another user"))
    configuration = shared(manifests, "ConfigMap")
    assert configuration["data"]["passwd"] == "gaudi-bert:x:4711:4711::/tmp:/bin/sh\n"
    for spec in pod_specs(manifests.steps["train"]):
        mounts = [mount for mount in spec["containers"][0]["volumeMounts"] if mount["mountPath"] == "/etc/passwd"]
        assert mounts == [{"name": "pipeline", "mountPath": "/etc/passwd", "subPath": "passwd", "readOnly": True}]
        assert spec["securityContext"]["runAsUser"] == 4711
    usual = shared(render(cluster_settings(PIPELINES[0], "mpijob")), "ConfigMap")
    assert list(usual["data"]) == ["pipeline.yaml"]


@pytest.mark.parametrize(
    ("variant", "label"),
    [
        ("mpijob", "training.kubeflow.org/job-name"),
        ("nodes", "job-name"),
        ("trainjob", "jobset.sigs.k8s.io/jobset-name"),
    ],
)
def test_only_pods_that_train_together_reach_one_another(variant: str, label: str) -> None:
    settings = cluster_settings(PIPELINES[0], variant)
    policy = shared(render(settings), "NetworkPolicy")
    ours = {"podSelector": {"matchLabels": {label: f"{settings.name}-train"}}}
    assert policy["spec"] == {**ours, "policyTypes": ["Ingress"], "ingress": [{"from": [ours]}]}


def test_where_no_policy_is_wanted_or_works_there_is_none() -> None:
    for variant in ("as it is", "cards, mpijob and EFA", "open mpijob in a queue", "open nodes in a queue"):
        assert render(cluster_settings(PIPELINES[0], variant)).of_kind("NetworkPolicy") == []


def test_the_pods_of_nodes_are_told_who_they_are_and_where_they_meet() -> None:
    """Kubernetes puts the Job's name and the pod's index where `$(JOB_NAME)` and the two fields stand."""
    manifests = render(cluster_settings(PIPELINES[0], "nodes and cards"), (1, 31))
    job, service = manifests.steps["train"], shared(manifests, "Service")
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    assert (spec["backoffLimit"], spec["podReplacementPolicy"]) == (40, "Failed")
    (pod,) = pod_specs(job)
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
    job = next(pod_specs(render(cluster_settings(PIPELINES[0], "nodes and cards")).steps["train"]))
    manifests = render(cluster_settings(PIPELINES[0], "trainjob"))
    train = manifests.steps["train"]
    runtime = shared(manifests, "TrainingRuntime")
    assert manifests.of_kind("Service") == []
    assert train["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"] == train["metadata"]["name"]
    (pod,) = manifests.pod_specs("train")
    ours, theirs = job["containers"][0], pod["containers"][0]
    set_by_trainer = [variable for variable in ours["env"] if variable not in theirs["env"]]
    assert {variable["name"] for variable in set_by_trainer} == {"JOB_NAME", NODE_ADDRESS, *NODE_VARIABLES}
    same = {**ours, "name": "node", "env": [variable for variable in ours["env"] if variable not in set_by_trainer]}
    assert pod == {**{key: value for key, value in job.items() if key != "subdomain"}, "containers": [same]}


def test_a_queue_is_named_by_jobs_and_by_no_pod() -> None:
    label = "kueue.x-k8s.io/queue-name"
    for item in render(cluster_settings(PIPELINES[0], "open mpijob in a queue")).steps.values():
        assert item["metadata"]["labels"][label] == "gpus"
        assert "suspend" not in item["spec"].get("runPolicy", item["spec"]), "a queue suspends what is its own"
        assert all(label not in template["metadata"]["labels"] for template in pod_templates(item))
    for item in render(cluster_settings(PIPELINES[0], "mpijob")).steps.values():
        assert label not in item["metadata"]["labels"]


def test_with_a_queue_the_top_of_a_rendered_folder_holds_no_quota_for_training(tmp_path: Path) -> None:
    settings = load_pipeline(None, ["kubernetes.queue=gpus"])
    write_rendered(settings, stages_of(settings), tmp_path)
    listed = yaml.safe_load((tmp_path / "kustomization.yaml").read_text())["resources"]
    steps = ("prepare", "histogram", "plan", "write", "write-finish", "verify", "verify-finish")
    assert listed == ["base", *(f"data/{step}.yaml" for step in steps)]


def test_fine_tuning_on_a_cluster_is_one_worker_with_all_its_cards() -> None:
    """However many workers train the model: an update is said in sequences, so their number changes nothing of it."""
    steps = render(load_pipeline(None, [*TASKS, *VARIANTS["cards and mpijob"]])).steps
    assert (steps["train"]["kind"], steps["finetune"]["kind"], steps["predict"]["kind"]) == ("MPIJob", "Job", "Job")
    (template,) = pod_templates(steps["finetune"])
    command = template["spec"]["containers"][0]["command"]
    assert command[command.index("-np") + 1] == "8"
    nodes = render(load_pipeline(None, [*TASKS, *VARIANTS["nodes and cards"]])).steps
    assert next(pod_specs(nodes["finetune"]))["containers"][0]["command"] == command[command.index("gaudi-bert") :]
    assert nodes["finetune"]["spec"].get("completions") is None
    assert command[-6:] == ["--stages", "finetune", "--set", "resources.workers=1", "--set", "kubernetes.efa=0"]
    (spec,) = pod_specs(steps["predict"])
    assert spec["containers"][0]["resources"]["limits"]["habana.ai/gaudi"] == "1"


def test_weights_that_are_given_leave_no_step_before_fine_tuning() -> None:
    given = ["finetune.init_checkpoint=/data/bert", "kubernetes.data_claim=models", *VARIANTS["mpijob"]]
    manifests = render(load_pipeline(None, [*TASKS, *given]))
    assert list(manifests.steps) == ["finetune", "predict", "report"]
    assert [item["kind"] for item in manifests.shared] == ["ServiceAccount", "PersistentVolumeClaim", "ConfigMap"]


# --- a cluster without a volume: what the pods get of a bucket; `test_commands.py` runs their commands


@pytest.mark.parametrize("workers", [1, 3])
def test_no_pod_has_a_volume_for_the_work_folder(workers: int) -> None:
    manifests = render(load_pipeline(None, [*STORE, f"resources.workers={workers}"]))
    assert manifests.of_kind("PersistentVolumeClaim") == []
    for item in manifests.steps.values():
        for spec in pod_specs(item):
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
    manifests = render(load_pipeline(None, [*STORE, "resources.workers=3"]))
    launcher, _ = pod_specs(manifests.steps["train"])
    command = launcher["containers"][0]["command"]
    passed = [following for word, following in itertools.pairwise(command) if word == "-x"]
    assert [name for name in passed if name.endswith("*")] == ["AWS_*", "AZURE_*", "GOOGLE_*"]


def test_shards_that_training_keeps_fit_the_scratch() -> None:
    text = ["kubernetes.scratch=6Gi", "store.connections=2"]
    manifests = render(load_pipeline(None, [*STORE, *text]))
    configuration = shared(manifests, "ConfigMap")
    written = yaml.safe_load(configuration["data"]["pipeline.yaml"])
    assert written["store"] == {"connections": 2, "cache_bytes": 3 * 2**30}


def test_data_in_a_bucket_needs_no_claim() -> None:
    render(load_pipeline(None, ["prepare.text=s3://bucket/text", "prepare.vocab=gs://bucket/vocab.txt"]))
