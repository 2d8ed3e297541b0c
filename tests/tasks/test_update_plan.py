"""Updates of rows: every row once an epoch, one shape that holds all, packs that hold each sequence of an update once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.tasks import update_plan
from gaudi_bert.tasks.update_plan import RowStream, SequenceGroups, choose_update_shape


def stream_of(rows: int, batch_rows: int, epochs: int, seed: int = 5, texts: int | None = None) -> RowStream:
    """Rows of two to four texts of 3 to 61 tokens, of which some are in several rows."""
    random = np.random.default_rng(rows)
    sizes = random.integers(2, 5, rows)
    texts = texts or 2 * rows
    members = random.integers(0, texts, int(sizes.sum()))
    starts = np.concatenate([[0], np.cumsum(sizes)])
    return RowStream(random.integers(3, 62, texts), SequenceGroups(members, starts), batch_rows, epochs, seed)


SIZES = st.tuples(st.integers(1, 90), st.integers(1, 41), st.integers(1, 4))


@given(SIZES)
def test_every_row_once_an_epoch_in_updates_of_one_size(sizes: tuple[int, int, int]) -> None:
    rows, batch_rows, epochs = sizes
    stream = stream_of(*sizes)
    updates = [stream.select_update_rows(update, update + 1) for update in range(stream.update_count)]
    assert {len(update) for update in updates[:-1]} <= {batch_rows}
    assert 1 <= len(updates[-1]) <= batch_rows
    together = np.concatenate(updates)
    assert len(together) == epochs * rows
    for epoch in range(epochs):
        assert sorted(together[epoch * rows : (epoch + 1) * rows].tolist()) == list(range(rows))
    assert together.tolist() == stream.select_update_rows(0, stream.update_count).tolist()


@given(SIZES)
def test_packs_hold_every_sequence_of_an_update_once(sizes: tuple[int, int, int]) -> None:
    stream = stream_of(*sizes)
    shape = choose_update_shape(stream, max_micro_batch_packs=5, processes=2, hidden_size=24, longest=128)
    assert shape.pack_count == shape.batch.packs * shape.micro_batches * 2
    assert shape.batch.packs <= 5
    assert -(-int(stream.lengths.max()) // 8) * 8 <= shape.batch.length <= 128
    for update in range(stream.update_count):
        packs = stream.pack_update(update, shape.batch)
        wanted = {
            text
            for row in stream.select_update_rows(update, update + 1)
            for text in stream.rows.select_sequences(np.array([row])).tolist()
        }
        assert sorted(packs.members.tolist()) == sorted(wanted)
        assert len(packs) <= shape.pack_count
        for first, last in itertools.pairwise(packs.starts):
            assert 1 <= last - first <= shape.batch.depth
            assert stream.lengths[packs.members[first:last]].sum() <= shape.batch.length


def test_a_run_of_many_epochs_is_planned_by_what_it_looks_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million epochs are as soon planned as those that are looked at."""
    monkeypatch.setattr(update_plan, "_SAMPLED_ROWS", 64)
    shapes = []
    for epochs in (2, 10**6):
        stream = stream_of(40, 8, epochs)
        assert stream.updates_examined_for_shape == 9
        shapes.append(choose_update_shape(stream, max_micro_batch_packs=5, processes=2, hidden_size=24, longest=128))
    assert shapes[0] == shapes[1]


def stream_of_questions(rows: int, contexts: int, batch_rows: int, epochs: int) -> RowStream:
    """Pairs of a question and a context, which several share."""
    random = np.random.default_rng(5)
    questions = np.clip(random.lognormal(2.6, 0.4, rows), 4, 60).astype(np.int64)
    lengths = np.concatenate([questions, np.clip(random.lognormal(4.9, 0.5, contexts), 8, 256).astype(np.int64)])
    members = np.stack([np.arange(rows), rows + random.integers(0, contexts, rows)], axis=1).ravel()
    return RowStream(lengths, SequenceGroups(members, np.arange(0, 2 * rows + 1, 2)), batch_rows, epochs, 7)


@pytest.mark.parametrize(("rows", "contexts", "batch_rows"), [(1190, 240, 32), (1187, 240, 128), (3208, 3208, 32)])
def test_updates_need_as_many_tokens_and_little_padding(rows: int, contexts: int, batch_rows: int) -> None:
    stream = stream_of_questions(rows, contexts, batch_rows, 3)
    complete = 3 * rows // batch_rows
    sequences, starts = stream.find_distinct_sequences(0, complete)
    tokens = np.add.reduceat(stream.lengths[sequences], starts[:-1])
    assert tokens.max() <= 1.03 * tokens.mean()
    assert np.ptp(tokens[: rows // batch_rows]) <= 2, "within an epoch"
    shape = choose_update_shape(stream, max_micro_batch_packs=999, processes=1, hidden_size=384, longest=512)
    assert tokens.sum() >= (0.94 if batch_rows == 32 else 0.98) * complete * shape.pack_count * shape.batch.length


def test_as_many_equal_texts_meet_as_in_random_updates() -> None:
    rows, contexts, batch_rows, epochs = 1280, 240, 128, 30
    stream = stream_of_questions(rows, contexts, batch_rows, epochs)
    sequences, _ = stream.find_distinct_sequences(0, stream.update_count)
    uses = np.bincount(stream.rows.members, minlength=len(stream.lengths))
    expected = stream.update_count * (1 - (1 - batch_rows / rows) ** uses).sum()
    assert abs(len(sequences) - expected) <= 0.003 * expected


def test_rows_meet_others_in_each_epoch() -> None:
    stream = RowStream(np.arange(96) // 3 + 5, SequenceGroups(np.arange(96), np.arange(97)), 8, 8, 7)
    updates = stream.select_update_rows(0, stream.update_count).reshape(-1, 8)
    met = {frozenset(pair) for update in updates for pair in itertools.combinations(update.tolist(), 2)}
    # A random order of 8 epochs lets 7/95 of all pairs meet in each.
    assert 0.8 <= len(met) / (96 * 95 / 2) / (1 - (1 - 7 / 95) ** 8) <= 1.2
    again = RowStream(stream.lengths, stream.rows, 8, 8, 7)
    assert updates[60:].ravel().tolist() == again.select_update_rows(60, again.update_count).tolist()
