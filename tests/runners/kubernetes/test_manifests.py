"""The objects of every pipeline and variant: schemas and our own checks accept them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.kubernetes.manifests import Manifests, build_manifests, write_manifests
from gaudi_bert.runners.kubernetes.pods import _iterate_pod_templates
from gaudi_bert.runners.stage_table import list_pipeline_stages
from tests.builders.effort import LONG
from tests.k8s.cluster_settings import MAIN_VARIANTS, PIPELINES, VARIANTS, cluster_settings, existing_claims, shared
from tests.k8s.manifest_checks import VERSIONS, check_manifests, check_schema

Json = dict[str, Any]


def all_objects(manifests: Manifests) -> list[Json]:
    return [manifests.namespace, *manifests.shared, *manifests.steps.values()]


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
        objects = all_objects(build_manifests(settings, (major, minor)))
        assert [problem for item in objects for problem in check_schema(item, version)] == []
        assert check_manifests(objects, external=existing_claims(settings)) == []


def test_the_failure_policy_is_known_from_1_29_on() -> None:
    pytest.importorskip("kubernetes_validate")
    manifests = build_manifests(cluster_settings(PIPELINES[0], "as it is"), (1, 29))
    assert build_manifests(cluster_settings(PIPELINES[0], "as it is", "kubernetes.version=1.29")).steps == manifests.steps
    objects = all_objects(manifests)
    assert [problem for item in objects for problem in check_schema(item, "1.29")] == []
    assert [problem for item in objects for problem in check_schema(item, "1.25")] != []
    rules = [item["spec"]["podFailurePolicy"]["rules"] for item in objects if item["kind"] == "Job"]
    taken_away = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert all(taken_away in each for each in rules), "an eviction costs no retry"


def test_rendered_manifests_suit_the_oldest_version_unless_the_pipeline_names_a_later_one() -> None:
    """1.25 requires `onPodConditions` of every rule; there are no schemas of 1.24, which knows no such policy."""
    pytest.importorskip("kubernetes_validate")
    objects = all_objects(build_manifests(cluster_settings(PIPELINES[0], "as it is")))
    assert [problem for version in ("1.25", "1.37") for item in objects for problem in check_schema(item, version)] == []


TASKS = ["task.name=classification", "finetune.data=python-docstrings", "predict.data=python-docstrings"]
STORE = ["kubernetes.store=s3://bucket/prefix", "kubernetes.store_secret=mine"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["resources.workers=2", "kubernetes.training=job"], "kubernetes.training is `job`"),
        (["kubernetes.training=trainjob"], "kubernetes.training is `trainjob`"),
        (["kubernetes.training=mpijob", "training.engine=pytorch"], "kubernetes.training is `mpijob`"),
        (["kubernetes.efa=4"], "kubernetes.efa .*MPIJob"),
        (["resources.cards=3"], "resources.cards"),
        (["resources.training.memory=lots"], "must be a quantity in the notation of Kubernetes, for example 500m"),
        (["kubernetes.data_pods.tolerations=[{operator: Exists, key: a, value: b}]"], "operator Exists cannot be combined"),
        (["kubernetes.store=s3://bucket", "kubernetes.work_claim=ours"], "store cannot be combined with kubernetes.work_"),
        (["kubernetes.store_secret=mine"], "store_secret requires kubernetes.store"),
        (["kubernetes.store=s3://key:secret@bucket/prefix"], "kubernetes.store"),
        (TASKS[1:2], "finetune.data .*task.name"),
        ([TASKS[0], TASKS[2]], "predict.data requires finetune.data"),
        # Accepted elsewhere, but no container of a cluster has that path.
        (["prepare.text=../corpus"], r"prepare.text = \.\./corpus: this path does not exist in a container; .*data_claim"),
        (["prepare.text=/data/corpus"], r"prepare.text = /data/corpus: no volume is mounted at /data"),
        ([*TASKS, STORE[0]], "kubernetes.store = s3://bucket/prefix: the stages finetune and predict need a work"),
    ],
)
def test_settings_that_cannot_be_are_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        build_manifests(load_pipeline(None, overrides))


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
    policy = shared(build_manifests(settings), "NetworkPolicy")
    ours = {"podSelector": {"matchLabels": {label: f"{settings.name}-train"}}}
    assert policy["spec"] == {**ours, "policyTypes": ["Ingress"], "ingress": [{"from": [ours]}]}


def test_where_no_policy_is_wanted_or_works_there_is_none() -> None:
    for variant in ("as it is", "cards, mpijob and EFA", "open mpijob in a queue", "open nodes in a queue"):
        assert build_manifests(cluster_settings(PIPELINES[0], variant)).list_objects_shared_by_steps("NetworkPolicy") == []


def test_a_queue_is_named_by_jobs_and_by_no_pod() -> None:
    label = "kueue.x-k8s.io/queue-name"
    for item in build_manifests(cluster_settings(PIPELINES[0], "open mpijob in a queue")).steps.values():
        assert item["metadata"]["labels"][label] == "gpus"
        assert "suspend" not in item["spec"].get("runPolicy", item["spec"]), "a queue suspends what is its own"
        assert all(label not in template["metadata"]["labels"] for template in _iterate_pod_templates(item))
    for item in build_manifests(cluster_settings(PIPELINES[0], "mpijob")).steps.values():
        assert label not in item["metadata"]["labels"]


def test_weights_that_are_given_leave_no_step_before_fine_tuning() -> None:
    given = ["finetune.init_checkpoint=/data/bert", "kubernetes.data_claim=models", *VARIANTS["mpijob"]]
    manifests = build_manifests(load_pipeline(None, [*TASKS, *given]))
    assert list(manifests.steps) == ["finetune", "predict", "report"]
    assert [item["kind"] for item in manifests.shared] == ["ServiceAccount", "PersistentVolumeClaim", "ConfigMap"]


def test_shards_that_training_keeps_fit_the_scratch() -> None:
    text = ["kubernetes.scratch=6Gi", "store.connections=2"]
    configuration = shared(build_manifests(load_pipeline(None, [*STORE, *text])), "ConfigMap")
    written = yaml.safe_load(configuration["data"]["pipeline.yaml"])
    assert written["store"] == {"connections": 2, "cache_bytes": 3 * 2**30}


def test_data_in_a_bucket_needs_no_claim() -> None:
    build_manifests(load_pipeline(None, ["prepare.text=s3://bucket/text", "prepare.vocab=gs://bucket/vocab.txt"]))


# --- what `--render` writes: kustomize builds it, the parts are in the order in which they are applied

# Pipelines as they are, one that pretrains and one of a task, or in the long form all; the demos with cards too.
EXAMPLES = ("demo", "finetune-demo", "mlperf", "squad")
BUILT = [(path, "as it is") for path in PIPELINES if LONG or path.stem in EXAMPLES]
BUILT += [(path, "cards and mpijob") for path in PIPELINES if "demo" in path.stem]


@pytest.mark.repeated
@pytest.mark.parametrize(("pipeline", "variant"), BUILT, ids=[f"{path.stem}, {variant}" for path, variant in BUILT])
def test_kustomize_builds_it(variant: str, pipeline: Path, tmp_path: Path, kustomize: Callable[[Path], list[Json]]) -> None:
    settings = cluster_settings(pipeline, variant)
    manifests = build_manifests(settings)
    parts = ["data", "training"] if settings.has_pretraining else []
    parts += ["finetuning", "results"] if settings.has_finetuning else ["results"]
    assert write_manifests(settings, list_pipeline_stages(settings), tmp_path) == parts
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
    assert write_manifests(load_pipeline(None), ["plan", "report"], tmp_path / "out") == ["data", "results"]
    assert sorted(path.name for path in (tmp_path / "out" / "data").iterdir()) == ["kustomization.yaml", "plan.yaml"]


def test_manifests_of_a_changed_pipeline_name_another_configuration(tmp_path: Path) -> None:
    mounted = []
    for name, overrides in (("before", []), ("after", ["packing.depth=5"]), ("again", [])):
        write_manifests(load_pipeline(None, overrides), ["plan"], tmp_path / name)
        job = yaml.safe_load((tmp_path / name / "data" / "plan.yaml").read_text())
        volumes = job["spec"]["template"]["spec"]["volumes"]
        mounted += [volume["configMap"]["name"] for volume in volumes if "configMap" in volume]
    before, after, again = mounted
    assert before == again != after


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(InputError, match="contains files that --render did not write"):
        write_manifests(load_pipeline(None), list_pipeline_stages(load_pipeline(None)), tmp_path)


def test_with_a_queue_the_top_of_a_rendered_folder_holds_no_quota_for_training(tmp_path: Path) -> None:
    settings = load_pipeline(None, ["kubernetes.queue=gpus"])
    write_manifests(settings, list_pipeline_stages(settings), tmp_path)
    listed = yaml.safe_load((tmp_path / "kustomization.yaml").read_text())["resources"]
    steps = ("prepare", "histogram", "plan", "write", "write-finish", "verify", "verify-finish")
    assert listed == ["base", *(f"data/{step}.yaml" for step in steps)]


def test_the_runtime_of_a_trainjob_is_applied_before_it(tmp_path: Path, kustomize: Callable[[Path], list[Json]]) -> None:
    """Kubeflow Trainer's webhook refuses a TrainJob whose runtime it does not know: two folders, one after the other."""
    settings = load_pipeline(None, VARIANTS["trainjob"])
    assert write_manifests(settings, list_pipeline_stages(settings), tmp_path) == ["base", "data", "training", "results"]
    kinds = {part: {item["kind"] for item in kustomize(tmp_path / part)} for part in (".", "base", "training")}
    assert "TrainingRuntime" in kinds["base"]
    assert "TrainJob" not in kinds["."] | kinds["base"]
    assert "TrainJob" in kinds["training"]
