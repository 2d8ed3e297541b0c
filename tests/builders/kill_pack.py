"""Kills the packing of a folder at random moments, runs it again, and compares the bytes; run as a program.

    python -m tests.builders.kill_pack RECORDS FOLDER SEED MOMENTS

Each attempt is a forked child of this process (which has loaded and compiled everything, and has no threads), so that the
moments fall into the work and not into the start of an interpreter. The last line printed is `done` with the counts.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from gaudi_bert.common.errors import GaudiBertError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import PackingSettings
from gaudi_bert.stages.data.pack import pack

SETTINGS = PackingSettings(algorithm="spfhp", group_sequences=400, shard_multiple=4, shard_bytes=40_000)


def start(records: Path, out: Path) -> int:
    """Pack in a child; its process id."""
    child = os.fork()
    if child:
        return child
    try:
        pack(records, out, SETTINGS, reporter=Reporter(quiet=True), workers=2, verified=True)
    except GaudiBertError as error:
        print(error, flush=True)
        os._exit(1)
    os._exit(0)


def finish(child: int) -> int:
    """Wait for a child; its exit code, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def content(folder: Path) -> dict[str, bytes]:
    """Every file that a listing shows."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


def leftovers(folder: Path) -> list[str]:
    """Temporary files that nobody would remove."""
    return [path.name for path in folder.rglob(".*.tmp")]


def main(records: Path, folder: Path, seed: int, moments: int) -> int:
    whole = folder / "whole"
    pack(records, folder / "first" / "packed", SETTINGS, reporter=Reporter(quiet=True), workers=1, verified=True)
    started = time.monotonic()
    if finish(start(records, whole / "packed")) != 0:
        return 1
    seconds = time.monotonic() - started
    wanted = content(whole)
    if content(folder / "first") != wanted:
        print("one thread and two threads differ")
        return 1
    rng = random.Random(seed)
    killed = attempts = wrong = 0
    while killed < moments and attempts < 5 * moments:
        target = folder / "killed"
        shutil.rmtree(target, ignore_errors=True)
        for _ in range(rng.choice([1, 1, 2, 3])):
            child = start(records, target / "packed")
            time.sleep(rng.uniform(0, seconds))
            os.kill(child, signal.SIGKILL)
            in_time = finish(child) == -signal.SIGKILL
            seconds *= 1.03 if in_time else 0.8  # follow what else the machine does
            killed += in_time
            attempts += 1
        if finish(start(records, target / "packed")) != 0 or content(target) != wanted or leftovers(target):
            wrong += 1
            found = content(target)
            different = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
            print(f"after {killed} kills: {different} differ, {leftovers(target)} left over")
    print(f"done: {killed} killed in {attempts} attempts, {wrong} wrong, {len(wanted)} files")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
