"""Without a card: the vendor's documented calls in their documented order, by a stand-in for its software.

Each run is the command, in processes of its own that find `stand_in/` first on their path; what the stand-in wrote down is
read afterwards. Its docstring says what that proves and what it cannot.
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
import torch
from torch.utils import backend_registration

from gaudi_bert.engines import pytorch as gaudi
from gaudi_bert.engines.pytorch import VARIABLES, _set_environment_defaults
from tests.builders import training_data as data
from tests.builders.agree import agree
from tests.builders.bert_folder import VOCABULARY, write_rows, write_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
        reason=f"NO STAND-IN FOR GAUDI: PyTorch {torch.__version__} knows no devices in Python",
    ),
]

ROOT = Path(__file__).resolve().parents[3]
PACKAGE, CORE = "import habana_frameworks", "import habana_frameworks.torch.core"
HCCL, FUSED = "import habana_frameworks.torch.distributed.hccl", "import habana_frameworks.torch.hpex"
# Of other launchers, and what would be written down in the reader's own environment.
OTHERS = (
    *("OMPI_", "HOROVOD_", "PMI", "MPI_LOCAL", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_"),
    *("PT_HPU", "HLS_", "TORCH_DEVICE"),
)
LOOP = {"device": "hpu", "micro_batch_packs": 2, "log_every_updates": 1, "threads": 1}
PIPELINE = {
    "model": {**data.MODEL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "training": {
        **LOOP,
        "engine": "pytorch",
        "updates": 3,
        "warmup_updates": 1,
        "global_batch_sequences": 32,
        "evaluate_every_updates": 2,
        "measure_speedup": False,
        "stall_seconds": 600,
    },
    "task": {"name": "classification"},
    "finetune": {**LOOP, "engine": "pytorch", "max_sequence_length": 23, "epochs": 1, "batch_sequences": 12},
}
Events = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packs, rows of a task, and a pipeline."""
    folder = tmp_path_factory.mktemp("gaudi")
    data.write_packed(folder / "packed", data.make_packs(41), vocabulary=len(VOCABULARY))
    data.write_packed(folder / "held-out", data.make_packs(17), vocabulary=len(VOCABULARY))
    write_tokenizer(folder / "vocab")
    write_rows(folder / "rows.jsonl", "classification", 12, 1)
    (folder / "pipeline.yaml").write_text(json.dumps(PIPELINE))
    return folder


def train_command(out: Path, *settings: str) -> list[str]:
    command = ["train", "--pipeline", "pipeline.yaml", "--data", "packed", "--evaluation-data", "held-out", "--out"]
    return [*command, str(out)] + [word for setting in settings for word in ("--set", f"training.{setting}")]


