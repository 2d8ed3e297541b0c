"""Batches and parts of batches that are computed at the same time: the same bits in the same order, also after an error."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from gaudi_bert.engines.protocol import ModelSpec  # noqa: E402
from gaudi_bert.engines.pytorch.engine import build_model  # noqa: E402
from gaudi_bert.engines.pytorch.parallel import RowDivider, map_batches_in_parallel  # noqa: E402
from gaudi_bert.model.heads import VectorHead  # noqa: E402
from gaudi_bert.rows.types import sequences_from_ids  # noqa: E402
from gaudi_bert.rows.window_plan import PackRunner, plan_window  # noqa: E402
from tests.builders.model_packs import VOCABULARY, small_config  # noqa: E402


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
def test_embeddings_have_the_same_bits_with_any_number_of_threads() -> None:
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
    divided = replace(runner, compute=RowDivider(model.compute_outputs).compute, map_batches=map)
    assert divided.run(sequences, plan).tobytes() == with_three.tobytes()
    torch.set_num_threads(1)
    assert runner.run(sequences, plan).tobytes() == with_three.tobytes()


def rows_and_threads(batch: dict[str, np.ndarray]) -> np.ndarray:
    threads = np.full(len(batch["input_ids"]), torch.get_num_threads())
    return np.stack([batch["input_ids"][:, 0], batch["numbers"], threads], axis=1)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize(("rows", "threads"), [(1, 3), (2, 1), (3, 1), (7, 1)])
def test_rows_are_divided_among_the_threads_and_come_back_in_order(rows: int, threads: int) -> None:
    ids = np.arange(rows * 5).reshape(rows, 5)
    found = RowDivider(rows_and_threads).compute({"input_ids": ids, "numbers": np.arange(rows)})
    assert found.tolist() == [[5 * row, row, threads] for row in range(rows)]
    assert (torch.get_num_threads(), threads_of_a_new_thread()) == (3, 3)


@pytest.mark.usefixtures("three_threads")
def test_a_batch_that_interrupts_another_is_computed_by_the_calling_thread_alone() -> None:
    inner, caller = list[np.ndarray](), threading.current_thread()

    def compute(batch: dict[str, np.ndarray]) -> np.ndarray:
        if threading.current_thread() is caller and not inner:
            inner.append(np.zeros(0))
            inner.append(divider.compute({"input_ids": np.full((4, 1), 9), "numbers": np.arange(4)}))
        return rows_and_threads(batch)

    divider = RowDivider(compute)
    outer = divider.compute({"input_ids": np.zeros((3, 1), int), "numbers": np.arange(3)})
    assert outer.tolist() == [[0, row, 1] for row in range(3)]
    assert inner[1].tolist() == [[9, row, 1] for row in range(4)]


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("failing", [0, 2])
def test_an_error_in_any_part_is_raised_and_the_next_batch_is_computed(failing: int) -> None:
    def compute(batch: dict[str, np.ndarray]) -> np.ndarray:
        if failing in batch["numbers"] and batch["input_ids"][0, 0]:
            raise RuntimeError(f"row {failing}")
        return rows_and_threads(batch)

    divider, numbers = RowDivider(compute), np.arange(3)
    with pytest.raises(RuntimeError, match=f"row {failing}"):
        divider.compute({"input_ids": np.ones((3, 1), int), "numbers": numbers})
    assert divider.compute({"input_ids": np.zeros((3, 1), int), "numbers": numbers}).tolist() == [[0, n, 1] for n in numbers]
    assert (torch.get_num_threads(), threads_of_a_new_thread()) == (3, 3)
