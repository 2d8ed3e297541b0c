"""Without a card: the vendor's documented calls in their documented order, by a stand-in for its software.

What runs has processes of its own that find `stand_in/` first on their path; what it wrote down is read afterwards.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", exc_type=ImportError)

import torch

from gaudi_bert.engines.pytorch import bert, gaudi
from gaudi_bert.engines.pytorch.gaudi import VARIABLES
from tests.builders import training_data as data
from tests.builders.bert_folder import VOCABULARY, write_rows, write_tokenizer
from tests.builders.effort import LONG

ROOT = Path(__file__).resolve().parents[3]
PACKAGE, CORE = "import habana_frameworks", "import habana_frameworks.torch.core"
HCCL, GROUP = "import habana_frameworks.torch.distributed.hccl", "process group"
# Of other launchers, and what would be written down in the reader's own environment.
OTHERS = (
    *("OMPI_", "HOROVOD_", "PMI", "MPI_LOCAL", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_"),
    *("PT_HPU", "HLS_", "TORCH_DEVICE"),
)
# What every run does first: connect, then open the device.
BEGIN = """
from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.engines.choose import load_engine
engine, settings = load_engine("pytorch"), TrainingSettings(device="auto", stall_seconds=600)
communicator = engine.connect(settings, {})
device = engine.open_device(settings)
communicator.barrier()
print(device.kind, *device.notes, sep="\\n")
"""
MAY_DIFFER = "note: a resumed run may differ in rounding: the vendor of Gaudi does not promise the same bits twice"
Events = list[dict[str, Any]]


def run(out: Path, words: Sequence[str], launcher: Sequence[str] = (), **variables: str) -> list[str]:
    """Run Python with the stand-in, which writes to `out`/calls; the lines that it prints."""
    (out / "calls").mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OTHERS)}
    paths = f"{ROOT / 'tests' / 'engines' / 'pytorch' / 'stand_in'}{os.pathsep}{ROOT}"
    added = {"PYTHONPATH": paths, "HPU_STAND_IN": str(out / "calls"), "OMP_NUM_THREADS": "1"}
    environment = {**kept, **added, **variables}
    command = [*launcher, sys.executable, *words]
    done = subprocess.run(command, cwd=out, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def calls_of(out: Path) -> list[Events]:
    """What each process that loaded the stand-in did, those of the lowest rank first."""
    files = [[json.loads(line) for line in path.read_text().splitlines()] for path in (out / "calls").glob("*.jsonl")]
    return sorted(files, key=lambda each: [call.get("rank", 0) for call in each])


def names(events: Events) -> list[str]:
    return [event["call"] for event in events]


def check_order(events: Events, **variables: str) -> None:
    """Variables, then the package, then the device, once."""
    assert names(events)[:2] == [PACKAGE, CORE]
    assert [event["environment"] for event in events[:2]] == [{**VARIABLES, **variables}] * 2
    assert names(events).count(CORE) == 1


@pytest.mark.parametrize("autoload", ["1", "0"])
def test_one_process_sets_variables_then_loads_the_bridge_then_opens_the_card(autoload: str, tmp_path: Path) -> None:
    """Whether `import torch` loads the vendor's software, as in its images, or we do."""
    printed = run(tmp_path, ["-c", BEGIN], TORCH_DEVICE_BACKEND_AUTOLOAD=autoload)
    assert printed == ["hpu", MAY_DIFFER]
    (events,) = calls_of(tmp_path)
    check_order(events)
    assert len(events) == 2


def test_a_variable_that_the_user_set_stays_and_is_named(tmp_path: Path) -> None:
    printed = run(tmp_path, ["-c", BEGIN], PT_HPU_LAZY_MODE="1")
    note = "note: PT_HPU_LAZY_MODE=1 is set in the environment and stays (the default here is 0)"
    assert printed == ["hpu", note, MAY_DIFFER]
    check_order(calls_of(tmp_path)[0], PT_HPU_LAZY_MODE="1")


@pytest.mark.slow
def test_commands_set_the_variables_before_anything_loads_torch(tmp_path: Path) -> None:
    """Their device is automatic, and the stand-in has no card, so that a CPU computes."""
    for name, packs in (("packed", 41), ("held-out", 17)):
        data.write_packed(tmp_path / name, data.make_packs(packs), vocabulary=len(VOCABULARY))
    write_tokenizer(tmp_path / "vocab")
    write_rows(tmp_path / "rows.jsonl", "classification", 12, 1)
    loop = {"micro_batch_packs": 2, "threads": 1, "engine": "pytorch"}
    training = {**loop, "updates": 1, "warmup_updates": 1, "global_batch_sequences": 32, "measure_speedup": False}
    finetuning = {**loop, "max_sequence_length": 23, "epochs": 1, "batch_sequences": 12}
    pipeline = {"model": data.MODEL, "training": training, "task": {"name": "classification"}, "finetune": finetuning}
    (tmp_path / "pipeline.yaml").write_text(json.dumps(pipeline))
    train = ["train", "--pipeline", "pipeline.yaml", "--data", "packed", "--out", "run"]
    evaluate = ["evaluate", "--engine", "pytorch", "--data", "held-out", "--checkpoint", "run"]
    finetune = ["finetune", "--pipeline", "pipeline.yaml", "--model", "run", "--vocab", "vocab", "--data", "rows.jsonl"]
    finetune += ["--evaluation", "rows.jsonl", "--out", "task"]
    for number, command in enumerate((train, evaluate, finetune), 1):
        run(tmp_path, ["-m", "gaudi_bert", *command], HPU_STAND_IN_CARDS="0")
        calls = calls_of(tmp_path)
        assert len(calls) == number
        for events in calls:
            check_order(events)


