"""Kills parts of `histogram` and `write` at random moments, runs them again in another order, and compares; as a program.

    python -m tests.builders.kill_parts RECORDS EXPECTED FOLDER SEED KILLS N...

Each attempt is a forked child of this process, whose kernels are loaded and which has no threads. EXPECTED holds plan.json
and packed/ of a whole run. The last line printed is `done` with the counts.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import PackingSettings
from gaudi_bert.stages.data.counted_records import histogram_shard
from gaudi_bert.stages.data.histogram import histogram
from gaudi_bert.stages.data.plan import plan
from gaudi_bert.stages.data.write import write, write_shard

QUIET = Reporter(quiet=True)
SETTINGS = PackingSettings(group_sequences=100, shard_multiple=4)


def fork(work: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def disturbed(work: Callable[[], object], rng: random.Random, seconds: float) -> int:
    """Start `work`, kill it after a part of `seconds`, start it again; how often it was killed in time."""
    child = fork(work)
    time.sleep(rng.uniform(0, seconds))
    os.kill(child, signal.SIGKILL)
    killed = int(os.WIFSIGNALED(os.waitpid(child, 0)[1]))
    for _ in range(2):  # what is finished is left alone
        assert os.waitpid(fork(work), 0)[1] == 0, "the part did not end well after it was killed"
    return killed


class Round:
    """One packing of RECORDS in `parts` parts, below `out`."""

    def __init__(self, records: Path, out: Path, parts: int) -> None:
        self.records, self.out, self.parts = records, out, parts

    def count(self, number: int) -> None:
        shard = histogram_shard(self.records, (number, self.parts))
        if shard is not None:
            histogram(self.records, self.out / f"histogram-{number}.json", shard=shard, reporter=QUIET, workers=1)

    def plan(self) -> bytes:
        plan(list(self.out.glob("histogram-*[0-9].json")), self.out / "plan.json", SETTINGS, reporter=QUIET)
        return (self.out / "plan.json").read_bytes()

    def write(self, number: int) -> None:
        shard = (number, self.parts)
        write_shard(self.records, self.out / "plan.json", self.out / "packed", shard, reporter=QUIET, workers=1)

    def finish(self) -> dict[str, bytes]:
        write(self.records, self.out / "plan.json", self.out / "packed", finish=True, reporter=QUIET)
        assert not list((self.out / "packed").glob(".*.tmp")), "temporary files are left"
        return visible(self.out / "packed")


def visible(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def main(records: Path, expected: Path, folder: Path, seed: int, kills: int, counts: list[int]) -> None:
    rng = random.Random(seed)
    write(records, expected / "plan.json", folder / "warm", reporter=QUIET, workers=1)  # loads the kernels
    started = time.monotonic()
    write(records, expected / "plan.json", folder / "timed", reporter=QUIET, workers=1)
    seconds = time.monotonic() - started
    killed = rounds = 0
    while killed < kills:
        parts = counts[rounds % len(counts)]
        one = Round(records, folder / f"round-{rounds}", parts)
        for number in rng.sample(range(parts), parts):
            killed += disturbed(partial(one.count, number), rng, seconds / parts)
        assert one.plan() == (expected / "plan.json").read_bytes(), f"{one.out}: another plan"
        for number in rng.sample(range(parts), parts):
            killed += disturbed(partial(one.write, number), rng, seconds / parts)
        assert one.finish() == visible(expected / "packed"), f"{one.out}: not the bytes of a whole run"
        rounds += 1
    print(f"done: {killed} killed in {rounds} rounds")


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:4]), *map(int, sys.argv[4:6]), [int(count) for count in sys.argv[6:]])
