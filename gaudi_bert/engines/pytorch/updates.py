"""Updates in PyTorch: forward and backward passes of micro-batches, sums over processes, clipping, and the optimizer.

Gradients are added over the micro-batches, and then over the processes, which begins during the last backward pass
(`distributed.GradientReducer`). The complete gradient is clipped once.

Letters in shapes: M micro-batches, K sums of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from gaudi_bert.common.arrays import BatchArrays, FloatArray, Int32Array, WeightArrays
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import LoopSettings
from gaudi_bert.encoders.pack_inputs import upcast_to_float32
from gaudi_bert.engines.protocol import Communicator, Moments, UpdateLoss, UpdateScalars, WaitForSums
from gaudi_bert.engines.pytorch.distributed import GradientReducer, TorchCommunicator
from gaudi_bert.engines.pytorch.model import TorchModel, prefetch_to_device, to_numpy


class TorchUpdates:
    """Trains one model with one optimizer, one update of the variables at a time.

    Args:
        model: The model.
        settings: The settings of the training loop.
        communicator: The processes of the run.
        accumulation_steps: Not used by this engine.
    """

    def __init__(
        self, model: TorchModel, settings: LoopSettings, communicator: Communicator, accumulation_steps: int
    ) -> None:
        del accumulation_steps  # not needed, because updates with any number of micro-batches run in the same way
        self._model, self._settings, self._communicator = model, settings, communicator
        self._lengths: set[int] = set()
        self._has_run = False  # the first update compiles the graphs
        self._optimizer = _Optimizer(model.parameters_by_name, settings, model.has_weight_decay)
        self._gradient_reducer = None
        if isinstance(communicator, TorchCommunicator):
            self._gradient_reducer = GradientReducer(list(model.parameters_by_name.values()), settings.fusion_bytes)

    def run_update(
        self,
        micro_batches: Sequence[BatchArrays],
        dropout_seeds_M2: Int32Array,
        loss_factors_M2: FloatArray,
        scalars: UpdateScalars,
        update: int,
        update_loss: UpdateLoss | None = None,
    ) -> WaitForSums:
        """Add up gradients, clip them, and update the variables. See `engines/protocol.Updates.run_update`.

        Raises:
            InputError: An operation of the model has no deterministic kernel, but `deterministic` is true.
        """
        model, communicator = self._model, self._communicator
        try:
            if update_loss is None:
                sums = self._accumulate_gradients(micro_batches, dropout_seeds_M2, loss_factors_M2, update)
            else:
                sums = self._accumulate_gradients_in_two_passes(micro_batches, dropout_seeds_M2, update_loss, update)
        except RuntimeError as error:
            if "use_deterministic_algorithms" not in str(error):
                raise
            reason = " ".join(str(error).split(", but you set")[0].split())
            raise InputError(f"{self._settings.section_name}.deterministic = true: {reason}; set it to false") from error
        with torch.no_grad():
            if self._gradient_reducer is not None:
                if model.device.type != "cpu":
                    sums.cpu()  # waits until the device has finished the passes
                communicator.record_waiting_for_others()
                self._gradient_reducer.wait_for_sums()
            gradients = {
                name: parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
                for name, parameter in model.parameters_by_name.items()
            }
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in gradients.values()]))
            most = self._settings.clip_norm  # maximum of the joint norm, or 0 for no clipping
            clip_factor = torch.ones_like(norm) if most == 0 else most / norm.clamp(min=most)
            self._optimizer.apply_gradients(gradients, scalars, clip_factor, update)
            for parameter in model.parameters_by_name.values():
                parameter.grad = None
            if (
                communicator.size > 1 and model.persistent_buffers()
            ):  # each process may have changed its buffers in another way
                buffers = {name: to_numpy(buffer) for name, buffer in model.persistent_buffers().items()}
                model.load_variables(communicator.broadcast(buffers))
            self._has_run = True
            return partial(to_numpy, torch.cat([sums, norm.reshape(1)]))

    def _accumulate_gradients(
        self, micro_batches: Sequence[BatchArrays], dropout_seeds_M2: Int32Array, loss_factors_M2: FloatArray, update: int
    ) -> Tensor:
        """Run the forward and backward passes of all micro-batches. Return the sums over these micro-batches that give the
        loss and the metrics.

        The gradients of the micro-batches are added up in the `grad` attributes of the parameters.
        """
        model = self._model
        factors = torch.tensor(loss_factors_M2, dtype=torch.float32, device=model.device)
        sums = torch.zeros(model.spec.head.sums, device=model.device)
        for number, batch in enumerate(
            prefetch_to_device(map(model.validate_and_extend_batch, micro_batches), model.device)
        ):
            self._report_to_watchdog(number, update, batch)
            loss, batch_sums = model.compute_loss(batch, dropout_seeds_M2[number], factors[number])
            if self._gradient_reducer is not None and number == len(micro_batches) - 1:
                self._gradient_reducer.prepare_last_backward_pass()
            loss.backward()
            sums += batch_sums
        return sums

    def _accumulate_gradients_in_two_passes(
        self, micro_batches: Sequence[BatchArrays], dropout_seeds_M2: Int32Array, update_loss: UpdateLoss, update: int
    ) -> Tensor:
        """Accumulate the gradients of a loss that depends on the outputs of all micro-batches. Return the sums over these
        micro-batches that give the loss and the metrics.

        The last micro-batch is computed once, and all others twice. The gradients are added up in the `grad` attributes of
        the parameters.
        """
        model, batches, last = (
            self._model,
            [self._model.copy_to_device(batch) for batch in micro_batches],
            len(micro_batches) - 1,
        )
        outputs = []
        for number, batch in enumerate(batches):
            self._report_to_watchdog(number, update, batch)
            with torch.set_grad_enabled(number == last):
                outputs.append(upcast_to_float32(model.compute_training_outputs(batch, dropout_seeds_M2[number])))
        sums, gradients = update_loss([to_numpy(each) for each in outputs])
        for number in (sequence := (last, *range(last))):
            self._report_to_watchdog(number, update, batches[number])
            output = (
                outputs[last]
                if number == last
                else upcast_to_float32(model.compute_training_outputs(batches[number], dropout_seeds_M2[number]))
            )
            if self._gradient_reducer is not None and number == sequence[-1]:
                self._gradient_reducer.prepare_last_backward_pass()
            output.backward(torch.as_tensor(gradients[number], dtype=output.dtype, device=output.device))
        return torch.as_tensor(sums, dtype=torch.float32, device=model.device)

    def _report_to_watchdog(self, number: int, update: int, batch: Mapping[str, Tensor]) -> None:
        """Report to the watchdog which micro-batch begins, and whether it may take long.

        The first micro-batch of each row length may take long, because a graph may be compiled for it.
        """
        length = batch["input_ids"].shape[1]
        is_new = length not in self._lengths
        if number or (is_new and self._lengths):
            slow = is_new or not self._has_run
            self._communicator.record_activity(f"micro-batch {number + 1} of update {update}", slow=slow)
        self._lengths.add(length)

    def copy_moments(self) -> Moments:
        """Return copies of the first and second moments, by variable name."""
        first, second = (
            {name: to_numpy(moment).copy() for name, moment in moments.items()} for moments in self._optimizer.moments
        )
        return Moments(first, second)

    def load_moments(self, first: WeightArrays, second: WeightArrays) -> None:
        """Set the first and second moments of all variables."""
        for moments, values in zip(self._optimizer.moments, (first, second), strict=True):
            for name, moment in moments.items():
                moment.copy_(torch.tensor(values[name]))


# --- AdamW and LAMB, as described in `engines/tensorflow/updates.py`, and clipping
#
# On CPUs and GPUs, AdamW uses PyTorch's fused operation, which takes one pass over memory for each variable, including the
# multiplication by the clipping factor. `torch.optim.AdamW(fused=True)` calls the same operation, but creating it imports
# torch._dynamo, which takes 1.1 s of CPU time and 72 MiB in every process (torch 2.13), and `clip_grad_norm_` takes another
# pass over the gradients. On other devices, and for LAMB, the optimizer is composed of basic operations.

_FUSED_DEVICES = ("cpu", "cuda")


class _Optimizer:
    """Updates variables with AdamW or LAMB, and stores their moments.

    Args:
        variables: The variables by name.
        settings: The optimizer and its hyperparameters.
        has_weight_decay: Returns whether weight decay applies to a variable.

    Attributes:
        moments: The first and the second moments, by variable name.
    """

    def __init__(
        self, variables: Mapping[str, torch.nn.Parameter], settings: LoopSettings, has_weight_decay: Callable[[str], bool]
    ) -> None:
        self._variables, self._settings = dict(variables), settings
        self.moments: tuple[dict[str, Tensor], ...] = tuple(
            {name: torch.zeros_like(variable) for name, variable in self._variables.items()} for _ in range(2)
        )
        self._decayed = {name for name in self._variables if has_weight_decay(name)}

    def apply_gradients(
        self, gradients: Mapping[str, Tensor], scalars: UpdateScalars, clip_factor: Tensor, update: int
    ) -> None:
        """Update every variable with its gradient multiplied by `clip_factor`. The gradients may be overwritten."""
        settings = self._settings
        adapts_all = settings.layer_adaptation == "all"
        adapted = [
            name for name in self._variables if settings.optimizer == "lamb" and (adapts_all or name in self._decayed)
        ]
        plain = [name for name in self._variables if name not in set(adapted)]
        for name in adapted:
            variable, direction = (
                self._variables[name],
                self._compute_direction(name, gradients[name].mul_(clip_factor), scalars),
            )
            variable_norm, direction_norm = torch.linalg.vector_norm(variable), torch.linalg.vector_norm(direction)
            usable = (variable_norm > 0) & (direction_norm > 0)
            one = torch.ones_like(variable_norm)
            ratio = torch.where(usable, variable_norm / torch.where(usable, direction_norm, one), one)
            variable.sub_(direction.mul_(ratio * scalars.learning_rate))
        for has_decay in (True, False):
            names = [name for name in plain if (name in self._decayed) == has_decay]
            if names:
                self._apply_adamw(names, [gradients[name] for name in names], scalars, clip_factor, update, has_decay)

    def _apply_adamw(
        self,
        names: list[str],
        gradients: list[Tensor],
        scalars: UpdateScalars,
        clip_factor: Tensor,
        update: int,
        has_decay: bool,
    ) -> None:
        """Update the named variables with AdamW, with weight decay if `has_decay` is true."""
        settings, variables = self._settings, [self._variables[name] for name in names]
        if variables[0].device.type not in _FUSED_DEVICES or not hasattr(torch, "_fused_adamw_"):
            for name, gradient in zip(names, gradients, strict=True):
                direction = self._compute_direction(name, gradient.mul_(clip_factor), scalars)
                self._variables[name].sub_(direction.mul_(scalars.learning_rate))
            return
        steps = [torch.full((), float(update), device=variables[0].device) for _ in names]
        torch._fused_adamw_(
            variables,
            gradients,
            *([moments[name] for name in names] for moments in self.moments),
            [],
            steps,
            lr=scalars.learning_rate,
            beta1=settings.beta_1,
            beta2=settings.beta_2,
            weight_decay=settings.weight_decay if has_decay else 0.0,
            eps=settings.epsilon,
            amsgrad=False,
            maximize=False,
            grad_scale=1.0 / clip_factor,
        )

    def _compute_direction(self, name: str, gradient: Tensor, scalars: UpdateScalars) -> Tensor:
        """Update the moments of a variable with its gradient, and return the direction of the variable's update.

        The direction is in new memory, so the caller may change it in place.
        """
        settings, (first, second) = self._settings, (moments[name] for moments in self.moments)
        first.mul_(settings.beta_1).add_(gradient, alpha=1.0 - settings.beta_1)
        second.mul_(settings.beta_2).addcmul_(gradient, gradient, value=1.0 - settings.beta_2)
        denominator = (second * scalars.second_correction).sqrt_().add_(settings.epsilon)
        direction = torch.div(first, denominator).mul_(scalars.first_correction)
        if name in self._decayed and settings.weight_decay > 0:
            direction.add_(self._variables[name], alpha=settings.weight_decay)
        return direction
