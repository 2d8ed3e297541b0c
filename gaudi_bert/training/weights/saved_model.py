"""A TensorFlow SavedModel for serving: two signatures of static shapes, plain float32 operations, nothing of this
package.

`serving_default` takes one sequence a row, as any BERT does; `packed` takes packs, and gives the same outputs at a
fraction of the rows. Both return `sequence_output`, `pooled_output`, `masked_lm_logits` and `next_sentence_logits`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tensorflow as tf

from gaudi_bert.common.arrays import WeightArrays
from gaudi_bert.common.errors import FailedError
from gaudi_bert.model.bert import BertForPretraining
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.inputs import PACKED_FEATURES, as_packed

__all__ = ["ServingSizes", "write_saved_model"]

# What the losses alone read; the signatures do without.
LABELS = ("masked_lm_ids", "masked_lm_weights", "next_sentence_labels", "next_sentence_weights")
UNPACKED_INPUTS = {"input_ids": "BL", "input_mask": "BL", "segment_ids": "BL", "masked_lm_positions": "BP"}
PACKED_INPUTS = {name: letters for name, (letters, _) in PACKED_FEATURES.items() if name not in LABELS}


@dataclass(frozen=True)
class ServingSizes:
    """The static sizes of both signatures: rows, positions of a row, and masked positions and sequences of a pack."""

    rows: int
    max_sequence_length: int
    max_predictions: int
    masked_slots: int
    depth: int

    @property
    def letters(self) -> dict[str, int]:
        """By the letters of shapes: B rows, L positions, P masked positions of a sequence, Q of a pack, S depth."""
        return {
            "B": self.rows,
            "L": self.max_sequence_length,
            "P": self.max_predictions,
            "Q": self.masked_slots,
            "S": self.depth,
        }


def write_saved_model(folder: Path, config: BertConfig, variables: WeightArrays, sizes: ServingSizes) -> None:
    """Write the model into `folder`.

    Args:
        folder: is made.
        config: the model.
        variables: all of its variables.
        sizes: of the signatures.

    Raises:
        FailedError: the disk is full or the folder not writable.
    """
    model = BertForPretraining(config, seed=0)
    model.load_values(variables)

    def run(batch: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        hidden_BLH, outputs = model.with_hidden_states(batch)
        return {
            "sequence_output": hidden_BLH,
            "pooled_output": outputs.pooled_output_BSH,
            "masked_lm_logits": outputs.masked_lm_logits_BQV,
            "next_sentence_logits": outputs.next_sentence_logits_BS2,
        }

    def serve_packed(**features: tf.Tensor) -> dict[str, tf.Tensor]:
        labels = {name: _nothing(PACKED_FEATURES[name], sizes) for name in LABELS}
        return run({**features, **labels})

    def serve_unpacked(**features: tf.Tensor) -> dict[str, tf.Tensor]:
        positions = features["masked_lm_positions"]
        rows = positions.shape[0]
        labels = {
            "masked_lm_ids": tf.zeros_like(positions),
            "masked_lm_weights": tf.zeros(positions.shape, tf.float32),
            "next_sentence_labels": tf.zeros([rows, 1], tf.int32),
        }
        return run(as_packed({**features, **labels}))

    module = tf.Module()
    module.model = model
    signatures = {
        "serving_default": _signature(serve_unpacked, UNPACKED_INPUTS, sizes),
        "packed": _signature(serve_packed, PACKED_INPUTS, sizes),
    }
    # The gradients that are written out by hand are for training; a served model has none.
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    try:
        tf.saved_model.save(module, str(folder), signatures=signatures, options=options)
    except tf.errors.OpError as error:
        reason = " ".join(str(error).split())
        raise FailedError(f"{folder}: cannot write ({reason}); free some space, or choose another folder") from error


def _signature(
    function: tf.types.experimental.PolymorphicFunction, inputs: Mapping[str, str], sizes: ServingSizes
) -> tf.types.experimental.ConcreteFunction:
    specs = {name: tf.TensorSpec(_shape(letters, sizes), tf.int32, name=name) for name, letters in inputs.items()}
    return tf.function(function, autograph=False).get_concrete_function(**specs)


def _nothing(feature: tuple[str, tf.DType], sizes: ServingSizes) -> tf.Tensor:
    letters, dtype = feature
    return tf.zeros(_shape(letters, sizes), dtype)


def _shape(letters: str, sizes: ServingSizes) -> list[int]:
    return [sizes.letters[letter] for letter in letters]
