"""Updates of rows: every row once an epoch, one shape that holds all, packs that hold each sequence of an update once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.tasks.update_plan import GroupedRows, RowStream, choose_shape, fill_packs, stratified_order


def stream_of(rows: int, batch_rows: int, epochs: int, seed: int = 5, texts: int | None = None) -> RowStream:
    """Rows of two to four texts of 3 to 61 tokens, of which some are in several rows."""
    random = np.random.default_rng(rows)
    sizes = random.integers(2, 5, rows)
    texts = texts or 2 * rows
    members = random.integers(0, texts, int(sizes.sum()))
    starts = np.concatenate([[0], np.cumsum(sizes)])
    return RowStream(random.integers(3, 62, texts), GroupedRows(members, starts), batch_rows, epochs, seed)


SIZES = st.tuples(st.integers(1, 90), st.integers(1, 41), st.integers(1, 4))


@given(SIZES)
def test_every_row_once_an_epoch_in_updates_of_one_size(sizes: tuple[int, int, int]) -> None:
    rows, batch_rows, epochs = sizes
    stream = stream_of(*sizes)
    updates = [stream.rows_of(update, update + 1) for update in range(stream.updates)]
    assert {len(update) for update in updates[:-1]} <= {batch_rows}
    assert 1 <= len(updates[-1]) <= batch_rows
    together = np.concatenate(updates)
    for epoch in range(epochs):
        assert sorted(together[epoch * rows : (epoch + 1) * rows].tolist()) == list(range(rows))
    assert together.tolist() == stream.rows_of(0, stream.updates).tolist()


@given(SIZES)
def test_packs_hold_every_sequence_of_an_update_once(sizes: tuple[int, int, int]) -> None:
    stream = stream_of(*sizes)
    shape = choose_shape(stream, most_packs=5, processes=2, hidden_size=24, longest=128)
    assert shape.packs == shape.batch.packs * shape.micro_batches * 2
    assert shape.batch.packs <= 5
    assert 61 <= shape.batch.length <= 128 or shape.batch.length == -(-int(stream.lengths.max()) // 8) * 8
    for update in range(stream.updates):
        packs, sequences = stream.packs_of(update, shape.batch)
        wanted = {text for row in stream.rows_of(update, update + 1) for text in stream.rows.of(np.array([row])).tolist()}
        assert sequences.tolist() == sorted(wanted)
        assert sorted(packs.members.tolist()) == list(range(len(sequences)))
        assert len(packs) <= shape.packs
        for first, last in itertools.pairwise(packs.starts):
            assert 1 <= last - first <= shape.batch.depth
            assert stream.lengths[sequences[packs.members[first:last]]].sum() <= shape.batch.length


def best_fit(lengths: list[int], length: int, depth: int) -> int:
    """Packs, the longest first, each into the fullest pack that has room."""
    packs: list[list[int]] = []
    for size in sorted(lengths, reverse=True):
        fitting = [pack for pack in packs if len(pack) < depth and sum(pack) + size <= length]
        if fitting:
            max(fitting, key=sum).append(size)
        else:
            packs.append([size])
    return len(packs)


@given(st.lists(st.lists(st.integers(1, 23), min_size=1, max_size=40), min_size=1, max_size=4), st.integers(1, 6))
def test_best_fit(updates: list[list[int]], depth: int) -> None:
    starts = np.cumsum([0, *map(len, updates)])
    flat, needed = np.array(list(itertools.chain.from_iterable(updates))), np.zeros(len(updates), np.int64)
    deepest = fill_packs(flat, starts, 23, depth, np.zeros(len(flat), np.int64), needed)
    assert deepest <= depth
    assert all(count >= -(-sum(lengths) // 23) for count, lengths in zip(needed, updates, strict=True))
    unlimited = np.zeros(len(updates), np.int64)
    fill_packs(flat, starts, 23, 99, np.zeros(len(flat), np.int64), unlimited)
    assert unlimited.tolist() == [best_fit(lengths, 23, 99) for lengths in updates]


@pytest.mark.parametrize("rows", [1190, 1184, 3468])
def test_updates_have_about_as_many_tokens(rows: int) -> None:
    tokens = np.minimum(np.random.default_rng(5).lognormal(4.5, 0.6, rows).astype(np.int64) + 5, 256)
    together = np.concatenate([stratified_order(tokens, 32, 7, epoch) for epoch in range(3)])
    sums = tokens[together[: len(together) // 32 * 32].reshape(-1, 32)].sum(axis=1)
    assert sums.max() <= 1.08 * sums.mean()
    random = tokens[np.random.default_rng(5).permutation(rows)[: rows // 32 * 32].reshape(-1, 32)].sum(axis=1)
    assert random.max() > 1.1 * random.mean()


def test_rows_meet_others_in_each_epoch() -> None:
    tokens = np.arange(96) // 3 + 5
    orders = [stratified_order(tokens, 8, 7, epoch) for epoch in range(8)]
    met = {
        frozenset(pair) for order in orders for update in order.reshape(-1, 8) for pair in itertools.combinations(update, 2)
    }
    neighbours = [frozenset((row, row + 1)) for row in range(95)]
    assert sum(pair in met for pair in neighbours) > 9
    assert orders[0].tolist() == stratified_order(tokens, 8, 7, 0).tolist() != orders[1].tolist()