def run(
    folder: Path, out: Path, command: Sequence[str], launcher: Sequence[str] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the command with the stand-in; it writes to `out`/calls."""
    (out / "calls").mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OTHERS)}
    paths = f"{ROOT / 'tests' / 'engines' / 'pytorch' / 'stand_in'}{os.pathsep}{ROOT}"
    added = {"PYTHONPATH": paths, "HPU_STAND_IN": str(out / "calls"), "OMP_NUM_THREADS": "1"}
    starts = [*launcher, "-m", "gaudi_bert", *command] if launcher else [sys.executable, "-m", "gaudi_bert", *command]
    environment = {**kept, **added, **variables}
    done = subprocess.run(starts, cwd=folder, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def calls_of(out: Path) -> list[Events]:
    """What each process that loaded the stand-in did, those of the lowest rank first."""
    files = [[json.loads(line) for line in path.read_text().splitlines()] for path in (out / "calls").glob("*.jsonl")]
    return sorted((each for each in files if len(each) > 2), key=lambda each: [call.get("rank", 0) for call in each])


def names(events: Events) -> list[str]:
    return [event["call"] for event in events]


def types_of(events: Events, *operations: str) -> set[str]:
    """The types of the tensors that operations on the device were given."""
    return {
        kind
        for event in events
        if event["call"] == "operation" and event["name"].split(".")[1] in operations
        for kind in event["types"]
    }


def check_order(events: Events, **variables: str) -> None:
    """Variables, then the package, then the device, and only then anything on it."""
    assert names(events)[:2] == [PACKAGE, CORE]
    for event in events[:2]:
        assert event["environment"] == {**VARIABLES, **variables}
    assert names(events).count(CORE) == 1


def figures(out: Path) -> list[float]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [value for row in rows for name, value in sorted(row.items()) if "loss" in name and value is not None]


def test_one_process_and_the_task_that_it_goes_on_with(folder: Path, tmp_path: Path) -> None:
    """In bfloat16, where `import torch` loads the vendor's software, as in its images.

    Each pass is compiled once, of training and of evaluation, and its sizes are numbers.
    """
    done = run(folder, tmp_path, train_command(tmp_path / "run", "precision=bfloat16"))
    assert "train: on Gaudi card, PyTorch\n" in done.stderr
    (note,) = [line for line in done.stderr.splitlines() if line.startswith("note:")]
    assert "a resumed run may differ in rounding" in note
    (events,) = calls_of(tmp_path)
    check_order(events)
    assert not {FUSED, HCCL, "process group", "all_reduce", "initialize_distributed_hpu"} & set(names(events))
    compiled = [event for event in events if event["call"] == "compile"]
    assert [(event["devices"], event["symbols"]) for event in compiled] == [(["hpu"], [])] * 2
    assert types_of(events, "bmm") == {"bfloat16"}
    assert "bfloat16" in types_of(events, "addmm", "mm")
    for operation in ("_softmax", "native_layer_norm", "_log_softmax", "linalg_vector_norm", "sqrt_", "addcmul_", "sub_"):
        assert types_of(events, operation) == {"float32"}, operation
    assert types_of(events, "nll_loss_forward") == {"float32", "int64"}
    task = ["--data", "rows.jsonl", "--evaluation", "rows.jsonl", "--out", str(tmp_path / "task")]
    command = ["finetune", "--pipeline", "pipeline.yaml", "--model", str(tmp_path / "run"), "--vocab", "vocab", *task]
    run(folder, tmp_path / "tuned", command)
    check_order(*calls_of(tmp_path / "tuned"))


def test_a_bridge_that_is_imported_by_name_computes_what_a_cpu_does_by_the_vendors_attention(
    folder: Path, tmp_path: Path
) -> None:
    """In float32, not compiled, with the automatic device; and the same run on a CPU, which loads nothing of the vendor's.

    A variable that the user set stays, and is named. Every layer calls the vendor's attention, when training and when
    evaluating, with one mask for all heads.
    """
    by_name = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    asked = ("gaudi_fused_attention=true", "compile=false")
    command = train_command(tmp_path / "hpu" / "run", "device=auto", *asked)
    done = run(folder, tmp_path / "hpu", command, PT_HPU_LAZY_MODE="1", **by_name)
    assert "note: the environment sets PT_HPU_LAZY_MODE=1, which replaces the default, 0" in done.stderr
    run(folder, tmp_path / "cpu", train_command(tmp_path / "cpu" / "run", "device=cpu", *asked), **by_name)
    assert calls_of(tmp_path / "cpu") == []
    (events,) = calls_of(tmp_path / "hpu")
    check_order(events, PT_HPU_LAZY_MODE="1")
    assert "compile" not in names(events)
    assert types_of(events, "addmm", "mm") == {"float32"}
    called = [event for event in events if event["call"] == "FusedSDPA"]
    assert len(called) >= 3 * data.MODEL["num_hidden_layers"]
    for event in called:
        (packs, _, queries, _), mask = event["query"], event["mask"]
        assert mask == [packs, 1, queries, data.LENGTH]
        assert (event["dropout_p"], event["is_causal"], set(event["types"])) == (0.0, False, {"float32"})
    assert len(figures(tmp_path / "hpu" / "run")) > 6
    agree(figures(tmp_path / "hpu" / "run"), figures(tmp_path / "cpu" / "run"), 1e-5, scale=1.0)


@pytest.mark.parametrize(
    ("given", "wait"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_how_long_threads_wait_is_set_unless_the_user_has_set_it(given: dict[str, str], wait: str | None) -> None:
    _set_environment_defaults(given)
    assert given.get("GOMP_SPINCOUNT") == wait


def test_variables_that_come_too_late_are_not_set_and_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a script that imports torch itself, where that loads the vendor's software."""
    monkeypatch.setattr(gaudi, "is_habana_frameworks_installed", lambda: True)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    early: dict[str, str] = {"PT_HPU_LAZY_MODE": "1"}
    _set_environment_defaults(early)
    assert {**early, **VARIABLES, "PT_HPU_LAZY_MODE": "1"} == early
    monkeypatch.setitem(sys.modules, "habana_frameworks.torch", types.ModuleType("habana_frameworks.torch"))
    _set_environment_defaults()
    assert not VARIABLES.keys() & os.environ.keys()
    notes = gaudi.describe_nondefault_environment_variables()
    assert notes[0] == "note: PT_HPU_LAZY_MODE was not set when torch was imported; set it to 0 before importing torch"
    assert len(notes) == len(VARIABLES)


# --- several processes

MPIRUN = "mpirun --allow-run-as-root --oversubscribe --bind-to none --mca mpi_yield_when_idle 1 -np 2"


def check_rank(events: Events, rank: int, size: int) -> None:
    """The bridge, then the address, then the backend, then the connection, then the card of the local rank."""
    check_order(events)
    calls = names(events)
    assert calls.index(CORE) < calls.index(HCCL) < calls.index("process group") < calls.index("operation")
    backend, connection = (events[calls.index(name)] for name in (HCCL, "process group"))
    assert {"MASTER_ADDR", "MASTER_PORT"} <= backend["environment"].keys()
    assert (connection["rank"], connection["size"]) == (rank, size)
    assert connection["environment"]["HLS_MODULE_ID"] == str(rank)
    sums = [event for event in events if event["call"] == "all_reduce"]
    assert sums
    assert {event["type"] for event in sums} == {"float32"}


def check_ranks(out: Path) -> list[Events]:
    """Check what both processes called, and return it."""
    ranks = calls_of(out)
    assert len(ranks) == 2
    for rank, events in enumerate(ranks):
        check_rank(events, rank, 2)
    return ranks


def test_processes_of_mpirun_connect_by_hccl_and_end_well(folder: Path, tmp_path: Path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("MPIRUN MISSING: install Debian's openmpi-bin")
    command = train_command(tmp_path / "run", "precision=bfloat16", "compile=false")
    assert "3 updates" in run(folder, tmp_path, command, [*MPIRUN.split(), sys.executable]).stdout
    for events in check_ranks(tmp_path):
        assert "initialize_distributed_hpu" not in names(events), "the launcher's variables are all there"


def test_what_another_launcher_does_not_set_the_vendors_function_is_told(folder: Path, tmp_path: Path) -> None:
    """horovodrun's variables are not the vendor's: without the call, both processes would take one card."""
    script = (
        'export HOROVOD_SIZE=2 HOROVOD_LOCAL_SIZE=2 MASTER_PORT=$(python3 -c "import socket; s = socket.socket(); '
        "s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])\")\n"
        'for rank in 0 1; do HOROVOD_RANK=$rank HOROVOD_LOCAL_RANK=$rank "$0" "$@" & done; wait -n && wait -n'
    )
    run(folder, tmp_path, train_command(tmp_path / "run", "compile=false"), ["bash", "-c", script, sys.executable])
    for rank, events in enumerate(check_ranks(tmp_path)):
        told = [event for event in events if event["call"] == "initialize_distributed_hpu"]
        assert [(event["WORLD_SIZE"], event["RANK"], event["LOCAL_RANK"]) for event in told] == [(2, rank, rank)]
        calls = [names(events).index(call) for call in (HCCL, "initialize_distributed_hpu", "process group")]
        assert calls == sorted(calls)
