"""A TensorFlow SavedModel for serving: two signatures of static shapes, plain float32 operations, nothing of this package.

`serving_default` takes one sequence per row, as any BERT does; `packed` takes packs, and gives the same outputs with a
fraction of the rows. A pretrained model returns `sequence_output`, `pooled_output`, `masked_lm_logits` and
`next_sentence_logits`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import tensorflow as tf

from gaudi_bert.common.arrays import WeightArrays
from gaudi_bert.common.errors import FailedError
from gaudi_bert.engines.tensorflow.bert import BertForPretraining
from gaudi_bert.engines.tensorflow.heads import BertForTask
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.features import PACKED_FEATURES
from gaudi_bert.model.heads import TaskHead

# What the losses alone read; the signatures do without.
LABELS = ("masked_lm_ids", "masked_lm_weights", "next_sentence_labels", "next_sentence_weights")
_UNPACKED_INPUTS = {"input_ids": "BL", "input_mask": "BL", "segment_ids": "BL", "masked_lm_positions": "BP"}
_PACKED_INPUTS = {name: letters for name, (letters, _) in PACKED_FEATURES.items() if name not in LABELS}

Serve = Callable[..., dict[str, tf.Tensor]]
_Shapes = dict[str, list[int]]


def write_saved_model(folder: Path, config: BertConfig, variables: WeightArrays, sizes: Mapping[str, int]) -> None:
    """Write a pretrained model into `folder`, which is created.

    `sizes` are the static ones of both signatures, by the letters of shapes: B rows, L positions of a row, P masked
    positions of a sequence, Q of a pack, S depth.
    """

    def shape_of(letters: str) -> list[int]:
        return [sizes[letter] for letter in letters]

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
        labels = {name: tf.zeros(shape_of(PACKED_FEATURES[name][0]), PACKED_FEATURES[name][1]) for name in LABELS}
        return run({**features, **labels})

    def serve_unpacked(**features: tf.Tensor) -> dict[str, tf.Tensor]:
        mask_BL, rows = features["input_mask"], sizes["B"]
        positions_BL = tf.range(sizes["L"], dtype=tf.int32)[tf.newaxis, :] * mask_BL
        labels = {
            "masked_lm_ids": tf.zeros_like(features["masked_lm_positions"]),
            "masked_lm_weights": tf.zeros(shape_of("BP"), tf.float32),
            "next_sentence_labels": tf.zeros([rows, 1], tf.int32),
            "next_sentence_weights": tf.cast(mask_BL[:, :1], tf.float32),
        }
        starts_B1 = tf.zeros([rows, 1], tf.int32)
        return run({**features, **labels, "positions": positions_BL, "next_sentence_positions": starts_B1})

    _save(
        folder,
        model,
        {
            "serving_default": (serve_unpacked, {name: shape_of(letters) for name, letters in _UNPACKED_INPUTS.items()}),
            "packed": (serve_packed, {name: shape_of(letters) for name, letters in _PACKED_INPUTS.items()}),
        },
    )


# --- A fine-tuned model, with its head: both signatures give `logits`
#
# `serving_default` takes one sequence per row: `input_ids`, `input_mask`, `segment_ids`, [B, L]. `packed` takes packs:
# `input_mask` holds the number of the sequence at each position, `positions` restart in each, and `sequence_positions`
# [B, S] is the position of each [CLS]. Logits are [B, S, C] for tasks of texts (S is 1 in `serving_default`), [B, L, C] for
# those of tokens. Letters: B rows, L positions, S depth, C values of an answer.

_ROW_INPUTS = ("input_ids", "input_mask", "segment_ids")


def write_task_saved_model(
    folder: Path, config: BertConfig, head: TaskHead, variables: WeightArrays, sizes: Mapping[str, int]
) -> None:
    """Write a model with the head of a task into `folder`, which is created; `sizes` are those of a batch, by letter."""
    model = BertForTask(config, head, seed=None)
    model.load_values(variables)

    def serve_packed(**features: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"logits": model(features)}

    def serve_rows(**features: tf.Tensor) -> dict[str, tf.Tensor]:
        positions_BL = tf.range(sizes["L"], dtype=tf.int32)[tf.newaxis, :] * features["input_mask"]
        starts_B1 = tf.zeros([sizes["B"], 1], tf.int32)
        return {"logits": model({**features, "positions": positions_BL, "sequence_positions": starts_B1})}

    tokens, sequences = [sizes["B"], sizes["L"]], [sizes["B"], sizes["S"]]
    rows = dict.fromkeys(_ROW_INPUTS, tokens)
    _save(
        folder,
        model,
        {
            "serving_default": (serve_rows, rows),
            "packed": (serve_packed, {**rows, "positions": tokens, "sequence_positions": sequences}),
        },
    )


# --- Both


def _save(folder: Path, model: tf.Module, functions: Mapping[str, tuple[Serve, _Shapes]]) -> None:
    """Write a model with a signature per function, whose inputs are int32 of static shapes."""
    module = tf.Module()
    module.model = model
    signatures = {}
    for signature, (function, shapes) in functions.items():
        specs = {name: tf.TensorSpec(shape, tf.int32, name=name) for name, shape in shapes.items()}
        signatures[signature] = tf.function(function, autograph=False).get_concrete_function(**specs)
    # The gradients that are written out by hand are for training; a served model has none.
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    try:
        tf.saved_model.save(module, str(folder), signatures=signatures, options=options)
    except tf.errors.OpError as error:
        reason = " ".join(str(error).split())
        raise FailedError(f"{folder}: cannot write ({reason}); free some space, or choose another folder") from error
