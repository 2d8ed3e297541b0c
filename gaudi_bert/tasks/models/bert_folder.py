"""A model's folder, run by an engine: the vectors of a BERT, and the answers of any model with the head of a task.

A batch has about `_TOKENS_OF_A_BATCH` tokens, where a CPU is fastest; what does not fill one is run pack by pack, so that
nothing empty is computed. A device that compiles a graph for one shape (`one_shape`) gets empty packs instead.

Letters: B packs, L positions, S depth, C values of an answer, N sequences, T tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gaudi_bert.common.arrays import Float32Array
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TaskSettings, TrainingSettings
from gaudi_bert.config.values import Precision
from gaudi_bert.engines.protocol import Device, Engine, Model, ModelSpec
from gaudi_bert.model.heads import Pooling, VectorHead, variables_of
from gaudi_bert.rows.packs import BatchShape, lay_out_packs
from gaudi_bert.rows.tokenizer import RowTokenizer
from gaudi_bert.rows.types import Row, Sequences
from gaudi_bert.rows.window_plan import Part, Runner, WindowPlan, plan_window
from gaudi_bert.tasks.models.task_models import open_task_model, read_task_folder, start_weights, weights_checksum
from gaudi_bert.training.model_files import tokenizer_length
from gaudi_bert.training.weights import read_weights

_TOKENS_OF_A_BATCH = 1024


class PackRunner:
    """Runs one model, whose outputs are for each sequence or for each token, `width` values each.

    With `one_shape`, batches are filled up with empty packs, rather than running the rest in smaller ones.
    """

    def __init__(
        self,
        model: Model,
        *,
        per: Literal["sequence", "token"],
        width: int,
        one_shape: bool = False,
        batch_tokens: int = _TOKENS_OF_A_BATCH,
    ) -> None:
        self._model, self._per, self._width = model, per, width
        self._one_shape, self._batch_tokens = one_shape, batch_tokens

    def run(
        self, sequences: Sequences, plan: WindowPlan, computed: Callable[[int], None] = lambda slots: None
    ) -> Float32Array:
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
                computed(min(packs, remaining) * part.length)
                first += packs
        return out

    def _run_batch(self, sequences: Sequences, part: Part, first: int, packs: int, out: Float32Array) -> None:
        chosen = np.arange(first, min(first + packs, len(part.packs)))
        shape = BatchShape(packs, part.length, part.depth)
        placed = lay_out_packs(sequences, part.packs, chosen, shape)
        values = self._model.outputs(placed.features(sequences))
        if self._per == "sequence":
            placed.scatter_sequences(values, out)
        else:
            placed.scatter_tokens(values, out)


class BertFolder:
    """An encoder with its weights, held once."""

    def __init__(self, path: Path, engine: Engine) -> None:
        self.engine, self.weights = engine, read_weights(path)
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
        spec = ModelSpec(self.config, VectorHead(pooling, normalize))
        names = variables_of(self.config, spec.head)
        missing = [name for name in names if name not in self.weights.variables]
        if missing:
            raise InputError(f"weights: {missing[0]} is missing; give the weights of a complete encoder")
        device = _open_device(self.engine, precision)
        model = self.engine.build(spec, device, seed=None)
        model.load_values({name: self.weights.variables[name] for name in names})
        return _runner(model, "sequence", self.hidden_size, device, self.hidden_size, longest)


class TaskModelFolder:
    """A model with the head of a task, with its weights."""

    def __init__(self, path: Path, engine: Engine) -> None:
        self._folder = folder = read_task_folder(path)
        self._engine, self._start = engine, start_weights(path, folder.make_task(), lacks_head=False)
        sizes = self._start.sizes
        self.hidden_size, self.positions = sizes.hidden_size, sizes.positions
        self.usual_length = min(folder.max_sequence_length or self.positions, self.positions)
        self.identity = self._start.identity
        self.task, self.labels, self.settings = folder.task, folder.labels, folder.settings

    def check_fits(self, tokenizer: RowTokenizer) -> None:
        """Refuse a tokenizer of another model."""
        tokenizer.check_fits(self._start.sizes.vocab_size, self._start.sizes.segments)

    def answerer(self, settings: TaskSettings, precision: Precision, longest: int) -> Runner:
        """The model."""
        task = self._folder.make_task(settings)
        head = task.head
        if not head.keeps_outputs:
            raise InputError(
                f"{self._folder.path}: {task.name} has no answers to predict; embed its texts, or fine-tune another task"
            )
        device = _open_device(self._engine, precision)
        model = open_task_model(self._start, task, self._engine, device)
        per: Literal["sequence", "token"] = "token" if head.per_token else "sequence"
        return _runner(model, per, head.width, device, self.hidden_size, longest)

    def answers(
        self, settings: TaskSettings, values: Float32Array, sequences: Sequences, rows: Sequence[Row]
    ) -> Iterable[Mapping[str, Any]]:
        """The model's outputs as one JSON object for each row."""
        return self._folder.make_task(settings).answers(values, sequences, rows)


def _open_device(engine: Engine, precision: Precision) -> Device:
    return engine.open_device(TrainingSettings(precision=precision))


def _runner(
    model: Model, per: Literal["sequence", "token"], width: int, device: Device, hidden_size: int, longest: int
) -> Runner:
    """A model on a device; a card that compiles gets one shape."""
    one_shape = device.kind == "hpu"

    def plan(sequences: Sequences, packed: bool) -> WindowPlan:
        one_length = longest if one_shape else None
        return plan_window(sequences.lengths, hidden_size=hidden_size, packed=packed, one_length=one_length)

    return Runner(plan, PackRunner(model, per=per, width=width, one_shape=one_shape).run)
