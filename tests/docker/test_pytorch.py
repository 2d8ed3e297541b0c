"""The images with PyTorch: the vendor's packages stay as they are, and several processes train in them.

On a stand-in for the vendor's image: PyTorch for CPUs, and a bridge that finds no card, so that a run falls to the CPU.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gaudi_bert import __version__
from tests.builders.real_containers import WHEELS, Docker, build

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = ROOT / "tests" / "docker" / "stand-in"
VENDOR = "gaudi-bert-test-vendor-pytorch"
GAUDI = f"gaudi-bert-train-gaudi-pytorch:{__version__}"
GaudiBert = Callable[..., subprocess.CompletedProcess[str]]

TINY = """
name: tiny
prepare: {text: text, train_vocab: 131, max_sequence_length: 37, max_predictions: 7, duplicates: 2, shards: 3,
          evaluation_fraction: 0.2}
packing: {depth: 5, shard_multiple: 4}
model: {hidden_size: 10, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 14}
training: {engine: pytorch, global_batch_sequences: 12, micro_batch_packs: 2, updates: 6, warmup_updates: 2,
           save_every_updates: 3, evaluate_every_updates: 6, log_every_updates: 1}
"""
SENTENCES = "The river runs under the stone. A quick delta sings. Green alpha is over beta.\nGamma is the river's stone.\n"
# Two processes: containers that each have one, or one container in which mpirun starts them as it does for cards.
WORKERS = ("--set", "resources.workers=2")
CARDS = ("--set", "resources={cards: 2, training: {cpu: 2, memory: 3Gi}}", "--set", "docker.runtime=runc")


@pytest.fixture(scope="module")
def vendor(docker: Docker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The stand-in for the vendor's image, and the image of this project on top of it."""
    context = tmp_path_factory.mktemp("context")
    shutil.copytree(ROOT / "docker", context / "docker")
    for file in (ROOT / "constraints.txt", STAND_IN / "make_wheels.py"):
        shutil.copy(file, context)
    done = build(STAND_IN / "vendor-pytorch.Dockerfile", context, VENDOR, BASE_IMAGE=WHEELS)
    assert done.returncode == 0, done.stderr[-3000:]
    done = build(ROOT / "docker" / "train-gaudi-pytorch.Dockerfile", ROOT, GAUDI, BASE_IMAGE=VENDOR, VERSION=__version__)
    assert done.returncode == 0, done.stderr[-3000:]
    yield VENDOR
    docker("image", "rm", GAUDI, VENDOR)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A folder with a small pipeline, whose work folder belongs to a user who is not root."""
    (tmp_path / "text").mkdir()
    for number in range(11):
        (tmp_path / "text" / f"{number}.txt").write_text(SENTENCES * (number % 3 + 2))
    (tmp_path / "tiny.yaml").write_text(TINY)
    work = tmp_path / "work" / "tiny"
    work.mkdir(parents=True)
    if work.owner() == "root":
        shutil.chown(work, 1000, 1000)
    return tmp_path


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


def test_a_build_that_would_replace_the_vendors_pytorch_fails(docker: Docker, vendor: str, tmp_path: Path) -> None:
    context = tmp_path / "context"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(context)], check=True)
    file = context / "docker" / "train-gaudi-pytorch.Dockerfile"
    text, install = file.read_text(), "pip-install --no-cache-dir --no-deps /opt/gaudi-bert/src"
    file.write_text(text.replace(install, f"{install} /opt/more-wheels/torch_of_others-1.0.0-py3-none-any.whl", 1))
    assert file.read_text() != text
    failed = build(file, context, "gaudi-bert-test-replaced", BASE_IMAGE=vendor)
    assert failed.returncode != 0
    assert re.search(r"error: files of the vendor's torch \S+ were replaced", failed.stderr + failed.stdout)


@pytest.mark.parametrize("processes", [WORKERS, CARDS], ids=["two containers", "mpirun in the image for cards"])
def test_two_processes_train_by_pytorch(
    docker: Docker, gaudi_bert: GaudiBert, vendor: str, tiny: Path, processes: tuple[str, ...]
) -> None:
    data = gaudi_bert(tiny, "run", "tiny.yaml", "--on", "docker", "--stages", "prepare,histogram,plan,write,verify")
    assert data.returncode == 0, data.stderr
    done = gaudi_bert(tiny, "run", "tiny.yaml", "--on", "docker", "--stages", "train,evaluate", "--json", *processes)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["train"]["updates"], summary["train"]["processes"]) == (6, 2)
    assert 0 <= summary["evaluate"]["masked_lm_accuracy"] <= 1
    assert docker("ps", "--all", "--quiet", "--filter", f"label=gaudi-bert.work={tiny / 'work' / 'tiny'}").stdout == ""


def test_two_processes_of_the_command_train_train_in_the_image(
    docker: Docker, gaudi_bert: GaudiBert, vendor: str, tiny: Path
) -> None:
    """As who knows the vendor's image starts it: mpirun, and the command that each process runs."""
    data = gaudi_bert(tiny, "run", "tiny.yaml", "--on", "docker", "--stages", "prepare,histogram,plan,write")
    assert data.returncode == 0, data.stderr
    launcher = ["python3", "-m", "gaudi_bert.runners.stop_ranks", "mpirun", "--allow-run-as-root", "-np", "2"]
    command = [
        "gaudi-bert",
        "train",
        "--pipeline",
        "tiny.yaml",
        "--data",
        "work/tiny/packed/train",
        "--out",
        "work/tiny/train",
    ]
    options = ["--rm", "--ipc=host", "--volume", f"{tiny}:{tiny}", "--workdir", str(tiny), "--entrypoint", launcher[0]]
    words = [*launcher[1:], "--bind-to", "none", "--host", "localhost:2", *command, "--set", "training.engine=pytorch"]
    done = docker("run", *options, GAUDI, *words, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert json.loads((tiny / "work" / "tiny" / "train" / "training.json").read_text())["processes"] == 2