# --- several processes


def check_rank(events: Events, rank: int, size: int) -> None:
    """The bridge, then the address, then the backend, then the connection, then the card of the local rank."""
    check_order(events)
    calls = names(events)
    assert calls.index(CORE) < calls.index(HCCL) < calls.index(GROUP)
    backend, connection = (events[calls.index(name)] for name in (HCCL, GROUP))
    assert {"MASTER_ADDR", "MASTER_PORT"} <= backend["environment"].keys()
    assert (connection["rank"], connection["size"]) == (rank, size)
    assert connection["environment"]["HLS_MODULE_ID"] == str(rank)


MPIRUN = "mpirun --allow-run-as-root --oversubscribe --bind-to none --mca mpi_yield_when_idle 1 -np 4"
TORCHRUN = f"{sys.executable} -m torch.distributed.run --nproc-per-node 4 --no-python"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", *(["torchrun"] if LONG else [])])
def test_four_processes_connect_by_hccl(launcher: str, tmp_path: Path) -> None:
    if launcher == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("MPIRUN MISSING: install Debian's openmpi-bin")
    (tmp_path / "begin.py").write_text(BEGIN)
    run(tmp_path, ["begin.py"], (MPIRUN if launcher == "mpirun" else TORCHRUN).split())
    ranks = [events for events in calls_of(tmp_path) if GROUP in names(events)]  # without the launcher's own process
    assert len(ranks) == 4
    for rank, events in enumerate(ranks):
        check_rank(events, rank, 4)
        assert "initialize_distributed_hpu" not in names(events), "the launcher's variables are all there"


@pytest.mark.slow
def test_what_another_launcher_does_not_set_the_vendors_function_is_told(tmp_path: Path) -> None:
    """horovodrun's variables are not the vendor's: without the call, both processes would take one card."""
    script = (
        'export HOROVOD_SIZE=2 HOROVOD_LOCAL_SIZE=2 MASTER_PORT=$(python3 -c "import socket; s = socket.socket(); '
        "s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])\")\n"
        'for rank in 0 1; do HOROVOD_RANK=$rank HOROVOD_LOCAL_RANK=$rank "$0" "$@" & done; wait -n && wait -n'
    )
    run(tmp_path, ["-c", BEGIN], ["bash", "-c", script])
    ranks = calls_of(tmp_path)
    assert len(ranks) == 2
    for rank, events in enumerate(ranks):
        check_rank(events, rank, 2)
        told = [event for event in events if event["call"] == "initialize_distributed_hpu"]
        assert [(event["WORLD_SIZE"], event["RANK"], event["LOCAL_RANK"]) for event in told] == [(2, rank, rank)]
        calls = [names(events).index(call) for call in (HCCL, "initialize_distributed_hpu", GROUP)]
        assert calls == sorted(calls)


# --- in this process


def test_the_vendors_attention_is_called_as_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    """Query, key, value, a mask of their type, the rate of dropout, and that it is not causal."""
    kernels = types.ModuleType("habana_frameworks.torch.hpex.kernels")
    kernels.FusedSDPA = types.SimpleNamespace(apply=lambda *given: given)  # type: ignore[attr-defined]
    for name in ("habana_frameworks", "habana_frameworks.torch", "habana_frameworks.torch.hpex"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    query, key, value = torch.randn(3, 2, 4, 5, 3, dtype=torch.bfloat16)
    mask = torch.zeros(2, 1, 5, 5)
    given = bert.gaudi_attention()(query, key, value, mask, 0.25)
    assert [each is one for each, one in zip(given, (query, key, value), strict=False)] == [True] * 3
    assert (given[3].shape, given[3].dtype, *given[4:]) == (mask.shape, torch.bfloat16, 0.25, False)


@pytest.mark.parametrize(
    ("given", "wait"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_how_long_threads_wait_is_set_before_torch_is_loaded(given: dict[str, str], wait: str | None) -> None:
    """By what loads an engine; what the user has set stays."""
    code = "\n".join(
        [
            "import os, sys",
            "import gaudi_bert.engines.pytorch",
            "assert 'torch' not in sys.modules",
            "print(os.environ.get('GOMP_SPINCOUNT'))",
        ]
    )
    unset = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", code], env={**unset, **given}, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"{wait}\n", "")


def test_variables_that_come_too_late_are_not_set_and_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a script that imports torch itself, where that loads the vendor's software."""
    monkeypatch.setattr(gaudi, "has_gaudi", lambda: True)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    early: dict[str, str] = {"PT_HPU_LAZY_MODE": "1"}
    gaudi.prepare_gaudi(early)
    assert early == {**VARIABLES, "PT_HPU_LAZY_MODE": "1"}
    monkeypatch.setitem(sys.modules, "habana_frameworks.torch", types.ModuleType("habana_frameworks.torch"))
    gaudi.prepare_gaudi()
    assert not VARIABLES.keys() & os.environ.keys()
    notes = gaudi.environment_notes()
    assert notes[0] == "note: PT_HPU_LAZY_MODE was not set when torch was imported; set it to 0 before that"
    assert len(notes) == len(VARIABLES)
