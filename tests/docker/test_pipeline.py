"""Pipelines with --on docker, in real containers, as a user runs them: to the end, stopped midway, and set up wrongly."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gaudi_bert import __version__
from tests.builders.folders import contents
from tests.builders.real_containers import DATA, TRAIN, Docker

ROOT = Path(__file__).resolve().parents[2]
GaudiBert = Callable[..., subprocess.CompletedProcess[str]]

TINY = """
name: tiny
prepare: {text: text, train_vocab: 131, max_sequence_length: 37, max_predictions: 7, duplicates: 2, shards: 3,
          evaluation_fraction: 0.2}
packing: {depth: 5, shard_multiple: 4}
model: {hidden_size: 10, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 14}
training: {device: cpu, global_batch_sequences: 12, micro_batch_packs: 2, updates: 6, warmup_updates: 2,
           save_every_updates: 3, evaluate_every_updates: 6, log_every_updates: 1}
"""
TINY_TASK = """
task: {name: classification}
finetune: {data: rows.jsonl, evaluation_data: rows.jsonl, max_sequence_length: 37, depth: 3, epochs: 2, batch_sequences: 5}
predict: {data: rows.jsonl}
"""
SENTENCES = "The river runs under the stone. A quick delta sings. Green alpha is over beta.\nGamma is the river's stone.\n"
DATA_STAGES = "prepare,histogram,plan,write,verify"


@pytest.fixture
def tiny(tmp_path: Path, docker: Docker) -> Path:
    """A folder with a small pipeline, owned by a user who is not root."""
    (tmp_path / "text").mkdir()
    for number in range(11):
        (tmp_path / "text" / f"{number}.txt").write_text(SENTENCES * (number % 3 + 2))
    (tmp_path / "tiny.yaml").write_text(TINY)
    give_away(tmp_path / "work" / "tiny")
    return tmp_path


def give_away(folder: Path) -> None:
    """Make a work folder as a user who is not root would."""
    folder.mkdir(parents=True)
    if folder.owner() == "root":
        shutil.chown(folder, 1000, 1000)


def leftovers(docker: Docker, folder: Path) -> str:
    label = f"label=gaudi-bert.work={folder / 'work' / 'tiny'}"
    return (
        docker("ps", "--all", "--quiet", "--filter", label).stdout + docker("network", "ls", "-q", "--filter", label).stdout
    )


def test_the_demo_runs_to_its_end_and_packs_the_same_bytes_as_without_containers(
    docker: Docker, gaudi_bert: GaudiBert, tmp_path: Path
) -> None:
    assert "gaudi-bert run pipelines/demo.yaml --on docker\n" in (ROOT / "docs" / "docker.md").read_text()
    demo = str(ROOT / "pipelines" / "demo.yaml")
    give_away(tmp_path / "work" / "demo")
    done = gaudi_bert(tmp_path, "run", demo, "--on", "docker", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert list(summary) == ["prepare", "histogram", "plan", "write", "verify", "train", "evaluate", "report"]
    assert summary["evaluate"]["masked_lm_accuracy"] > summary["evaluate"]["unigram_baseline"]
    in_docker = tmp_path / "work" / "demo"
    assert (in_docker / "report.html").stat().st_uid == in_docker.stat().st_uid != 0
    # The documentation inside Python differs from version to version, so both sides pack what was prepared in the container.
    shutil.copytree(in_docker / "examples", tmp_path / "local" / "demo" / "examples")
    local = gaudi_bert(tmp_path, "run", demo, "--work", "local", "--stages", "histogram,plan,write,verify")
    assert local.returncode == 0, local.stderr
    for name in ("histogram.json", "plan.json", "histogram-evaluation.json", "plan-evaluation.json"):
        assert (tmp_path / "local" / "demo" / name).read_bytes() == (in_docker / name).read_bytes(), name
    assert contents(tmp_path / "local" / "demo" / "packed") == contents(in_docker / "packed")
    again = gaudi_bert(tmp_path, "run", demo, "--on", "docker", "--stages", f"{DATA_STAGES},train")
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("nothing to do") >= 5


def test_a_users_own_text_and_settings_give_the_same_bytes_as_without_containers(
    docker: Docker, gaudi_bert: GaudiBert, tiny: Path
) -> None:
    changed = ("--set", "packing.depth=4", "--stages", DATA_STAGES)
    done = gaudi_bert(tiny, "run", "tiny.yaml", "--on", "docker", *changed)
    assert done.returncode == 0, done.stderr
    local = gaudi_bert(tiny, "run", "tiny.yaml", "--work", "local", *changed)
    assert local.returncode == 0, local.stderr
    (tiny / "work" / "tiny" / ".run-in-docker.lock").unlink()
    assert contents(tiny / "work" / "tiny") == contents(tiny / "local" / "tiny")
    assert json.loads((tiny / "work" / "tiny" / "packed" / "train" / "metadata.json").read_text())["depth"] == 4
    assert done.stdout == local.stdout
    assert leftovers(docker, tiny) == ""


def test_sigterm_saves_a_checkpoint_and_the_same_command_goes_on(docker: Docker, gaudi_bert: GaudiBert, tiny: Path) -> None:
    assert gaudi_bert(tiny, "run", "tiny.yaml", "--on", "docker", "--stages", DATA_STAGES).returncode == 0
    command = ["run", "tiny.yaml", "--on", "docker", "--stages", "train", "--set", "training.updates=100000"]
    process = subprocess.Popen([sys.executable, "-m", "gaudi_bert", *command], cwd=tiny, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    metrics = tiny / "work" / "tiny" / "train" / "metrics.jsonl"
    until = time.monotonic() + 180
    while time.monotonic() < until and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=180)[1]
    assert process.returncode == 75, said
    assert "run the same command again to resume" in said.splitlines()[-1]
    assert any((tiny / "work" / "tiny" / "train" / "checkpoints").iterdir())
    assert leftovers(docker, tiny) == ""


def test_a_run_that_was_killed_leaves_a_container_that_the_next_one_names(
    docker: Docker, gaudi_bert: GaudiBert, tiny: Path
) -> None:
    label = f"gaudi-bert.work={tiny / 'work' / 'tiny'}"
    docker("run", "--detach", "--name", "gaudi-bert-test-left", "--label", label, "--entrypoint", "sleep", DATA, "600")
    try:
        done = gaudi_bert(tiny, "run", "tiny.yaml", "--on", "docker", "--stages", "prepare")
        assert done.returncode == 1
        assert "docker rm --force gaudi-bert-test-left" in done.stderr
    finally:
        docker("rm", "--force", "gaudi-bert-test-left")


@pytest.mark.parametrize(
    ("setting", "code", "message"),
    [
        ("images.data=not-built", 2, f"image not-built:{__version__}: not on this machine"),
        ("prepare.text=nowhere", 2, "prepare.text = "),
        ("resources.data={memory: 24Mi}", 1, "raise resources.data.memory_limit"),
        ("prepare.max_predictions=0", 2, "--set prepare.max_predictions=0: must be"),
    ],
)
def test_what_is_set_wrongly_is_one_line(
    docker: Docker, gaudi_bert: GaudiBert, tiny: Path, setting: str, code: int, message: str
) -> None:
    done = gaudi_bert(tiny, "run", "tiny.yaml", "--on", "docker", "--stages", "prepare", "--set", setting)
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert leftovers(docker, tiny) == ""


def test_cards_without_their_runtime_are_one_line(docker: Docker, gaudi_bert: GaudiBert, tiny: Path) -> None:
    wanted = ("--set", "resources.cards=1", "--set", f"images.train={TRAIN.partition(':')[0]}")
    done = gaudi_bert(tiny, "run", "tiny.yaml", "--on", "docker", "--stages", "evaluate", *wanted)
    assert done.returncode == 2
    assert "install the Gaudi container runtime" in done.stderr.splitlines()[-1]


def test_a_task_is_learnt_and_answered_as_without_containers(docker: Docker, gaudi_bert: GaudiBert, tiny: Path) -> None:
    assert gaudi_bert(tiny, "run", "tiny.yaml", "--on", "docker", "--stages", f"{DATA_STAGES},train").returncode == 0
    shutil.copytree(tiny / "work", tiny / "local")
    words = SENTENCES.replace(".", "").lower().split()
    rows = [{"text": " ".join(words[first : first + 2 + first % 5]), "label": "ab"[first % 2]} for first in range(13)]
    (tiny / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tiny / "task.yaml").write_text(TINY + TINY_TASK)
    threads = ("--set", "training.threads=1")
    done = gaudi_bert(tiny, "run", "task.yaml", "--on", "docker", "--stages", "finetune,predict", *threads)
    assert done.returncode == 0, done.stderr
    local = gaudi_bert(tiny, "run", "task.yaml", "--work", "local", "--stages", "finetune,predict", *threads)
    assert local.returncode == 0, local.stderr
    made, alone = (contents(tiny / work / "tiny") for work in ("work", "local"))
    for name in ("finetune/metrics.json", "finetune/predictions.jsonl", "predict/predictions.jsonl"):
        assert made[name] == alone[name], name
    assert [json.loads(line)["label"] in "ab" for line in made["predict/predictions.jsonl"].splitlines()] == [True] * 13
    assert leftovers(docker, tiny) == ""
