"""Batches of a file of rows: shares of any number of processes are the whole."""

from __future__ import annotations

from typing import Any

import numpy as np

from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.engines.choose import load_engine
from gaudi_bert.engines.protocol import Communicator, ModelSpec
from gaudi_bert.rows.tokenizer import open_tokenizer
from gaudi_bert.tasks.models.task_models import read_task_folder, start_weights
from gaudi_bert.tasks.task_data import TaskData, TaskEvaluation, tokenized_file
from tests.builders.agree import agree


class OneOfMany(Communicator):
    """Any process of any number, one after the other; it keeps what it gives to the sums."""

    def become(self, rank: int, size: int) -> list[np.ndarray]:
        given: list[np.ndarray] = []
        for name, value in (("rank", rank), ("size", size), ("given", given)):
            object.__setattr__(self, name, value)
        return given

    def sum_array(self, values: Any) -> np.ndarray:
        self.given.append(np.array(values, np.float64))
        return self.given[-1]


def test_the_shares_of_any_number_of_processes_add_up_to_the_whole(files, finished) -> None:
    model, path, one = finished("token-classification").out, files["token-classification"][1], OneOfMany()
    folder = read_task_folder(model)
    task = folder.make_task()
    sequences, rows = tokenized_file(path, folder.task, TaskSettings(), open_tokenizer(model), folder.labels, 61)
    data = TaskData.planned(path, "", rows, sequences, max_sequence_length=61, algorithm="optimal", depth=2)
    start = start_weights(model, task, lacks_head=False)
    bert = load_engine("tensorflow").build(ModelSpec(start.config, task.head), seed=None)
    bert.load_values(start.variables)
    held_out = TaskEvaluation(task, data, batch_packs=2, seed=3, best_metric=task.best_metric)
    whole = one.become(0, 1)
    expected = held_out.evaluate(bert, one)
    for size in (3, 7):
        shares = []
        for rank in range(size):
            shares.append(one.become(rank, size))
            held_out.evaluate(bert, one)
        sums, logits = (sum(share[number] for share in shares) for number in range(2))
        agree(sums, whole[0], 1e-9)
        agree(logits, expected.logits)
        shared = sum((share[1] != 0).any(axis=1).astype(int) for share in shares)
        assert shared.max() == 1, "a token that two processes answered"
        assert any(not share[1].any() for share in shares) == (size > 5)
