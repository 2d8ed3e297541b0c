"""Two pods that train together, with the variables of their Job: lost, stopped, resumed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch")

from gaudi_bert.common.launch import find_free_port
from gaudi_bert.training.checkpoint import _list_checkpoints, read_checkpoint
from tests.builders import training_data as data
from tests.builders.agree import identical
from tests.builders.json_lines import losses_of

UPDATES = 8
SETTINGS = {
    "updates": UPDATES,
    "warmup_updates": 1,
    "global_batch_sequences": 16,
    "micro_batch_packs": 2,
    "log_every_updates": 1,
    "save_every_updates": 2,
    "measure_speedup": "false",
    "stall_seconds": 12,
    "meeting_seconds": 12,
    "threads": 1,
}
# A command whose pod gets a signal when it meets the others or has done so many updates.
POD = """
import os, signal, sys
from gaudi_bert.cli import main
from gaudi_bert.engines.pytorch import distributed
from gaudi_bert.training.objective import TrainingStep
end, at = sys.argv[1:3]
open_store, step = distributed._open_store, TrainingStep.run_update

def end_now():
    os.kill(os.getpid(), signal.Signals[end])

def meet(*arguments):
    store = open_store(*arguments)
    if at == "meeting":
        end_now()
    return store

def run(self, micro_batches, update, learning_rate):
    sums = step(self, micro_batches, update, learning_rate)
    if at == str(update):
        end_now()
    return sums

distributed._open_store, TrainingStep.run_update = meet, run
main(sys.argv[3:])
"""
Ends = list[tuple[int, str]]
# One that is stopped is silent, as one is whose node is lost.
ENDS = [("SIGSTOP", 0, "meeting"), ("SIGKILL", 1, "3"), ("SIGSTOP", 1, "4"), ("SIGTERM", 1, "5")]


def run_pods(
    packed: Path,
    out: Path,
    end: str = "",
    pod: int = 1,
    at: str = "",
    started: tuple[int, ...] = (0, 1),
    second: Sequence[str] = (),
    **changes: object,
) -> Ends:
    """The exit code and the output of each pod that is started; `pod` meets its `end`, the `second` has more options."""
    values = [f"training.{name}={value}" for name, value in {**SETTINGS, **changes}.items()]
    values += [f"model.{name}={value}" for name, value in data.MODEL.items()]
    command = ["train", "--data", str(packed), "--out", str(out), "--engine", "pytorch"]
    command += [word for value in values for word in ("--set", value)]
    shared = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "localhost"}
    shared |= {"PET_MASTER_PORT": str(find_free_port()), "OMP_NUM_THREADS": "1"}
    running = []
    for rank in started:
        words = [sys.executable, "-c", POD, end, at if rank == pod else "never", *command, *(second if rank else ())]
        variables = {**os.environ, **shared, "PET_NODE_RANK": str(rank)}
        pipe = subprocess.PIPE
        running.append(subprocess.Popen(words, env=variables, stdout=pipe, stderr=subprocess.STDOUT, text=True))
    if end == "SIGSTOP":  # it ends when the other one has
        running[1 - pod].wait(240)
        running[pod].kill()
    printed = [process.communicate(timeout=240)[0] for process in running]
    return [(process.returncode, text) for process, text in zip(running, printed, strict=True)]


@pytest.mark.slow
def test_pods_that_are_lost_and_stopped_end_with_the_bits_of_those_that_are_not(tmp_path: Path) -> None:
    packed, complete, broken = tmp_path / "packed", tmp_path / "complete", tmp_path / "broken"
    data.write_packed(packed, data.make_packs(29))
    done = run_pods(packed, complete, stall_seconds=120)  # which also compiles what is compiled once a machine
    assert [code for code, _ in done] == [0, 0], done
    assert done[1][1] == "", "the first pod reports for both"
    for end, pod, at in ENDS:
        check_end(run_pods(packed, broken, end, pod, at), end, pod, at)
    resumed = run_pods(packed, broken)
    assert [code for code, _ in resumed] == [0, 0], resumed
    assert "resuming after update 5" in resumed[0][1]
    check_same_bits(complete, broken)
    # Lost after the first one has finished: nobody is there to be met.
    ((code, text),) = run_pods(packed, broken, started=(1,))
    assert (code, text) == (0, f"{broken}: already trained with these settings; nothing to do\n")


@pytest.mark.slow
def test_a_pod_with_other_data_is_refused_and_named(tmp_path: Path) -> None:
    packed, other = (data.write_packed(tmp_path / name, data.make_packs(29)) for name in ("packed", "other"))
    metadata = other / "metadata.json"
    metadata.write_text(metadata.read_text().replace('"manifest_crc32c": 1', '"manifest_crc32c": 2'))
    for code, text in run_pods(packed, tmp_path / "out", second=["--data", str(other)]):
        assert code == 2, text
        assert text.splitlines()[-1].startswith("error: data is "), text
        assert f" in rank 1 ({socket.gethostname()}), " in text


def check_end(printed: Ends, end: str, pod: int, at: str) -> None:
    (own, _), (others, text) = printed[pod], printed[1 - pod]
    assert (own, others) == ((75, 75) if end == "SIGTERM" else (-9, 1)), printed
    for _, each in printed:
        assert "Traceback" not in each
        assert "[c10d]" not in each, "one line of ours, not torch's own"
    if end == "SIGTERM":
        assert "stopped on request after update 5 of 8; run the same command again to resume it" in text
        return
    (line,) = (line for line in text.splitlines() if line.startswith("error: "))
    assert line.startswith(f"error: rank {1 - pod} of 2"), "it names itself"
    if at != "meeting":
        meaning = {"SIGKILL": "is lost because", "SIGSTOP": "is not responding because"}
        assert f": rank {pod} ({socket.gethostname()}) {meaning[end]}" in line
        assert "the last saved update is 2; run the same command again to resume" in line


def check_same_bits(complete: Path, broken: Path) -> None:
    ends = [read_checkpoint(_list_checkpoints(out / "checkpoints")[-1]) for out in (complete, broken)]
    assert [end.update for end in ends] == [UPDATES] * 2
    for part in ("variables", "first_moments", "second_moments"):
        identical(*(getattr(end, part) for end in ends))
    identical(losses_of(complete), losses_of(broken))
