"""What a framework does for a run: the list that `engines/tensorflow` and `engines/pytorch` fulfil, and nothing else.

Everything else (the plan of a run, its loop, data, denominators, figures, checkpoints) is written once, in `training/`.
Arrays go in and out as numpy; how they are computed is the engine's.

The processes that train together are a `Communicator`, by Horovod or torch.distributed. Gradients are summed, not averaged:
the loss of every process is already divided by the denominators of the complete update (`training/objective.py`), so the sum
is exact.

Letters: B packs, M micro-batches of an update on one process, K sums of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.common.arrays import BatchArrays, Float32Array, FloatArray, Int32Array, WeightArrays
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import LoopSettings
from gaudi_bert.config.values import EngineName
from gaudi_bert.model.config import BertConfig, EncoderConfig, find_shape_mismatch
from gaudi_bert.model.heads import Head, Loss

T = TypeVar("T")
ComputeDtype = Literal["float32", "bfloat16", "float64"]
DeviceKind = Literal["cpu", "cuda", "hpu"]


@dataclass(frozen=True)
class Communicator:
    """One process on its own: rank 0 of 1, whose sums do not travel.

    `local_size` is the number of processes on this host; `errors` are what a sum raises that another process misses.
    """

    rank: int = 0
    size: int = 1
    local_size: int = 1
    errors: ClassVar[tuple[type[Exception], ...]] = (RuntimeError,)

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and speaks: rank 0."""
        return self.rank == 0

    def sum_array(self, values: NDArray[Any]) -> FloatArray:
        """The sum over all processes of a small host array (float64)."""
        return np.asarray(values, np.float64)

    def sum_tensors(self, tensors: list[Any]) -> list[Any]:
        """The sums over all processes, inside a graph of TensorFlow."""
        return tensors

    def any_true(self, value: bool) -> bool:
        """Whether `value` is true in at least one process; the same answer in all."""
        return bool(self.sum_array(np.array([float(value)]))[0] > 0)

    def from_first(self, make: Callable[[], T]) -> T:
        """Return what `make` returns in the first process, which alone calls it; every process gets it."""
        return make()

    def broadcast(self, arrays: WeightArrays) -> WeightArrays:
        """The arrays of rank 0, in every process; names and shapes are the same in all."""
        return arrays

    def barrier(self) -> None:
        """Wait until every process is here."""
        self.sum_array(np.zeros(1))

    def note(self, activity: str, *, slow: bool = False) -> None:
        """Report what this process is doing: a sign of work for the watchdog. `slow`: it may take longer than usual."""

    def note_saved(self, update: int) -> None:
        """Report the last update of which a checkpoint is complete."""

    def arrive(self) -> None:
        """Report that this process's share is done, and that it is about to wait for the others."""

    @contextmanager
    def watched(self, settings: LoopSettings) -> Iterator[Communicator]:
        """End this process when another one is lost or asleep, while the context lasts (`watchdog.py`).

        The communicator of the context is the one to work with. The device must be open.
        """
        del settings
        yield self


@dataclass(frozen=True)
class Device:
    """An opened device; `name` is the framework's, `notes` are lines for the user.

    `compute_dtype` is that of the matrix products, float32 where the device's own software converts; `compiles`: whether a
    model's step is compiled here, unless a run began otherwise; `recomputes`: whether layers are computed once more for the
    backward pass; `fuses_attention`: whether the kernel of Gaudi's vendor computes attention.
    """

    kind: DeviceKind
    name: str
    compute_dtype: Literal["float32", "bfloat16"]
    description: str
    compiles: bool
    notes: tuple[str, ...] = ()
    recomputes: bool = False
    fuses_attention: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """A model: the encoder and its head."""

    config: BertConfig | EncoderConfig
    head: Head


class Trial(NamedTuple):
    """One forward and backward pass without dropout.

    `outputs`: `hidden_states` [B, L, H], `masked_lm_logits` [B, Q, V], `next_sentence_logits` [B, S, 2]. `gradients`, by
    variable, are those of masked-LM plus next-sentence loss, each divided by its weight.
    """

    outputs: dict[str, Float32Array]
    losses: dict[str, float]
    gradients: dict[str, Float32Array]


