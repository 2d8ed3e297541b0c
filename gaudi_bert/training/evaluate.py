"""Stage evaluate: how good a checkpoint is on held-out data, exactly weighted, packed or not.

Sums and weights are added in float64 over every record (the last batch is filled up with packs of weight zero) and divided
once. Each accuracy comes with a baseline, the accuracy of the best constant answer on this very set: for masked tokens the
*unigram baseline*, the share of the most frequent one. Given packed and unpacked data, the figures must be the same, and
their largest difference is stored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from gaudi_bert.artefacts.completion import Signature, begin_artefact
from gaudi_bert.artefacts.mirrored_folder import mirrored, shown_path
from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.artefacts.training import EvaluationFigures, EvaluationResult
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
from gaudi_bert.training.checkpoint import checkpoint_identity, find_checkpoint, read_checkpoint
from gaudi_bert.training.input import Batch, DataSource, check_fits, evaluation_batches, open_data
from gaudi_bert.training.objective import Evaluation, PretrainingObjective
from gaudi_bert.training.weights import local_weights

# Packed and unpacked figures are sums of the same float32 terms in another order.
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
    """Evaluate a checkpoint, of a run's folder the newest; the same figures in every process.

    With `unpacked`, the same sequences unpacked, both are evaluated and compared. The figures also go to the JSON file
    `out`; those that it holds already are not computed again.
    """
    with (
        local_weights(checkpoint, store) as weights,
        mirrored(Path(out or "").parent, store) as folder,
        ExitStack() as stack,
    ):
        sources = [stack.enter_context(open_data(each, store)) for each in (data, unpacked) if each is not None]
        return _evaluate_once(find_checkpoint(weights), sources, out and folder / Path(out).name, engine, reporter)


def _evaluate_once(
    file: Path, sources: list[DataSource], out: Path | None, requested: EngineChoice, reporter: Reporter
) -> StageOutput[EvaluationResult]:
    """Evaluate a checkpoint on one source, or on two that must agree, unless `out` holds the figures already."""
    chosen = choose_engine(requested, key="--engine")
    engine = load_engine(chosen.name)
    inputs = {"checkpoint": checkpoint_identity(file), "data": [source.identity for source in sources]}
    communicator = engine.connect(TrainingSettings(), inputs)
    reporter = reporter if communicator.is_first else Reporter(quiet=True)
    stored = read_checkpoint(file)
    if not {"model", "training"} <= stored.settings.keys():
        raise InputError(f"{file}: holds no model and training settings; use a checkpoint that `train` wrote")
    settings = section_from_mapping(TrainingSettings, stored.settings["training"], str(file))
    reporter.say(f"evaluate: {chosen.line()}")
    # In float32, whatever it was trained in and on.
    device = engine.open_device(settings.model_copy(update={"device": "auto", "precision": "float32"}), settings.threads)
    with communicator.watched(settings) as watched:
        # An evaluation of another checkpoint or of other data is useless now: it is replaced without --overwrite.
        signature = Signature("evaluate", {}, inputs)
        if out is not None and watched.from_first(lambda: begin_artefact(out, out, signature, overwrite=True)):
            reporter.say(f"{shown_path(out)}: already evaluated, nothing to do")
            return StageOutput(watched.from_first(lambda: EvaluationResult.read(out)), skipped=True)
        config = BertConfig.from_json(stored.settings["model"])
        model = engine.build(ModelSpec(config, PretrainingHead(settings.loss)), device, seed=None)
        model.load_values(stored.variables)
        model.freeze()
        evaluations = []
        for source in sources:
            check_fits(source, config)
            evaluations.append(RecordsEvaluation(source, config, settings.micro_batch_packs).evaluate(model, watched))
            reporter.say(f"evaluate: {shown_path(source.path)}: {evaluations[-1].line()}")
        packed, *unpacked = evaluations
        difference = _difference(packed, unpacked[0], sources) if unpacked else None
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
        reporter.say(f"evaluate: packed and unpacked figures differ by at most {difference:.1e}")
    return StageOutput(result)


def _difference(one: EvaluationFigures, other: EvaluationFigures, sources: list[DataSource]) -> float:
    """The largest difference of any figure; counts must be equal, so theirs weighs as it is."""
    values = other.as_json()
    difference: float = max(abs(value - values[name]) for name, value in one.as_json().items())
    if difference > _LARGEST_DIFFERENCE:
        raise FailedError(
            f"{sources[0].path} and {sources[1].path}: their figures differ by {difference:g}, rounding is "
            f"{_LARGEST_DIFFERENCE:g}; `gaudi-bert verify` tells whether they are the same sequences"
        )
    return difference


# --- One model on one set: also what a run evaluates between its updates
#
# The processes share the batches. Sums are added up over them and divided once, so no figure is a mean of means. Outputs,
# where a head keeps them, are put back into the order of the data and added up too: all processes but one hold zeros there.


EvaluationBatch = tuple[Batch, Callable[[Float32Array, Float32Array], None] | None]
"""A batch, and what puts the outputs of a head into those of the complete set (`EvaluationSet.outputs`)."""

_OUTPUTS_AT_ONCE = 8192
E = TypeVar("E", bound=Evaluation, covariant=True)


class EvaluationSet(ABC, Generic[E]):
    """Data that a model is evaluated on: every sequence once, whatever its pack and the number of processes."""

    @property
    @abstractmethod
    def sums(self) -> int:
        """The count of the numbers that are added up: those of the head, and behind them those that are `counted`."""

    @abstractmethod
    def batches(self, rank: int, size: int) -> Iterable[EvaluationBatch]:
        """Return the batches of one process."""

    def counted(self, batch: Batch) -> FloatArray:
        """Return what else is added up, float64."""
        return np.zeros(0)

    def outputs(self) -> Float32Array | None:
        """Zeros for the outputs of all sequences or tokens; None where none are stored."""
        return None

    @abstractmethod
    def figures(self, totals: FloatArray, outputs: Float32Array | None) -> E:
        """The result, from the sums and outputs of all processes."""

    def evaluate(self, model: Model, communicator: Communicator) -> E:
        """Evaluate a model; every process calls it at the same time."""
        totals, outputs = np.zeros(self.sums, np.float64), self.outputs()
        for number, (batch, scatter) in enumerate(self.batches(communicator.rank, communicator.size)):
            communicator.note("an evaluation", slow=number == 0)
            values, sums = model.evaluate(batch)
            totals += np.concatenate([sums.astype(np.float64), self.counted(batch)])
            if outputs is not None and values is not None and scatter is not None:
                scatter(values, outputs)
        totals = communicator.sum_array(totals)
        if outputs is not None and communicator.size > 1:
            for first in range(0, len(outputs), _OUTPUTS_AT_ONCE):  # sums travel in float64
                part = slice(first, first + _OUTPUTS_AT_ONCE)
                outputs[part] = communicator.sum_array(outputs[part])
        return self.figures(totals, outputs)


def majority_share(label_counts: FloatArray) -> float:
    """The share of the most frequent label, 0 where there is none: the accuracy of always giving that answer."""
    total = label_counts.sum()
    return float(label_counts.max() / total) if total else 0.0


def count_values(values: AnyArray, weights: AnyArray, size: int) -> FloatArray:
    """Count how often each number below `size` is among the values that have a weight, float64 [size]."""
    return np.bincount(values[weights > 0], minlength=size).astype(np.float64)


@dataclass(frozen=True)
class RecordsEvaluation(EvaluationSet[EvaluationFigures]):
    """Records of pretraining; `take_packs` limits them to the first."""

    source: DataSource
    config: BertConfig
    batch_packs: int
    take_packs: int | None = None

    @property
    def sums(self) -> int:
        """The sums of `PretrainingObjective`, both next-sentence labels, and every word."""
        return 8 + 2 + self.config.vocab_size

    def batches(self, rank: int, size: int) -> Iterator[EvaluationBatch]:
        """Every record once; the last batch is filled up."""
        batches = evaluation_batches(self.source, self.config, self.batch_packs, rank, size, self.take_packs)
        return ((batch, None) for batch in batches)

    def counted(self, batch: Batch) -> FloatArray:
        """Count each label."""
        sentences = count_values(batch["next_sentence_labels"], batch["next_sentence_weights"], 2)
        return np.concatenate(
            [sentences, count_values(batch["masked_lm_ids"], batch["masked_lm_weights"], self.config.vocab_size)]
        )

    def figures(self, totals: FloatArray, outputs: Float32Array | None) -> EvaluationFigures:
        """Both losses and accuracies, and their baselines."""
        sums, next_counts, token_counts = np.split(totals, [8, 10])
        if not next_counts.any():
            raise InputError(f"{self.source.path}: holds no sequence to evaluate on; prepare more text")
        return EvaluationFigures(
            **dict(PretrainingObjective().figures(sums)),
            unigram_baseline=majority_share(token_counts),
            next_sentence_baseline=majority_share(next_counts),
            sequences=int(next_counts.sum()),
            masked_tokens=int(token_counts.sum()),
        )
