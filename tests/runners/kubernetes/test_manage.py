"""`k8s status | logs | delete`, and the rights that all of it needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from gaudi_bert.artefacts.object_store import ObjectStore
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.doctor import _list_required_permissions
from gaudi_bert.runners.kubernetes import manage
from gaudi_bert.runners.kubernetes.client import Cluster
from gaudi_bert.runners.kubernetes.manifests import build_manifests
from gaudi_bert.runners.kubernetes.run import run_on_kubernetes
from tests.builders.fake_api_server import HELM_LABELS, OWN_LABELS, FakeApiServer, Json, State
from tests.builders.recorded_answers import ACTIVE, active, complete, failed, running, unschedulable
from tests.builders.s3_server import S3Server, contents, quick

SETTINGS = load_pipeline(None)
TWO = ["name=two", "resources.workers=2", "kubernetes.access_mode=ReadWriteMany"]


def test_status_tells_each_step(server: FakeApiServer, cluster: Cluster) -> None:
    for name in ("demo-prepare", "demo-plan", "demo-write"):
        server.put_own("Job", name, status=ACTIVE)
    server.script("demo-prepare", complete())
    old = failed("p-0", 1, "error: disk full")
    old["metadata"]["creationTimestamp"] = "2025-01-01T00:00:00Z"
    server.script("demo-plan", active(old, running("p-1")))
    server.script("demo-write", active(unschedulable("w", "1 Insufficient cpu.")))
    found = manage.read_step_statuses(SETTINGS, cluster)
    assert found["prepare"] == {"state": "complete", "pods": {}, "problem": None}
    assert found["plan"] == {"state": "running", "pods": {"Running": 1}, "problem": None}, "one was replaced"
    assert found["write"]["state"] == "waiting"
    assert found["write"]["problem"].startswith("pod w: Unschedulable")
    assert found["train"] == {"state": "not submitted"}


def test_an_mpijob_of_a_pipeline_that_has_one_worker_by_now_is_seen(server: FakeApiServer, cluster: Cluster) -> None:
    server.put_own("MPIJob", "demo-train", spec={}, status={})
    server.script("demo-train", State({}, [running("launcher", "train")]))
    assert manage.read_step_statuses(SETTINGS, cluster)["train"]["state"] == "running"
    server.kinds_unknown = {"MPIJob"}
    assert manage.read_step_statuses(SETTINGS, cluster)["train"]["state"] == "not submitted"


def test_status_and_logs_of_a_helm_release_of_the_same_name_are_not_the_pipelines(
    server: FakeApiServer, cluster: Cluster
) -> None:
    server.put("Job", {"metadata": {"name": "demo-plan", "labels": HELM_LABELS}, "status": ACTIVE})
    server.script("demo-plan", active(running("p-1")))
    server.logs["p-1"] = ["2026-01-01T00:00:00Z of Helm"]
    found = manage.read_step_statuses(SETTINGS, cluster)["plan"]
    assert found["state"] == "not submitted"
    assert found["problem"].startswith("Job demo-plan in namespace gaudi-bert does not belong to this pipeline")
    with pytest.raises(InputError, match="no pod of plan has started"):
        manage.show_logs(SETTINGS, "plan", cluster, print)


def test_logs_are_shown_with_the_name_of_their_pod(server: FakeApiServer, cluster: Cluster) -> None:
    server.put_own("Job", "demo-plan", status=ACTIVE)
    server.script("demo-plan", active(running("p-1")))
    server.advance("Job", "demo-plan")
    server.logs["p-1"] = ["2026-01-01T00:00:00Z packing", "2026-01-01T00:00:01Z done"]
    lines: list[str] = []
    assert manage.show_logs(SETTINGS, "plan", cluster, lines.append) == 1
    assert lines == ["[p-1] packing", "[p-1] done"]


def test_logs_of_nothing_are_refused(server: FakeApiServer, cluster: Cluster) -> None:
    with pytest.raises(InputError, match="plan"):
        manage.show_logs(SETTINGS, "plan", cluster, print)
    with pytest.raises(InputError, match="--step pack"):
        manage.show_logs(SETTINGS, "pack", cluster, print)


def test_delete_keeps_the_work_folder(server: FakeApiServer, cluster: Cluster, reporter: Reporter) -> None:
    run_on_kubernetes(SETTINGS, ["plan", "verify"], reporter, cluster)
    server.put("Job", {"metadata": {"name": "other-plan", "labels": {**OWN_LABELS, "gaudi-bert.io/pipeline": "other"}}})
    server.put("ConfigMap", {"metadata": {"name": "demo-pipeline-1a2b", "labels": OWN_LABELS}})
    removed = manage.delete_pipeline_objects(SETTINGS, cluster, delete_data=False)
    assert {"Job demo-plan", "Job demo-verify", "ConfigMap demo-pipeline", "ConfigMap demo-pipeline-1a2b"} <= set(removed)
    assert set(server.objects) == {("Job", "other-plan"), ("PersistentVolumeClaim", "demo-work")}
    assert manage.delete_pipeline_objects(SETTINGS, cluster, delete_data=True) == ["PersistentVolumeClaim demo-work"]
    assert manage.delete_pipeline_objects(SETTINGS, cluster, delete_data=True) == []


def test_what_is_not_the_pipelines_own_is_not_removed(server: FakeApiServer, cluster: Cluster, reporter: Reporter) -> None:
    run_on_kubernetes(SETTINGS, ["plan"], reporter, cluster)
    theirs = [
        ("Job", "demo-db"),
        ("ConfigMap", "demo-web"),
        ("Service", "demo-train"),
        ("PersistentVolumeClaim", "demo-work"),
    ]
    for kind, name in (*theirs, ("PersistentVolumeClaim", "mine")):
        server.put(kind, {"metadata": {"name": name, "labels": HELM_LABELS}})
    before = dict(server.objects)
    for overrides, claim in (([], "demo-work"), (["kubernetes.work_claim=mine"], "mine")):
        with pytest.raises(
            InputError, match=rf"claim {claim} .* was not created by this pipeline.* `gaudi-bert k8s delete` without --data"
        ):
            manage.delete_pipeline_objects(load_pipeline(None, overrides), cluster, delete_data=True)
        assert server.objects == before
    manage.delete_pipeline_objects(SETTINGS, cluster, delete_data=False)
    assert set(server.objects) == {*theirs, ("PersistentVolumeClaim", "mine")}


def test_a_claim_that_a_served_model_mounts_is_kept_and_what_mounts_it_is_named(
    server: FakeApiServer, cluster: Cluster, reporter: Reporter
) -> None:
    run_on_kubernetes(SETTINGS, ["plan"], reporter, cluster)
    pod = {"spec": {"volumes": [{"name": "work", "persistentVolumeClaim": {"claimName": "demo-work"}}]}}

    def put_pod(name: str, owner: Json, phase: str = "Running", labels: Json = HELM_LABELS) -> None:
        metadata = {"name": name, "labels": labels, "ownerReferences": [owner] if owner else []}
        server.put("Pod", {**pod, "metadata": metadata, "status": {"phase": phase}})

    put_pod("demo-plan-x", {"kind": "Job", "name": "demo-plan"}, labels=OWN_LABELS)
    put_pod("old", {}, "Succeeded")
    assert "PersistentVolumeClaim demo-work" in manage.delete_pipeline_objects(SETTINGS, cluster, delete_data=True)
    run_on_kubernetes(SETTINGS, ["plan"], reporter, cluster)
    put_pod("demo-serve-5d4f-x", {"kind": "ReplicaSet", "name": "demo-serve-5d4f"})
    put_pod("shell", {})
    server.put("Deployment", {"metadata": {"name": "scaled-to-none"}, "spec": {"template": pod}})
    named = "mounted by deployment demo-serve, deployment scaled-to-none, pod shell, which"
    with pytest.raises(InputError, match=named) as caught:
        manage.delete_pipeline_objects(SETTINGS, cluster, delete_data=True)
    assert "kubectl delete --namespace gaudi-bert deployment demo-serve" in str(caught.value)
    assert ("Job", "demo-plan") in server.objects
    assert "Job demo-plan" in manage.delete_pipeline_objects(SETTINGS, cluster, delete_data=False)


def test_what_an_earlier_kind_of_training_left_is_removed(
    server: FakeApiServer, cluster: Cluster, reporter: Reporter
) -> None:
    """And what the pipeline does not use by now needs no right."""
    settings = load_pipeline(None, [*TWO, "name=demo", "training.engine=pytorch", "kubernetes.training=trainjob"])
    run_on_kubernetes(settings, ["train"], reporter, cluster)
    server.forbidden = {("list", "mpijobs")}
    removed = manage.delete_pipeline_objects(SETTINGS, cluster, delete_data=True)
    assert {"TrainJob demo-train", "TrainingRuntime demo-train", "NetworkPolicy demo-train"} <= set(removed)
    assert server.objects == {}


def test_the_role_allows_all_that_is_used_and_no_more(
    repository: Path, server: FakeApiServer, cluster: Cluster, reporter: Reporter
) -> None:
    server.logs["p"] = ["2026-01-01T00:00:00Z x"]
    server.script("demo-plan", active(running("p")), active(running("p")), complete(running("p")))
    trained = State({"conditions": [{"type": "Succeeded", "status": "True"}]})
    server.script("two-train", State({}, suspended=True), State({}), trained)
    for overrides in ([], ["packing.depth=4"], [*TWO, "kubernetes.queue=gpus"]):
        run_on_kubernetes(load_pipeline(None, overrides), ["plan", "train"], reporter, cluster)
    run_on_kubernetes(load_pipeline(None, overrides), ["train"], reporter, cluster)
    for name, kind in (("three", "job"), ("four", "trainjob")):
        server.script(f"{name}-train", State({}), complete())
        nodes = [*TWO, f"name={name}", "training.engine=pytorch", f"kubernetes.training={kind}"]
        run_on_kubernetes(load_pipeline(None, nodes), ["train"], reporter, cluster)
        run_on_kubernetes(load_pipeline(None, [*nodes, "training.seed=3"]), ["train"], reporter, cluster)
        manage.delete_pipeline_objects(load_pipeline(None, nodes), cluster, delete_data=True)
    cluster.read_last_warning("demo-work")
    manage.read_step_statuses(SETTINGS, cluster)
    manage.delete_pipeline_objects(load_pipeline(None, TWO), cluster, delete_data=True)
    _, role, _ = yaml.safe_load_all((repository / "k8s" / "in-cluster" / "account.yaml").read_text())
    allowed = {(verb, resource) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    # Who may not list Deployments learns from their pods what mounts a claim.
    assert server.verbs - {("list", "deployments")} == allowed
    nodes = [*TWO, "training.engine=pytorch"]
    pipelines = [load_pipeline(None, each) for each in (TWO, nodes, [*nodes, "kubernetes.training=trainjob"])]
    rights = [right for each in pipelines for right in _list_required_permissions(build_manifests(each), uses_queue=True)]
    assert {(verb, resource) for _, resource, verb in rights} == allowed


def test_a_bucket_is_touched_only_with_data(
    server: FakeApiServer, cluster: Cluster, reporter: Reporter, s3: S3Server
) -> None:
    settings = load_pipeline(None, ["kubernetes.store=s3://bucket/cluster", f"store.endpoint_url={s3.endpoint}"])
    objects = ObjectStore(quick(s3.endpoint))
    before = {"demo/plan.json": b"plan", "demo/packed/train/metadata.json": b"metadata", "demo-2/plan.json": b"another's"}
    for name, content in before.items():
        objects.write(f"s3://bucket/cluster/{name}", content)
    run_on_kubernetes(settings, ["plan"], reporter, cluster)
    assert server.created("PersistentVolumeClaim") == []
    assert "Job demo-plan" in manage.delete_pipeline_objects(settings, cluster, delete_data=False)
    assert contents("s3://bucket/cluster", objects) == before
    assert (
        manage.delete_pipeline_objects(settings, cluster, delete_data=True)[-1] == "2 objects below s3://bucket/cluster/demo"
    )
    assert contents("s3://bucket/cluster", objects) == {"demo-2/plan.json": b"another's"}
