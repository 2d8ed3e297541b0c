"""Stage evaluate: a checkpoint's losses and accuracies on held-out data, beside the unigram baseline.

The data may be packed or not; given both, the same figures must come out, and how far they are apart is told.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gaudi_bert.artefacts.completion import Signature
from gaudi_bert.artefacts.store.mirror import mirror
from gaudi_bert.artefacts.store.workplace import Workplace, begin_in, workplace
from gaudi_bert.artefacts.training import EvaluationResult, read_evaluation, write_evaluation
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import StoreSettings, TrainingSettings
from gaudi_bert.stages.training.model_results import EvaluateResult
from gaudi_bert.stages.training.stored_inputs import open_data, weights_here

if TYPE_CHECKING:
    from gaudi_bert.training.checkpoint import Checkpoint
    from gaudi_bert.training.distributed.communicator import Communicator
    from gaudi_bert.training.evaluate import Evaluation
    from gaudi_bert.training.input.source import DataSource

__all__ = ["evaluate"]

# Packed and unpacked figures are sums of the same float32 terms in another order.
LARGEST_DIFFERENCE = 1e-4


def evaluate(
    data: Path,
    checkpoint: Path,
    *,
    reporter: Reporter,
    unpacked: str | Path | None = None,
    out: Path | None = None,
    store: StoreSettings | None = None,
) -> EvaluateResult | None:
    """Evaluate a checkpoint.

    Args:
        data: a packed folder, or unpacked records.
        checkpoint: a checkpoint, or a folder that `train` made (its newest checkpoint is taken).
        reporter: where progress goes.
        unpacked: the same sequences unpacked: evaluated too, and compared.
        out: a JSON file to write the figures to.
        store: how object stores are reached, where a path is a URL.

    Returns:
        What was found, and whether `out` held it already; None in all processes but the first.

    Raises:
        InputError: no whole checkpoint is there, or the data does not fit the model.
        FailedError: packed and unpacked figures differ.
    """
    with mirror(store, (data, checkpoint, unpacked)) as copies, workplace(Path(out or "").parent, store) as place:
        return _evaluate_here(
            weights_here(checkpoint, copies),
            [open_data(each, copies) for each in (data, unpacked) if each is not None],
            place,
            None if out is None else place.folder / Path(out).name,
            reporter,
        )


def _evaluate_here(
    checkpoint: Path, sources: list[DataSource], place: Workplace, out: Path | None, reporter: Reporter
) -> EvaluateResult | None:
    from gaudi_bert.training.checkpoint import checkpoint_identity, find_checkpoint
    from gaudi_bert.training.device import open_device
    from gaudi_bert.training.distributed.connect import connect

    file = find_checkpoint(checkpoint)
    communicator = connect(TrainingSettings())
    reporter = reporter if communicator.is_first else Reporter(quiet=True)
    stored = _read(file)
    settings = TrainingSettings.model_validate(stored.settings["training"])
    open_device("auto", "float32", settings.threads)
    with communicator.watched(settings) as watched:
        inputs = {"checkpoint": checkpoint_identity(file), "data": [source.identity for source in sources]}
        # An evaluation of another checkpoint or of other data is of no use any more: it is replaced without being asked.
        signature = Signature("evaluate", {}, inputs)
        file_out = out if communicator.is_first else None
        finished = file_out is not None and begin_in(place, file_out, file_out, signature, overwrite=True)
        if watched.any_true(finished):
            reporter.say(f"{out}: already evaluated, nothing to do")
            return EvaluateResult(read_evaluation(file_out), skipped=True) if file_out is not None else None
        result = _evaluate(stored, settings, sources, watched, reporter)
        if file_out is not None:
            write_evaluation(file_out, result)
            place.put(file_out)
    return EvaluateResult(result) if communicator.is_first else None


def _read(file: Path) -> Checkpoint:
    from gaudi_bert.training.checkpoint import read_checkpoint

    stored = read_checkpoint(file)
    if not {"model", "training"} <= stored.settings.keys():
        raise InputError(f"{file}: holds no model and training settings; use a checkpoint that `train` wrote")
    return stored


def _evaluate(
    stored: Checkpoint,
    settings: TrainingSettings,
    sources: list[DataSource],
    communicator: Communicator,
    reporter: Reporter,
) -> EvaluationResult:
    """The figures of a checkpoint on one source, or on two that must agree."""
    measure = _measure_with(stored, settings, communicator)
    evaluations = []
    for source in sources:
        evaluations.append(measure(source))
        reporter.say(f"evaluate: {source.path}: {evaluations[-1].line()}")
    figures = [evaluation.as_figures() for evaluation in evaluations]
    unpacked, difference = None, None
    if len(evaluations) > 1:
        unpacked = figures[1]
        difference = _compare(evaluations[0], evaluations[1], f"{sources[0].path} and {sources[1].path}")
        reporter.say(f"evaluate: packed and unpacked figures differ by at most {difference:.1e}")
    return EvaluationResult(
        update=stored.update,
        loss_per=settings.loss,
        **dict(figures[0]),
        unpacked=unpacked,
        largest_difference=difference,
    )


def _measure_with(
    stored: Checkpoint, settings: TrainingSettings, communicator: Communicator
) -> Callable[[DataSource], Evaluation]:
    """The function that evaluates the stored model on data; in float32, whatever it was trained in."""
    from gaudi_bert.model.bert import BertForPretraining
    from gaudi_bert.model.config import BertConfig
    from gaudi_bert.training.evaluate import Evaluator
    from gaudi_bert.training.input.source import check_fits

    config = BertConfig.from_json(stored.settings["model"])
    model = BertForPretraining(config, seed=0)
    model.load_values(stored.variables)

    def measure(source: DataSource) -> Evaluation:
        check_fits(source, config)
        evaluator = Evaluator(model, source, communicator, loss=settings.loss, batch_packs=settings.micro_batch_packs)
        return evaluator.run()

    return measure


def _compare(one: Evaluation, other: Evaluation, what: str) -> float:
    """The largest difference of any figure; counts must be equal, so theirs weighs as it is."""
    values = other.as_json()
    difference = max(abs(value - values[name]) for name, value in one.as_json().items())
    if difference > LARGEST_DIFFERENCE:
        raise FailedError(
            f"{what}: their figures differ by {difference:g}, rounding is {LARGEST_DIFFERENCE:g}; "
            "`gaudi-bert verify` tells whether they are the same sequences"
        )
    return difference
