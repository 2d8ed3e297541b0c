"""One update in PyTorch: micro-batches forward and backward, sums over processes, clipping, the optimizer.

Letters: M micro-batches, K sums of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gaudi_bert.common.arrays import BatchArrays, Float32Array, FloatArray, Int32Array, WeightArrays
from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.engines.communicator import Communicator
from gaudi_bert.engines.protocol import UpdateScalars
from gaudi_bert.engines.pytorch.distributed import TorchCommunicator
from gaudi_bert.engines.pytorch.model import TorchModel, to_numpy
from gaudi_bert.engines.pytorch.optimizers import Optimizer, clip_factor


class TorchSums:
    """Numbers that the device may not have finished."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def numpy(self) -> Float32Array:
        """Wait for them, float32 [K + 1]."""
        return to_numpy(self._tensor)


class TorchUpdates:
    """Runs updates of one model with one optimizer, each of `accumulation_steps` micro-batches on this process."""

    def __init__(
        self, model: TorchModel, settings: TrainingSettings, communicator: Communicator, accumulation_steps: int
    ) -> None:
        self._model, self._settings, self._communicator = model, settings, communicator
        self._accumulation_steps = accumulation_steps
        self._optimizer = Optimizer(model.parameters_by_name, settings, model.is_decayed)

    def run(
        self,
        micro_batches: Sequence[BatchArrays],
        seeds_M2: Int32Array,
        factors_M2: FloatArray,
        scalars: UpdateScalars,
        update: int,
    ) -> TorchSums:
        """Do one update: float32 [K + 1], the sums, and the gradient's norm over all processes before clipping."""
        model, communicator = self._model, self._communicator
        factors = torch.tensor(factors_M2, dtype=torch.float32, device=model.device)
        sums = torch.zeros(model.spec.head.sums, device=model.device)
        for number, batch in enumerate(micro_batches):
            if number:
                communicator.note(f"micro-batch {number + 1} of update {update}", slow=model.graphs_built < 2)
            loss, batch_sums = model.loss(model.tensors(batch), seeds_M2[number], factors[number])
            loss.backward()
            sums += batch_sums
        with torch.no_grad():
            gradients = {
                name: parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
                for name, parameter in model.parameters_by_name.items()
            }
            if isinstance(communicator, TorchCommunicator):
                if model.device.type != "cpu":
                    sums.cpu()  # the device may still be at it
                communicator.arrive()
                communicator.sum_tensors(list(gradients.values()), self._settings.fusion_bytes)
            factor, norm = clip_factor(list(gradients.values()), self._settings.clip_norm)
            self._optimizer.apply(gradients, scalars, factor, update)
            for parameter in model.parameters_by_name.values():
                parameter.grad = None
            return TorchSums(torch.cat([sums, norm.reshape(1)]))

    def moments(self) -> tuple[dict[str, Float32Array], dict[str, Float32Array]]:
        """A copy of the first and second moments, by variable."""
        first, second = (
            {name: to_numpy(moment).copy() for name, moment in moments.items()}
            for moments in (self._optimizer.first_moments, self._optimizer.second_moments)
        )
        return first, second

    def load_moments(self, first: WeightArrays, second: WeightArrays) -> None:
        """Set all moments."""
        for moments, values in ((self._optimizer.first_moments, first), (self._optimizer.second_moments, second)):
            for name, moment in moments.items():
                moment.copy_(torch.tensor(values[name]))

    @property
    def graphs_built(self) -> int:
        """How many graphs of forward and backward passes have been built."""
        return self._model.graphs_built
