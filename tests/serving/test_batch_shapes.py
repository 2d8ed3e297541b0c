"""The shapes of batches, and which of the waiting texts a batch of each shape contains."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.errors import InputError
from gaudi_bert.rows.window_plan import compute_max_sequences_per_row
from gaudi_bert.serving.batch_shapes import Shape, choose_and_fill_shape, list_batch_shapes, pack_first_fit

COSTS = {shape: 0.004 + 0.0002 * shape.slots for shape in list_batch_shapes(256, 8)}


def test_shapes_double_from_one_short_row_to_all_rows() -> None:
    assert [str(shape) for shape in list_batch_shapes(256, 8)] == [
        "1x32",
        "1x64",
        "1x128",
        "1x256",
        "2x256",
        "4x256",
        "8x256",
    ]
    assert [str(shape) for shape in list_batch_shapes(300, 3)] == [
        "1x32",
        "1x64",
        "1x128",
        "1x256",
        "1x300",
        "2x300",
        "3x300",
    ]
    assert [str(shape) for shape in list_batch_shapes(64, 1, shortest=16)] == ["1x16", "1x32", "1x64"]
    assert list_batch_shapes(24, 1) == (Shape(1, 24),)


@pytest.mark.parametrize(("row_length", "batch_rows"), [(8192, 64), (131072, 4), (512, 32), (64, 1024)])
def test_there_are_never_more_shapes_than_are_computed(row_length: int, batch_rows: int) -> None:
    shapes = list_batch_shapes(row_length, batch_rows)
    assert len(shapes) <= 12
    assert shapes[-1] == Shape(batch_rows, row_length)
    assert list(shapes) == sorted(set(shapes))


def test_rows_that_need_too_many_shapes_are_refused() -> None:
    with pytest.raises(InputError, match="4096"):
        list_batch_shapes(512, 4096)


def test_what_fits_nowhere_waits() -> None:
    assert pack_first_fit([20, 20, 5, 12, 7, 3], Shape(1, 32)) == [[0, 2, 4]]
    assert pack_first_fit([20, 20, 5, 12, 7, 3], Shape(2, 32)) == [[0, 2, 4], [1, 3]]


def test_a_query_alone_takes_the_smallest_shape() -> None:
    fill = choose_and_fill_shape([9], COSTS)
    assert (fill.shape, fill.rows, fill.tokens) == (Shape(1, 32), [[0]], 9)


def test_many_texts_fill_a_shape_that_is_nearly_as_fast_as_the_largest() -> None:
    fill = choose_and_fill_shape([10, 100, 60] * 200, COSTS)
    assert fill.tokens >= 0.97 * fill.shape.slots
    assert fill.shape.slots >= 256


def test_a_card_whose_batches_cost_the_same_takes_the_largest() -> None:
    assert choose_and_fill_shape([10, 100, 60] * 200, dict.fromkeys(list_batch_shapes(256, 8), 0.01)).shape == Shape(8, 256)


@given(st.lists(st.integers(1, 256), min_size=1, max_size=120))
def test_a_batch_holds_each_text_once_and_the_oldest_always(lengths: list[int]) -> None:
    fill = choose_and_fill_shape(lengths, COSTS)
    numbers = [number for row in fill.rows for number in row]
    assert 0 in numbers
    assert len(numbers) == len(set(numbers))
    assert fill.tokens == sum(lengths[number] for number in numbers)
    assert len(fill.rows) == fill.shape.rows
    for row in fill.rows:
        assert sum(lengths[number] for number in row) <= fill.shape.length
        assert len(row) <= compute_max_sequences_per_row(fill.shape.length)


@given(st.lists(st.integers(1, 64), max_size=90), st.integers(1, 7))
def test_first_fit_is_that_of_the_obvious_loop(lengths: list[int], rows: int) -> None:
    expected: list[list[int]] = [[] for _ in range(rows)]
    for number, length in enumerate(lengths):
        for row in expected:
            if sum(lengths[each] for each in row) + length <= 64 and len(row) < compute_max_sequences_per_row(64):
                row.append(number)
                break
    assert pack_first_fit(lengths, Shape(rows, 64)) == expected


def test_a_long_queue_leaves_few_slots_empty() -> None:
    random = np.random.default_rng(11)
    waiting = np.where(random.random(600) < 0.7, random.integers(4, 20, 600), random.integers(40, 200, 600)).tolist()
    slots = tokens = 0
    while len(waiting) > 100:
        fill = choose_and_fill_shape(waiting, COSTS)
        taken = {number for row in fill.rows for number in row}
        waiting = [length for number, length in enumerate(waiting) if number not in taken]
        slots, tokens = slots + fill.shape.slots, tokens + fill.tokens
    assert slots <= 1.1 * tokens
