"""Models as TensorFlow stores them: Google's TF1 checkpoints, and SavedModels for serving.

A checkpoint is `bert_model.ckpt.index` and `.data-00000-of-00001`. Our variables carry the names and the layout of
`google-research/bert`, so it is a table of them. One written while training holds more (Adam's moments as
`<variable>/adam_m`, counters), which is ignored.

A SavedModel has two signatures of static shapes, plain float32 operations, and nothing of this package. `serving_default`
takes one sequence per row, as any BERT does; `packed` takes packs, and gives the same outputs with a fraction of the rows.
Letters: B rows, L positions, P masked positions of a sequence, Q of a pack, S depth, C values of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import tensorflow as tf

from gaudi_bert.common.arrays import Float32Array, WeightArrays
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.engines.protocol import ModelSpec
from gaudi_bert.engines.tensorflow.bert import outputs_of_every_token
from gaudi_bert.engines.tensorflow.model import TensorFlowModel
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.features import PACKED_FEATURES
from gaudi_bert.model.heads import PretrainingHead, TaskHead

_SCOPES = ("bert/", "cls/")


def read_google_checkpoint(prefix: Path) -> dict[str, Float32Array]:
    """The variables of BERT in a TF1 checkpoint, by name."""
    try:
        reader = tf.train.load_checkpoint(str(prefix))
        names = reader.get_variable_to_shape_map()
        values = {name: reader.get_tensor(name) for name in names if _is_weight(name, names)}
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{prefix}: not a complete TF1 checkpoint ({reason}); copy its .index and .data files again"
        ) from error
    if not values:
        raise InputError(f"{prefix}: holds no variable below bert/; give a checkpoint of google-research/bert")
    return values


def _is_weight(name: str, names: Mapping[str, object]) -> bool:
    """Whether `name` is the model's, and not what an optimizer keeps of another variable."""
    return name.startswith(_SCOPES) and name.rpartition("/")[0] not in names


def write_google_checkpoint(prefix: Path, variables: WeightArrays) -> None:
    """Write `variables` as a TF1 checkpoint, which `tf.compat.v1.train.Saver` and `tf.train.load_checkpoint` read."""
    names = sorted(variables)
    try:
        with tf.device("/CPU:0"):
            tf.raw_ops.SaveV2(
                prefix=str(prefix),
                tensor_names=names,
                shape_and_slices=[""] * len(names),
                tensors=[tf.constant(np.ascontiguousarray(variables[name])) for name in names],
            )
    except tf.errors.OpError as error:
        raise _cannot_write(prefix, error) from error


def _cannot_write(path: Path, error: Exception) -> FailedError:
    return FailedError(f"{path}: cannot write ({' '.join(str(error).split())}); free some space, or choose another folder")


# --- SavedModels

# What the losses alone read; the signatures do without.
LABELS = ("masked_lm_ids", "masked_lm_weights", "next_sentence_labels", "next_sentence_weights")
_ROW_INPUTS = {"input_ids": "BL", "input_mask": "BL", "segment_ids": "BL"}

_Serve = Callable[..., dict[str, tf.Tensor]]


def write_saved_model(folder: Path, config: BertConfig, variables: WeightArrays, sizes: Mapping[str, int]) -> None:
    """Write a pretrained model into `folder`, which is created; `sizes` are those of both signatures, by letter.

    It returns `sequence_output`, `pooled_output`, `masked_lm_logits` and `next_sentence_logits`.
    """
    model = TensorFlowModel(ModelSpec(config, PretrainingHead()), seed=0)
    model.load_values(variables)

    def shape_of(letters: str) -> list[int]:
        return [sizes[letter] for letter in letters]

    def run(batch: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        hidden_BLH, outputs = outputs_of_every_token(model.network(), batch)
        return {
            "sequence_output": hidden_BLH,
            "pooled_output": outputs.pooled_output_BSH,
            "masked_lm_logits": outputs.masked_lm_logits_BQV,
            "next_sentence_logits": outputs.next_sentence_logits_BS2,
        }

    def serve_packed(**features: tf.Tensor) -> dict[str, tf.Tensor]:
        labels = {name: tf.zeros(shape_of(PACKED_FEATURES[name][0]), PACKED_FEATURES[name][1]) for name in LABELS}
        return run({**features, **labels})

    def serve_rows(**features: tf.Tensor) -> dict[str, tf.Tensor]:
        labels = {
            "masked_lm_ids": tf.zeros_like(features["masked_lm_positions"]),
            "masked_lm_weights": tf.zeros(shape_of("BP"), tf.float32),
            "next_sentence_labels": tf.zeros([sizes["B"], 1], tf.int32),
            "next_sentence_weights": tf.cast(features["input_mask"][:, :1], tf.float32),
        }
        return run({**_as_packs(features, "next_sentence_positions"), **labels})

    packed_inputs = {name: letters for name, (letters, _) in PACKED_FEATURES.items() if name not in LABELS}
    row_inputs = {**_ROW_INPUTS, "masked_lm_positions": "BP"}
    _save(folder, model, sizes, {"serving_default": (serve_rows, row_inputs), "packed": (serve_packed, packed_inputs)})


def write_task_saved_model(
    folder: Path, config: BertConfig, head: TaskHead, variables: WeightArrays, sizes: Mapping[str, int]
) -> None:
    """Write a fine-tuned model with its head into `folder`, which is created; `sizes` are those of a batch, by letter.

    Both signatures give `logits`: [B, S, C] for tasks of texts (S is 1 in `serving_default`), [B, L, C] for those of tokens.
    Of packs, `input_mask` holds the number of the sequence at each position, `positions` restart in each, and
    `sequence_positions` [B, S] is the position of each [CLS].
    """
    model = TensorFlowModel(ModelSpec(config, head), seed=None)
    model.load_values(variables)

    def serve_packed(**features: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"logits": model.forward(features)}

    def serve_rows(**features: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"logits": model.forward(_as_packs(features, "sequence_positions"))}

    packed_inputs = {**_ROW_INPUTS, "positions": "BL", "sequence_positions": "BS"}
    _save(folder, model, sizes, {"serving_default": (serve_rows, _ROW_INPUTS), "packed": (serve_packed, packed_inputs)})


def _as_packs(features: Mapping[str, tf.Tensor], starts: str) -> dict[str, tf.Tensor]:
    """Rows of one sequence with the positions of packs; `starts` is the feature with the position of each [CLS]."""
    rows, length = features["input_mask"].shape
    positions_BL = tf.range(length, dtype=tf.int32)[tf.newaxis, :] * features["input_mask"]
    return {**features, "positions": positions_BL, starts: tf.zeros([rows, 1], tf.int32)}


def _save(
    folder: Path,
    model: TensorFlowModel,
    sizes: Mapping[str, int],
    functions: Mapping[str, tuple[_Serve, Mapping[str, str]]],
) -> None:
    """Write a model with a signature per function, whose inputs are int32; their shapes are given by letters."""
    module = tf.Module()
    module.weights = list(model.variables.values())
    signatures = {}
    for signature, (function, inputs) in functions.items():
        specs = {
            name: tf.TensorSpec([sizes[letter] for letter in letters], tf.int32, name=name)
            for name, letters in inputs.items()
        }
        signatures[signature] = tf.function(function, autograph=False).get_concrete_function(**specs)
    # The gradients that are written out by hand are for training; a served model has none.
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    try:
        tf.saved_model.save(module, str(folder), signatures=signatures, options=options)
    except tf.errors.OpError as error:
        raise _cannot_write(folder, error) from error
