"""Commands, run for real: those that the manifests hold, in pods of all steps side by side, and those of the pages."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shlex
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from gaudi_bert.artefacts.object_store import ObjectStore
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import PipelineSettings, load_pipeline, section_from_mapping
from gaudi_bert.runners.kubernetes.manifests import PIPELINE_LABEL, build_manifests
from gaudi_bert.runners.kubernetes.open_results import _iterate_results_as_base64_lines
from gaudi_bert.runners.kubernetes.pods import Manifest, iterate_pod_specs
from tests.builders import folders
from tests.builders.command_line import run_command
from tests.builders.fake_api_server import FakeApiServer
from tests.builders.recorded_answers import STORAGE_CLASS, active, complete, running, succeeded
from tests.builders.s3_server import S3Server, contents, quick
from tests.k8s.manifest_checks import check_schema

PODS = 2
DATA_STEPS = ("prepare", "histogram", "plan", "write", "write-finish", "verify", "verify-finish")
TEXT = "\n\n".join(
    "\n".join(f"Sentence {line} of document {document} says {'word ' * (line * document % 23 + 1)}." for line in range(30))
    for document in range(60)
)


def commands_of_pod(item: Manifest, index: int, pipeline: Path) -> list[list[str]]:
    """Those of its containers, one after the other, with the pipeline file where it is."""
    spec = next(iterate_pod_specs(item))
    commands = json.dumps([container["command"][1:] for container in (*spec["initContainers"], *spec["containers"])])
    commands = commands.replace("$(JOB_COMPLETION_INDEX)", str(index))
    return json.loads(commands.replace("/etc/gaudi-bert/pipeline.yaml", str(pipeline)))  # type: ignore[no-any-return]


def run_pod(commands: list[list[str]]) -> str:
    """What the first container says that fails; an empty text where all end well."""
    ended = (run_command(*command) for command in commands)
    return next((done.stderr for done in ended if done.returncode), "")


@pytest.mark.slow
def test_the_pods_of_all_steps_together_make_what_one_process_makes(s3: S3Server, tmp_path: Path) -> None:
    objects = ObjectStore(quick(s3.endpoint))
    objects.write("s3://bucket/corpus/text.txt", TEXT.encode())
    (tmp_path / "text.txt").write_text(TEXT)
    values = {
        "name": "tiny",
        "prepare": {"text": "s3://bucket/corpus/text.txt", "train_vocab": 200, "duplicates": 2, "shards": 3},
        "packing": {"shard_multiple": 4, "group_sequences": 200},
        "kubernetes": {"store": "s3://bucket/prefix"},
        "resources": {"data_workers": PODS},
        "store": {"endpoint_url": s3.endpoint},
    }
    pipeline = tmp_path / "pipeline.yaml"
    pipeline.write_text(yaml.safe_dump(values))
    steps = build_manifests(load_pipeline(pipeline)).steps
    pods = [(steps[step], index) for step in DATA_STEPS for index in range(steps[step]["spec"].get("completions", 1))]
    context = multiprocessing.get_context("forkserver")  # which loads our modules once for all pods
    context.set_forkserver_preload([__name__, "gaudi_bert.corpus.prepare", "gaudi_bert.tfrecords.verify", "s3fs"])
    with ProcessPoolExecutor(len(pods), context) as pool:
        assert set(pool.map(run_pod, [commands_of_pod(*pod, pipeline) for pod in pods])) == {""}
    local = ["run", pipeline, "--work", tmp_path / "work", "--set", f"prepare.text={tmp_path / 'text.txt'}"]
    done = run_command(*local, "--stages", "prepare,histogram,plan,write,verify")
    assert done.returncode == 0, done.stderr
    made, wanted = contents("s3://bucket/prefix/tiny", objects), folders.contents(tmp_path / "work" / "tiny")
    # Pods count parts of the histogram.
    for found in (made, wanted):
        for name in [name for name in found if name.startswith(("histogram", ".")) or "/." in name]:
            del found[name]
    assert made == wanted
    assert len(made) > 20


# --- the pages on Kubernetes: commands of gaudi-bert run against a fake cluster, those of kubectl are built


ROOT = Path(__file__).resolve().parent.parent.parent
PAGE, _, _ = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8").partition("## Without a cluster's runner")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [line for language, block in BLOCKS if not language for line in block.splitlines()]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder that looks like the checkout, with the page's own pipeline file."""
    for name in ("k8s", "pipelines"):
        (tmp_path / name).symlink_to(ROOT / name)
    for language, block in BLOCKS:
        if language == "yaml" and block.startswith("name: "):
            (tmp_path / f"{yaml.safe_load(block)['name']}.yaml").write_text(block)
    return tmp_path


