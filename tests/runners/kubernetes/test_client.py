"""The connection to a cluster: what is tried again and for how long, renewed, and said."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.kubernetes.client import Cluster, ClusterError
from gaudi_bert.runners.kubernetes.run import run_on_kubernetes
from tests.builders.fake_api_server import FakeApiServer, Fault, Run
from tests.builders.recorded_answers import active, complete, running

pytestmark = pytest.mark.usefixtures("short_watches")
PLAN = ["plan"]
SETTINGS = load_pipeline(None, ["kubernetes.start_seconds=1"])


@pytest.mark.parametrize("behaviour", ["drop", "gone", "silence"])
def test_a_watch_that_breaks_is_resumed(behaviour: str, server: FakeApiServer, run: Run) -> None:
    server.watches.extend([behaviour] * 2)
    server.script("demo-plan", *[active(running("p"))] * 4, complete())
    assert run(PLAN) == {"plan": "done"}


@pytest.mark.parametrize(
    ("code", "method", "path"),
    [(429, "GET", "/jobs/demo-plan"), (500, "POST", "/jobs"), (503, "GET", "/pods"), (409, "POST", "/jobs")],
    ids=["busy", "broken", "away", "somebody else creates it"],
)
def test_what_may_pass_is_tried_again(code: int, method: str, path: str, server: FakeApiServer, run: Run) -> None:
    server.faults = [Fault(method, path, code, {"Retry-After": "0"}) for _ in range(2)]
    server.script("demo-plan", active(), active(), complete())
    assert run(PLAN) == {"plan": "done"}
    assert server.faults == []


def test_what_stays_broken_ends_the_run_with_what_the_server_said(server: FakeApiServer, run: Run) -> None:
    server.faults = [Fault("POST", "/jobs", 500, message="etcd is down") for _ in range(10)]
    with pytest.raises(ClusterError, match="cannot create Job demo-plan: 500: etcd is down"):
        run(PLAN)


def test_a_server_that_is_away_is_asked_again_for_long(server: FakeApiServer, reporter: Reporter, said: io.StringIO) -> None:
    paused: list[float] = []
    cluster = Cluster("gaudi-bert", outage_seconds=3600, say=reporter.say, sleep=paused.append)
    server.faults = [Fault("GET", "/jobs/demo-plan", 503, message="apiserver is shutting down") for _ in range(60)]
    assert run_on_kubernetes(SETTINGS, PLAN, reporter, cluster) == {"plan": "done"}
    assert sum(paused) > 20 * 60
    assert said.getvalue().count("apiserver is shutting down") == 1
    assert said.getvalue().count("the cluster answers again") == 1


def test_an_outage_that_lasts_too_long_ends_the_run(server: FakeApiServer, reporter: Reporter) -> None:
    paused: list[float] = []
    cluster = Cluster("gaudi-bert", outage_seconds=120, say=reporter.say, sleep=paused.append)
    server.faults = [Fault("GET", "/jobs/demo-plan", 503, message="gone") for _ in range(60)]
    with pytest.raises(ClusterError, match="503: gone"):
        run_on_kubernetes(SETTINGS, PLAN, reporter, cluster)
    assert 60 < sum(paused) <= 120


def test_a_server_that_never_answered_is_not_asked_for_long(server: FakeApiServer) -> None:
    paused: list[float] = []
    lines: list[str] = []
    server.faults = [Fault("GET", "/version", 503) for _ in range(60)]
    with pytest.raises(ClusterError, match="503"):
        Cluster("gaudi-bert", outage_seconds=3600, say=lines.append, sleep=paused.append).read_server_version()
    assert sum(paused) <= 16
    assert len(lines) == 1


# As Kubernetes 1.36.2 says them.
NAMED = 'pods "p" is forbidden: '
CLAIM = 'persistentvolumeclaims "p" is forbidden: '
QUOTA = "exceeded quota: q, requested: "
REJECTIONS = {
    'jobs.batch is forbidden: User "joe" cannot create resource "jobs" in API group "batch" in the namespace "q"': "your",
    f"{NAMED}failed quota: q: must specify limits.cpu for: train,wait": "set cpu_limit in resources.data",
    f"{NAMED}{QUOTA}requests.cpu=200m, used: requests.cpu=0, limited: requests.cpu=10m": "wait, lower resources.data",
    f"{CLAIM}{QUOTA}requests.storage=10Gi, used: requests.storage=0, limited: requests.storage=5Gi": "lower kuber",
    f'jobs.batch "j" is forbidden: {QUOTA}count/jobs.batch=1, used: count/jobs.batch=0, limited: count/jobs.batch=0': "dele",
    f"{NAMED}minimum memory usage per Container is 256Mi, but request is 128Mi": "set resources.data, resources.training, ",
    f"{CLAIM}maximum storage usage per PersistentVolumeClaim is 5Gi, but request is 10Gi": "set kubernetes.storage to a",
    f"{NAMED}[cpu max limit to request ratio per Container is 2, but no limit is specified or limit is 0, memory max limit "
    "to request ratio per Container is 2, but provided ratio is 4.000000]": "lower cpu_limit and memory_limit in",
    f'{NAMED}violates PodSecurity "restricted:latest": runAsNonRoot != true': "the cluster rejects such pods",
    f"{NAMED}no PriorityClass with name nope was found": "correct priority_class",
    f'{NAMED}pod rejected: RuntimeClass "nix" not found': "correct runtime_class",
    f"{CLAIM}unable to create new content in namespace gone because it is being terminated": "wait until the",
    "configmaps \"bad\" is forbidden: ValidatingAdmissionPolicy 'n' with binding 'n' denied request: no bad": "correct",
    "something new is forbidden: by the moon": "this is a rule of the cluster",
}


@pytest.mark.parametrize(("message", "remedy"), REJECTIONS.items(), ids=range(len(REJECTIONS)))
def test_what_is_forbidden_has_the_remedy_for_its_reason_alone(
    message: str, remedy: str, server: FakeApiServer, run: Run
) -> None:
    server.faults = [Fault("POST", "/jobs", 403, message=message)]
    with pytest.raises(ClusterError) as caught:
        run(PLAN)
    said, _, advice = str(caught.value).partition(f"cannot create Job demo-plan: 403: {message}; ")
    assert said == ""
    assert advice.startswith(remedy)
    assert ";" not in advice


def test_an_expired_token_is_read_again(server: FakeApiServer, reporter: Reporter, tmp_path: Path) -> None:
    connected = Cluster("gaudi-bert")
    server.token = "second"
    server.on_unauthorized = lambda: (tmp_path / "kubeconfig").write_text(server.kubeconfig("second")) and None
    assert run_on_kubernetes(SETTINGS, PLAN, reporter, connected) == {"plan": "done"}


def test_credentials_that_stay_wrong_are_told(server: FakeApiServer, run: Run) -> None:
    server.token = "another"
    with pytest.raises(ClusterError, match="401: Unauthorized"):
        run(PLAN)


def test_a_cluster_that_does_not_answer_is_told(server: FakeApiServer, run: Run) -> None:
    server.__exit__()
    with pytest.raises(ClusterError, match=r"the cluster at http://127.* does not answer"):
        run(PLAN)
