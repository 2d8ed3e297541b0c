"""Kills the write stage at random moments and runs it again; run as a program, with nothing else in its process.

    python -m tests.builders.kill_write RECORDS PLAN EXPECTED FOLDER KILLS SEED

Each writer is a fork of this process, so that the kernels are loaded and a writer's life is writing alone. After
every few kills the stage is run to its end and the folder compared with EXPECTED, byte for byte.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from gaudi_bert.common.progress import Reporter
from gaudi_bert.stages.data.write import write

QUIET = Reporter(quiet=True)
KILLS_A_FOLDER = 5


def visible(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if not path.name.startswith(".")}


def start_writer(records: Path, plan: Path, out: Path) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            write(records, plan, out, reporter=QUIET, workers=2)
            code = 0
        finally:
            os._exit(code)
    return child


def main(records: Path, plan: Path, expected: Path, folder: Path, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    wanted = visible(expected)
    write(records, plan, folder / "warm", reporter=QUIET, workers=1)  # loads the kernels, and starts no thread
    started = time.monotonic()
    os.waitpid(start_writer(records, plan, folder / "timed"), 0)
    duration = time.monotonic() - started
    killed = 0
    while killed < kills:
        out = folder / f"out-{killed}"
        for _ in range(KILLS_A_FOLDER):
            child = start_writer(records, plan, out)
            time.sleep(rng.uniform(0, duration))
            os.kill(child, signal.SIGKILL)
            killed += os.waitpid(child, 0)[1] == signal.SIGKILL
            if (out / "metadata.json").exists():
                assert visible(out) == wanted, f"{out}: finished, and not as it should be"
                break
        _, status = os.waitpid(start_writer(records, plan, out), 0)
        assert status == 0, f"{out}: the run after the kills ended with {status}"
        assert visible(out) == wanted, f"{out}: not the same bytes as the undisturbed run"
        assert not list(out.glob(".*.tmp")), "temporary files are left"
        shutil.rmtree(out)
    print(f"done: {killed} killed")


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:5]), int(sys.argv[5]), int(sys.argv[6]))
