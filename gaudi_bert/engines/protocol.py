"""The interface between a run and the framework that computes it, which `engines/tensorflow` and `engines/pytorch`
implement.

Everything that does not depend on a framework (the plan of a run, the loop, data, denominators, metrics and checkpoints) is
implemented once, in `training/`. Inputs and outputs of an engine are numpy arrays.

A `Communicator` connects the processes that train together, by Horovod or torch.distributed. Gradients are summed over the
processes and not averaged, because the loss of every process is already divided by the denominators of the complete update
(`training/objective.py`).

Letters in shapes: B packs, L positions, Q masked slots, S depth, H hidden size, V vocabulary, M micro-batches of an update
on one process, K sums of a head.
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
    """Exchanges values between the processes of a run. This base class is for runs with a single process, and returns every
    value unchanged.

    Attributes:
        rank: The number of this process, from 0.
        size: The number of processes.
        local_size: The number of processes on this host.
        errors: The exceptions that a sum may raise if another process does not take part in it.
    """

    rank: int = 0
    size: int = 1
    local_size: int = 1
    errors: ClassVar[tuple[type[Exception], ...]] = (RuntimeError,)

    @property
    def is_first(self) -> bool:
        """Whether this process has rank 0. Only the process with rank 0 writes files and shows messages."""
        return self.rank == 0

    def sum_array(self, values: NDArray[Any]) -> FloatArray:
        """Return the element-wise sum of an array over all processes, as float64. All processes must call this method at the
        same time.

        The array must be small, and in the memory of the host.
        """
        return np.asarray(values, np.float64)

    def sum_tensors(self, tensors: list[Any]) -> list[Any]:
        """Return the element-wise sums of framework tensors over all processes.

        Only the TensorFlow engine calls this method, while a TensorFlow graph is being traced. The sum becomes a part of the
        graph, which can overlap it with other operations. `sum_array` cannot be used there, because tensors in a graph have
        no values yet. The PyTorch engine sums gradients with `GradientReducer` instead.
        """
        return tensors

    def is_true_in_any_process(self, value: bool) -> bool:
        """Return whether `value` is true in at least one process. All processes must call this method at the same time."""
        return bool(self.sum_array(np.array([float(value)]))[0] > 0)

    def run_on_first_process(self, function: Callable[[], T]) -> T:
        """Call `function` only in the process with rank 0, and return its result in every process. All processes must call
        this method at the same time.
        """
        return function()

    def broadcast(self, arrays: WeightArrays) -> WeightArrays:
        """Return the arrays of rank 0 in every process. All processes pass arrays with the same names and shapes."""
        return arrays

    def barrier(self) -> None:
        """Wait until every process has called this method."""
        self.sum_array(np.zeros(1))

    def record_activity(self, activity: str, *, slow: bool = False) -> None:
        """Report to the watchdog what this process is doing. This also counts as progress.

        Args:
            activity: A description for error messages.
            slow: Whether the activity may take longer than usual.
        """

    def record_saved_update(self, update: int) -> None:
        """Report to the watchdog the number of the last update whose checkpoint is complete. Error messages contain this
        number.
        """

    def record_waiting_for_others(self) -> None:
        """Report to the watchdog that this process is about to wait for other processes."""

    @contextmanager
    def watch_processes_during_block(self, settings: LoopSettings) -> Iterator[Communicator]:
        """Watch the other processes inside a `with` block, and end this process if another one is lost or hangs.

        This base class does nothing, and `watchdog.py` implements the method for several processes. The device must already
        be open.

        Yields:
            The communicator to use inside the block.
        """
        del settings
        yield self


@dataclass(frozen=True)
class Device:
    """An opened device, and the options for computations on it.

    Attributes:
        kind: The kind of device.
        name: The name that the framework gives to the device.
        compute_dtype: The dtype of the matrix products. It is float32 if the device's own software converts them.
        description: A description of the device for the user.
        compiles: Whether the training step of a new run is compiled.
        notes: Lines for the user.
        recomputes: Whether layers are computed again in the backward pass, which saves memory.
        fuses_attention: Whether attention is computed by the fused kernel of the Gaudi software.
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
    """Describes a model by the config of its encoder and its head."""

    config: BertConfig | EncoderConfig
    head: Head


