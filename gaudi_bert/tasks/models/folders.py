"""A model's folder, run by an engine: the vectors of an encoder, and the answers of any model with the head of a task.

An engine is imported when it is known which one: each takes seconds to load. A batch has about `_TOKENS_OF_A_BATCH` tokens,
where a CPU is fastest; what does not fill one is run pack by pack, so that nothing empty is computed. A device that compiles
a graph for one shape (`one_shape`) gets empty packs instead.

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
from gaudi_bert.engines.choose import choose_engine, load_engine
from gaudi_bert.engines.protocol import Device, Engine, Model, ModelSpec
from gaudi_bert.model.heads import Pooling, VectorHead, variables_of
from gaudi_bert.rows.packs import BatchShape, lay_out_packs
from gaudi_bert.rows.tokenizer import open_tokenizer
from gaudi_bert.rows.types import Row, Sequences
from gaudi_bert.rows.window_plan import Part, Runner, WindowPlan, plan_window
from gaudi_bert.tasks.models.task_models import (
    folder_identity,
    is_bert,
    open_task_model,
    read_task_folder,
    start_weights,
    weights_checksum,
)
from gaudi_bert.training.model_files import tokenizer_length
from gaudi_bert.training.weights import read_weights

_TOKENS_OF_A_BATCH = 1024
_Per = Literal["sequence", "token"]


class PackRunner:
    """Runs one model, whose outputs are for each sequence or for each token, `width` values each.

    With `one_shape`, batches are filled up with empty packs, rather than running the rest in smaller ones.
    """

    def __init__(
        self, model: Model, *, per: _Per, width: int, one_shape: bool = False, batch_tokens: int = _TOKENS_OF_A_BATCH
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
        placed = lay_out_packs(sequences, part.packs, chosen, BatchShape(packs, part.length, part.depth))
        values = self._model.outputs(placed.features(sequences))
        scatter = placed.scatter_sequences if self._per == "sequence" else placed.scatter_tokens
        scatter(values, out)


def _runner(model: Model, per: _Per, width: int, device: Device, hidden_size: int, longest: int) -> Runner:
    """A model on a device, for sequences of at most `longest` tokens; a card that compiles gets one shape."""
    one_shape = device.kind == "hpu"

    def plan(sequences: Sequences, packed: bool) -> WindowPlan:
        one_length = longest if one_shape else None
        return plan_window(sequences.lengths, hidden_size=hidden_size, packed=packed, one_length=one_length)

    return Runner(plan, PackRunner(model, per=per, width=width, one_shape=one_shape).run)


class TaskFolder:
    """A model with the head of a task, with its weights and its tokenizer.

    Attributes:
        usual_length: most tokens of a sequence, unless it is requested otherwise.
        settings: those of the task, as it was trained.
    """

    def __init__(self, path: Path) -> None:
        self._engine = load_engine(choose_engine("auto", is_bert=is_bert(path), key="--engine").name)
        self._folder = folder = read_task_folder(path)
        self._start = start_weights(path, folder.make_task(), lacks_head=False)
        self.identity, self.positions = self._start.identity, self._start.sizes.positions
        self.usual_length = min(folder.max_sequence_length or self.positions, self.positions)
        self.task, self.labels, self.settings = folder.task, folder.labels, folder.settings
        self.tokenizer = open_tokenizer(path)
        self.tokenizer.check_fits(self._start.sizes.vocab_size, self._start.sizes.segments)

    def answerer(self, settings: TaskSettings, precision: Precision, longest: int) -> Runner:
        """The model; `longest` is the most tokens of a sequence."""
        task = self._folder.make_task(settings)
        head = task.head
        if not head.keeps_outputs:
            raise InputError(
                f"{self._folder.path}: {task.name} has no answers to predict; embed its texts, or fine-tune another task"
            )
        device = self._engine.open_device(TrainingSettings(precision=precision))
        model = open_task_model(self._start, task, self._engine, device)
        per: _Per = "token" if head.per_token else "sequence"
        return _runner(model, per, task.width, device, self._start.sizes.hidden_size, longest)

    def answers(
        self, settings: TaskSettings, values: Float32Array, sequences: Sequences, rows: Sequence[Row]
    ) -> Iterable[Mapping[str, Any]]:
        """The model's outputs as one JSON object for each row."""
        return self._folder.make_task(settings).answers(values, sequences, rows)


# --- encoders, whatever heads they have


class BertFolder:
    """A BERT with its tokenizer, held once."""

    def __init__(self, path: Path, engine: Engine) -> None:
        self.engine, self.weights = engine, read_weights(path)
        if self.weights.config is None:
            raise InputError(f"{path}: its config is not known; put config.json next to the weights")
        self.config = self.weights.config
        self.hidden_size, self.positions = self.config.hidden_size, self.config.max_position_embeddings
        folder = path if path.is_dir() else path.parent
        self.usual_length = min(self.positions, tokenizer_length(folder) or self.positions)
        self.identity = weights_checksum(self.weights)
        self.tokenizer = open_tokenizer(path)
        self.tokenizer.check_fits(self.config.vocab_size, self.config.type_vocab_size)

    def embedder(self, pooling: Pooling, normalize: bool, precision: Precision, longest: int) -> Runner:
        """The encoder, its outputs pooled; `longest` is the most tokens of a text."""
        spec = ModelSpec(self.config, VectorHead(pooling, normalize))
        names = variables_of(self.config, spec.head)
        missing = [name for name in names if name not in self.weights.variables]
        if missing:
            raise InputError(f"weights: {missing[0]} is missing; give the weights of a complete encoder")
        device = self.engine.open_device(TrainingSettings(precision=precision))
        model = self.engine.build(spec, device, seed=None)
        model.load_values({name: self.weights.variables[name] for name in names})
        return _runner(model, "sequence", self.hidden_size, device, self.hidden_size, longest)


class _TorchFolder:
    """Any other encoder of `transformers`, in PyTorch."""

    def __init__(self, path: Path, engine: Engine) -> None:
        self._device = engine.open_device(TrainingSettings()).name
        self._path, self.tokenizer = path, open_tokenizer(path)
        self._encoder = self._opened("float32")
        self.hidden_size, self.positions = self._encoder.hidden_size, self._encoder.positions
        self.usual_length = min(self.positions, tokenizer_length(path) or self.positions)
        self.identity = folder_identity(path)

    def _opened(self, precision: Precision) -> Any:
        from gaudi_bert.pytorch.model_folder import open_encoder

        return open_encoder(self._path, self.tokenizer, with_head=False, precision=precision, device=self._device)

    def embedder(self, pooling: Pooling, normalize: bool, precision: Precision, longest: int) -> Runner:
        """As of a BERT."""
        encoder = self._encoder if precision == "float32" else self._opened(precision)
        return Runner(
            encoder.plan, lambda sequences, plan, computed: encoder.vectors(sequences, plan, pooling, normalize, computed)
        )


def open_encoder_folder(path: Path) -> BertFolder | _TorchFolder:
    """An encoder with the engine that runs it."""
    bert = is_bert(path)
    engine = load_engine(choose_engine("auto", is_bert=bert, key="--engine").name)
    return BertFolder(path, engine) if bert else _TorchFolder(path, engine)
