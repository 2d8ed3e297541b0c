"""Pipelines in real containers, by either engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from gaudi_bert import __version__
from gaudi_bert.artefacts.object_store import ObjectStore
from tests.builders.agree import identical
from tests.builders.command_line import succeed
from tests.builders.folders import comparable, contents
from tests.builders.real_containers import WHEELS, Docker, build
from tests.builders.s3_server import ENVIRONMENT, S3Server, quick, upload
from tests.builders.s3_server import contents as bucket_contents

ROOT = Path(__file__).resolve().parents[2]

TINY = """
name: tiny
prepare: {text: text, train_vocab: 131, max_sequence_length: 37, max_predictions: 7, duplicates: 2, shards: 3,
          evaluation_fraction: 0.2}
packing: {depth: 5, shard_multiple: 4}
model: {hidden_size: 10, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 14}
training: {device: cpu, global_batch_sequences: 12, micro_batch_packs: 2, updates: 6, warmup_updates: 2,
           save_every_updates: 3, evaluate_every_updates: 6, log_every_updates: 1}
"""
SENTENCES = "The river runs under the stone. A quick delta sings. Green alpha is over beta.\nGamma is the river's stone.\n"
DATA_STAGES = "prepare,histogram,plan,write,verify"
ALL_STAGES = [*DATA_STAGES.split(","), "train", "evaluate", "report"]


def command_line(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`gaudi-bert` in a folder."""
    command = [sys.executable, "-m", "gaudi_bert", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


@pytest.fixture
def tiny(tmp_path: Path, docker: Docker) -> Path:
    """A folder with a small pipeline, owned by a user who is not root."""
    write_pipeline(tmp_path, TINY)
    give_away(tmp_path / "work" / "tiny")
    return tmp_path


def write_pipeline(folder: Path, pipeline: str) -> None:
    """tiny.yaml, and the text beside it."""
    (folder / "text").mkdir()
    for number in range(11):
        (folder / "text" / f"{number}.txt").write_text(SENTENCES * (number % 3 + 2))
    (folder / "tiny.yaml").write_text(pipeline)


def give_away(folder: Path) -> None:
    """Make a work folder as a user who is not root would."""
    folder.mkdir(parents=True)
    if folder.owner() == "root":
        shutil.chown(folder, 1000, 1000)


def leftovers(docker: Docker, folder: Path) -> str:
    label = f"label=gaudi-bert.work={folder / 'work' / 'tiny'}"
    return docker("ps", "--all", "--quiet", "--filter", label).stdout


def test_the_demo_packs_the_same_bytes_as_without_containers(docker: Docker, tmp_path: Path) -> None:
    assert "gaudi-bert run pipelines/demo.yaml --on docker\n" in (ROOT / "docs" / "docker.md").read_text()
    demo = str(ROOT / "pipelines" / "demo.yaml")
    give_away(tmp_path / "work" / "demo")
    done = command_line(tmp_path, "run", demo, "--on", "docker", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert list(summary) == ALL_STAGES
    assert summary["evaluate"]["masked_lm_accuracy"] > summary["evaluate"]["unigram_baseline"]
    in_docker = tmp_path / "work" / "demo"
    assert (in_docker / "report.html").stat().st_uid == in_docker.stat().st_uid != 0
    # The documentation inside Python differs from version to version, so both sides pack what was prepared in the container.
    shutil.copytree(in_docker / "examples", tmp_path / "local" / "demo" / "examples")
    local = command_line(tmp_path, "run", demo, "--work", "local", "--stages", "histogram,plan,write,verify")
    assert local.returncode == 0, local.stderr
    for name in ("histogram.json", "plan.json", "histogram-evaluation.json", "plan-evaluation.json"):
        assert (tmp_path / "local" / "demo" / name).read_bytes() == (in_docker / name).read_bytes(), name
    assert contents(tmp_path / "local" / "demo" / "packed") == contents(in_docker / "packed")
    again = command_line(tmp_path, "run", demo, "--on", "docker", "--stages", f"{DATA_STAGES},train")
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("nothing to do") >= 5


# --- from and to a bucket: the bytes of a run on a disk, and no secret left


SECRET = ENVIRONMENT["AWS_SECRET_ACCESS_KEY"]
TINY_STORED = TINY.replace("training: {", "training: {threads: 1, measure_speedup: false, ")


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory: pytest.TempPathFactory, docker: Docker) -> Path:
    """A folder with the text, and what the pipeline makes of it without containers."""
    folder = tmp_path_factory.mktemp("disk")
    write_pipeline(folder, TINY_STORED)
    done = command_line(folder, "run", "tiny.yaml")
    assert done.returncode == 0, done.stderr
    return folder


def losses(metrics: bytes) -> list[float]:
    lines = map(json.loads, metrics.decode().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "train"]


def test_a_bucket_on_loopback(on_disk: Path, s3: S3Server, docker: Docker, tmp_path: Path) -> None:
    objects = ObjectStore(quick(s3.endpoint))
    upload(on_disk / "text", "s3://bucket/docker/text", objects)
    pipeline = TINY_STORED.replace("text: text", "text: s3://bucket/docker/text")
    (tmp_path / "tiny.yaml").write_text(
        f'{pipeline}store: {{endpoint_url: "{s3.endpoint}", scratch: "{tmp_path / "scratch"}"}}\n'
    )
    done = command_line(tmp_path, "run", "tiny.yaml", "--on", "docker", "--work", "s3://bucket/docker/work", "--json")
    assert done.returncode == 0, done.stderr
    assert list(json.loads(done.stdout)) == ALL_STAGES
    made, wanted = bucket_contents("s3://bucket/docker/work/tiny", objects), contents(on_disk / "work" / "tiny")
    others = ("settings.", "examples.json")
    assert comparable(made, *others) == comparable(wanted, *others)
    identical(losses(made["train/metrics.jsonl"]), losses(wanted["train/metrics.jsonl"]))
    assert {"report.html", "train/training.json"} <= made.keys()
    everything = b"".join(made.values()) + done.stdout.encode() + done.stderr.encode()
    assert SECRET.encode() not in everything
    assert list((tmp_path / "scratch").iterdir()) == [], "scratch is left"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scratch", "tiny.yaml"]
    assert docker("ps", "--all", "--quiet", "--filter", "label=gaudi-bert.work=s3://bucket/docker/work/tiny").stdout == ""


# --- the workflow that docs/ci-example gives to users: its steps are run, in order, as a runner would


EXAMPLE = ROOT / "docs" / "ci-example"


def steps() -> list[dict[str, str]]:
    """The steps of the workflow's only job."""
    (job,) = yaml.safe_load((EXAMPLE / "workflow.yaml").read_text())["jobs"].values()
    return job["steps"]


def test_every_step_of_the_workflow_ends_well(tmp_path: Path, docker: Docker) -> None:
    """What the two checkouts give is laid by hand: the user's files, and this checkout as `gaudi-bert`."""
    shutil.copy(EXAMPLE / "ci.yaml", tmp_path)
    shutil.copytree(EXAMPLE / "text", tmp_path / "text")
    (tmp_path / "gaudi-bert").symlink_to(ROOT)
    give_away(tmp_path / "work" / "ci")  # a runner of the workflow is not root
    for step in steps():
        if "run" in step:
            command = ["bash", "-e", "-o", "pipefail", "-c", step["run"]]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ)
            assert done.returncode == 0, f"{step['name']}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
    assert "packing factor" in done.stdout