class Model(Protocol):
    """A model on a device. A batch maps names of features to arrays [B, ...], integers int32, weights float32.

    Shapes are static: an engine may build a graph for each set of shapes it meets, and a run meets one for each length of
    rows.
    """

    spec: ModelSpec

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The variables' shapes by name, in the order in which the forward pass meets them."""

    def buffers(self) -> Collection[str]:
        """The names of the variables that no gradient reaches, so the optimizer has no moments of them."""

    def values(self) -> dict[str, Float32Array]:
        """A copy of the variables by name."""

    def load_values(self, values: WeightArrays) -> None:
        """Set variables by name; those that `values` does not name keep what they hold."""

    def freeze(self) -> None:
        """Give up training and the loading of weights, so that an engine may arrange them for inference.

        Afterwards only `outputs` and `evaluate` may be called.
        """

    def outputs(self, batch: BatchArrays) -> Float32Array:
        """Return what the head gives, without dropout (heads that keep outputs)."""

    def evaluate(self, batch: BatchArrays) -> tuple[Float32Array | None, Float32Array]:
        """The outputs, of heads that keep them, and the K sums; without dropout."""

    def trial(self, batch: BatchArrays, loss: Loss) -> Trial:
        """Outputs, losses and gradients of a model of pretraining."""

    def work(self, batch: BatchArrays) -> float:
        """One forward and backward pass with dropout; a number that needs all gradients. For timing."""


def check_weights(shapes: Mapping[str, tuple[int, ...]], values: WeightArrays) -> None:
    """Refuse values by name that are not of variables of a model, which have these shapes."""
    problem = find_shape_mismatch(shapes, values, optional_prefixes="")
    if problem is not None:
        raise InputError(f"model: {problem}; load the weights of a model of the same config")


class UpdateScalars(NamedTuple):
    """The numbers of an update: the learning rate, and 1 / (1 - beta^t) for both moments."""

    learning_rate: float
    first_correction: float
    second_correction: float


UpdateLoss = Callable[[Sequence[NDArray[Any]]], tuple[FloatArray, Sequence[FloatArray]]]
"""A loss of all micro-batches of an update together, those of other processes too.

From what the head gives for each micro-batch of this process, [M] arrays [B, ...], to the K sums and the loss's gradients by
these arrays. Every process calls it at the same time.
"""


Sums = Callable[[], NDArray[Any]]
"""Numbers that the device may not have finished: call it to wait for them, float32 [K + 1]."""


class Updates(Protocol):
    """Runs updates of one model by one optimizer; every process calls `run` at the same time."""

    def run(
        self,
        micro_batches: Sequence[BatchArrays],
        seeds_M2: Int32Array,
        factors_M2: FloatArray,
        scalars: UpdateScalars,
        update: int,
        update_loss: UpdateLoss | None = None,
    ) -> Sums:
        """Gradients of M micro-batches, summed over them and over processes, clipped once, and applied.

        The two losses of a micro-batch are multiplied by its `factors`; `seeds` are those of dropout. The result: the K sums
        over this process's micro-batches, and the gradient's norm over all processes before clipping.

        With an `update_loss`, loss and sums are its own, and `factors` are not used: all micro-batches are
        computed once, and all but the last once more, with gradients and the same dropout (GradCache, Gao et al., 2021).
        """

    def moments(self) -> tuple[dict[str, Float32Array], dict[str, Float32Array]]:
        """A copy of the first and second moments, by variable."""

    def load_moments(self, first: WeightArrays, second: WeightArrays) -> None:
        """Set all moments."""


class Engine(Protocol):
    """A framework. Each is a module, `engines/<name>/engine.py`, with these functions."""

    NAME: EngineName

    def connect(self, settings: LoopSettings, facts: Mapping[str, Any]) -> Communicator:
        """The communicator of all processes of this launch; without a launcher, that of this process alone.

        `facts` are what else has to be the same in all, the model and the identity of the data: one that differs is refused
        as soon as they are watched.
        """

    def open_device(self, settings: LoopSettings, threads: int | None = None) -> Device:
        """Open the device of `settings`; after `connect`, and before any model is built."""

    def build(
        self,
        spec: ModelSpec,
        device: Device | None = None,
        *,
        seed: int | None,
        compute_dtype: ComputeDtype | None = None,
        compiled: bool = False,
    ) -> Model:
        """A model on a device; on the CPU in float32 where none is given. `compute_dtype`: None for the device's.

        Initial values are a function of seed and variable, the same in every engine. Seed None: all are zeros, to be loaded.
        """

    def updates(self, model: Any, settings: LoopSettings, communicator: Communicator, accumulation_steps: int) -> Updates:
        """Updates of a model by the optimizer of `settings`, whose moments start at zero.

        `accumulation_steps`: the most micro-batches of an update on one process.
        """
