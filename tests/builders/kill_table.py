"""Kills the packing of a table at random moments, runs it again, and compares the bytes; run as a program.

    python -m tests.builders.kill_table TABLE FOLDER SEED MOMENTS

As `kill_pack`: each attempt is a forked child of this process, which has compiled everything.
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
from gaudi_bert.config import TableSettings
from gaudi_bert.stages.tables.pack_table import pack_table
from tests.builders.kill_pack import content, finish, leftovers

SETTINGS = TableSettings(max_sequence_length=128, algorithm="lpfhp", group_sequences=150, shard_multiple=3)


def start(table: Path, out: Path) -> int:
    """Pack in a child; its process id."""
    child = os.fork()
    if child:
        return child
    try:
        pack_table(table, out, SETTINGS, reporter=Reporter(quiet=True), workers=1)
    except GaudiBertError as error:
        print(error, flush=True)
        os._exit(1)
    os._exit(0)


def main(table: Path, folder: Path, seed: int, moments: int) -> int:
    pack_table(table, folder / "whole", SETTINGS, reporter=Reporter(quiet=True), workers=1)
    wanted = content(folder / "whole")
    started = time.monotonic()
    if finish(start(table, folder / "timed")) != 0:
        return 1
    seconds = time.monotonic() - started
    rng = random.Random(seed)
    killed = attempts = wrong = resumed = 0
    while killed < moments and attempts < 5 * moments:
        target = folder / "killed"
        shutil.rmtree(target, ignore_errors=True)
        for _ in range(rng.choice([1, 1, 2])):
            child = start(table, target)
            time.sleep(rng.uniform(0, seconds))
            os.kill(child, signal.SIGKILL)
            in_time = finish(child) == -signal.SIGKILL
            seconds *= 1.03 if in_time else 0.8  # follow what else the machine does
            killed += in_time
            attempts += 1
        resumed += any(target.glob("group-*.json"))
        if finish(start(table, target)) != 0 or content(target) != wanted or leftovers(target):
            wrong += 1
    print(
        f"done: {killed} killed in {attempts} attempts, {resumed} with finished groups, {wrong} wrong, {len(wanted)} files"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