class LossesAndGradients(NamedTuple):
    """The losses and gradients of a pretraining model for one batch without dropout, which are used to compare engines.

    Attributes:
        outputs: `hidden_states` [B, L, H], `masked_lm_logits` [B, Q, V] and `next_sentence_logits` [B, S, 2].
        losses: `masked_lm_loss` and `next_sentence_loss`, each divided by its weight.
        gradients: The gradients of the sum of both losses, by variable name.
    """

    outputs: dict[str, Float32Array]
    losses: dict[str, float]
    gradients: dict[str, Float32Array]


class BatchEvaluation(NamedTuple):
    """The head's outputs for one batch, computed without dropout, and the sums over the batch that give the loss and the
    metrics.

    Attributes:
        outputs: The outputs of the head. None if the head does not keep outputs.
        sums: The K sums of the head.
    """

    outputs: Float32Array | None
    sums: Float32Array


class Moments(NamedTuple):
    """The first and second moments of all variables, which AdamW and LAMB store.

    Attributes:
        first: The first moments, by variable name.
        second: The second moments, by variable name.
    """

    first: dict[str, Float32Array]
    second: dict[str, Float32Array]


class Model(Protocol):
    """A model on a device.

    A batch maps feature names to arrays [B, ...]. Integers are int32, and weights are float32. Shapes are static, because an
    engine may build a graph for each set of shapes. A run has one set of shapes per row length.
    """

    spec: ModelSpec

    def variable_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all variables by name, in the order of their use in the forward pass."""

    def persistent_buffers(self) -> Collection[str]:
        """Return the names of the variables that have no gradient, and therefore no moments. Checkpoints contain these
        variables too.
        """

    def copy_variables(self) -> dict[str, Float32Array]:
        """Return a copy of the values of all variables, by variable name."""

    def load_variables(self, values: WeightArrays) -> None:
        """Set variables to the given values. Variables that are not in `values` keep their current values.

        Raises:
            InputError: A name or a shape does not match the model.
        """

    def freeze(self) -> None:
        """Prepare the model for inference. Afterwards, the model cannot be trained, and no weights can be loaded.

        Afterwards, only `compute_outputs` and `evaluate_batch` may be called, because the engine may have changed the memory
        layout of the weights.
        """

    def compute_outputs(self, batch: BatchArrays) -> Float32Array:
        """Run the model on a batch without dropout, and return the outputs of its head.

        `metrics_need_outputs` of the head must be true. For other heads, use `evaluate_batch`, which returns the sums.
        """

    def evaluate_batch(self, batch: BatchArrays) -> BatchEvaluation:
        """Run the model on a batch without dropout. Return the head's outputs, and the sums over the batch that give the
        loss and the metrics.
        """

    def compute_losses_and_gradients(self, batch: BatchArrays, loss: Loss) -> LossesAndGradients:
        """Run a forward and a backward pass of a pretraining model without dropout, and return its outputs, losses and
        gradients.
        """

    def run_training_pass(self, batch: BatchArrays) -> float:
        """Run a forward and a backward pass with dropout, to measure how long they take. The weights do not change.

        Returns:
            A number that depends on all gradients, so that none of them can be skipped.
        """


def check_weights(shapes: Mapping[str, tuple[int, ...]], values: WeightArrays) -> None:
    """Check that each weight has the name and the shape of a variable of the model. Not every variable needs a weight.

    Raises:
        InputError: A name is unknown or a shape is wrong.
    """
    problem = find_shape_mismatch(shapes, values, optional_prefixes="")
    if problem is not None:
        raise InputError(f"model: {problem}; load weights of a model with the same config")


class UpdateScalars(NamedTuple):
    """The learning rate and the bias corrections, which the optimizer needs in every update.

    Attributes:
        learning_rate: The learning rate.
        first_correction: The bias correction of the first moment, 1 / (1 - beta_1^t) in update t.
        second_correction: The bias correction of the second moment, 1 / (1 - beta_2^t) in update t.
    """

    learning_rate: float
    first_correction: float
    second_correction: float


# A function that computes the loss of an update over the micro-batches of all processes. The argument contains the head's
# outputs for each micro-batch of this process, M arrays [B, ...]. The function returns the K loss sums and metric sums, and
# the gradients of the loss with respect to the M arrays. All processes call it at the same time.
UpdateLoss = Callable[[Sequence[NDArray[Any]]], tuple[FloatArray, Sequence[FloatArray]]]

# A function that waits until the device has finished an update. It returns the K loss sums and metric sums of this process,
# and the gradient norm, float32 [K + 1].
WaitForSums = Callable[[], NDArray[Any]]


class Updates(Protocol):
    """Trains one model with one optimizer, one update of the variables at a time. All processes of a run must call
    `run_update` at the same time.
    """

    def run_update(
        self,
        micro_batches: Sequence[BatchArrays],
        dropout_seeds_M2: Int32Array,
        loss_factors_M2: FloatArray,
        scalars: UpdateScalars,
        update: int,
        update_loss: UpdateLoss | None = None,
    ) -> WaitForSums:
        """Add up the gradients of all micro-batches of all processes, clip the sum, and update the variables.

        With an `update_loss`, all micro-batches are first computed without gradients, except for the last one. After the
        loss is known, all but the last one are computed again with gradients and the same dropout (GradCache, Gao et al.,
        2021).

        Args:
            micro_batches: The M micro-batches of this process.
            dropout_seeds_M2: The dropout seed of each micro-batch, int32 [M, 2].
            loss_factors_M2: The factors by which the two losses of each micro-batch are multiplied, float64 [M, 2]. They are
                not used with an `update_loss`.
            scalars: The learning rate and the bias corrections.
            update: The number of the update, from 1.
            update_loss: The loss over all micro-batches, if it is not a sum of their losses.

        Returns:
            A function that waits for the device and returns float32 [K + 1]: the K sums over the micro-batches of this
            process, and the gradient norm over all processes before clipping.
        """

    def copy_moments(self) -> Moments:
        """Return a copy of the moments of all variables."""

    def load_moments(self, first: WeightArrays, second: WeightArrays) -> None:
        """Set the first and second moments of all variables. Both arguments map variable names to values."""


class Engine(Protocol):
    """The functions that every engine defines in its module, `engines/<name>/engine.py`."""

    NAME: EngineName

    def connect_processes(self, settings: LoopSettings, facts: Mapping[str, Any]) -> Communicator:
        """Connect the processes that a launcher started, and return the communicator of this process. Without a launcher,
        the run has only this process.

        Args:
            settings: The settings of the training loop.
            facts: Values that must be equal in all processes, such as the model and the identity of the data. They are
                compared when the processes begin to be watched.

        Raises:
            InputError: The software for several processes is missing, or the launcher was used wrongly.
            FailedError: The processes cannot connect.
        """

    def open_device(self, settings: LoopSettings, threads: int | None = None) -> Device:
        """Open the device that the settings specify. Call this after `connect_processes` and before any model is built.

        Args:
            settings: The settings of the training loop.
            threads: The number of CPU threads of an operation. None for the default.

        Raises:
            InputError: The device is not available, or does not support the settings.
        """

    def build_model(
        self,
        spec: ModelSpec,
        device: Device | None = None,
        *,
        seed: int | None,
        compute_dtype: ComputeDtype | None = None,
        compiled: bool = False,
    ) -> Model:
        """Build a model with its head on a device, and return it.

        For a BERT, the initial value of a variable depends only on its name and the seed, and is the same in every engine.

        Args:
            spec: The model.
            device: The device. None for the CPU in float32.
            seed: The seed of the initial values. None if weights will be loaded.
            compute_dtype: The dtype of the matrix products. None for that of the device.
            compiled: Whether the model is compiled.
        """

    def create_updates(
        self, model: Any, settings: LoopSettings, communicator: Communicator, accumulation_steps: int
    ) -> Updates:
        """Return an object that trains a model with the chosen optimizer. The optimizer's moments start at zero.

        Args:
            model: A model of this engine.
            settings: The settings of the training loop.
            communicator: The processes of the run.
            accumulation_steps: The maximum number of micro-batches in an update on one process.
        """
