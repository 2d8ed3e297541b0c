"""Kills `prepare` at random moments, runs it again, and compares the bytes; run as a program.

    python -m tests.builders.kill_prepare TEXT FOLDER SEED KILLS

Each attempt is a forked child of this process (which has loaded and compiled everything), so that the moments fall into the
work and not into the start of an interpreter. The last line printed is `done` with the number of kills.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import PrepareSettings
from gaudi_bert.corpus import blocks
from gaudi_bert.stages.data.prepare import prepare
from tests.builders.kill_pack import content, finish

SETTINGS = {"train_vocab": 200, "max_sequence_length": 37, "max_predictions": 5, "duplicates": 3, "shards": 7}


def start(text: Path, out: Path) -> int:
    """Prepare in a child; its process id."""
    child = os.fork()
    if child:
        return child
    settings = PrepareSettings(text=str(text), **SETTINGS)
    prepare(settings, out, pipeline_folder=text.parent, reporter=Reporter(quiet=True), workers=1)
    os._exit(0)


def main(text: Path, folder: Path, seed: int, kills: int) -> int:
    """Kill until `kills` attempts were killed; 0 where every finished folder is as the undisturbed one."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork
    blocks.BLOCK_CHARACTERS = 3000
    finish(start(text, folder / "compiles-the-kernels"))
    began = time.perf_counter()
    finish(start(text, folder / "whole"))
    seconds = time.perf_counter() - began
    expected = content(folder / "whole")
    rng, killed, number = random.Random(seed), 0, 0
    while killed < kills:
        out = folder / str(number)
        child = start(text, out)
        time.sleep(rng.random() * seconds)
        os.kill(child, signal.SIGKILL)
        was_killed = finish(child) == -signal.SIGKILL
        killed += was_killed
        if was_killed and rng.random() < 0.5:
            continue
        if finish(start(text, out)) != 0 or content(out) != expected:
            print(f"attempt {number}: not the bytes of an undisturbed run")
            return 1
        number += 1
    print(f"done {killed}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
