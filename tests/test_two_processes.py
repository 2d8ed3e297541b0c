"""The stages that processes of a launcher do together: by `run`, and then again by `run` and by each command."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.builders import training_data as data
from tests.builders import two_processes
from tests.builders.bert_folder import VOCABULARY, write_rows, write_tokenizer
from tests.builders.effort import LONG

MPIRUN = "mpirun --allow-run-as-root --oversubscribe --bind-to none --mca mpi_yield_when_idle 1 -np 2"
LAUNCHERS = {"mpi": MPIRUN.split(), "gloo": ["horovodrun", "--gloo", "-np", "2"]}
# Kernels are compiled in each process, and hardly run.
ENVIRONMENT = {**two_processes.ENVIRONMENT, "XLA_FLAGS": "--xla_backend_optimization_level=0"}
STAGES = ("train", "evaluate", "finetune")
# One micro-batch an update and no dropout: a third of the graph to trace, in each of four processes.
LOOP = {"micro_batch_packs": 4, "threads": 1, "log_every_updates": 1, "stall_seconds": 120}
ROWS = {"data": "rows.jsonl", "evaluation_data": "held-out.jsonl"}
PIPELINE = {
    "name": "tiny",
    "model": two_processes.MODEL,
    "training": {**LOOP, "updates": 2, "warmup_updates": 1, "global_batch_sequences": 16, "measure_speedup": False},
    "task": {"name": "classification"},
    "finetune": {**LOOP, **ROWS, "max_sequence_length": 23, "epochs": 1, "batch_sequences": 12},
}


def need(launcher: str) -> None:
    """Skip loudly where several processes cannot be started."""
    horovod = find_spec("horovod")
    if horovod is None or horovod.origin is None:
        pytest.skip("HOROVOD MISSING: run `make setup-horovod` to test several processes")
    if launcher == "mpi" and shutil.which("mpirun") is None:
        pytest.skip("MPIRUN MISSING: install Debian's openmpi-bin and libopenmpi-dev, then build Horovod again")
    libraries = Path(horovod.origin).parent.glob("tensorflow/mpi_lib*.so")
    if launcher == "mpi" and not any(b"libmpi.so" in library.read_bytes() for library in libraries):
        pytest.skip("HOROVOD WITHOUT MPI: remove .venv/.horovod-complete, and run `make setup-horovod` with libopenmpi-dev")


def make_pipeline(folder: Path) -> list[list[str]]:
    """A pipeline whose data are packed already; `run` of what comes after that, and a command for each of its stages."""
    work = folder / "work" / "tiny"
    packed, held_out, unpacked = work / "packed" / "train", work / "packed" / "evaluation", work / "examples" / "evaluation"
    data.write_packed(packed, data.make_packs(29), vocabulary=len(VOCABULARY))
    data.write_packed(held_out, data.make_packs(7), vocabulary=len(VOCABULARY))
    data.write_unpacked(unpacked, data.make_packs(7))
    write_tokenizer(work / "examples")
    rows = write_rows(folder / "rows.jsonl", "classification", 24, 1)
    others = write_rows(folder / "held-out.jsonl", "classification", 6, 2)
    pipeline = folder / "tiny.yaml"
    pipeline.write_text(yaml.safe_dump(PIPELINE), encoding="utf-8")
    train = ["train", "--pipeline", pipeline, "--data", packed, "--evaluation-data", held_out, "--out", work / "train"]
    evaluate = ["evaluate", "--data", held_out, "--unpacked", unpacked, "--checkpoint", work / "train"]
    evaluate += ["--out", work / "train" / "evaluation.json"]
    finetune = ["finetune", "--pipeline", pipeline, "--data", rows, "--evaluation", others, "--model", work / "train"]
    finetune += ["--vocab", work / "examples", "--out", work / "finetune"]
    run = ["run", pipeline, "--stages", ",".join(STAGES), "--work", folder / "work"]
    return [[*map(str, command), "--json"] for command in (run, run, train, evaluate, finetune)]


def in_two_processes(launcher: str, commands: list[list[str]], folder: Path) -> list[dict[str, Any]]:
    """What the first process prints for each command; both must end each with 0, and the second prints nothing."""
    (folder / "commands.json").write_text(json.dumps(commands), encoding="utf-8")
    program = [sys.executable, "-m", "tests.builders.launched", str(folder / "commands.json"), str(folder)]
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [*LAUNCHERS[launcher], *program], cwd=root, env=ENVIRONMENT, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(2))
    assert [ending["code"] for ending in first] == [ending["code"] for ending in second] == [0] * len(commands)
    assert [(ending["stdout"], ending["stderr"]) for ending in second] == [("", "")] * len(commands)
    return [json.loads(ending["stdout"]) for ending in first]


# Which processes run a command does not depend on their launcher: the long form tries both.
@pytest.mark.slow
@pytest.mark.repeated
@pytest.mark.parametrize("launcher", LAUNCHERS if LONG else ["mpi"])
def test_every_stage_ends_well_in_both_processes_and_is_printed_once(launcher: str, tmp_path: Path) -> None:
    need(launcher)
    first, again, *alone = in_two_processes(launcher, make_pipeline(tmp_path), tmp_path)
    assert list(first) == list(STAGES)
    assert not any("skipped" in first[name] for name in STAGES)
    assert first["train"]["processes"] == 2
    assert again == {name: {**first[name], "skipped": True} for name in STAGES}
    assert alone == list(again.values())
