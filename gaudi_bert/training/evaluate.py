"""Stage evaluate: a checkpoint's losses and accuracies on held-out data, next to the unigram baseline.

The data may be packed or not; given both, the figures must be the same, and their largest difference is stored.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from gaudi_bert.artefacts.completion import Signature, begin_artefact
from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.artefacts.store.mirrored_folder import mirrored, shown_path
from gaudi_bert.artefacts.training import EvaluationFigures, EvaluationResult
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import section_from_mapping
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.config.values import Engine as EngineChoice
from gaudi_bert.engines.choose import choose_engine, load_engine
from gaudi_bert.engines.protocol import Communicator, Device, Engine, ModelSpec
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.heads import PretrainingHead
from gaudi_bert.training.checkpoint import Checkpoint, checkpoint_identity, find_checkpoint, read_checkpoint
from gaudi_bert.training.evaluator import PretrainingEvaluator
from gaudi_bert.training.input.source import DataSource, check_fits
from gaudi_bert.training.stored_inputs import local_weights, open_data

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
    engine: EngineChoice = "auto",
) -> StageOutput[EvaluationResult]:
    """Evaluate a checkpoint.

    The newest checkpoint of a run's folder is taken. Data may be packed or not; with `unpacked`, the same sequences
    unpacked, both are evaluated and compared. The figures also go to the JSON file `out`.

    Returns:
        The figures, and whether `out` held them already: the same in every process.
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
    """Evaluate a checkpoint, unless `out` holds its figures on these data already."""
    chosen = choose_engine(requested, key="--engine")
    engine = load_engine(chosen.name)
    communicator = engine.connect(TrainingSettings())
    reporter = reporter if communicator.is_first else Reporter(quiet=True)
    stored = _read(file)
    settings = section_from_mapping(TrainingSettings, stored.settings["training"], str(file))
    reporter.say(f"evaluate: {chosen.line()}")
    # In float32, whatever it was trained in and on.
    device = engine.open_device(
        settings.model_copy(update={"device": "auto", "precision": "float32"}), None, settings.threads
    )
    with communicator.watched(settings) as watched:
        inputs = {"checkpoint": checkpoint_identity(file), "data": [source.identity for source in sources]}
        # An evaluation of another checkpoint or of other data is useless now: it is replaced without --overwrite.
        signature = Signature("evaluate", {}, inputs)
        if out is not None and watched.from_first(lambda: begin_artefact(out, out, signature, overwrite=True)):
            reporter.say(f"{shown_path(out)}: already evaluated, nothing to do")
            return StageOutput(watched.from_first(lambda: EvaluationResult.read(out)), skipped=True)
        result = _evaluate(stored, settings, sources, engine, device, watched, reporter)
        if out is not None and watched.is_first:
            result.write(out)
    return StageOutput(result)


def _read(file: Path) -> Checkpoint:
    stored = read_checkpoint(file)
    if not {"model", "training"} <= stored.settings.keys():
        raise InputError(f"{file}: holds no model and training settings; use a checkpoint that `train` wrote")
    return stored


def _evaluate(
    stored: Checkpoint,
    settings: TrainingSettings,
    sources: list[DataSource],
    engine: Engine,
    device: Device,
    communicator: Communicator,
    reporter: Reporter,
) -> EvaluationResult:
    """The figures of a checkpoint on one source, or on two that must agree."""
    config = BertConfig.from_json(stored.settings["model"])
    model = engine.build(ModelSpec(config, PretrainingHead(settings.loss)), device, seed=None)
    model.load_values(stored.variables)
    evaluations = []
    for source in sources:
        check_fits(source, config)
        packs = settings.micro_batch_packs
        evaluator = PretrainingEvaluator(model, config, source, communicator, batch_packs=packs)
        evaluations.append(evaluator.run())
        reporter.say(f"evaluate: {shown_path(source.path)}: {evaluations[-1].line()}")
    unpacked, difference = None, None
    if len(evaluations) > 1:
        unpacked = evaluations[1]
        difference = _compare(evaluations[0], evaluations[1], f"{sources[0].path} and {sources[1].path}")
        reporter.say(f"evaluate: packed and unpacked figures differ by at most {difference:.1e}")
    return EvaluationResult(
        update=stored.update,
        loss_per=settings.loss,
        **dict(evaluations[0]),
        unpacked=unpacked,
        largest_difference=difference,
    )


def _compare(one: EvaluationFigures, other: EvaluationFigures, what: str) -> float:
    """The largest difference of any figure; counts must be equal, so theirs weighs as it is."""
    values = other.as_json()
    difference = max(abs(value - values[name]) for name, value in one.as_json().items())
    if difference > LARGEST_DIFFERENCE:
        raise FailedError(
            f"{what}: their figures differ by {difference:g}, rounding is {LARGEST_DIFFERENCE:g}; "
            "`gaudi-bert verify` tells whether they are the same sequences"
        )
    return difference
