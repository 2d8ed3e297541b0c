"""A fine-tuned model as a SavedModel: rows alone and packs get the logits that transformers gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import TaskSettings
from gaudi_bert.stages.training.export import export
from gaudi_bert.tasks.packs import BatchShape, Packs, place_packs
from gaudi_bert.tasks.rows.tokenizer import open_tokenizer
from gaudi_bert.tasks.rows.tokenizing import tokenize_rows
from gaudi_bert.tasks.rows.types import TextRow
from tests.stages.tasks.test_predict import TEXTS, logits_alone, write_model

pytestmark = pytest.mark.slow


def test_packs_are_served(tmp_path: Path) -> None:
    import tensorflow as tf

    model = write_model(tmp_path / "m", "BertForSequenceClassification", num_labels=3)
    out = tmp_path / "served"
    sizes = export(tmp_path / "m", out, kind="savedmodel", rows=2, reporter=Reporter(quiet=True)).sizes
    assert sizes == {"B": 2, "L": 64, "S": 16}
    assert (out / "assets" / "vocab.txt").is_file()
    texts = TEXTS[:5]
    rows = [TextRow(number, text) for number, text in enumerate(texts, 1)]
    tokenizer = open_tokenizer(tmp_path / "m")
    sequences = tokenize_rows(rows, tokenizer, task=None, settings=TaskSettings(), max_sequence_length=64)
    packs = Packs(np.array([4, 1, 0, 3, 2]), np.array([0, 3, 5]))
    placed = place_packs(sequences, packs, np.arange(2), BatchShape(2, 64, 16))
    features = {name: tf.constant(value) for name, value in placed.features(sequences).items() if name != "sequence_weights"}
    signatures = tf.saved_model.load(str(out)).signatures
    found = np.zeros((5, 3), np.float32)
    placed.scatter_sequences(signatures["packed"](**features)["logits"].numpy(), found)
    expected = np.concatenate([logits_alone(model, tmp_path / "m", text).logits.numpy() for text in texts])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    alone = place_packs(sequences, Packs(np.arange(2), np.arange(3)), np.arange(2), BatchShape(2, 64, 1)).features(sequences)
    row_inputs = {name: tf.constant(alone[name]) for name in ("input_ids", "input_mask", "segment_ids")}
    served = signatures["serving_default"](**row_inputs)["logits"].numpy()[:, 0]
    np.testing.assert_allclose(served, expected[:2], atol=1e-5)
