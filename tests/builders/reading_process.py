"""A process that reads an epoch of each folder with few descriptors, and says how many it had open.

    python -m tests.builders.reading_process rows|batches DESCRIPTORS FOLDER...

`rows` are of `PackedDataset`, packed records or tables; `batches` are those of the TensorFlow trainer and of an evaluation.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tests.builders.many_shards import mapped_files, open_files

ROOT = Path(__file__).resolve().parents[2]


def read_in_a_process(kind: str, descriptors: int, *folders: Path) -> list[dict]:
    """What it said of each folder: the packs that it read, and the most files that it had open (but its own) and mapped."""
    command = [sys.executable, "-m", "tests.builders.reading_process", kind, str(descriptors), *map(str, folders)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def _rows(folder: Path) -> Iterator[int]:
    from gaudi_bert.pytorch import PackedDataset

    return (1 for _ in PackedDataset(folder))


def _batches(folder: Path) -> Iterator[int]:
    from gaudi_bert.model.config import BertConfig
    from gaudi_bert.training.input.batches import TrainingOrder, evaluation_batches, training_batches, value_limits
    from gaudi_bert.training.input.source import open_source

    source = open_source(folder)
    limits = value_limits(source, BertConfig(max_position_embeddings=source.schema.max_sequence_length))
    updates = source.packs // 8
    yield from (8 for _ in islice(training_batches(source, limits, 8, TrainingOrder(seed=1, shuffle_packs=4096)), updates))
    yield from (0 for _ in evaluation_batches(source, limits, 8))


def main() -> None:
    kind, descriptors, folders = sys.argv[1], int(sys.argv[2]), map(Path, sys.argv[3:])
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    print(json.dumps([read(kind, folder) for folder in folders]))


def read(kind: str, folder: Path) -> dict:
    packs, own, opened, mapped = 0, 0, 0, 0
    for number, count in enumerate(_rows(folder) if kind == "rows" else _batches(folder)):
        own = own or open_files() - mapped_files(folder)
        packs += count
        if number % 50 == 0:
            opened, mapped = max(opened, open_files() - own), max(mapped, mapped_files(folder))
    return {"packs": packs, "opened": opened, "mapped": mapped}


if __name__ == "__main__":
    main()
