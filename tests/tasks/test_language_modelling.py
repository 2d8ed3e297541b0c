"""Masks depend on seed, epoch and place, never on packs: of the texts of rows, and of packed tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.sampling import SampledPacks
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.rows.packs import BatchShape, PackedSequences
from gaudi_bert.rows.types import Sequences
from gaudi_bert.tasks.language_modelling import WordTargets
from gaudi_bert.tasks.task import MaskKey, Vocabulary, import_task_class

MASKED = "masked-language-modelling"
VOCABULARY = Vocabulary(200, (0, 1, 2, 3), 3)
SEED = 11
Sequence_ = tuple[int, int, list[int]]
"""A row of the table, the position in it where a piece begins, and its tokens."""


def pack_of(sequences: Sequence[Sequence_], length: int) -> dict[str, np.ndarray]:
    """A pack as the table has it, written from its description."""
    row: dict[str, list[int]] = {"input_ids": [], "position_ids": [], "sequence_ids": []}
    for number, (_, _, ids) in enumerate(sequences, 1):
        row["input_ids"] += ids
        row["position_ids"] += range(len(ids))
        row["sequence_ids"] += [number] * len(ids)
    pack = {name: np.array(values + [0] * (length - len(values)), np.int32) for name, values in row.items()}
    pack["seq_lens"] = np.array([len(ids) for _, _, ids in sequences])
    pack["indices"], pack["starts"] = (np.array([each[number] for each in sequences]) for number in (0, 1))
    return pack


def masks_of(
    batch: dict[str, Any], packs: Sequence[Sequence[Sequence_]]
) -> dict[tuple[int, int], dict[int, tuple[int, int]]]:
    """Of each sequence: the positions that are predicted, what is seen there, and what is to be predicted."""
    found = {}
    for number, sequences in enumerate(packs):
        chosen = {
            int(at): int(target)
            for at, target, weight in zip(
                *(batch[name][number] for name in ("masked_positions", "targets", "target_weights")), strict=True
            )
            if weight
        }
        start = 0
        for row, first, ids in sequences:
            seen = batch["input_ids"][number]
            here = range(start, start + len(ids))
            found[row, first] = {at - start: (int(seen[at]), chosen[at]) for at in here if at in chosen}
            changed = {at - start for at in here if seen[at] != ids[at - start]}
            assert changed <= set(found[row, first]), "what is not predicted was changed"
            start += len(ids)
    return found


tokens = st.lists(st.integers(0, 199), min_size=1, max_size=12)


@given(
    texts=st.lists(tokens, min_size=1, max_size=7),
    masked_fraction=st.sampled_from([0.01, 0.15, 0.5, 1.0]),
    epoch=st.integers(-1, 3),
)
def test_masks_know_nothing_of_packs(texts: list[list[int]], masked_fraction: float, epoch: int) -> None:
    """All in one pack, in reverse, and each alone."""
    sequences = [(row // 2, 20 * (row % 2), ids) for row, ids in enumerate(texts)]  # pieces of the same row too
    length, depth = 12 * len(texts), len(texts)
    targets = WordTargets(MASKED, SEED, masked_fraction, VOCABULARY)

    def drawn(packs: list[list[Sequence_]]) -> dict[tuple[int, int], dict[int, tuple[int, int]]]:
        batch = targets.add_to_packs([pack_of(pack, length) for pack in packs], epoch, length, depth)
        assert batch["sequence_weights"].sum() == len(texts)
        return masks_of(batch, packs)

    one = drawn([sequences])
    assert drawn([sequences[::-1]]) == one
    assert drawn([[each] for each in sequences]) == one
    for row, first, ids in sequences:
        ordinary = [at for at, token in enumerate(ids) if token not in VOCABULARY.special_ids]
        predicted = one[row, first]
        assert set(predicted) <= set(ordinary)
        assert len(predicted) == min(len(ordinary), max(1, round(len(ordinary) * masked_fraction)))
        assert all(target == ids[at] for at, (_, target) in predicted.items())
        assert all(seen == 3 or seen not in VOCABULARY.special_ids for seen, _ in predicted.values())


def test_eighty_ten_ten_and_other_masks_in_each_epoch_row_and_seed() -> None:
    ids = list(np.random.default_rng(1).integers(4, 200, 2000))
    length, of_row = 4000, {}
    for seed, epoch in ((SEED, 0), (SEED, 1), (SEED, -1), (SEED + 1, 0)):
        packs = [[(5, 0, ids), (6, 0, ids)]]
        batch = WordTargets(MASKED, seed, 0.15, VOCABULARY).add_to_packs([pack_of(packs[0], length)], epoch, length, 2)
        for (row, _), predicted in masks_of(batch, packs).items():
            of_row[seed, epoch, row] = predicted
            assert len(predicted) == 300
            hidden = sum(seen == 3 for seen, _ in predicted.values())
            same = sum(seen == target for seen, target in predicted.values())
            # Four standard deviations of 300 draws; another token is the same one in 1 of 196.
            assert abs(hidden / 300 - 0.8) < 0.095
            assert abs(same / 300 - 0.1) < 0.07
            assert abs((300 - hidden - same) / 300 - 0.1) < 0.07
    positions = [set(predicted) for predicted in of_row.values()]
    for number, one in enumerate(positions):
        for other in positions[:number]:
            assert len(one & other) < 90  # of 300; 45 would be so by chance


def test_next_tokens_end_with_each_sequence() -> None:
    batch = WordTargets("causal-language-modelling", SEED, 0.15).add_to_packs(
        [pack_of([(0, 0, [5, 6, 7]), (1, 0, [8]), (2, 0, [9, 10])], 8)], 0, 8, 3
    )
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 10, 0, 0]]
    assert batch["targets"].tolist() == [[6, 7, 0, 0, 10, 0, 0, 0]]
    assert batch["target_weights"].tolist() == [[1, 1, 0, 0, 1, 0, 0, 0]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 0, 1, 0, 0]]


def test_masks_of_rows_are_drawn_anew_each_epoch_and_do_not_know_their_pack() -> None:
    task = import_task_class(MASKED)(TaskSettings(), (), Vocabulary(50, (0, 2, 3), 4))
    random = np.random.default_rng(1)
    texts = [[2, *random.integers(5, 50, length - 2).tolist(), 3] for length in (9, 30, 3, 2, 17)]
    ids = np.concatenate(texts).astype(np.int32)
    sequences = Sequences(np.arange(5), np.cumsum([0, *map(len, texts)]), ids, np.zeros(len(ids), np.int8))

    def masked(orders: list[list[int]], epoch: int) -> dict[tuple[int, int], dict[int, tuple[int, int]]]:
        packs = SampledPacks(np.concatenate(orders), np.cumsum([0, *map(len, orders)]))
        batch = PackedSequences(sequences, packs).build_batch(np.arange(len(packs)), BatchShape(len(packs), 64, 3))
        features = task.make_targets_and_weights(batch, MaskKey(1, epoch))
        return masks_of(features, [[(number, 0, texts[number]) for number in order] for order in orders])

    first = masked([[0], [1], [2], [3], [4]], 0)
    assert masked([[4, 1, 0], [3, 2]], 0) == first
    assert [len(first[number, 0]) for number in range(5)] == [1, 4, 1, 0, 2]
    assert all(target == texts[row][at] for (row, _), each in first.items() for at, (_, target) in each.items())
    assert masked([[0], [1], [2], [3], [4]], 1) != first
