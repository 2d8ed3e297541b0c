"""A BERT's folder, in TensorFlow: its vectors and its answers for packs, in the order of the sequences.

A batch has about `_TOKENS_OF_A_BATCH` tokens, where a CPU is fastest; what does not fill one is run pack by pack, so that
nothing empty is computed. A device that compiles a graph for one shape (`one_shape`) gets empty packs instead.

`Embedder` pools the hidden states of each sequence of a pack separately: `cls` is the hidden state of [CLS], `mean` the mean
over all its tokens ([CLS] and [SEP] too, as in sentence-transformers), `max` the largest value of each feature.

Letters: B packs, L positions, S depth, C values of an answer, H hidden size, N sequences, T tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import tensorflow as tf

from gaudi_bert.common.arrays import Float32Array, WeightArrays
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.config.values import Precision
from gaudi_bert.model.bert import PackedBert, encode_packs
from gaudi_bert.model.config import BertConfig, parameter_specs
from gaudi_bert.model.dropout import ForwardPass
from gaudi_bert.model.operations import widen
from gaudi_bert.rows.packs import BatchShape, lay_out_packs
from gaudi_bert.rows.tokenizer import RowTokenizer
from gaudi_bert.rows.types import Row, Sequences
from gaudi_bert.rows.window_plan import Part, Runner, WindowPlan, plan_window
from gaudi_bert.tasks.models.task_models import open_task_model, read_task_folder, weights_checksum
from gaudi_bert.training.tensorflow.device import Device, open_device
from gaudi_bert.training.weights.model_files import Pooling, tokenizer_length
from gaudi_bert.training.weights.sources import read_weights

Compute: TypeAlias = Callable[[Mapping[str, tf.Tensor]], tf.Tensor]
"""From the features of a batch (`Placement.features`) to [B, S, C] or [B, L, C]."""

_TOKENS_OF_A_BATCH = 1024
# Below any hidden state; a sequence that is absent has nothing else.
_LOWEST = -3.0e38


class PackRunner:
    """Runs one model.

    `compute` is traced once for each shape; its answers are for each sequence or for each token, `width` values each. With
    `one_shape`, batches are filled up with empty packs, rather than running the rest in smaller ones.
    """

    def __init__(
        self,
        compute: Compute,
        *,
        per: Literal["sequence", "token"],
        width: int,
        device: str = "/device:CPU:0",
        one_shape: bool = False,
        batch_tokens: int = _TOKENS_OF_A_BATCH,
    ) -> None:
        self._function = tf.function(lambda features: compute(features), autograph=False, reduce_retracing=False)
        self._traced: dict[BatchShape, tf.types.experimental.ConcreteFunction] = {}
        self._per, self._width, self._device = per, width, device
        self._one_shape, self._batch_tokens = one_shape, batch_tokens

    def run(self, sequences: Sequences, plan: WindowPlan) -> Float32Array:
        """The model's outputs for each sequence, [N, C], or for each token, [T, C]."""
        rows = len(sequences) if self._per == "sequence" else len(sequences.input_ids)
        out: Float32Array = np.zeros((rows, self._width), np.float32)
        for part in plan.parts:
            batch = max(1, self._batch_tokens // part.length)
            first = 0
            while first < len(part.packs):
                remaining = len(part.packs) - first
                packs = batch if remaining >= batch or self._one_shape else 1
                self._run_batch(sequences, part, first, packs, out)
                first += packs
        return out

    def _run_batch(self, sequences: Sequences, part: Part, first: int, packs: int, out: Float32Array) -> None:
        chosen = np.arange(first, min(first + packs, len(part.packs)))
        shape = BatchShape(packs, part.length, part.depth)
        placed = lay_out_packs(sequences, part.packs, chosen, shape)
        with tf.device(self._device):
            features = {name: tf.constant(values) for name, values in placed.features(sequences).items()}
            if shape not in self._traced:
                self._traced[shape] = self._function.get_concrete_function(features)
            values = self._traced[shape](features).numpy()
        if self._per == "sequence":
            placed.scatter_sequences(values, out)
        else:
            placed.scatter_tokens(values, out)


class Embedder(PackedBert):
    """An encoder that gives one vector for each sequence.

    Of the weights, by our names, heads and pooler are not used; `normalize` divides each vector by its length.
    """

    def __init__(
        self,
        config: BertConfig,
        weights: WeightArrays,
        *,
        pooling: Pooling,
        normalize: bool,
        compute_dtype: Literal["float32", "bfloat16"] = "float32",
    ) -> None:
        specs = {
            name: spec
            for name, spec in parameter_specs(config).items()
            if name.startswith("bert/") and not name.startswith("bert/pooler/")
        }
        missing = [name for name in specs if name not in weights]
        if missing:
            raise InputError(f"weights: {missing[0]} is missing; give the weights of a complete encoder")
        super().__init__(config, specs, seed=None, compute_dtype=compute_dtype)
        self.load_values({name: weights[name] for name in specs})
        self.pooling, self.normalize = pooling, normalize

    def __call__(self, batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Vectors of the sequences of `Placement.features`, float32 [B, S, H]; those of absent ones mean nothing."""
        positions_BS = batch["sequence_positions"] if self.pooling == "cls" else None
        hidden = encode_packs(batch, self.parameters(), self.config, self.compute_dtype, ForwardPass(), positions_BS)
        packs, depth = batch["sequence_positions"].shape
        if self.pooling == "cls":
            vectors_BSH = tf.reshape(widen(hidden), [packs, depth, self.config.hidden_size])
        else:
            hidden_BLH = tf.reshape(widen(hidden), [*batch["input_ids"].shape, self.config.hidden_size])
            vectors_BSH = _pooled(hidden_BLH, batch["input_mask"], depth, self.pooling)
        return tf.math.l2_normalize(vectors_BSH, axis=-1, epsilon=1e-24) if self.normalize else vectors_BSH


def _pooled(hidden_BLH: tf.Tensor, input_mask_BL: tf.Tensor, depth: int, pooling: Pooling) -> tf.Tensor:
    """Mean or maximum over the tokens of each sequence, [B, S, H].

    The mean is a product with 0 and 1; the maximum goes over flat tokens by the number of their sequence.
    """
    packs, length, hidden = hidden_BLH.shape
    if pooling == "mean":
        belongs_BSL = tf.one_hot(input_mask_BL - 1, depth, axis=1, dtype=hidden_BLH.dtype)
        tokens_BS1 = tf.reduce_sum(belongs_BSL, axis=2, keepdims=True)
        return tf.matmul(belongs_BSL, hidden_BLH) / tf.maximum(tokens_BS1, 1.0)
    first_B1 = tf.range(0, packs * (depth + 1), depth + 1, dtype=tf.int32)[:, tf.newaxis]
    segments_T = tf.reshape(input_mask_BL + first_B1, [-1])
    flat_TH = tf.reshape(hidden_BLH, [packs * length, hidden])
    most = tf.math.unsorted_segment_max(flat_TH, segments_T, packs * (depth + 1))
    return tf.maximum(tf.reshape(most, [packs, depth + 1, hidden])[:, 1:], _LOWEST)


class BertFolder:
    """An encoder with its weights, held once."""

    def __init__(self, path: Path) -> None:
        self.weights = read_weights(path)
        if self.weights.config is None:
            raise InputError(f"{path}: its config is not known; put config.json next to the weights")
        self.config = self.weights.config
        self.hidden_size = self.config.hidden_size
        self.positions = self.config.max_position_embeddings
        folder = path if path.is_dir() else path.parent
        self.usual_length = min(self.positions, tokenizer_length(folder) or self.positions)
        self.identity = weights_checksum(self.weights)

    def check_fits(self, tokenizer: RowTokenizer) -> None:
        """Refuse a tokenizer of another model."""
        tokenizer.check_fits(self.config.vocab_size, self.config.type_vocab_size)

    def embedder(self, pooling: Pooling, normalize: bool, precision: Precision, longest: int) -> Runner:
        """The encoder, its outputs pooled."""
        device = open_device("auto", precision)
        embedder = Embedder(
            self.config,
            self.weights.variables,
            pooling=pooling,
            normalize=normalize,
            compute_dtype=device.compute_dtype,
        )
        return _runner(embedder, "sequence", self.hidden_size, device, self.hidden_size, longest)


class BertTaskFolder(BertFolder):
    """A BERT with the head of a task."""

    def __init__(self, path: Path) -> None:
        self._folder = folder = read_task_folder(path)
        super().__init__(path)
        self.usual_length = folder.max_sequence_length
        self.task, self.labels, self.settings = folder.task, folder.labels, folder.settings

    def answerer(self, settings: TaskSettings, precision: Precision, longest: int) -> Runner:
        """The model."""
        task = self._folder.make_task(settings)
        if not task.keeps_logits:
            raise InputError(
                f"{self._folder.path}: {task.name} has no answers to predict; embed its texts, or fine-tune another task"
            )
        device = open_device("auto", precision)
        model = open_task_model(self._folder, task, compute_dtype=device.compute_dtype, weights=self.weights)
        per: Literal["sequence", "token"] = "token" if task.per_token else "sequence"
        return _runner(model, per, task.width, device, self.hidden_size, longest)

    def answers(
        self, settings: TaskSettings, values: Float32Array, sequences: Sequences, rows: Sequence[Row]
    ) -> Iterable[Mapping[str, Any]]:
        """The model's outputs as one JSON object for each row."""
        return self._folder.make_task(settings).answers(values, sequences, rows)


def _runner(
    compute: Compute, per: Literal["sequence", "token"], width: int, device: Device, hidden_size: int, longest: int
) -> Runner:
    """A model on a device; a card that compiles gets one shape."""
    one_shape = device.kind == "hpu"

    def plan(sequences: Sequences, packed: bool) -> WindowPlan:
        one_length = longest if one_shape else None
        return plan_window(sequences.lengths, hidden_size=hidden_size, packed=packed, one_length=one_length)

    return Runner(plan, PackRunner(compute, per=per, width=width, device=device.name, one_shape=one_shape).run)
