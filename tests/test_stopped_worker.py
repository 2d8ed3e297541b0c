"""Training in a worker of an MPIJob that is stopped: as root, in whose folder the virtual environment may lie."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gaudi_bert.training.checkpoint import read_newest
from tests.builders import training_data as data
from tests.builders.ssh_hosts import made_hosts, wait_until
from tests.builders.two_processes import MODEL
from tests.test_two_processes import ENVIRONMENT, LOOP, need

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_a_worker_that_is_stopped_lets_its_ranks_save_the_update_that_they_have_done() -> None:
    """The other worker is left alone."""
    need("mpi")
    with made_hosts(0) as hosts:
        packed, out, log = hosts.folder / "packed", hosts.folder / "run", hosts.folder / "training.log"
        data.write_packed(packed, data.make_packs(29))
        settings = {**LOOP, "updates": 10**6, "warmup_updates": 1, "global_batch_sequences": 16, "measure_speedup": False}
        sets = [word for name, value in settings.items() for word in ("--set", f"training.{name}={value}")]
        sets += [word for name, value in MODEL.items() for word in ("--set", f"model.{name}={value}")]
        train = [sys.executable, "-m", "gaudi_bert", "train", "--data", str(packed), "--out", str(out), *sets]
        with hosts.workers() as servers:
            with log.open("w") as output:
                launcher = subprocess.Popen(hosts.mpirun(train), stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
            wait_until("update 3/", log, [*servers, launcher], seconds=240)
            hosts.stop_worker(servers[0], PYTHONPATH=str(ROOT), PATH=ENVIRONMENT["PATH"])
            assert launcher.wait(60) != 0, "a run that was stopped is not complete"
            servers[0].wait(30)
        last = [json.loads(line)["update"] for line in (out / "metrics.jsonl").read_text().splitlines()][-1]
        assert f"stopped on request after update {last} of 1000000; run it again to resume" in log.read_text()
        checkpoint = read_newest(out / "checkpoints", pytest.fail)
        assert checkpoint is not None
        assert checkpoint.update == last
