"""Stage train on pretraining records: train a BERT on packed or unpacked records.

`training/run.py` contains the steps of a run, and lists the files in its folder. The file that is written last is
`training.json`, the result of the run. On request, the job also measures how much faster packing makes the training.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from typing_extensions import Unpack

from gaudi_bert.artefacts.base import METADATA_NAME, VocabularyInfo
from gaudi_bert.artefacts.completion import Signature
from gaudi_bert.artefacts.mirrored_folder import download_missing_files, format_path, mirror_bucket
from gaudi_bert.artefacts.packed import RecordMetadata
from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.artefacts.training import EvaluationMetrics, LossMetrics, TrainingResult
from gaudi_bert.common.arrays import AnyArray, BatchArrays
from gaudi_bert.common.files import read_text, write_json, write_text
from gaudi_bert.common.progress import Reporter, format_count
from gaudi_bert.config.options import find_preset_name
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.config.values import find_keys_changeable_on_resume
from gaudi_bert.engines.protocol import Model, ModelSpec
from gaudi_bert.model.config import BertConfig, count_parameters
from gaudi_bert.model.heads import PretrainingHead
from gaudi_bert.training.batches import TrainingOrder, read_training_batches
from gaudi_bert.training.evaluate import RecordsEvaluation
from gaudi_bert.training.logs import MlperfLog
from gaudi_bert.training.loop import RunContext, TrainingLoop
from gaudi_bert.training.objective import PretrainingObjective, make_loss_denominators
from gaudi_bert.training.run import Job, PlannedUpdates, RunOptions, run_job
from gaudi_bert.training.run_plan import DryRun, RunPlan, RunSettings, format_plan
from gaudi_bert.training.sources import RecordSource, check_records_fit_model, open_records
from gaudi_bert.training.weights import load_weights, make_bert_config, open_local_weights

_DEFAULT_MODEL = (
    "this small default model is for first experiments; pass --model bert-base, bert-large or a config.json to train another"
)
_SMALL_MODELS_RATE = " (the default for small models; BERT was published with --set training.learning_rate=1e-4)"


def train(
    settings: PipelineSettings,
    data: Path,
    evaluation_data: Path | None,
    out: Path,
    **options: Unpack[RunOptions],
) -> StageOutput[TrainingResult] | DryRun:
    """Train a BERT on pretraining records, and return the result of the run.

    Args:
        settings: The settings of the pipeline.
        data: Packed or unpacked records, on a disk or in an object store.
        evaluation_data: Records for evaluations, or None.
        out: The folder of the run.
        **options: See `RunOptions`.

    Returns:
        The result, or the plan for a dry run.

    Raises:
        InputError: The settings and the records do not fit together, or the records cannot be read.
        StoppedError: A signal requested a stop. A checkpoint has been saved.
        FailedError: The training diverged, or another process was lost.
    """
    store = settings.store
    with (
        open_records(data, store) as source,
        nullcontext() if evaluation_data is None else open_records(evaluation_data, store) as held_out,
    ):
        job = _RecordsJob(settings, data, source, held_out)
        return run_job(lambda _: job, settings, settings.training, out, is_bert=True, **options)


class _RecordsJob(Job[TrainingResult]):
    """The job that trains a BERT on pretraining records.

    Args:
        settings: The settings of the pipeline.
        data: The path of the records.
        source: The records.
        held_out: Records for evaluations, or None.

    Raises:
        InputError: The model is too small for the records.
    """

    result_type = TrainingResult
    section: TrainingSettings

    def __init__(self, settings: PipelineSettings, data: Path, source: RecordSource, held_out: RecordSource | None) -> None:
        training = self.section = settings.training
        self._settings, self._data, self._source = settings, data, source
        self._config = make_bert_config(settings.model, source.vocabulary_size, source.schema.max_sequence_length)
        for each in (source, held_out):
            if each is not None:
                check_records_fit_model(each, self._config)
        self._speedup: float | None = None
        self.spec = ModelSpec(self._config, PretrainingHead(training.loss))
        self.signature = _make_run_signature(training, self._config, source, held_out)
        self.evaluation = None
        if held_out is not None:
            self.evaluation = RecordsEvaluation(held_out, self._config, training.micro_batch_packs, training.evaluate_packs)
        self.denominators = make_loss_denominators(training, source)
        self.checkpoint_settings = {"data": asdict(source.schema)}

    def plan_weight_updates(self, processes: int, initial_processes: int) -> PlannedUpdates:
        """Divide the records into weight updates. See `Job.plan_weight_updates`.

        Raises:
            InputError: The cache for shards in an object store is too small.
        """
        source, training = self._source, self.section
        if source.cache is not None:
            stored = source.open_packs()
            source.cache.check_capacity_for_open_shards(stored.streams, processes, stored.sets)
        plan = RunPlan(
            RunSettings.from_training_section(training),
            source.packing_factor,
            processes=processes,
            slots_per_pack=source.schema.max_sequence_length,
            packs=source.pack_count,
            mean_tokens=source.mean_tokens,
        )
        if plan.packs is None:  # count unpacked records only as far as one update needs, because counting reads them
            packs = source.count_packs_up_to(plan.packs_per_update)
            plan = replace(plan, packs=packs if packs < plan.packs_per_update else None)
        return PlannedUpdates(
            plan,
            PretrainingObjective(training.loss),
            partial(read_training_batches, source, self._config, training.micro_batch_packs),
            self._format_run_description(plan),
        )

    def _format_run_description(self, plan: RunPlan) -> list[str]:
        """Return lines for the user that describe the model, the data and the updates."""
        chosen, training, source, config = self._settings.model, plan.settings, self._source, self._config
        origin = "as requested" if {"hidden_size", "num_hidden_layers"} & chosen.model_fields_set else _DEFAULT_MODEL
        kind = f"packed, depth {source.depth}" if source.is_packed else "not packed"
        vocabulary = f"vocabulary {config.vocab_size:,}"
        if source.vocabulary_size is None:
            vocabulary += " (the size of the model; the data does not state a vocabulary)"
        has_default_rate = "learning_rate" not in self._settings.training.model_fields_set
        return [
            f"{find_preset_name(chosen) or 'a BERT model'}: {format_count(config.num_hidden_layers, 'layer')}, "
            f"hidden size {config.hidden_size}, {count_parameters(config) / 1e6:,.1f} million parameters; {origin}",
            f"{format_path(source.path)} ({kind}, length {source.schema.max_sequence_length}, {vocabulary})",
            f"{training.optimizer}, learning rate {training.learning_rate:g}"
            + (_SMALL_MODELS_RATE if config.hidden_size >= 512 and has_default_rate else ""),
            *format_plan(plan),
            *filter(None, [source.format_shared_shards_note(plan.processes)]),
        ]

    def begin_run(self, run: RunContext[TrainingResult], plan: RunPlan, model: Model) -> MlperfLog | None:
        """Copy the vocabulary into the folder of the run. If requested, measure the speed-up.

        Return the MLPerf log if it is requested, otherwise None.
        """
        settings, config = self._settings, self._config
        if run.communicator.is_first:
            _copy_tokenizer(
                self._data, run.folder, settings.prepare.lower_case, config.max_position_embeddings, settings.store
            )
        if settings.training.measure_speedup and self._source.is_packed:
            self._measure_speedup(run, plan, model)
        if not (settings.mlperf.log and run.communicator.is_first):
            return None
        return MlperfLog(run.folder / "mlperf.log", settings.mlperf, plan, self._source, config)

    def _measure_speedup(self, run: RunContext[TrainingResult], plan: RunPlan, model: Model) -> None:
        """Measure how much packing speeds up the training of this model, in sequences per second, and report the result to
        the user.
        """
        run.communicator.record_activity("measuring the speed-up", slow=True)
        run.reporter.say("train: measuring how much faster packs are than rows with one sequence each")
        settings, communicator = plan.settings, run.communicator
        order = TrainingOrder(settings.seed, settings.shuffle_packs, communicator.rank, communicator.size)
        packed = next(read_training_batches(self._source, self._config, settings.micro_batch_packs, order))
        # On a CPU, other programs would distort wall-clock times, so measure CPU time. CPU time does not include the work of
        # an accelerator, so measure wall-clock time there.
        clock = time.process_time if run.device.kind == "cpu" else time.perf_counter
        unpacked = _keep_first_sequence_per_pack(packed, self._source.schema.max_predictions)

        def seconds(inputs: BatchArrays) -> float:
            """Run one forward and backward pass, and return its duration in seconds."""
            started = clock()
            model.run_training_pass(inputs)
            return clock() - started

        pairs = [(seconds(packed), seconds(unpacked)) for _ in range(_PAIRS + 1)]
        # The first pair of passes takes longer because it also builds the graphs, so its times are ignored.
        self._speedup, line = _compute_speedup(self._source.packing_factor, *zip(*pairs[1:], strict=True))
        run.reporter.say(f"train: {line}")

    def load_initial_weights(self, model: Model, reporter: Reporter) -> None:
        """Load the weights from `training.init_checkpoint` into the model. Do nothing if this setting is not set."""
        initial = self._settings.training.init_checkpoint
        if initial is None:
            return
        with open_local_weights(initial, self._settings.store) as path:
            weights = load_weights(path, model, self._config)
        missing = f"; {len(weights.missing_variables)} variables are not in the file and are initialized randomly"
        reporter.say(
            f"train: starting from the weights in {weights.path} "
            f"({weights.kind}){missing if weights.missing_variables else ''}"
        )

    def finish_run_and_build_result(self, loop: TrainingLoop, updates: PlannedUpdates) -> TrainingResult:
        """Return the result of the run, which is written to training.json."""
        return TrainingResult(
            **loop.collect_result_fields(),
            training=cast(LossMetrics, loop.report.metrics) if loop.report is not None else None,
            evaluation=cast(EvaluationMetrics | None, loop.evaluation),
            realized_speedup=self._speedup,
        )


def _make_run_signature(
    training: TrainingSettings, config: BertConfig, source: RecordSource, held_out: RecordSource | None
) -> Signature:
    """Return the signature of a run, which contains the settings, the model and the data that determine its result."""
    section = training.model_dump(exclude=find_keys_changeable_on_resume(TrainingSettings))
    # The path of the initial checkpoint may differ between machines. Therefore the signature contains only its name, which
    # is sufficient to detect another checkpoint.
    section["init_checkpoint"] = Path(section["init_checkpoint"]).name if section["init_checkpoint"] else None
    inputs = {"data": source.identity, "evaluation_data": held_out.identity if held_out is not None else None}
    return Signature("train", {"model": config.to_json(), "training": section}, inputs)


def _copy_tokenizer(data: Path, run_folder: Path, lower_case: bool, positions: int, store: StoreSettings | None) -> None:
    """Copy the vocabulary of the packed data into the folder of a run, so that the folder can be passed to `finetune
    --model`.

    The vocabulary is searched for in the folder of the data and in the folders above it, and recognized by its checksum. If
    it is not found, nothing is copied.

    Args:
        data: The packed data.
        run_folder: The folder of the run.
        lower_case: Whether texts are converted to lower case before tokenization.
        positions: The number of positions of the model.
        store: The settings of the object store.
    """
    with mirror_bucket(data, store) as packed:
        download_missing_files(packed / METADATA_NAME)
        known = RecordMetadata.read(packed).vocabulary if (packed / METADATA_NAME).is_file() else None
        if known is None:
            return
        above = (packed, *packed.resolve().parents[:3])
        for file in (folder / below / "vocab.txt" for folder in above for below in (".", "examples")):
            download_missing_files(file)
            if file.is_file() and VocabularyInfo.from_file(file) == known:
                write_text(run_folder / "vocab.txt", read_text(file))
                content = {"tokenizer_class": "BertTokenizer", "do_lower_case": lower_case, "model_max_length": positions}
                write_json(run_folder / "tokenizer_config.json", content)
                return


# --- The real speed-up through packing, measured in the run itself before its first update
#
# The model does forward and backward passes alternately over a micro-batch of packs, and over equally many rows that contain
# one sequence each. With f sequences per pack, the speed-up is f times the median ratio of the two times. It is smaller than
# f, because packing needs block masks, gathered positions and larger heads (Krell et al. 2021, table 2). A result well above
# f means that other programs disturbed the measurement, so it is not reported. The measurement builds two more graphs, so it
# is only made on request.

_PAIRS = 5
_TOLERANCE = 1.05


class _Speedup(NamedTuple):
    """The measured speed-up of packs over rows with one sequence each, and a line for the user that describes it.

    Attributes:
        value: The speed-up, or None if the measured value is larger than possible.
        line: The line.
    """

    value: float | None
    line: str


def _keep_first_sequence_per_pack(packed: BatchArrays, masked_slots_per_row: int) -> BatchArrays:
    """Return a batch that contains only the first sequence of each pack, with `masked_slots_per_row` slots for masked
    tokens in each row.
    """
    is_own_BL, is_own_BQ = packed["input_mask"] == 1, packed["masked_lm_weights"][:, :masked_slots_per_row] == 1
    unpacked: dict[str, AnyArray] = {}
    for name, values in packed.items():
        if name.startswith("next_sentence_"):
            unpacked[name] = values[:, :1]
        else:
            unpacked[name] = (
                values[:, :masked_slots_per_row] * is_own_BQ if name.startswith("masked_lm_") else values * is_own_BL
            )
    return unpacked


def _compute_speedup(packing_factor: float, packed_seconds: Sequence[float], unpacked_seconds: Sequence[float]) -> _Speedup:
    """Compute the speed-up through packing from the measured times of training passes over packed and over unpacked rows.

    Args:
        packing_factor: The number of sequences per pack.
        packed_seconds: The time of each pass over a micro-batch of packs.
        unpacked_seconds: The time of each pass over equally many unpacked rows.
    """
    measured = packing_factor * float(np.median(np.array(unpacked_seconds) / np.array(packed_seconds)))
    if measured > _TOLERANCE * packing_factor:
        return _Speedup(
            None,
            f"the realized speed-up could not be measured, because the machine was busy: {measured:.2f} was measured, but "
            f"at most {packing_factor:.2f} is possible",
        )
    packed, unpacked = (1000 * np.median(seconds) for seconds in (packed_seconds, unpacked_seconds))
    return _Speedup(
        measured,
        f"the realized speed-up is {measured:.3f}, which is {measured / packing_factor:.1%} of the {packing_factor:.3f} "
        f"sequences per pack: a micro-batch takes {packed:.1f} ms with packs, and {unpacked:.1f} ms with one sequence per "
        "row",
    )
