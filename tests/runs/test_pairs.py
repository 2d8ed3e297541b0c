"""Updates of pairs: the packs of each, in as many micro-batches as it needs."""

from __future__ import annotations

import numpy as np
import pytest

from gaudi_bert.rows.packs import BatchShape
from gaudi_bert.rows.types import Sequences
from gaudi_bert.runs.pairs import PairUpdates
from gaudi_bert.tasks.update_plan import RowStream, SequenceGroups, UpdateShape


@pytest.mark.parametrize("processes", [1, 2])
def test_an_update_that_needs_more_packs_than_were_planned_has_more_micro_batches(processes: int) -> None:
    """Of the same shape; every process has as many, and together they hold each text of the update once."""
    random = np.random.default_rng(7)
    lengths, rows = random.integers(3, 23, 26), 13
    groups = SequenceGroups(np.arange(2 * rows), np.arange(0, 2 * rows + 1, 2))
    tokens = int(lengths.sum())
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    sequences = Sequences(np.arange(26), offsets, np.ones(tokens, np.int32), np.zeros(tokens, np.int8))
    stream = RowStream(lengths, groups, batch_rows=5, epochs=2, seed=5)
    data = PairUpdates(sequences, None, stream, UpdateShape(BatchShape(2, 24, 3), 1, processes))  # type: ignore[arg-type]
    counts = [data.count_micro_batches(update) for update in range(stream.update_count)]
    assert max(counts) > 1
    of_rank = [data.iterate_micro_batches(0, rank) for rank in range(processes)]
    for update, count in enumerate(counts):
        batches = [next(batches) for batches in of_rank for _ in range(count)]
        assert {batch["input_ids"].shape for batch in batches} == {(2, 24)}
        numbers = np.concatenate([batch["text_numbers"].ravel() for batch in batches])
        expected = len(stream.find_distinct_sequences(update, update + 1)[0])
        assert sorted(numbers[numbers >= 0].tolist()) == list(range(expected))
        assert expected <= data.compute_sequence_capacity(update)
