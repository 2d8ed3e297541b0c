"""Batches that are computed at the same time: the same bits in the same order, also after an error."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from gaudi_bert.engines.protocol import ModelSpec
from gaudi_bert.engines.pytorch.engine import build_model
from gaudi_bert.engines.pytorch.parallel import map_batches_in_parallel
from gaudi_bert.model.heads import VectorHead
from gaudi_bert.rows.types import sequences_from_ids
from gaudi_bert.rows.window_plan import PackRunner, plan_window
from tests.builders.model_packs import VOCABULARY, small_config


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def threads_of_a_new_thread() -> int:
    found = list[int]()
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.usefixtures("three_threads")
def test_three_batches_are_computed_at_once_by_one_thread_each_and_results_come_in_order() -> None:
    all_run, threads = threading.Barrier(3, timeout=60), set[str]()

    def compute(batch: int) -> tuple[int, int]:
        threads.add(threading.current_thread().name)
        if batch < 3:
            all_run.wait()
        return batch, torch.get_num_threads()

    assert list(map_batches_in_parallel(compute, range(17))) == [(batch, 1) for batch in range(17)]
    assert len(threads) == 3
    assert (torch.get_num_threads(), threads_of_a_new_thread()) == (3, 3)


@pytest.mark.usefixtures("three_threads")
def test_with_more_than_eight_threads_each_batch_has_its_share() -> None:
    torch.set_num_threads(17)
    eight_run = threading.Barrier(8, timeout=60)

    def compute(batch: int) -> int:
        eight_run.wait()
        return torch.get_num_threads()

    assert list(map_batches_in_parallel(compute, range(16))) == [2] * 16
    assert (torch.get_num_threads(), threads_of_a_new_thread()) == (17, 17)


@pytest.mark.usefixtures("three_threads")
def test_at_most_two_batches_per_thread_are_taken_in_advance() -> None:
    taken = list[int]()

    def batches() -> Iterator[int]:
        for batch in range(40):
            taken.append(batch)
            yield batch

    for done, _ in enumerate(map_batches_in_parallel(lambda batch: batch, batches()), 1):
        assert len(taken) <= done + 5


@pytest.mark.usefixtures("three_threads")
def test_an_error_ends_the_other_batches_and_restores_the_threads() -> None:
    computed = list[int]()

    def compute(batch: int) -> int:
        if batch == 2:
            raise ValueError("batch 2")
        computed.append(batch)
        return batch

    with pytest.raises(ValueError, match="batch 2"):
        list(map_batches_in_parallel(compute, range(1000)))
    assert len(computed) <= 8
    assert (torch.get_num_threads(), threads_of_a_new_thread()) == (3, 3)


@pytest.mark.usefixtures("three_threads")
def test_embeddings_have_the_same_bits_with_three_threads_and_with_one() -> None:
    model = build_model(ModelSpec(small_config(max_position_embeddings=512), VectorHead("mean", True)), seed=1)
    model.freeze()
    rng = np.random.default_rng(5)
    lengths = rng.integers(2, 61, 97)
    sequences = sequences_from_ids(
        [rng.integers(0, VOCABULARY, length, dtype=np.int32) for length in lengths], [np.zeros(n, np.int8) for n in lengths]
    )
    runner = PackRunner(model.compute_outputs, False, model.spec.config.hidden_size, 128, "smaller", map_batches_in_parallel)
    plan = plan_window(sequences.lengths, hidden_size=model.spec.config.hidden_size)
    with_three = runner.run(sequences, plan)
    torch.set_num_threads(1)
    assert runner.run(sequences, plan).tobytes() == with_three.tobytes()
