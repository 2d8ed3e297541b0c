"""Stage evaluate: a checkpoint's losses and accuracies on held-out data, beside the unigram baseline.

The data may be packed or not; given both, the same figures must come out, and how far they are apart is told.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import write_json
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import TrainingSettings

if TYPE_CHECKING:
    from gaudi_bert.training.checkpoint import Checkpoint
    from gaudi_bert.training.evaluate import Evaluation

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
) -> dict[str, Any]:
    """Evaluate a checkpoint.

    Args:
        data: a packed folder, or unpacked records.
        checkpoint: a checkpoint, or a folder that `train` made (its newest checkpoint is taken).
        reporter: where progress goes.
        unpacked: the same sequences unpacked: evaluated too, and compared.
        out: a JSON file to write the figures to.

    Returns:
        `update`, the figures of `Evaluation.as_json`, and with `unpacked` its figures and the largest difference.

    Raises:
        InputError: no whole checkpoint is there, or the data does not fit the model.
        FailedError: packed and unpacked figures differ.
    """
    from gaudi_bert.training.checkpoint import find_checkpoint, read_checkpoint

    file = find_checkpoint(checkpoint)
    stored = read_checkpoint(file)
    if not {"model", "training"} <= stored.settings.keys():
        raise InputError(f"{file}: holds no model and training settings; use a checkpoint that `train` wrote")
    settings = TrainingSettings.model_validate(stored.settings["training"])
    measure = _measure_with(stored, settings)
    evaluation = measure(data)
    reporter.say(f"evaluate: {data}: {evaluation.line()}")
    result: dict[str, Any] = {"update": stored.update, "loss_per": settings.loss, **evaluation.as_json()}
    if unpacked is not None:
        other = measure(unpacked)
        reporter.say(f"evaluate: {unpacked}: {other.line()}")
        difference = _compare(evaluation, other, f"{data} and {unpacked}")
        reporter.say(f"evaluate: packed and unpacked figures differ by at most {difference:.1e}")
        result.update(unpacked=other.as_json(), largest_difference=difference)
    if out is not None:
        write_json(Path(out), result)
    return result


def _measure_with(stored: Checkpoint, settings: TrainingSettings) -> Callable[[str | Path], Evaluation]:
    """The function that evaluates the stored model on data; in float32, whatever it was trained in."""
    from gaudi_bert.training.device import open_device
    from gaudi_bert.training.distributed import connect

    communicator = connect()
    open_device("auto", "float32", settings.threads)

    from gaudi_bert.model.bert import BertForPretraining
    from gaudi_bert.model.config import BertConfig
    from gaudi_bert.training.evaluate import Evaluator
    from gaudi_bert.training.source import check_fits, open_source

    config = BertConfig.from_json(stored.settings["model"])
    model = BertForPretraining(config, seed=0)
    model.load_values(stored.variables)

    def measure(data: str | Path) -> Evaluation:
        source = open_source(data)
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
