"""What distinguishes one kind of run from the others: its data, model, objective, evaluation and result.

`run.py` contains the steps that all kinds of runs have in common. The jobs are in `gaudi_bert/runs/`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic

from gaudi_bert.artefacts.completion import Signature
from gaudi_bert.common.arrays import WeightArrays
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.sections import LoopSettings
from gaudi_bert.engines.protocol import Model, ModelSpec
from gaudi_bert.training.batches import Batch, TrainingOrder
from gaudi_bert.training.evaluate import EvaluationSet
from gaudi_bert.training.logs import MlperfLog
from gaudi_bert.training.loop import R, RunContext, TrainingLoop
from gaudi_bert.training.objective import GLOBAL, Evaluation, LossDenominators, Objective
from gaudi_bert.training.run_plan import RunPlan


@dataclass(frozen=True)
class PreparedUpdates:
    """The plan of a run's updates, and a function that returns their batches.

    Attributes:
        plan: The plan of the run.
        objective: The loss to minimize.
        make_batches: A function that returns the training batches of a process from a position on. There are at least as
            many batches as the remaining updates need.
        lines: Lines for the user that describe the model, the data and the updates.
        packing: Values of the result that describe how the training data is packed, by name.
    """

    plan: RunPlan
    objective: Objective
    make_batches: Callable[[TrainingOrder], Iterator[Batch]]
    lines: Sequence[str]
    packing: Mapping[str, Any] = field(default_factory=dict)


class Job(ABC, Generic[R]):
    """One kind of run, such as pretraining. It defines the data, the model, the objective and the result of the run.

    All input files have been read and checked when a job is created. `run_job` calls the methods in the order in which they
    are defined here.

    Attributes:
        result_type: The type of the result. Its file is written last.
        evaluates_first: Whether the model is also evaluated before the first update.
        section: The settings of the training loop.
        spec: The config of the model, and its head.
        signature: Everything that the result depends on.
        evaluation: The held-out data, or None.
        denominators: The rule by which loss sums are divided.
        initial_variables: The pretrained weights with which a new run begins, by variable name. Variables without such
            weights keep their random initial values.
        checkpoint_settings: Values that checkpoints contain in addition to the model config and the settings of the loop.
    """

    result_type: type[R]
    evaluates_first: ClassVar[bool] = False
    section: LoopSettings
    spec: ModelSpec
    signature: Signature
    evaluation: EvaluationSet[Any] | None
    denominators: LossDenominators = GLOBAL
    initial_variables: WeightArrays
    checkpoint_settings: Mapping[str, Any]

    @abstractmethod
    def prepare_updates(self, processes: int, processes_at_start: int) -> PreparedUpdates:
        """Plan the updates of the run. Return the plan, and a function that reads the batches.

        This method does not change the job. It is called again if the run was begun by another number of processes, which is
        known only after the folder of the run was opened.

        Args:
            processes: The number of processes of the run.
            processes_at_start: The number of processes that began the run. It decides which packs an update contains.

        Raises:
            InputError: The data and the settings do not fit together.
        """

    def format_dry_run(self) -> list[str]:
        """Return additional lines that only a dry run prints."""
        return []

    def begin_run(self, run: RunContext[R], plan: RunPlan, model: Model) -> MlperfLog | None:
        """Prepare the run, for example by opening an MLPerf log. Called after the model was built and before weights are
        loaded.

        Returns:
            The MLPerf log of the run, or None.
        """
        return None

    def load_initial_weights(self, model: Model, reporter: Reporter) -> None:
        """Load the weights with which a new run begins.

        Only the first process calls this.
        """
        model.load_values(self.initial_variables)

    def handle_evaluation(self, run: RunContext[R], model: Model, update: int, evaluation: Evaluation) -> None:
        """Handle the metrics of an evaluation after update `update`, for example by saving the best weights.

        Every process calls this.
        """

    @abstractmethod
    def finish_run(self, loop: TrainingLoop, updates: PreparedUpdates) -> R:
        """Write the remaining files to the folder of the run, and return the result.

        Every process calls this.
        """
