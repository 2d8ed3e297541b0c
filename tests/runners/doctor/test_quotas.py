"""LimitRanges and ResourceQuotas that would refuse the pods or the claim of a pipeline."""

from __future__ import annotations

from typing import Any

import pytest

from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.doctor.checks import ClusterAnswers
from gaudi_bert.runners.doctor.cluster import _ask_cluster
from gaudi_bert.runners.doctor.room import check_limits
from gaudi_bert.runners.kubernetes.client import Cluster
from tests.builders.fake_api_server import FakeApiServer

Json = dict[str, Any]

DATA = "resources.data={cpu: 2, memory: 4Gi}"
MPI = ["resources.workers=2", "kubernetes.access_mode=ReadWriteMany"]


def limit_range(kind: str = "Container", **limits: Json) -> Json:
    return {"metadata": {"name": "team"}, "spec": {"limits": [{"type": kind, **limits}]}}


def quota(used: Json | None = None, scopes: tuple[str, ...] = (), **hard: str) -> Json:
    amounts = {key.replace("count_", "count/").replace("_", "."): value for key, value in hard.items()}
    spec = {"hard": amounts, **({"scopes": list(scopes)} if scopes else {})}
    return {"metadata": {"name": "compute"}, "spec": spec, "status": {"hard": amounts, "used": used or {}}}


def found(overrides: list[str], ranges: list[Json] | None = None, quotas: list[Json] | None = None) -> list[tuple[str, str]]:
    answers = ClusterAnswers(version=(1, 31), namespace=None, limit_ranges=ranges or [], quotas=quotas or [])
    return [(check.verdict, str(check)) for check in check_limits(answers, load_pipeline(None, overrides))]


WIDE = "resources.data={cpu: 1, memory: 1Gi, memory_limit: 9Gi}"
CLAIMS_OF_50 = limit_range("PersistentVolumeClaim", max={"storage": "50Gi"})


@pytest.mark.parametrize(
    ("overrides", "limits", "said"),
    [
        ([DATA], limit_range(max={"memory": "1Gi"}), "container prepare of prepare: 4Gi memory, at most 1Gi"),
        ([DATA], limit_range(max={"cpu": "1"}), "container prepare of prepare: 2 cpu, at most 1; change resources.data"),
        ([], limit_range(min={"memory": "1Gi"}), "at least 1Gi; change resources.data to at least that"),
        ([DATA], limit_range(default={"cpu": "500m"}), "it requests 2 cpu, and its limit would be 0.5 cpu"),
        ([WIDE], limit_range(maxLimitRequestRatio={"memory": "4"}), "its limit of memory is more than 4 times its request"),
        ([DATA], limit_range("Pod", max={"cpu": "1"}), "refuses a pod of prepare: 2"),
        (["kubernetes.storage=100Gi"], CLAIMS_OF_50, "the volume claim: 100Gi storage, at most 50Gi; change kubernetes"),
    ],
    ids=["memory", "cpu", "least", "default", "ratio", "pod", "claim"],
)
def test_a_limit_range_that_refuses_pods_or_the_claim_is_found(overrides: list[str], limits: Json, said: str) -> None:
    ((verdict, text),) = found(overrides, ranges=[limits])
    assert verdict == "failed"
    assert "LimitRange team refuses " in text
    assert said in text


@pytest.mark.parametrize(
    ("overrides", "limits", "verdict", "said"),
    [
        ([DATA], quota(requests_cpu="1"), "failed", "quota compute allows 1 requests.cpu, and prepare needs 2; lower"),
        ([DATA], quota(requests_memory="2Gi"), "failed", "allows 2Gi requests.memory, and prepare needs"),
        ([DATA], quota(memory="2Gi"), "failed", "allows 2Gi memory, and prepare needs"),
        ([], quota(limits_cpu="100"), "failed", "has limits.cpu, which container prepare of prepare does not name"),
        (MPI, quota(pods="2"), "failed", "allows 2 pods, and train needs 3; lower resources.workers, or ask"),
        (MPI, quota(count_pods="0"), "failed", "allows 0 count/pods, and prepare needs 1; ask who runs"),
        (MPI, quota(requests_cpu="300m"), "failed", "train needs 0.45; lower resources.training or resources.workers, or"),
        ([], quota(requests_storage="5Gi"), "failed", "allows 5Gi requests.storage; lower kubernetes.storage"),
        ([DATA], quota({"requests.cpu": "3"}, requests_cpu="4"), "warning", "of which 3 is in use; wait until it has room"),
    ],
    ids=["cpu", "memory", "short name", "not named", "pods", "no pods", "workers", "storage", "in use"],
)
def test_a_quota_that_refuses_pods_or_claims_is_found(overrides: list[str], limits: Json, verdict: str, said: str) -> None:
    ((actual, text),) = found(overrides, quotas=[limits])
    assert actual == verdict
    assert said in text


@pytest.mark.parametrize(
    ("ranges", "quotas"),
    [
        ([limit_range(max={"cpu": "64", "memory": "512Gi"}, min={"cpu": "1m"})], [quota(requests_cpu="64", pods="50")]),
        ([limit_range(default={"cpu": "64"})], [quota(limits_cpu="100")]),
        ([], [quota(scopes=("BestEffort",), pods="0"), quota(scopes=("Terminating",), requests_cpu="0")]),
        ([], [quota(count_jobs_batch="0", services="0")]),
    ],
    ids=["wide", "default", "of other pods", "of other objects"],
)
def test_limits_that_admit_all_are_no_problem(ranges: list[Json], quotas: list[Json]) -> None:
    ((verdict, text),) = found([DATA], ranges, quotas)
    assert verdict == "ok"
    assert f"{len(ranges)} LimitRanges and {len(quotas)} quotas admit all" in text
    assert found([DATA]) == [("ok", "ok       limits: no LimitRange and no quota")]


def test_a_claim_that_exists_is_not_created_again() -> None:
    limits, quotas = limit_range("PersistentVolumeClaim", max={"storage": "5Gi"}), [quota(requests_storage="5Gi")]
    answers = ClusterAnswers((1, 31), None, claims={"demo-work": {}}, limit_ranges=[limits], quotas=quotas)
    assert [check.verdict for check in check_limits(answers, load_pipeline(None))] == ["ok"]


def test_pods_that_no_cluster_can_run_are_one_line() -> None:
    ((verdict, text),) = found(["prepare.text=../corpus"], quotas=[quota(pods="9")])
    assert verdict == "failed"
    assert "pipeline: prepare.text = ../corpus: no such path in a container; put it on a volume" in text


def test_the_limits_of_a_namespace_are_asked_for(server: FakeApiServer, cluster: Cluster) -> None:
    settings = load_pipeline(None, [DATA])
    server.put("LimitRange", limit_range(max={"memory": "1Gi"}))
    server.put("ResourceQuota", quota(requests_cpu="1"))
    assert [check.verdict for check in check_limits(_ask_cluster(cluster, settings), settings)] == ["failed", "failed"]
    server.forbidden = {("list", "resourcequotas")}
    (hidden,) = check_limits(_ask_cluster(cluster, settings), settings)
    assert (hidden.verdict, "may not list" in hidden.found) == ("warning", True)
