"""Bad packs for PyTorch, and damaged folders of models: each is an error of ours, of one line.

`make test` tries a few of each, always the same; `make test-long` thousands.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from tests.builders.effort import tries
from tests.builders.model_mutations import FILES, good_folder, mutated_file
from tests.builders.watched_worker import WatchedWorker

ROW = {
    "input_ids": [5, 6, 0],
    "position_ids": [0, 1, 0],
    "sequence_ids": [1, 1, 0],
    "seq_lens": [2],
    "labels": [5, 6, -100],
}
VALUES = (
    *([5, 2**32 + 7, 0], [5, 2**40, 0], [5, 10**400, 0], [True, False, True], [5.0, 6.5, 0], [5, None, 0]),
    *(["5", "6", "0"], np.array([5, 2**64 - 1, 0], np.uint64), np.array([1.5, 2, 3]), np.array([np.nan, 2, 3])),
    *(np.array([True, True, False]), np.array(["a", "b", "c"]), np.array([5, None, 0], object)),
)
BAD = dict.fromkeys(("input_ids", "position_ids", "sequence_ids", "labels"), VALUES)
BAD["seq_lens"] = ([2.5], [2**40], ["2"], [None], [True])


@pytest.mark.parametrize("name", BAD)
def test_bad_packs_are_named(name: str) -> None:
    pytest.importorskip("torch", reason="PYTORCH MISSING: install the extra dev to test packs for PyTorch")
    from gaudi_bert.pytorch import PackCollator

    for value in BAD[name]:
        with pytest.raises(InputError) as caught:
            PackCollator()([{**ROW, name: value}])
        assert len(str(caught.value)) <= 1000
        assert "\n" not in str(caught.value)


# --- damaged folders: config, tokenizer and weights are read, or refused in one line; none ends the process


COUNT, AT_ONCE = tries(100, 2000), 50


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return good_folder(tmp_path_factory.mktemp("model") / "good")


def read_damaged(good: Path, name: str, seed: int, folder: Path) -> str | None:
    """What is wrong with how one damaged folder was read; None where nothing is."""
    from gaudi_bert.common.errors import InputError
    from gaudi_bert.config.sections import TaskSettings
    from gaudi_bert.rows.tokenizer import open_tokenizer
    from gaudi_bert.rows.tokenizing import tokenize_rows
    from gaudi_bert.rows.types import RowPosition, TextRow
    from gaudi_bert.tasks.task_models import read_task_folder, start_weights
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
        rows = [TextRow(RowPosition(1), "the cat sat"), TextRow(RowPosition(2), "on the mat, unable", "dogs runs")]
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
