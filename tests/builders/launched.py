"""Programs that launchers start for a test.

usage: python -m tests.builders.launched COMMANDS.json OUT   commands of `gaudi-bert`, one after the other; writes
       OUT/rank-<n>.json: exit code and output of each
usage: python -m tests.builders.launched stops|hangs         starts one watched process, which heeds a request to stop or
       does not, and sleeps
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

# Two processes of PyTorch on this machine.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable]
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def finished(command: list[str], seconds: float = 580) -> subprocess.CompletedProcess[str]:
    """Run a command, whose processes must all end well, within many times what it takes."""
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=seconds, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def kill_at(path: Path, command: list[str]) -> None:
    """Run a command, and kill all its processes when they have written `path`."""
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=nothing, stderr=nothing, env=ENVIRONMENT, start_new_session=True)
    while not path.exists() and process.poll() is None:
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_commands(commands: list[list[str]], out: Path) -> None:
    from gaudi_bert.common.launch import detect_launcher  # the launcher below needs nothing of ours
    from tests.builders.command_line import run_command

    launch = detect_launcher()
    assert launch is not None, "not started by a launcher"
    endings = []
    for command in commands:
        done = run_command(*command)  # a traceback ends this process, and its file shows which command was the last
        endings.append({"code": done.returncode, "stdout": done.stdout, "stderr": done.stderr})
        (out / f"rank-{launch.rank}.json").write_text(json.dumps(endings))
    sys.exit(max(ending["code"] for ending in endings))


def launch_one(kind: str) -> None:
    with subprocess.Popen([sys.executable, "-m", "tests.builders.launched", kind, "watched"]):
        for _ in range(12_000):  # a long sleep can lose a signal
            time.sleep(0.05)


def be_watched(kind: str) -> None:
    from gaudi_bert.engines import watchdog
    from gaudi_bert.engines.watchdog import Watchdog

    watchdog.ORPHAN_SECONDS = 1.0

    def stop(number: int, frame: object) -> None:
        print("asked to stop", flush=True)
        if kind == "stops":
            sys.exit(75)

    signal.signal(signal.SIGTERM, stop)
    with Watchdog("rank 0 of 1", 60.0):
        print("ready", flush=True)
        while True:
            time.sleep(0.05)


if __name__ == "__main__":
    if sys.argv[1] in ("stops", "hangs"):
        (launch_one if len(sys.argv) == 2 else be_watched)(sys.argv[1])
    else:
        run_commands(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
