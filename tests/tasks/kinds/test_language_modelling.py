"""Masks are drawn anew each epoch, and know nothing of packs."""

from __future__ import annotations

import numpy as np

from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.rows.packs import BatchShape, Packs, lay_out_packs
from gaudi_bert.rows.types import Sequences
from gaudi_bert.tasks.kinds.task import Draw, Vocabulary, task_named


def test_masks_are_drawn_anew_each_epoch_and_do_not_know_their_pack() -> None:
    task = task_named("masked-language-modelling")(TaskSettings(), (), Vocabulary(50, (0, 2, 3), 4))
    lengths = [9, 30, 3, 2, 17]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.random.default_rng(1).integers(5, 50, offsets[-1]).astype(np.int32)
    ids[offsets[:-1]], ids[offsets[1:] - 1] = 2, 3
    sequences = Sequences(np.arange(5), offsets, ids, np.zeros(len(ids), np.int8))

    def masked(packs: Packs, depth: int, epoch: int) -> dict[int, list]:
        placed = lay_out_packs(sequences, packs, np.arange(len(packs)), BatchShape(len(packs), 64, depth))
        features = task.target_features(sequences, placed, Draw(1, epoch))
        found: dict[int, list] = {number: [] for number in range(5)}
        for pack, (positions, targets, weights) in enumerate(
            zip(features["masked_positions"], features["targets"], features["target_weights"], strict=True)
        ):
            for position, target in zip(positions[weights > 0], targets[weights > 0], strict=True):
                inside = (placed.packs == pack) & (placed.starts <= position) & (position < placed.starts + placed.lengths)
                here = int(np.flatnonzero(inside)[0])
                within = int(position - placed.starts[here])
                number = int(placed.sequences[here])
                assert ids[offsets[number] + within] == target
                found[number].append((within, int(features["input_ids"][pack, position])))
        return found

    alone, together = Packs(np.arange(5), np.arange(6)), Packs(np.array([4, 1, 0, 3, 2]), np.array([0, 3, 5]))
    first = masked(alone, 1, 0)
    assert masked(together, 3, 0) == first
    assert [len(first[number]) for number in range(5)] == [1, 4, 1, 0, 2]
    assert masked(alone, 1, 1) != first
