"""The checks of a cluster, against an API server over real HTTP."""

from __future__ import annotations

import io
from typing import Any

import pytest

from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.doctor.checks import CheckResult
from gaudi_bert.runners.doctor.cluster import examine_cluster
from gaudi_bert.runners.kubernetes.client import Cluster
from tests.builders.fake_api_server import FakeApiServer, Fault

CLAIM = "PersistentVolumeClaim demo-work"


def examined(cluster: Cluster, *overrides: str) -> list[CheckResult]:
    return examine_cluster(load_pipeline(None, overrides), Reporter(io.StringIO()), cluster)


def wrong(cluster: Cluster, *overrides: str) -> dict[str, CheckResult]:
    return {result.check: result for result in examined(cluster, *overrides) if result.verdict != "ok"}


def put_claim(server: FakeApiServer, phase: str, **metadata: str) -> None:
    server.put("PersistentVolumeClaim", {"metadata": {"name": "demo-work", **metadata}, "status": {"phase": phase}})


def test_a_good_cluster_is_ready_and_nothing_is_created(server: FakeApiServer, cluster: Cluster) -> None:
    results = examined(cluster)
    assert [str(result) for result in results if result.verdict != "ok"] == []
    checks = [result.check for result in results]
    assert checks[:3] == ["Kubernetes", "namespace", "rights"]
    assert {CLAIM, "Job demo-train", "ConfigMap demo-pipeline", "pods"} <= set(checks)
    assert server.objects == {}


@pytest.mark.parametrize(("minor", "overrides"), [("23", ()), ("28", ("kubernetes.version=1.29",))])
def test_a_cluster_that_is_too_old_fails(
    minor: str, overrides: tuple[str, ...], server: FakeApiServer, cluster: Cluster
) -> None:
    server.version = {"major": "1", "minor": minor}
    assert wrong(cluster, *overrides)["Kubernetes"].verdict == "failed"


@pytest.mark.parametrize(
    ("namespaces", "forbidden", "verdict"),
    [({}, set(), "failed"), ({"gaudi-bert": "Terminating"}, set(), "failed"), ({}, {("get", "namespaces")}, "warning")],
)
def test_the_namespace_must_be_there(
    namespaces: dict[str, str], forbidden: set[Any], verdict: str, server: FakeApiServer, cluster: Cluster
) -> None:
    server.namespaces, server.forbidden = namespaces, forbidden
    assert wrong(cluster)["namespace"].verdict == verdict


def test_missing_rights_are_named_and_those_that_are_not_used_are_not_asked_for(
    server: FakeApiServer, cluster: Cluster
) -> None:
    unused = {("list", "mpijobs"), ("create", "trainjobs"), ("list", "workloads"), ("create", "services")}
    server.forbidden = {("watch", "jobs"), ("get", "pods/log"), *unused}
    result = wrong(cluster)["rights"]
    assert (result.verdict, result.found) == ("failed", "may not get pods/log, watch jobs")


def test_what_the_server_says_to_an_object_is_printed(server: FakeApiServer, cluster: Cluster) -> None:
    server.faults.append(Fault("POST", "/jobs?", 403, message="exceeded quota: jobs, limited: count/jobs.batch=2"))
    found = wrong(cluster)
    assert [result.verdict for result in found.values()] == ["failed"]
    assert "exceeded quota: jobs, limited: count/jobs.batch=2" in next(iter(found.values())).found


def test_pods_are_checked_by_who_may_create_them(server: FakeApiServer, cluster: Cluster) -> None:
    message = 'violates PodSecurity "restricted:latest": host namespaces'
    server.faults.append(Fault("POST", "/pods?", 403, message=message))
    assert message in next(iter(wrong(cluster).values())).found
    server.forbidden = {("create", "pods")}
    assert "pods" not in {result.check for result in examined(cluster)}


def test_an_operator_that_is_not_there_fails(server: FakeApiServer, cluster: Cluster) -> None:
    server.kinds_unknown = {"MPIJob"}
    mpi = ("resources.workers=2", "training.engine=tensorflow", "kubernetes.access_mode=ReadWriteMany")
    assert wrong(cluster, *mpi)["MPIJob demo-train"].verdict == "failed"


def test_a_claim_that_is_not_bound_is_not_ok(server: FakeApiServer, cluster: Cluster) -> None:
    put_claim(server, "Bound")
    assert wrong(cluster) == {}
    put_claim(server, "Pending")
    server.warn("demo-work", 'storageclass.storage.k8s.io "fast" not found')
    result = wrong(cluster)[CLAIM]
    assert (result.verdict, result.found) == ("warning", 'Pending: storageclass.storage.k8s.io "fast" not found')
    put_claim(server, "Bound", deletionTimestamp="2026-01-01T00:00:00Z")
    assert wrong(cluster)[CLAIM].verdict == "failed"


def test_a_claim_that_the_pipeline_names_must_be_there(server: FakeApiServer, cluster: Cluster) -> None:
    assert wrong(cluster, "kubernetes.work_claim=shared")["PersistentVolumeClaim shared"].verdict == "failed"
