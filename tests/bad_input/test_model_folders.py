"""Damaged model folders: config, tokenizer and weights are read, or refused in one line; none ends the process.

`make test` tries a few of each file, always the same; `make test-long` thousands.
"""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.builders.effort import tries
from tests.builders.model_mutations import FILES, good_encoder, good_folder, mutated_file
from tests.builders.watched_worker import WatchedWorker, command_and_libraries

COUNT, AT_ONCE = tries(100, 2000), 50
ANSWERED = tries(4, 400)
TORCH_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
PROGRESS = re.compile(r"packing: |[\d,]+ (of [\d,]+ )?rows|texts.txt: reads plain text; row 1 begins ")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return good_folder(tmp_path_factory.mktemp("model") / "good")


def read_damaged(good: Path, name: str, seed: int, folder: Path) -> str | None:
    """What is wrong with how one damaged folder was read; None where nothing is."""
    from gaudi_bert.common.errors import InputError
    from gaudi_bert.config.sections import TaskSettings
    from gaudi_bert.rows.tokenizer import open_tokenizer
    from gaudi_bert.rows.tokenizing import tokenize_rows
    from gaudi_bert.rows.types import TextRow
    from gaudi_bert.tasks.models.task_models import read_task_folder, start_weights
    from gaudi_bert.training.model_files import read_sentence_folder

    shutil.copytree(good, folder)
    (folder / name).write_bytes(mutated_file(good / name, random.Random(f"{name} {seed}")))
    try:
        description = read_task_folder(folder)
        read_sentence_folder(folder)
        weights = start_weights(folder, description.make_task())
        config = weights.config
        tokenizer = open_tokenizer(folder)
        tokenizer.check_fits(config.vocab_size, config.type_vocab_size)
        rows = [TextRow(1, "the cat sat"), TextRow(2, "on the mat, unable", "dogs runs")]
        settings = TaskSettings(too_long="truncate")
        sequences = tokenize_rows(rows, tokenizer, task="classification", settings=settings, max_sequence_length=16)
    except InputError as error:
        return None if "\n" not in str(error) and len(str(error)) < 1000 else f"not one line: {error}"
    if not all(np.isfinite(value).all() for value in weights.variables.values()):
        return "weights that are not finite"
    known = 0 <= sequences.input_ids.min() <= sequences.input_ids.max() < config.vocab_size
    return None if known else "numbers that the model does not have"


@pytest.mark.repeated
@pytest.mark.parametrize("first", range(0, COUNT, AT_ONCE))
@pytest.mark.parametrize("name", FILES)
def test_damaged_model_folders(worker: WatchedWorker, model: Path, tmp_path: Path, name: str, first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        outcome = worker.run(read_damaged, model, name, seed, tmp_path / str(seed))
        assert outcome == ("ended", None), f"{name} {seed}: {outcome}"
        shutil.rmtree(tmp_path / str(seed))


# --- the commands, by TensorFlow and by PyTorch: answers, or one line; nothing of the libraries is printed


def answer_damaged(good: Path, name: str, seed: int, folder: Path) -> str | None:
    """What is wrong with how `embed` and `predict` ended for one damaged folder; None where nothing is."""
    shutil.copytree(good, folder)
    (folder / name).write_bytes(mutated_file(good / name, random.Random(f"{name} {seed}")))
    (folder / "texts.txt").write_text("the cat sat\non the mat, unable\n", encoding="utf-8")
    for command, out in (("embed", "vectors.npy"), ("predict", "answers.jsonl")):
        code, printed = command_and_libraries([command, "--model", ".", "--data", "texts.txt", "--out", out], folder)
        lines = printed.splitlines()
        answered = code == 0 and all(map(PROGRESS.match, lines))
        if not answered and not (code == 2 and len(lines) == 1 and lines[0].startswith("error: ")):
            return f"{command} ended with {code}: {printed}"
    return None


@pytest.mark.slow
@pytest.mark.repeated
@pytest.mark.parametrize(
    ("software", "name"), [*(("tensorflow", name) for name in FILES), *(("torch", name) for name in TORCH_FILES)]
)
def test_commands_answer_or_end_in_one_line(worker: WatchedWorker, tmp_path: Path, software: str, name: str) -> None:
    pytest.importorskip(software, exc_type=ImportError)
    good = (good_encoder if software == "torch" else good_folder)(tmp_path / "good")
    for seed in range(ANSWERED):
        outcome = worker.run(answer_damaged, good, name, seed, tmp_path / "m")
        assert outcome == ("ended", None), f"{name} {seed}: {outcome}"
        shutil.rmtree(tmp_path / "m")
