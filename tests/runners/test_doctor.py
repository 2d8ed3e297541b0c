"""`doctor`: the checks of this machine on recorded answers, of a cluster over real HTTP, and of an object store."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gaudi_bert.artefacts.object_store import ObjectStore
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.processor import Processor
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import PipelineSettings, load_pipeline
from gaudi_bert.runners.doctor import CheckResult, _check_host, _HostInfo, examine_cluster, examine_store
from gaudi_bert.runners.kubernetes.client import Cluster
from tests.builders.command_line import run_command
from tests.builders.fake_api_server import FakeApiServer, Fault
from tests.builders.machines import hl_smi_table
from tests.builders.s3_server import S3Server, quick

CARDS = load_pipeline(None, ["resources.cards=8", "resources.training={cpu: 95, memory: 409Gi}"])
TENSORFLOW = {"tensorflow": "2.15.1", "habana-tensorflow": "1.14.0.493"}
PYTORCH = {"torch": "2.10.0", "habana-torch-plugin": "1.24.0.481"}
SERVER = _HostInfo(
    hl_smi=hl_smi_table("1.24.0", cards=8), device_nodes=tuple(f"accel{number}" for number in range(8)), packages=PYTORCH
)


def wrong(results: list[CheckResult]) -> dict[str, CheckResult]:
    return {result.check: result for result in results if result.verdict != "ok"}


def test_a_good_server_is_ready() -> None:
    assert wrong(_check_host(SERVER, CARDS)) == {}
    assert SERVER.accelerator_models == ["HL-225"] * 8


@pytest.mark.parametrize(
    ("changed", "check", "verdict", "named"),
    [
        ({"hl_smi": ""}, "driver", "failed", "1.24.0"),
        ({"hl_smi": hl_smi_table("1.24.2", cards=8)}, "driver", "warning", "1.24.2"),
        ({"hl_smi": hl_smi_table("1.22.1", cards=8)}, "driver", "failed", "1.22.1"),
        ({"hl_smi": hl_smi_table("1.14.0", cards=8)}, "driver", "failed", "set training.engine to tensorflow"),
        ({"hl_smi": hl_smi_table("1.24.0", cards=7)}, "cards", "warning", "lists 7"),
        ({"device_nodes": ("accel0", "accel1")}, "cards", "failed", "resources.cards to 2"),
        ({"device_nodes": ()}, "cards", "failed", "modprobe habanalabs"),
        ({"disk": 2**30}, "disk", "warning", "1.0 GiB"),
        ({"packages": {"torch": "2.10.0", **TENSORFLOW}}, "driver", "failed", "1.14.0"),
    ],
)
def test_what_is_wrong_has_a_remedy(changed: dict[str, Any], check: str, verdict: str, named: str) -> None:
    found = wrong(_check_host(dataclasses.replace(SERVER, **changed), CARDS))
    assert {name: result.verdict for name, result in found.items()} == {check: verdict}
    assert named in str(found[check])
    assert found[check].remedy


def test_the_driver_of_the_network_is_not_taken_for_the_driver() -> None:
    lines = hl_smi_table("1.24.0", cards=2).splitlines()
    network = next(line for line in lines if "Nic Driver" in line)
    first = [lines[0], network.replace("1.24.0", "1.22.0"), *(line for line in lines[1:] if line != network)]
    assert _HostInfo("\n".join(first)).driver_release == "1.24.0"


@pytest.mark.parametrize(
    ("packages", "python", "engine", "verdict"),
    [
        ({"torch": "2.13"}, (3, 12), "auto", "ok"),
        ({"tensorflow-cpu": "2.15.1"}, (3, 11), "auto", "ok"),
        ({"torch": "2.13"}, (3, 12), "tensorflow", "warning"),
        ({"tensorflow": "2.16.1"}, (3, 11), "auto", "warning"),
        ({}, (3, 13), "auto", "warning"),
    ],
)
def test_an_engine_that_is_named_must_run(
    packages: dict[str, str], python: tuple[int, int], engine: str, verdict: str
) -> None:
    results = _check_host(_HostInfo(packages=packages, python=python), load_pipeline(None, [f"training.engine={engine}"]))
    assert [(result.check, result.verdict) for result in results[:1]] == [("engines", verdict)]
    assert [result.check for result in results] == ["engines", "extras", "cards", "disk"]


@pytest.mark.parametrize(
    ("multiplies", "shares", "stated"),
    [
        (True, {"8 rows": 0.5, "1 row": 0.875}, "takes 0.50 times as long as float32 for 8 rows and 0.88 times as long"),
        (True, {}, "this processor multiplies in bfloat16"),
        (False, {}, "`--precision bfloat16` computes in float32"),
    ],
)
def test_what_bfloat16_brings(multiplies: bool, shares: dict[str, float], stated: str) -> None:
    answers = dataclasses.replace(SERVER, processor=Processor("Some CPU", "AVX2", multiplies), bfloat16_shares=shares)
    result = next(each for each in _check_host(answers, CARDS) if each.check == "processor")
    assert result.verdict == "ok"
    assert result.found.startswith("Some CPU, AVX2: ")
    assert stated in result.found


def test_on_cards_an_engine_needs_its_bridge() -> None:
    results = _check_host(dataclasses.replace(SERVER, packages={"torch": "2.13"}), CARDS)
    assert "habana-torch-plugin" in wrong(results)["engines"].found


def test_the_command_asks_hl_smi(tmp_path: Path) -> None:
    (tmp_path / "hl-smi").write_text(f"#!/bin/sh\necho '{hl_smi_table('1.24.0', cards=2, name='HL-325L')}'\n")
    (tmp_path / "hl-smi").chmod(0o755)
    command = [sys.executable, "-m", "gaudi_bert", "doctor", "--set", "resources.cards=8", "--json"]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    printed = json.loads(done.stdout)
    assert (done.returncode, printed["ready"]) == (1, False)
    assert (printed["driver"], printed["cards"]) == ("1.24.0", ["HL-325L", "HL-325L"])
    verdicts = {finding["check"]: finding["verdict"] for finding in printed["findings"]}
    assert (verdicts["driver"], verdicts["cards"]) == ("ok", "failed")


# --- a cluster


def examined(cluster: Cluster, *overrides: str) -> list[CheckResult]:
    return examine_cluster(load_pipeline(None, overrides), Reporter(io.StringIO()), cluster)


def wrong_there(cluster: Cluster, *overrides: str) -> dict[str, CheckResult]:
    return wrong(examined(cluster, *overrides))


def put_claim(server: FakeApiServer, phase: str, **metadata: str) -> None:
    server.put("PersistentVolumeClaim", {"metadata": {"name": "demo-work", **metadata}, "status": {"phase": phase}})


def test_a_good_cluster_is_ready_and_nothing_is_created(server: FakeApiServer, cluster: Cluster) -> None:
    results = examined(cluster)
    assert [str(result) for result in results if result.verdict != "ok"] == []
    checks = [result.check for result in results]
    assert checks[:3] == ["Kubernetes", "namespace", "rights"]
    assert {"PersistentVolumeClaim demo-work", "volume", "Job demo-train", "ConfigMap demo-pipeline", "pods"} <= set(checks)
    assert server.objects == {}


@pytest.mark.parametrize(("minor", "overrides"), [("23", ()), ("28", ("kubernetes.version=1.29",))])
def test_a_cluster_that_is_too_old_fails(
    minor: str, overrides: tuple[str, ...], server: FakeApiServer, cluster: Cluster
) -> None:
    server.version = {"major": "1", "minor": minor}
    assert wrong_there(cluster, *overrides)["Kubernetes"].verdict == "failed"


@pytest.mark.parametrize("namespaces", [{}, {"gaudi-bert": "Terminating"}])
def test_the_namespace_must_be_there(namespaces: dict[str, str], server: FakeApiServer, cluster: Cluster) -> None:
    server.namespaces = namespaces
    assert wrong_there(cluster)["namespace"].verdict == "failed"
    server.forbidden = {("get", "namespaces")}
    assert wrong_there(cluster) == {}, "an account may use what it may not look at"


def test_missing_rights_are_named_and_those_that_are_not_used_are_not_asked_for(
    server: FakeApiServer, cluster: Cluster
) -> None:
    unused = {("list", "mpijobs"), ("create", "trainjobs"), ("list", "workloads"), ("create", "services")}
    server.forbidden = {("watch", "jobs"), ("get", "pods/log"), *unused}
    result = wrong_there(cluster)["rights"]
    assert (result.verdict, result.found) == ("failed", "the account may not get pods/log, watch jobs")


def test_what_the_server_says_to_an_object_is_printed(server: FakeApiServer, cluster: Cluster) -> None:
    server.faults.append(Fault("POST", "/jobs?", 403, message="exceeded quota: jobs, limited: count/jobs.batch=2"))
    found = wrong_there(cluster)
    assert [result.verdict for result in found.values()] == ["failed"]
    assert "exceeded quota: jobs, limited: count/jobs.batch=2" in next(iter(found.values())).found


def test_pods_are_checked_by_who_may_create_them(server: FakeApiServer, cluster: Cluster) -> None:
    message = 'violates PodSecurity "restricted:latest": host namespaces'
    server.faults.append(Fault("POST", "/pods?", 403, message=message))
    assert message in next(iter(wrong_there(cluster).values())).found
    server.forbidden = {("create", "pods")}
    assert "pods" not in {result.check for result in examined(cluster)}


def test_a_claim_that_is_not_bound_is_not_ok(server: FakeApiServer, cluster: Cluster) -> None:
    put_claim(server, "Bound")
    assert wrong_there(cluster) == {}
    put_claim(server, "Pending")
    server.warn("demo-work", 'storageclass.storage.k8s.io "fast" not found')
    result = wrong_there(cluster)["volume"]
    assert result.verdict == "warning"
    assert result.found == 'claim demo-work is Pending: storageclass.storage.k8s.io "fast" not found'
    put_claim(server, "Bound", deletionTimestamp="2026-01-01T00:00:00Z")
    assert wrong_there(cluster)["volume"].verdict == "failed"


# --- an object store


def stored(endpoint: str, **changes: Any) -> PipelineSettings:
    return load_pipeline(None).model_copy(update={"store": quick(endpoint, **changes)})


def test_a_place_that_is_ready_is_left_as_it_was_and_what_is_missing_is_named(s3: S3Server) -> None:
    assert examine_store("s3://bucket/ready/", stored(s3.endpoint)).verdict == "ok"
    assert ObjectStore(quick(s3.endpoint)).list("s3://bucket/ready") == {}
    bucket = examine_store("s3://no-such-bucket/x", stored(s3.endpoint))
    assert bucket.verdict == "failed"
    assert "no-such-bucket" in bucket.found
    assert examine_store("s3://bucket/x", stored("http://127.0.0.1:9", timeout_seconds=1)).verdict == "failed"
    with pytest.raises(InputError, match="bucket/x"):
        examine_store("bucket/x", stored(s3.endpoint))


def test_the_command_fails_where_a_check_does(s3: S3Server) -> None:
    command = ("doctor", "--set", f"store.endpoint_url={s3.endpoint}", "--store")
    assert run_command(*command, "s3://bucket/x").returncode == 0
    assert run_command(*command, "s3://no-such-bucket/x").returncode == 1
