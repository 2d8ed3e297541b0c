"""The doctor's checks on recorded answers of hosts and clusters."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gaudi_bert.config import PipelineSettings, load_pipeline
from gaudi_bert.runners.doctor import cluster as cluster_checks
from gaudi_bert.runners.doctor import host as host_checks
from gaudi_bert.runners.doctor.cluster import ClusterAnswers
from gaudi_bert.runners.doctor.finding import Finding
from gaudi_bert.runners.doctor.host import HostAnswers
from gaudi_bert.runners.kubernetes.client import Cluster
from tests.builders.fake_api_server import FakeApiServer
from tests.builders.recorded_answers import GAUDI_NODE, STORAGE_CLASS, node

CARDS = load_pipeline(
    None,
    [
        *("resources.cards=8", "resources.hugepages_2Mi=95000Mi", "resources.cores_per_process=6"),
        "resources.training={cpu: 95, memory: 409Gi}",
    ],
)
MPI = load_pipeline(None, ["resources.workers=2"])

HL_SMI = """
+-----------------------------------------------------------------------------+
| HL-SMI Version:                              hl-1.14.0-fw-48.0.1.0          |
| Driver Version:                                     1.14.0-9e8ecf0          |
|-------------------------------+----------------------+----------------------+
| AIP  Name        Persistence-M| Bus-Id        Disp.A | Volatile Uncorr. ECC |
"""
MODULES = "module_id, bus_id\n" + "".join(f"{number}, 0000:{number}3:00.0\n" for number in (3, 1, 0, 2, 6, 7, 4, 5))
MEMINFO = "MemTotal: 1056293516 kB\nHugePages_Total:   48000\nHugePages_Free:    47900\nHugepagesize:       2048 kB\n"
LISTENING = "   0: 00000000:0016 00000000:0000 0A\n"
TCP = f"  sl  local_address rem_address   st\n{LISTENING}   1: 0100007F:0BCE 00000000:0000 01\n"
SERVER = HostAnswers(
    hl_smi=HL_SMI,
    modules=MODULES,
    device_nodes=tuple(f"accel{number}" for number in range(8)),
    software="1.14.0.493",
    meminfo=MEMINFO,
    numa_balancing="0\n",
    kernel="5.15.0-91-generic",
    memory_lock=-1,
    runtimes='{"habana": {"path": "habana-container-runtime"}, "runc": {"path": "runc"}}\n',
    tcp=TCP,
    cores=56,
)


def wrong(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings if finding.verdict != "ok"}


def test_a_server_as_the_vendor_wants_it_is_ready() -> None:
    assert wrong(host_checks.judge(SERVER, CARDS)) == {}


@pytest.mark.parametrize(
    ("changed", "check", "verdict", "said"),
    [
        ({"hl_smi": ""}, "driver", "mend", "install the Gaudi driver 1.14.0"),
        ({"hl_smi": HL_SMI.replace("1.14.0-9", "1.15.1-9")}, "driver", "mend", "driver 1.15.1, but software 1.14.0"),
        ({"device_nodes": ("accel0", "accel1")}, "cards", "mend", "2 device nodes, the pipeline asks for 8 cards"),
        ({"modules": ""}, "module ids", "warning", "hl-smi lists none"),
        ({"modules": MODULES.replace("7,", "6,")}, "module ids", "mend", "some are twice"),
        ({"environment": {"HABANA_VISIBLE_MODULES": "0,1"}}, "module ids", "mend", "HABANA_VISIBLE_MODULES=0,1"),
        ({"meminfo": MEMINFO.replace("47900", "40000")}, "huge pages", "mend", "vm.nr_hugepages=55500"),
        ({"meminfo": MEMINFO.replace("2048 kB", "1048576 kB")}, "huge pages", "mend", "default_hugepagesz=2M"),
        ({"memory_lock": 8192 * 1024}, "memory lock", "mend", "at most 8192 kB; ulimit -l unlimited"),
        ({"numa_balancing": "1"}, "NUMA balancing", "mend", "kernel.numa_balancing=0"),
        ({"cores": 32}, "cores", "mend", "set resources.cores_per_process to 4"),
        ({"runtimes": '{"runc": {}}'}, "container runtime", "mend", "not habana; install habana-container-runtime"),
        ({"runtimes": ""}, "container runtime", "warning", "docker does not answer"),
        ({"runtimes": "<html>"}, "container runtime", "warning", "docker answers something else"),
        ({"tcp": TCP.replace("00000000:0016", "00000000:0BCE")}, "ports", "warning", "3022 is taken"),
    ],
)
def test_what_is_wrong_with_a_host_is_said_with_its_remedy(
    changed: dict[str, Any], check: str, verdict: str, said: str
) -> None:
    found = wrong(host_checks.judge(dataclasses.replace(SERVER, **changed), CARDS))
    assert list(found) == [check]
    assert found[check].verdict == verdict
    assert said in str(found[check])


def test_numa_balancing_does_no_harm_on_newer_kernels() -> None:
    answers = dataclasses.replace(SERVER, numa_balancing="1", kernel="6.8.0")
    assert wrong(host_checks.judge(answers, CARDS)) == {}


def test_a_laptop_is_not_asked_for_what_only_cards_need() -> None:
    findings = host_checks.judge(HostAnswers(runtimes='{"runc": {}}'), load_pipeline(None))
    assert [(finding.check, finding.verdict) for finding in findings] == [("cards", "ok"), ("container runtime", "ok")]


def test_this_machine_can_be_asked() -> None:
    findings = host_checks.judge(host_checks.look(), CARDS)
    assert len(findings) == 9
    assert all(finding.remedy for finding in findings if finding.verdict != "ok")


CLUSTER = ClusterAnswers(
    version=(1, 25),
    namespace={"metadata": {"name": "gaudi-bert"}},
    nodes=[node("a", **GAUDI_NODE), node("b", **GAUDI_NODE)],
    plugin_pods=[{"metadata": {"name": "habanalabs-device-plugin-x"}, "status": {"phase": "Running"}}],
    mpi_operator="mpioperator/mpi-operator:0.6.0",
    storage_classes=[STORAGE_CLASS],
)
EFA = load_pipeline(
    None,
    [
        *("resources.cards=8", "resources.workers=2", "kubernetes.efa=4", "kubernetes.access_mode=ReadWriteMany"),
        "resources.training={cpu: 95, memory: 409Gi}",
    ],
)


@pytest.mark.parametrize("settings", [load_pipeline(None), CARDS, EFA])
def test_a_good_cluster_is_ready(settings: PipelineSettings) -> None:
    assert wrong(cluster_checks.judge(CLUSTER, settings)) == {}


def no_plugin(phase: str) -> list[dict[str, Any]]:
    return [{"metadata": {"name": "plugin"}, "status": {"phase": phase}}]


@pytest.mark.parametrize(
    ("changed", "settings", "check", "said"),
    [
        ({"version": (1, 23)}, CARDS, "Kubernetes", "mend.*need 1.24 or later"),
        ({"version": (1, 31)}, CARDS, "Kubernetes", "warning.*failure_policy: true"),
        ({"namespace": None}, CARDS, "namespace", "mend.*kubectl create namespace gaudi-bert"),
        ({"missing_rights": ("create jobs",)}, CARDS, "rights", "mend.*may not create jobs"),
        ({"storage_classes": []}, CARDS, "storage", "mend.*no default storage class"),
        ({"storage_classes": None}, CARDS, "storage", "warning.*may not list"),
        ({"nodes": None}, load_pipeline(None), "images", "warning.*have no registry"),
        ({"plugin_pods": []}, CARDS, "device plugin", "mend.*install habana-k8s-device-plugin"),
        ({"plugin_pods": no_plugin("Pending")}, CARDS, "device plugin", "mend.*plugin not running"),
        ({"plugin_pods": None}, CARDS, "device plugin", "warning.*may not list pods"),
        ({"mpi_operator": None}, MPI, "MPI operator", "mend.*install the MPI operator"),
        ({"mpi_operator": ""}, MPI, "MPI operator", "warning.*is not seen"),
        ({"mpi_operator": "mpioperator/mpi-operator:v0.3.0"}, MPI, "MPI operator", "mend.*0.4 or later"),
    ],
)
def test_what_is_wrong_with_a_cluster_is_said_with_its_remedy(
    changed: dict[str, Any], settings: PipelineSettings, check: str, said: str
) -> None:
    found = wrong(cluster_checks.judge(dataclasses.replace(CLUSTER, **changed), settings))
    assert check in found
    verdict, _, words = said.partition(".*")
    assert found[check].verdict == verdict
    assert words in str(found[check])


@pytest.mark.parametrize(
    ("nodes", "settings", "check", "said"),
    [
        ([node("a", **GAUDI_NODE)], EFA, "cards", "1 of 1 nodes have 8 habana.ai/gaudi (the most is 8), 2 needed"),
        ([node("a", **{**GAUDI_NODE, "habana.ai/gaudi": "4"})], CARDS, "cards", "0 of 1 nodes have 8"),
        ([node("a", **{**GAUDI_NODE, "hugepages_2Mi": "35202Mi"})], CARDS, "huge pages", "0 of 1 nodes"),
        ([node("a", **{"habana.ai/gaudi": "8"})] * 2, EFA, "EFA", "install the EFA device plugin"),
    ],
)
def test_nodes_that_have_too_little_are_counted(nodes: list[Any], settings: PipelineSettings, check: str, said: str) -> None:
    found = wrong(cluster_checks.judge(dataclasses.replace(CLUSTER, nodes=nodes), settings))
    assert found[check].verdict == "mend"
    assert said in str(found[check])


@pytest.mark.parametrize(
    ("level", "settings", "said"),
    [("baseline", CARDS, "forbids hostIPC"), ("restricted", MPI, "forbids sshd as root"), ("restricted", None, None)],
)
def test_pod_security_that_forbids_the_pods_is_seen(level: str, settings: PipelineSettings | None, said: str | None) -> None:
    namespace = {"metadata": {"name": "x", "labels": {"pod-security.kubernetes.io/enforce": level}}}
    answers = dataclasses.replace(CLUSTER, namespace=namespace)
    found = wrong(cluster_checks.judge(answers, settings or load_pipeline(None)))
    assert ("namespace" in found) == (said is not None)
    if said:
        assert said in found["namespace"].found


def test_several_pods_on_several_nodes_want_a_volume_for_all() -> None:
    settings = load_pipeline(None, ["resources.data_workers=4"])
    assert "ReadWriteMany" in wrong(cluster_checks.judge(CLUSTER, settings))["storage"].remedy
    shared = load_pipeline(None, ["resources.data_workers=4", "kubernetes.access_mode=ReadWriteMany"])
    assert wrong(cluster_checks.judge(CLUSTER, shared)) == {}


def test_an_image_that_no_node_has_is_seen() -> None:
    settings = load_pipeline(None, ["images.tag=v9"])
    assert "not seen on a, b" in wrong(cluster_checks.judge(CLUSTER, settings))["images"].found
    pulled = load_pipeline(None, ["images.tag=v9", "images.registry=registry.example"])
    assert wrong(cluster_checks.judge(CLUSTER, pulled)) == {}


def test_a_cluster_can_be_asked(server: FakeApiServer, cluster: Cluster) -> None:
    server.version = {"major": "1", "minor": "25+"}
    for item in CLUSTER.nodes or ():
        server.put("Node", item)
    server.put("StorageClass", STORAGE_CLASS)
    plugin = {
        "metadata": {"name": "habanalabs-device-plugin-x", "labels": {}},
        "spec": {"containers": [{"image": "vault/docker-k8s-device-plugin:1.14.0"}]},
        "status": {"phase": "Running"},
    }
    operator = {
        "metadata": {"name": "mpi-operator-y", "labels": {}},
        "spec": {"containers": [{"image": "mpioperator/mpi-operator:0.6.0"}]},
        "status": {"phase": "Running"},
    }
    server.put("Pod", plugin)
    server.put("Pod", operator)
    assert wrong(cluster_checks.judge(cluster_checks.look(cluster), EFA)) == {}
    server.allowed = False
    server.kinds_unknown = {"MPIJob"}
    found = wrong(cluster_checks.judge(cluster_checks.look(cluster), EFA))
    assert set(found) == {"rights", "MPI operator"}
