"""Read damaged model folders. Damaged configs, tokenizers and weights must be read, or rejected with a one-line message, and
none may crash the process.

    python -m tools.fuzz_models FILE SEED COUNT FOLDER      FILE is one of `FILES`; FOLDER is empty

Each folder is read in a watched process. Problems are printed, and if there are any, the exit code is 1.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.rows.tokenizer import open_tokenizer
from gaudi_bert.rows.tokenizing import tokenize_rows
from gaudi_bert.rows.types import RowPosition, TextRow
from gaudi_bert.tasks.task_models import load_initial_weights, read_task_description
from gaudi_bert.training.model_files import read_sentence_settings
from tests.builders.bert_folder import good_folder
from tests.builders.watched_worker import WatchedWorker
from tools.damage import mutated

FILES = ("config.json", "tokenizer.json", "model.safetensors", "modules.json", "sentence_bert_config.json")
HOSTILE: tuple[Any, ...] = (
    *(None, True, 0, -1, 3, 1.5, 2**31, 2**63, 2**64 + 1, 10**30, float("nan"), float("inf")),
    *("", "x" * 5000, "\ud800", "../..", [], {}, [1, "a"], {"a": None}),
)


def mutated_file(file: Path, rng: random.Random) -> bytes:
    """Return the damaged bytes of a file. In JSON, values are replaced, and otherwise bytes."""
    data = file.read_bytes()
    if file.suffix == ".safetensors" and rng.random() < 0.5:
        size = struct.unpack("<Q", data[:8])[0]
        header = json.dumps(_with_damage(json.loads(data[8 : 8 + size]), rng)).encode()
        return struct.pack("<Q", len(header)) + header + data[8 + size :]
    if file.suffix == ".json" and rng.random() < 0.7:
        return json.dumps(_with_damage(json.loads(data), rng)).encode()
    return mutated(data, rng)


def _with_damage(content: Any, rng: random.Random) -> Any:
    """Return JSON with one to three of its values replaced or removed."""
    for _ in range(rng.randint(1, 3)):
        here = content
        while isinstance(here, dict | list) and here:
            keys = list(here) if isinstance(here, dict) else list(range(len(here)))
            key = rng.choice(keys)
            deeper = isinstance(here[key], dict | list) and here[key] and rng.random() < 0.8
            if deeper:
                here = here[key]
                continue
            if rng.random() < 0.2:
                del here[key]
            else:
                here[key] = copy.deepcopy(rng.choice(HOSTILE))
            break
    return content


def read_damaged(good: Path, name: str, seed: int, folder: Path) -> str | None:
    """Read one damaged folder. Return a description of the problem, or None if there is none."""

    shutil.copytree(good, folder)
    (folder / name).write_bytes(mutated_file(good / name, random.Random(f"{name} {seed}")))
    try:
        description = read_task_description(folder)
        read_sentence_settings(folder)
        weights = load_initial_weights(folder, description.make_task())
        config = weights.config
        tokenizer = open_tokenizer(folder)
        tokenizer.check_fits(config.vocab_size, config.type_vocab_size)
        rows = [TextRow(RowPosition(1), "the cat sat"), TextRow(RowPosition(2), "on the mat, unable", "dogs runs")]
        settings = TaskSettings(too_long="truncate")
        sequences = tokenize_rows(rows, tokenizer, task="classification", settings=settings, max_sequence_length=16)
    except InputError as error:
        return None if "\n" not in str(error) and len(str(error)) < 1000 else f"not one line: {error}"
    if not all(np.isfinite(value).all() for value in weights.variables.values()):
        return "weights that are not finite"
    known = 0 <= sequences.input_ids.min() <= sequences.input_ids.max() < config.vocab_size
    return None if known else "numbers that the model does not have"


def problems(worker: WatchedWorker, model: Path, name: str, seeds: Iterable[int], folder: Path) -> Iterator[str]:
    """Read folders whose file `name` is damaged, and yield a description of each problem."""
    for seed in seeds:
        outcome = worker.run(read_damaged, model, name, seed, folder / str(seed))
        if outcome != ("ended", None):
            yield f"{name} {seed}: {outcome}"
        shutil.rmtree(folder / str(seed), ignore_errors=True)


def main(name: str, first: int, count: int, folder: Path) -> int:
    """Read a number of damaged folders, and return the exit code."""
    found = list(problems(WatchedWorker(), good_folder(folder / "model"), name, range(first, first + count), folder))
    print(*found, f"{count} read, {len(found)} wrong", sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])))
