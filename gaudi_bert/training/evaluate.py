"""Stage evaluate: compute the losses and accuracies of a checkpoint on held-out data, packed or unpacked.

Loss sums and weights are added in float64 over all records and divided once, so that every masked token and every sequence
has the same weight. The last batch is padded with packs of weight zero. Each accuracy is reported with a baseline, which is
the accuracy of the best constant prediction on the same data. For masked tokens, this *unigram baseline* is the frequency of
the most frequent token. If packed and unpacked data are both given, their metrics must agree, and the largest difference is
stored.

`EvaluationSet` is also what a training run evaluates between its updates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from gaudi_bert.artefacts.completion import Signature, begin_artefact_unless_finished
from gaudi_bert.artefacts.mirrored_folder import format_path, mirror_folder
from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.artefacts.training import EvaluationMetrics, EvaluationResult
from gaudi_bert.common.arrays import AnyArray, Float32Array, FloatArray
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import section_from_mapping
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.config.values import Engine as EngineChoice
from gaudi_bert.engines import choose_engine, load_engine
from gaudi_bert.engines.protocol import Communicator, Model, ModelSpec
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.heads import PretrainingHead
from gaudi_bert.training.batches import Batch, read_evaluation_batches
from gaudi_bert.training.checkpoint import find_checkpoint, read_checkpoint, read_checkpoint_identity
from gaudi_bert.training.objective import Evaluation, PretrainingObjective
from gaudi_bert.training.sources import RecordSource, check_records_fit_model, open_records
from gaudi_bert.training.weights import open_local_weights

# The largest allowed difference between the metrics of packed and of unpacked data. Both add the same float32 terms, but in
# different orders, so rounding errors differ.
_LARGEST_DIFFERENCE = 1e-4


def evaluate(
    data: Path,
    checkpoint: Path,
    *,
    reporter: Reporter,
    unpacked: str | Path | None = None,
    out: Path | None = None,
    store: StoreSettings | None = None,
    engine: EngineChoice = "auto",
) -> StageOutput[EvaluationResult]:
    """Evaluate a checkpoint on held-out data, and return the metrics.

    Args:
        data: Packed or unpacked records, on a disk or in an object store.
        checkpoint: A checkpoint file, or the folder of a run, whose newest checkpoint is evaluated.
        reporter: Shows progress and results.
        unpacked: The same sequences without packing. If given, both are evaluated and their metrics are compared.
        out: A JSON file for the metrics. If it already contains the metrics of this checkpoint and data, they are not
            computed again.
        store: The settings of the object store.
        engine: The engine that computes, or "auto".

    Returns:
        The metrics, which are the same in every process.

    Raises:
        InputError: The checkpoint or the data cannot be read, or the data does not fit the model.
        FailedError: The metrics of packed and unpacked data differ by more than rounding.
    """
    with (
        open_local_weights(checkpoint, store) as weights,
        mirror_folder(Path(out or "").parent, store) as folder,
        ExitStack() as stack,
    ):
        sources = [stack.enter_context(open_records(each, store)) for each in (data, unpacked) if each is not None]
        return _evaluate_checkpoint(find_checkpoint(weights), sources, out and folder / Path(out).name, engine, reporter)


def _evaluate_checkpoint(
    checkpoint_file: Path, sources: list[RecordSource], out: Path | None, requested_engine: EngineChoice, reporter: Reporter
) -> StageOutput[EvaluationResult]:
    """Evaluate a checkpoint on one or two record sources, and return the metrics.

    The metrics of two sources must agree. If `out` already contains the metrics, they are read from it instead.
    """
    chosen = choose_engine(requested_engine, setting_name="--engine")
    engine = load_engine(chosen.name)
    inputs = {"checkpoint": read_checkpoint_identity(checkpoint_file), "data": [source.identity for source in sources]}
    communicator = engine.connect_processes(TrainingSettings(), inputs)
    reporter = reporter if communicator.is_first else Reporter(quiet=True)
    stored = read_checkpoint(checkpoint_file)
    if not {"model", "training"} <= stored.settings.keys():
        raise InputError(
            f"{checkpoint_file}: the checkpoint does not contain the settings of a model and its training; pass a "
            "checkpoint that `train` wrote"
        )
    settings = section_from_mapping(TrainingSettings, stored.settings["training"], str(checkpoint_file))
    reporter.say(f"evaluate: {chosen.format_choice()}")
    # Metrics must not depend on the precision or the device that was used for training, so always compute in float32.
    device = engine.open_device(settings.model_copy(update={"device": "auto", "precision": "float32"}), settings.threads)
    with communicator.watch_processes_during_block(settings) as watched:
        # The output file may contain metrics of another checkpoint or of other data. Replace them even without --overwrite.
        signature = Signature("evaluate", {}, inputs)
        if out is not None and watched.run_on_first_process(
            lambda: begin_artefact_unless_finished(out, out, signature, overwrite=True)
        ):
            reporter.say(f"{format_path(out)}: already evaluated; nothing to do")
            return StageOutput(watched.run_on_first_process(lambda: EvaluationResult.read(out)), skipped=True)
        config = BertConfig.from_json(stored.settings["model"])
        model = engine.build_model(ModelSpec(config, PretrainingHead(settings.loss)), device, seed=None)
        model.load_variables(stored.variables)
        model.freeze()
        evaluations = []
        for source in sources:
            check_records_fit_model(source, config)
            evaluations.append(RecordsEvaluation(source, config, settings.micro_batch_packs).evaluate_model(model, watched))
            reporter.say(f"evaluate: {format_path(source.path)}: {evaluations[-1].format_line()}")
        packed, *unpacked = evaluations
        difference = _check_agreement(packed, unpacked[0], sources) if unpacked else None
        result = EvaluationResult(
            update=stored.update,
            loss_per=settings.loss,
            **dict(packed),
            unpacked=unpacked[0] if unpacked else None,
            largest_difference=difference,
        )
        if out is not None and watched.is_first:
            result.write(out)
    if difference is not None:
        reporter.say(f"evaluate: the metrics of packed and unpacked data differ by at most {difference:.1e}")
    return StageOutput(result)


def _check_agreement(packed: EvaluationMetrics, unpacked: EvaluationMetrics, sources: list[RecordSource]) -> float:
    """Check that the metrics of packed and unpacked data agree. Return their largest absolute difference.

    Counts are compared like all other metrics, so that counts that differ by one already fail.

    Raises:
        FailedError: The difference is larger than rounding explains.
    """
    values = unpacked.as_json()
    difference: float = max(abs(value - values[name]) for name, value in packed.as_json().items())
    if difference > _LARGEST_DIFFERENCE:
        raise FailedError(
            f"{sources[0].path} and {sources[1].path}: the metrics differ by {difference:g}, but rounding explains at most "
            f"{_LARGEST_DIFFERENCE:g}; run `gaudi-bert verify` to check whether both contain the same sequences"
        )
    return difference


# --- Evaluating one model on one data set, also between the updates of a training run
#
# Each process evaluates some of the batches. The sums of all processes are added and divided once, because a mean of the
# processes' means would give wrong weights. If a head keeps outputs, each process writes its outputs at their positions in
# an array that is zero elsewhere. The sum of these arrays over the processes contains all outputs in the order of the data.


# A batch and the function that stores its outputs. This function copies the outputs of the batch, its first argument, into
# an array of all outputs, its second argument. If an evaluation does not need the outputs, None replaces the function.
EvaluationBatch = tuple[Batch, Callable[[Float32Array, Float32Array], None] | None]

_OUTPUTS_AT_ONCE = 8192
E = TypeVar("E", bound=Evaluation, covariant=True)


class EvaluationSet(ABC, Generic[E]):
    """A data set for evaluating models, such as the held-out data of a run.

    Every sequence is counted exactly once, for any number of processes.
    """

    @property
    @abstractmethod
    def metric_sum_count(self) -> int:
        """The number of values that an evaluation sums over all batches. The values from the model head come first, followed
        by those from `count_labels`.
        """

    @abstractmethod
    def read_batches(self, rank: int, world_size: int) -> Iterable[EvaluationBatch]:
        """Return the batches that process `rank` of `world_size` evaluates."""

    def count_labels(self, batch: Batch) -> FloatArray:
        """Count how often each label occurs in a batch. By default, return an empty array.

        The counts are float64, and are added over all batches.
        """
        return np.zeros(0)

    def allocate_outputs(self) -> Float32Array | None:
        """Return a zero array for the model outputs of all sequences or tokens. Return None if the metrics are computed only
        from values that are summed over all batches.
        """
        return None

    @abstractmethod
    def compute_metrics(self, totals: FloatArray, outputs: Float32Array | None) -> E:
        """Compute the metrics of the complete data set from the summed values and the model outputs of all processes."""

    def evaluate_model(self, model: Model, communicator: Communicator) -> E:
        """Evaluate a model on this data set, and return its metrics.

        Every process calls this at the same time, and returns the same metrics.
        """
        totals, outputs = np.zeros(self.metric_sum_count, np.float64), self.allocate_outputs()
        for number, (batch, scatter) in enumerate(self.read_batches(communicator.rank, communicator.size)):
            communicator.record_activity("an evaluation", slow=number == 0)
            values, sums = model.evaluate_batch(batch)
            totals += np.concatenate([sums.astype(np.float64), self.count_labels(batch)])
            if outputs is not None and values is not None and scatter is not None:
                scatter(values, outputs)
        totals = communicator.sum_array(totals)
        if outputs is not None and communicator.size > 1:
            for first in range(0, len(outputs), _OUTPUTS_AT_ONCE):  # in parts, because each is copied to float64
                part = slice(first, first + _OUTPUTS_AT_ONCE)
                outputs[part] = communicator.sum_array(outputs[part])
        return self.compute_metrics(totals, outputs)


def compute_majority_baseline(label_counts: FloatArray) -> float:
    """Return the accuracy of always predicting the most frequent label.

    Args:
        label_counts: float64 [labels], how often each label occurs.

    Returns:
        A number from 0 to 1. It is 0 if there are no labels.
    """
    total = label_counts.sum()
    return float(label_counts.max() / total) if total else 0.0


def count_values(values: AnyArray, weights: AnyArray, value_count: int) -> FloatArray:
    """Count how often each integer occurs in `values`, considering only elements with a positive weight.

    Args:
        values: Integers from 0 to `value_count` - 1.
        weights: An array of the same shape.
        value_count: The number of possible values.

    Returns:
        float64 [value_count].
    """
    return np.bincount(values[weights > 0], minlength=value_count).astype(np.float64)


@dataclass(frozen=True)
class RecordsEvaluation(EvaluationSet[EvaluationMetrics]):
    """Evaluates a model on packed or unpacked pretraining records.

    Attributes:
        source: The records, packed or unpacked.
        config: The config of the model.
        batch_packs: The number of packs in a batch.
        max_packs: Evaluate only this many packs from the beginning, or all packs if None.
    """

    source: RecordSource
    config: BertConfig
    batch_packs: int
    max_packs: int | None = None

    @property
    def metric_sum_count(self) -> int:
        """The number of values that are summed over all evaluation batches, such as losses and the counts of labels.

        There are 8 sums of `PretrainingObjective`, 2 counts of next-sentence labels, and 1 count for each token of the
        vocabulary.
        """
        return 8 + 2 + self.config.vocab_size

    def read_batches(self, rank: int, world_size: int) -> Iterator[EvaluationBatch]:
        """Return the batches that process `rank` of `world_size` evaluates.

        All processes together read every record once. The last batch is padded with empty packs.
        """
        batches = read_evaluation_batches(self.source, self.config, self.batch_packs, rank, world_size, self.max_packs)
        return ((batch, None) for batch in batches)

    def count_labels(self, batch: Batch) -> FloatArray:
        """Count how often each next-sentence label and each masked token id occurs in a batch.

        Returns float64 [2 + vocabulary size].
        """
        sentences = count_values(batch["next_sentence_labels"], batch["next_sentence_weights"], 2)
        return np.concatenate(
            [sentences, count_values(batch["masked_lm_ids"], batch["masked_lm_weights"], self.config.vocab_size)]
        )

    def compute_metrics(self, totals: FloatArray, outputs: Float32Array | None) -> EvaluationMetrics:
        """Compute the losses, the accuracies and their baselines from values that were summed over all records.

        Raises:
            InputError: The data contains no sequences.
        """
        sums, next_counts, token_counts = np.split(totals, [8, 10])
        if not next_counts.any():
            raise InputError(f"{self.source.path}: the data contains no sequence to evaluate on; prepare more text")
        return EvaluationMetrics(
            **dict(PretrainingObjective().compute_metrics(sums)),
            unigram_baseline=compute_majority_baseline(token_counts),
            next_sentence_baseline=compute_majority_baseline(next_counts),
            sequences=int(next_counts.sum()),
            masked_tokens=int(token_counts.sum()),
        )
