"""The checks of a cluster, on recorded answers and against an API server over real HTTP."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gaudi_bert.config.pipeline import PipelineSettings, load_pipeline
from gaudi_bert.runners.doctor.checks import CheckResult, ClusterAnswers
from gaudi_bert.runners.doctor.cluster import _ask_cluster, _check_cluster, _needed_rights
from gaudi_bert.runners.kubernetes.client import Cluster
from tests.builders.fake_api_server import FakeApiServer
from tests.builders.recorded_answers import GAUDI_NODE, STORAGE_CLASS, node


def demo(*overrides: str) -> PipelineSettings:
    return load_pipeline(None, overrides)


DEMO = demo()
MPI = demo("resources.workers=2")
QUEUED = demo("resources.workers=2", "kubernetes.queue=gpus")
SERVER = ("resources.training={cpu: 95, memory: 409Gi}", "resources.hugepages_2Mi=95000Mi", "resources.cards=8")
CARDS = demo(*SERVER)
STORED = demo("kubernetes.store=s3://bucket/work", "kubernetes.store_secret=object-store")
ANY_NODE = "kubernetes.access_mode=ReadWriteMany"
EFA = demo(*SERVER, "resources.workers=2", "training.engine=tensorflow", "kubernetes.efa=4", ANY_NODE)
POLICY = {value: demo(f"kubernetes.failure_policy={str(value).lower()}") for value in (True, False)}
LAPTOP = {"cpu": "2", "memory": "16374368Ki"}

CLUSTER = ClusterAnswers(
    version=(1, 25),
    namespace={"metadata": {"name": "gaudi-bert"}},
    nodes=[node("a", **GAUDI_NODE), node("b", **GAUDI_NODE)],
    plugin_pods=[{"metadata": {"name": "habanalabs-device-plugin-x"}, "status": {"phase": "Running"}}],
    serves_mpijobs=True,
    mpi_operator="mpioperator/mpi-operator:0.6.0",
    storage_classes=[STORAGE_CLASS],
    volumes=[],
)


def wrong(results: list[CheckResult]) -> dict[str, CheckResult]:
    return {result.check: result for result in results if result.verdict != "ok"}


def wrong_at(cluster: Cluster, settings: PipelineSettings) -> dict[str, CheckResult]:
    return wrong(_check_cluster(_ask_cluster(cluster, settings), settings))


def assert_failed(result: CheckResult, said: str) -> None:
    assert result.verdict == "failed"
    assert said in str(result)


def wrong_with(settings: PipelineSettings, **changed: Any) -> dict[str, CheckResult]:
    return wrong(_check_cluster(dataclasses.replace(CLUSTER, **changed), settings))


PENDING_PLUGIN = [{"metadata": {"name": "plugin"}, "status": {"phase": "Pending"}}]
BASELINE, RESTRICTED = (
    {"metadata": {"name": "x", "labels": {"pod-security.kubernetes.io/enforce": level}}}
    for level in ("baseline", "restricted")
)
FOUR = "resources.data_workers=4"
EBS = [{**STORAGE_CLASS, "provisioner": "ebs.csi.aws.com"}]
BY_HAND = {**STORAGE_CLASS, "provisioner": "kubernetes.io/no-provisioner"}
CANNOT_CHANGE = "kubernetes.access_mode is ReadWriteMany, and a claim cannot be changed; "
SHARED_BY_WORKERS = "2 workers may run on several of the 2 nodes; set kubernetes.access_mode to ReadWriteMany"


def volume(
    phase: str = "Available", size: str = "20Gi", storage_class: str = "", modes: tuple[str, ...] = ("ReadWriteOnce",)
) -> dict[str, Any]:
    spec = {"capacity": {"storage": size}, "accessModes": [*modes], "storageClassName": storage_class}
    return {"metadata": {"name": "disk-1"}, "spec": spec, "status": {"phase": phase}}


def claimed(mode: str, name: str = "demo-work", phase: str = "Bound") -> dict[str, Any]:
    return {name: {"spec": {"accessModes": [mode]}, "status": {"phase": phase}}}


def by_hand(unfit: dict[str, Any]) -> dict[str, Any]:
    """A cluster that provisions nothing, and has this volume."""
    return {"storage_classes": [], "volumes": [unfit]}


@pytest.mark.parametrize(
    ("changed", "settings", "check", "said"),
    [
        ({"version": (1, 23)}, CARDS, "Kubernetes", "failed.*need 1.24 or later"),
        ({"version": (1, 28)}, POLICY[True], "Kubernetes", "failed.*set kubernetes.failure_policy to auto"),
        ({"version": (1, 28)}, demo("kubernetes.version=1.29"), "Kubernetes", "failed.*to '1.28'"),
        ({"version": (1, 29)}, POLICY[False], "Kubernetes", "warning.*failure_policy: auto"),
        ({"namespace": None}, CARDS, "namespace", "failed.*kubectl create namespace gaudi-bert"),
        ({"namespace": None, "namespace_is_hidden": True}, CARDS, "namespace", "warning.*may not look at gaudi-bert"),
        ({"namespace": BASELINE}, CARDS, "namespace", "failed.*forbids hostIPC"),
        ({"missing_rights": ("create jobs",)}, CARDS, "rights", "failed.*may not create jobs"),
        ({"storage_classes": []}, CARDS, "storage", "failed.*no default storage class"),
        ({"storage_classes": [], "volumes": None}, CARDS, "storage", "warning.*may not list volumes"),
        ({"storage_classes": None}, CARDS, "storage", "warning.*may not list"),
        (
            {"storage_classes": [BY_HAND]},
            DEMO,
            "storage",
            "failed.*class nfs provisions nothing, and no free volume of class nfs",
        ),
        (by_hand(volume("Bound")), DEMO, "storage", "failed.*no default storage class, and no free volume"),
        (by_hand(volume(storage_class="fast")), DEMO, "storage", "failed.*no default storage class, and no free volume"),
        (by_hand(volume(size="9Gi")), DEMO, "storage", "failed.*no free volume of 10Gi: the largest has 9Gi"),
        (by_hand(volume(modes=("ReadOnlyMany",))), DEMO, "storage", "failed.*ReadWriteOnce: they offer ReadOnlyMany"),
        ({}, demo(FOUR), "storage", "warning.*ReadWriteMany"),
        # A claim keeps the modes that it was made with.
        ({"claims": claimed("ReadWriteOnce")}, demo(FOUR, ANY_NODE), "storage", f"failed.*{CANNOT_CHANGE}"),
        ({"claims": claimed("ReadWriteOnce")}, demo(ANY_NODE), "storage", "failed.*to ReadWriteOnce"),
        (
            {"claims": claimed("ReadWriteOnce", "shared")},
            demo(FOUR, "kubernetes.work_claim=shared"),
            "storage",
            "warning.*the claim shared, ReadWriteOnce: all pods must share one of the 2 nodes",
        ),
        ({"storage_classes": EBS}, MPI, "storage", f"failed.*{SHARED_BY_WORKERS}"),
        ({"storage_classes": EBS, "claims": claimed("ReadWriteOnce")}, MPI, "storage", f"failed.*{SHARED_BY_WORKERS}"),
        ({"claims": claimed("ReadWriteOnce", phase="Lost")}, DEMO, "storage", "failed.*has lost its volume"),
        (
            {},
            demo("kubernetes.data_claim=corpus"),
            "storage",
            "failed.*no claim corpus; set kubernetes.data_cl",
        ),
        ({}, demo("images.tag=v9"), "images", "warning.*not seen on a, b"),
        ({"nodes": None}, DEMO, "images", "warning.*have no registry"),
        ({"nodes": None}, CARDS, "nodes", "warning.*a training worker asks for 95 cpu, 409Gi memory, 8 habana.ai/gaudi"),
        ({"plugin_pods": []}, CARDS, "device plugin", "failed.*install habana-k8s-device-plugin"),
        ({"plugin_pods": PENDING_PLUGIN}, CARDS, "device plugin", "failed.*plugin not running"),
        ({"plugin_pods": None}, CARDS, "device plugin", "warning.*may not list pods"),
        ({"serves_mpijobs": False, "mpi_operator": None}, MPI, "MPI operator", "failed.*install the MPI operator"),
        ({"mpi_operator": None, "pods_are_hidden": True}, MPI, "MPI operator", "warning.*is not seen by this account"),
        ({"mpi_operator": None}, MPI, "MPI operator", "warning.*no pod of the cluster has the operator's image"),
        ({"mpi_operator": "mpioperator/mpi-operator:v0.3.0"}, MPI, "MPI operator", "failed.*0.4 or later"),
        ({"mpi_operator": "mpioperator/mpi-operator:v0.7.0"}, QUEUED, "MPI operator", "failed.*Kueue needs 0.8 or later"),
        ({"local_queues": ["a", "b"]}, QUEUED, "queue", "failed.*no LocalQueue gpus, there are a, b; correct kubernetes"),
        ({"local_queues": []}, QUEUED, "queue", "failed.*no LocalQueue gpus, there is none at all"),
        ({"local_queues": None}, QUEUED, "queue", "warning.*may not list localqueues"),
    ],
)
def test_what_is_wrong_with_a_cluster_is_said_with_its_remedy(
    changed: dict[str, Any], settings: PipelineSettings, check: str, said: str
) -> None:
    found = wrong_with(settings, **changed)
    assert check in found
    verdict, _, words = said.partition(".*")
    assert found[check].verdict == verdict
    assert words in str(found[check])


CORDONED = {**node("b", **GAUDI_NODE), "spec": {"unschedulable": True}}
TAINTED = {**node("c", **GAUDI_NODE), "spec": {"taints": [{"key": "g", "value": "x", "effect": "NoSchedule"}]}}
EVICTING = {**node("d", **GAUDI_NODE), "spec": {"taints": [{"key": "g", "effect": "NoExecute"}]}}
CHOSEN = {**node("e", **GAUDI_NODE), "metadata": {"name": "e", "labels": {"kind": "gaudi2", "disk": "fast"}}}
SMALL_DISK = node("a", **{**LAPTOP, "ephemeral-storage": "252Gi"})
SELECTED = demo(*SERVER, "kubernetes.data_pods.node_selector={disk: fast}", "kubernetes.node_selector={kind: gaudi2}")


@pytest.mark.parametrize(
    ("nodes", "settings", "check", "said"),
    [
        ([node("a", **GAUDI_NODE)], EFA, "cards", "1 of 2 training workers with 8 habana.ai/gaudi fit (the most of a node"),
        ([node("a", **{**GAUDI_NODE, "habana.ai/gaudi": "4"})], CARDS, "cards", "0 of 1 training workers"),
        ([node("a", **GAUDI_NODE | {"hugepages_2Mi": "35202Mi"})], CARDS, "huge pages", "(the most of a node is 34.4Gi"),
        ([node("a", **{"habana.ai/gaudi": "8"})] * 2, EFA, "EFA", "install the EFA device plugin"),
        ([node("a", **LAPTOP)], CARDS, "cpu", "with 95 cpu fit (the most of a node is 2 cpu); lower resources.training.cpu"),
        ([node("a", **LAPTOP)], CARDS, "memory", "with 409Gi memory fit (the most of a node is 15.6Gi memory)"),
        ([node("a", cpu="50m", memory="1Gi")], DEMO, "data pods", "no node has room for one of 80m cpu, 256Mi memory"),
        (
            [node("a", cpu="96", memory="1Gi"), node("b", cpu="2", memory="500Gi")],
            demo("resources.training={cpu: 95, memory: 409Gi}"),
            "room",
            "0 of 1 training workers fit that ask for 95 cpu, 409Gi memory together",
        ),
        (CLUSTER.nodes, SELECTED, "data pods", "the labels disk=fast; correct kubernetes.data_pods.node_selector"),
        (CLUSTER.nodes, SELECTED, "training pods", "labels kind=gaudi2; correct kubernetes.training_pods.node_sel"),
        ([CORDONED], DEMO, "data pods", "cordoned, so that no pod is put on them: b; kubectl uncordon b"),
        ([CORDONED], DEMO, "training pods", "kubectl uncordon b"),
        ([EVICTING], DEMO, "data pods", "on d: g:NoExecute"),
        ([TAINTED], DEMO, "data pods", "on c: g=x:NoSchedule; set kubernetes.data_pods.tolerations, or remove the taints"),
        ([TAINTED, CORDONED], DEMO, "data pods", "kubectl uncordon b, or set kubernetes.data_pods.tolerations"),
        (
            [node("a", **LAPTOP), CORDONED],
            demo("resources.data={cpu: 3, memory: 1Gi}"),
            "data pods",
            "2 cpu, 15.6Gi memory); kubectl uncordon b, or lower",
        ),
        (
            [SMALL_DISK],
            demo("kubernetes.scratch=500Gi"),
            "data pods",
            "252Gi ephemeral-storage); lower kubernetes.scratch, or",
        ),
        (
            [SMALL_DISK],
            demo("kubernetes.scratch=500Gi"),
            "scratch",
            "(the most of a node is 252Gi ephemeral-storage); lower",
        ),
    ],
)
def test_why_no_node_takes_the_pods_has_a_remedy(
    nodes: list[Any], settings: PipelineSettings, check: str, said: str
) -> None:
    assert_failed(wrong_with(settings, nodes=nodes)[check], said)


def test_data_pods_that_have_to_take_turns_are_a_warning() -> None:
    settings = demo("resources.data_workers=30")
    found = wrong_with(settings, nodes=[node("a", **LAPTOP)])["data pods"]
    assert (found.verdict, found.remedy) == ("warning", "set resources.data_workers to 25, or add nodes")


@pytest.mark.parametrize("kind", ["PriorityClass", "RuntimeClass"])
def test_a_class_that_pods_name_must_exist(kind: str, gaudi_server: FakeApiServer, cluster: Cluster) -> None:
    """The API refuses pods that name another one."""
    key = f"kubernetes.training_pods.{'priority' if kind == 'PriorityClass' else 'runtime'}_class"
    settings = demo(*SERVER, f"{key}=high")
    assert wrong_at(cluster, settings)[kind].remedy == f"set {key} to one of: there are none"
    gaudi_server.put(kind, {"metadata": {"name": "low"}})
    assert str(wrong_at(cluster, settings)[kind]).endswith(f"no {kind} high; set {key} to one of: low")
    gaudi_server.forbidden = {("list", f"{kind.lower()}es")}
    assert wrong_at(cluster, settings)[kind].verdict == "warning"
    gaudi_server.forbidden = set()
    gaudi_server.put(kind, {"metadata": {"name": "high"}})
    assert wrong_at(cluster, settings) == {}


@pytest.mark.parametrize(
    ("toleration", "fits"),
    [
        ("{operator: Exists}", True),
        ("{key: gaudi, operator: Exists, effect: NoSchedule}", True),
        ("{key: gaudi, value: 'yes'}", True),
        ("{key: gaudi, value: 'no'}", False),
        ("{key: gaudi, value: 'yes', effect: NoExecute}", False),
        ("{key: other, operator: Exists}", False),
    ],
)
def test_nodes_whose_taint_is_tolerated_count(toleration: str, fits: bool) -> None:
    taint = {"key": "gaudi", "value": "yes", "effect": "NoSchedule"}
    nodes = [{**node("a", **GAUDI_NODE), "spec": {"taints": [taint]}}, node("b", **LAPTOP)]
    settings = demo(*SERVER, f"kubernetes.training_pods.tolerations=[{toleration}]")
    assert ("cards" not in wrong_with(settings, nodes=nodes)) == fits


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        *((settings, {}) for settings in (DEMO, CARDS, EFA)),
        (demo("resources.workers=2", "resources.cards=4"), {"nodes": [node("a", **GAUDI_NODE)]}),
        (demo("kubernetes.scratch=200Gi"), {"nodes": [SMALL_DISK]}),
        (CARDS, {"nodes": [CORDONED, TAINTED, EVICTING, node("a", **GAUDI_NODE)]}),
        (SELECTED, {"nodes": [node("a", **LAPTOP), CHOSEN]}),
        *((settings, {"namespace": RESTRICTED}) for settings in (DEMO, demo("resources.workers=2", ANY_NODE))),
        (demo("images.tag=v9", "images.registry=registry.example"), {}),
        (demo(FOUR, ANY_NODE), {}),
        (demo(FOUR, ANY_NODE), {"claims": claimed("ReadWriteMany")}),
        (MPI, {"storage_classes": EBS, "nodes": [node("a", **GAUDI_NODE)], "claims": claimed("ReadWriteOnce")}),
        (MPI, {"storage_classes": [{**STORAGE_CLASS, "provisioner": "efs.csi.aws.com"}]}),
        (DEMO, {"storage_classes": [BY_HAND], "volumes": [volume(storage_class="nfs")]}),
        (DEMO, {"storage_classes": [], "volumes": [volume()]}),
        (demo("kubernetes.storage_class=by-hand"), {"volumes": [volume(storage_class="by-hand")]}),
        (DEMO, {"storage_classes": [], "claims": {"demo-work": {"status": {"phase": "Bound"}}}}),
    ],
)
def test_a_good_cluster_is_ready(settings: PipelineSettings, changed: dict[str, Any]) -> None:
    assert wrong_with(settings, **changed) == {}


@pytest.fixture
def gaudi_server(server: FakeApiServer) -> FakeApiServer:
    """A cluster with two servers of 8 cards, the device plugin and the MPI operator."""
    server.version = {"major": "1", "minor": "25+"}
    for item in CLUSTER.nodes or ():
        server.put("Node", item)
    server.put("StorageClass", STORAGE_CLASS)
    for name, image in (
        ("habanalabs-device-plugin-x", "vault/docker-k8s-device-plugin:1.14.0"),
        ("mpi-operator-y", "mpioperator/mpi-operator:0.6.0"),
    ):
        spec = {"containers": [{"image": image}]}
        server.put("Pod", {"metadata": {"name": name, "labels": {}}, "spec": spec, "status": {"phase": "Running"}})
    return server


def test_a_cluster_can_be_asked(gaudi_server: FakeApiServer, cluster: Cluster) -> None:
    assert wrong_at(cluster, EFA) == {}
    gaudi_server.kinds_unknown = {"MPIJob"}
    assert set(wrong_at(cluster, EFA)) == {"MPI operator"}


def test_each_right_that_a_run_needs_is_asked_for(gaudi_server: FakeApiServer, cluster: Cluster) -> None:
    rights = _needed_rights(training="mpijob", queue=True, network_policy=True)
    gaudi_server.forbidden = {(right.verb, right.resource) for right in rights}
    queued = demo("resources.workers=2", "kubernetes.queue=gpus")
    assert wrong_at(cluster, queued)["rights"].found == f"may not {', '.join(map(str, rights))}"


def rights_for(**more: Any) -> set[str]:
    """What is needed besides what every run needs."""
    least: dict[str, Any] = {"training": "job", "queue": False, "network_policy": False}
    return {str(right) for right in set(_needed_rights(**{**least, **more})) - set(_needed_rights(**least))}


def test_rights_are_asked_for_where_they_are_needed() -> None:
    """MPIJobs of other runs are listed in any case."""
    assert rights_for(training="mpijob") == {f"{verb} mpijobs" for verb in ("create", "get", "watch", "delete")}
    assert rights_for(training="nodes") == {f"{verb} services" for verb in ("create", "get", "delete")}
    of_trainer = {f"{verb} trainjobs" for verb in ("create", "get", "list", "watch", "delete")}
    of_trainer |= {f"{verb} trainingruntimes" for verb in ("create", "get", "update", "delete")}
    assert rights_for(training="trainjob") == of_trainer
    assert rights_for(network_policy=True) == {f"{verb} networkpolicies" for verb in ("create", "get", "update", "delete")}
    assert rights_for(queue=True) == {"list workloads"}
    assert [MPI.has_network_policy, EFA.has_network_policy, DEMO.has_network_policy] == [True, False, False]


def test_kubeflow_trainer_is_asked_for_where_it_is_needed(gaudi_server: FakeApiServer, cluster: Cluster) -> None:
    trained = [*SERVER, "resources.workers=2", "kubernetes.training=trainjob", "kubernetes.access_mode=ReadWriteMany"]
    settings = demo(*trained)
    assert wrong_at(cluster, settings) == {}
    gaudi_server.kinds_unknown = {"TrainJob"}
    found = wrong_at(cluster, settings)
    assert set(found) == {"Kubeflow Trainer"}
    assert_failed(
        found["Kubeflow Trainer"], "v1alpha1 is not served; install Kubeflow Trainer 2 (docs/kubernetes.md), or set"
    )
    gaudi_server.kinds_unknown, gaudi_server.forbidden = set(), {("list", "trainjobs")}
    assert wrong_at(cluster, settings)["Kubeflow Trainer"].verdict == "warning"
    assert "Kubeflow Trainer" not in wrong_at(cluster, CARDS)


def test_the_queues_of_either_version_are_found(gaudi_server: FakeApiServer, cluster: Cluster) -> None:
    gaudi_server.put("LocalQueue", {"metadata": {"name": "gpus"}})
    for unknown in (set(), {"kueue.x-k8s.io/v1beta2"}, {"kueue.x-k8s.io/v1beta1"}):
        gaudi_server.versions_unknown = unknown
        assert _ask_cluster(cluster, QUEUED).local_queues == ["gpus"]
    gaudi_server.versions_unknown = {"kueue.x-k8s.io/v1beta1", "kueue.x-k8s.io/v1beta2"}
    assert _ask_cluster(cluster, QUEUED).local_queues == []
    gaudi_server.forbidden = {("list", "localqueues")}
    gaudi_server.versions_unknown = set()
    assert _ask_cluster(cluster, QUEUED).local_queues is None
    assert _ask_cluster(cluster, DEMO).local_queues is None


def test_what_an_account_may_not_see_is_a_warning(gaudi_server: FakeApiServer, cluster: Cluster) -> None:
    hidden = ("nodes", "storageclasses", "persistentvolumes")
    gaudi_server.forbidden = {("get", "namespaces"), *(("list", resource) for resource in hidden)}
    found = wrong_at(cluster, DEMO)
    assert set(found) == {"namespace", "storage", "images", "nodes"}
    assert {result.verdict for result in found.values()} == {"warning"}


def test_the_secret_of_the_store_is_looked_for(gaudi_server: FakeApiServer, cluster: Cluster) -> None:
    def found() -> CheckResult:
        return next(one for one in _check_cluster(_ask_cluster(cluster, STORED), STORED) if one.check == "store secret")

    assert found().verdict == "failed"
    assert "kubectl -n gaudi-bert create secret generic object-store --from-literal" in str(found())
    secret = {"metadata": {"name": "object-store"}, "data": {"AWS_SECRET_ACCESS_KEY": "dGhlLXNlY3JldA=="}}
    gaudi_server.put("Secret", secret)
    assert (found().verdict, found().found) == ("ok", "object-store: AWS_SECRET_ACCESS_KEY")
    assert "dGhlLXNlY3JldA" not in repr(_ask_cluster(cluster, STORED))
    gaudi_server.put("Secret", {**secret, "data": {"key": "YQ==", "password": "YQ=="}})
    assert found().verdict == "warning"
    assert "it has key, password, none of them AWS_*" in str(found())
    gaudi_server.forbidden = {("get", "secrets")}
    assert found().verdict == "warning"
    assert "this account may not get secrets" in str(found())
    assert _ask_cluster(cluster, DEMO).secret_keys is None
    assert "store secret" not in {one.check for one in _check_cluster(CLUSTER, DEMO)}
