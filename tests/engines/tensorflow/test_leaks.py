"""The leak probe: no bit of a sequence's outputs depends on its neighbours in the pack, or on the padding."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from gaudi_bert.engines.tensorflow.bert import outputs_of_every_token
from gaudi_bert.model.sequences import join_sequences, split_packs
from gaudi_bert.training.verify_model import probe_leaks
from tests.builders.model_packs import VOCABULARY, random_packs, small_model


def outputs_of(model, as_graph: bool = False):
    """Hidden states of all tokens, and what the heads say, computed for their positions alone."""

    def both(batch):
        return outputs_of_every_token(model.network(), batch)[0], *model.forward(batch)

    run = tf.function(both, autograph=False) if as_graph else both
    return lambda batch: [part.numpy() for part in run({name: tf.constant(value) for name, value in batch.items()})]


def own(outputs: list[np.ndarray], placed) -> list[bytes]:
    hidden_BLH, pooled_BSH, words_BQV, sentences_BS2 = outputs
    return [
        hidden_BLH[placed.pack, placed.positions].tobytes(),
        pooled_BSH[placed.pack, placed.number - 1].tobytes(),
        words_BQV[placed.pack, placed.masked_slots].tobytes(),
        sentences_BS2[placed.pack, placed.number - 1].tobytes(),
    ]


@pytest.mark.parametrize(("attention", "compiled"), [("bidirectional", False), ("causal", True)])
def test_changing_any_one_token_touches_its_own_sequence_only(attention, compiled):
    model = small_model(attention=attention, compiled=compiled)
    length = 31
    batch = join_sequences(random_packs(2, [[7, 3, 11, 5], [13, 17]]), length, 19, 5)
    placed = split_packs(batch)
    run = outputs_of(model, as_graph=True)
    before = run(batch)
    for pack in range(2):
        for position in range(length):
            ids = batch["input_ids"].copy()
            ids[pack, position] = (ids[pack, position] + 1) % VOCABULARY
            after = run({**batch, "input_ids": ids})
            for each in placed:
                same = [one == other for one, other in zip(own(before, each), own(after, each), strict=True)]
                touched = each.pack == pack and batch["input_mask"][pack, position] == each.number
                if not touched:
                    assert all(same), (pack, position, each.number)
                else:
                    assert not same[0], (pack, position, each.number)


@pytest.mark.parametrize("changes", [{"initializer_range": 2.0}, {"compute_dtype": "bfloat16", "attention": "causal"}])
def test_large_scores_and_half_precision_leak_nothing(changes):
    model = small_model(**changes)
    batch = join_sequences(random_packs(4, [[7, 3, 11, 5], [13, 17]]), 31, 19, 4)
    for chosen in range(4):
        report = probe_leaks(model, VOCABULARY, batch, chosen)
        assert report.leaks == 0
        assert report.own_outputs_moved
    assert report.sequences_compared == 4


def test_causal_outputs_do_not_see_their_own_future():
    model = small_model(attention="causal")
    batch = join_sequences(random_packs(2, [[7, 11]]), 19, 9, 2)
    run = outputs_of(model)
    before = run(batch)[0]
    ids = batch["input_ids"].copy()
    ids[0, 12] = (ids[0, 12] + 1) % VOCABULARY
    after = run({**batch, "input_ids": ids})[0]
    assert before[0, :12].tobytes() == after[0, :12].tobytes()
    assert (before[0, 12:18] != after[0, 12:18]).any(axis=-1).all()


def test_probe_reports_a_leak():
    """With one number for the whole pack the sequences see each other; the probe is then told their true places."""
    model = small_model()
    batch = join_sequences(random_packs(2, [[7, 11]]), 19, 9, 2)

    class WithoutMask:
        def trial(self, batch, loss):
            return model.trial({**batch, "input_mask": np.minimum(batch["input_mask"], 1)}, loss)

    report = probe_leaks(WithoutMask(), VOCABULARY, batch)
    assert report.leaks == 1


def test_padding_rows_are_finite():
    batch = join_sequences([*random_packs(2, [[3]]), []], 19, 9, 2)
    assert all(np.isfinite(part).all() for part in outputs_of(small_model())(batch))