@pytest.fixture
def cluster_environment(tmp_path: Path) -> Any:
    pytest.importorskip("kubernetes")
    with FakeApiServer() as server:
        server.put("PersistentVolumeClaim", {"metadata": {"name": "corpus"}, "status": {"phase": "Bound"}})
        server.put("StorageClass", STORAGE_CLASS)
        for name in ("a", "b"):
            server.put("Node", {"metadata": {"name": name}})
        server.put_own("Job", "demo-write", status={"active": 1})
        server.script("demo-write", active(running("write-0")))
        server.advance("Job", "demo-write")
        server.logs["write-0"] = ["2026-01-01T00:00:00Z writing"]
        server.put_own("PersistentVolumeClaim", "demo-work", spec={}, status={"phase": "Bound"})
        server.script("demo-open", complete(succeeded("open-0")))
        (tmp_path / "sent").mkdir()
        (tmp_path / "sent" / "report.html").write_text("a page")
        server.logs["open-0"] = [
            f"2026-01-01T00:00:00Z {line}" for line in _iterate_results_as_base64_lines(tmp_path / "sent", Reporter())
        ]
        del server.scripts["demo-write"]
        (tmp_path / "kubeconfig").write_text(server.kubeconfig())
        yield {**os.environ, "KUBECONFIG": str(tmp_path / "kubeconfig")}


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("gaudi-bert")])
def test_a_command_of_the_pages_works(command: str, clone: Path, cluster_environment: dict[str, str]) -> None:
    done = run_command(*shlex.split(command)[1:], folder=clone, environment=cluster_environment)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_folder_that_the_pages_apply_can_be_built(clone: Path, kustomize: Callable[[Path], list[Any]]) -> None:
    assert any(command.startswith("kubectl apply -k ") for command in COMMANDS)
    for command in COMMANDS:
        if "--render" in command:
            done = run_command(*shlex.split(command)[1:], folder=clone)
            assert done.returncode == 0, done.stderr
        if command.startswith("kubectl apply -k "):
            assert kustomize((clone / command.split()[-1]).resolve())


def test_what_the_pages_delete_are_the_jobs_of_the_demo_and_nothing_else() -> None:
    deleted = [shlex.split(command) for command in COMMANDS if command.startswith("kubectl delete ")]
    assert [words[2] for words in deleted] == ["jobs", "mpijobs", "trainjobs"]
    settings = load_pipeline(ROOT / "pipelines" / "demo.yaml")
    for words in deleted:
        assert words[3:] == ["--namespace", settings.kubernetes.namespace, "--selector", f"{PIPELINE_LABEL}={settings.name}"]
    assert all(
        item["metadata"]["labels"][PIPELINE_LABEL] == settings.name for item in build_manifests(settings).steps.values()
    )


@pytest.mark.parametrize("block", [block for language, block in BLOCKS if language == "yaml"])
def test_the_settings_of_the_pages_are_accepted(block: str) -> None:
    manifests = build_manifests(section_from_mapping(PipelineSettings, yaml.safe_load(block), "docs/kubernetes.md"))
    assert manifests.steps
    pytest.importorskip("kubernetes_validate")
    for version in ("1.25", "1.26"):  # of 1.24, which the page names as well, there is no schema
        assert [problem for item in manifests.steps.values() for problem in check_schema(item, version)] == []
