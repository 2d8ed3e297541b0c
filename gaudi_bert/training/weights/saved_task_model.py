"""A fine-tuned model as a TensorFlow SavedModel for serving: two signatures of static shapes, both with `logits`.

`serving_default` takes one sequence a row: `input_ids`, `input_mask`, `segment_ids`, [B, L]. `packed` takes packs:
`input_mask` holds the number of the sequence at each position, `positions` restart in each, and `sequence_positions`
[B, S] says where each [CLS] is. Logits are [B, S, C] for tasks of whole texts (S is 1 in `serving_default`), [B, L, C]
for those of tokens.

Letters: B rows, L positions, S depth, C values of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import tensorflow as tf

from gaudi_bert.common.errors import FailedError
from gaudi_bert.tasks.model import BertForTask
from gaudi_bert.tasks.packs import BatchShape

__all__ = ["write_task_saved_model"]

ROW_INPUTS = ("input_ids", "input_mask", "segment_ids")


def write_task_saved_model(folder: Path, model: BertForTask, shape: BatchShape) -> None:
    """Write the model into `folder`, which is made.

    Args:
        folder: the place.
        model: with its weights.
        shape: rows of a batch, positions of a row, and the depth of the packs.

    Raises:
        FailedError: the disk is full or the folder not writable.
    """

    def serve_packed(**features: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"logits": model(features)}

    def serve_rows(**features: tf.Tensor) -> dict[str, tf.Tensor]:
        positions_BL = tf.range(shape.length, dtype=tf.int32)[tf.newaxis, :] * features["input_mask"]
        starts_B1 = tf.zeros([shape.packs, 1], tf.int32)
        return {"logits": model({**features, "positions": positions_BL, "sequence_positions": starts_B1})}

    tokens, sequences = [shape.packs, shape.length], [shape.packs, shape.depth]
    rows = dict.fromkeys(ROW_INPUTS, tokens)
    module = tf.Module()
    module.model = model
    signatures = {
        "serving_default": _signature(serve_rows, rows),
        "packed": _signature(serve_packed, {**rows, "positions": tokens, "sequence_positions": sequences}),
    }
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    try:
        tf.saved_model.save(module, str(folder), signatures=signatures, options=options)
    except tf.errors.OpError as error:
        reason = " ".join(str(error).split())
        raise FailedError(f"{folder}: cannot write ({reason}); free some space, or choose another folder") from error


def _signature(
    function: Callable[..., dict[str, tf.Tensor]], inputs: Mapping[str, list[int]]
) -> tf.types.experimental.ConcreteFunction:
    specs = {name: tf.TensorSpec(shape, tf.int32, name=name) for name, shape in inputs.items()}
    return tf.function(function, autograph=False).get_concrete_function(**specs)