# --- the images with PyTorch, on a stand-in for the vendor's: PyTorch for CPUs, and a bridge whose cards compute on the CPU


STAND_IN = ROOT / "tests" / "docker" / "stand-in"
BRIDGE = ROOT / "tests" / "engines" / "pytorch" / "stand_in"
VENDOR = "gaudi-bert-test-vendor-pytorch"
GAUDI = f"gaudi-bert-train-gaudi-pytorch:{__version__}"

# Two processes of one container.
WORKERS = ("--set", "resources.workers=2")
CARDS = ("--set", "resources={cards: 2, training: {cpu: 2, memory: 3Gi}}", "--set", "docker.runtime=runc")


@pytest.fixture(scope="module")
def vendor(docker: Docker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The stand-in for the vendor's image, and the image of this project on top of it."""
    context = tmp_path_factory.mktemp("context")
    shutil.copytree(ROOT / "docker", context / "docker")
    shutil.copytree(BRIDGE, context / "stand_in", ignore=shutil.ignore_patterns("__pycache__"))
    for file in (ROOT / "constraints.txt", STAND_IN / "make_wheels.py"):
        shutil.copy(file, context)
    done = build(STAND_IN / "vendor-pytorch.Dockerfile", context, VENDOR, BASE_IMAGE=WHEELS)
    assert done.returncode == 0, done.stderr[-3000:]
    done = build(ROOT / "docker" / "train-gaudi-pytorch.Dockerfile", ROOT, GAUDI, BASE_IMAGE=VENDOR, VERSION=__version__)
    assert done.returncode == 0, done.stderr[-3000:]
    yield VENDOR
    docker("image", "rm", GAUDI, VENDOR)


def test_an_image_of_gaudi_keeps_the_vendors_pytorch(docker: Docker, vendor: str) -> None:
    shown = (
        "import importlib.metadata as m, json; print(json.dumps({d.metadata['Name']: d.version for d in m.distributions()}))"
    )
    before, after = (
        json.loads(docker("run", "--rm", "--entrypoint", "python3", image, "-c", shown).stdout) for image in (vendor, GAUDI)
    )
    kept = [name for name in before if re.match(r"torch|habana|numpy", name)]
    assert {"torch", "habana-torch-plugin", "numpy"} <= {name.replace("_", "-") for name in kept}
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert {"gaudi-bert", "transformers"} <= after.keys()
    assert "tensorflow-cpu" not in after
    assert docker("run", "--rm", GAUDI, "--version").stdout.strip() == f"gaudi-bert {__version__}"


@pytest.mark.parametrize("processes", [WORKERS, CARDS], ids=["on CPUs", "on cards"])
def test_two_processes_train_by_pytorch(docker: Docker, vendor: str, tiny: Path, processes: tuple[str, ...]) -> None:
    (tiny / "tiny.yaml").write_text(TINY.replace("device: cpu", "engine: pytorch"))
    succeed("run", "tiny.yaml", "--on", "docker", "--stages", DATA_STAGES, folder=tiny)
    done = succeed("run", "tiny.yaml", "--on", "docker", "--stages", "train,evaluate", "--json", *processes, folder=tiny)
    summary = json.loads(done.stdout)
    assert (summary["train"]["updates"], summary["train"]["processes"]) == (6, 2)
    assert 0 <= summary["evaluate"]["masked_lm_accuracy"] <= 1
    assert leftovers(docker, tiny) == ""
