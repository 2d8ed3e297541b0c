"""What is settled of a training run before anything is built: its data, its model's sizes, its plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gaudi_bert.artefacts.store.mirror import Mirror
from gaudi_bert.common.errors import InputError
from gaudi_bert.config import ModelSettings, PipelineSettings
from gaudi_bert.stages.training.stored_inputs import open_data

if TYPE_CHECKING:
    from gaudi_bert.model.config import BertConfig
    from gaudi_bert.training.distributed.communicator import Communicator
    from gaudi_bert.training.input.source import DataSource
    from gaudi_bert.training.run_plan import RunPlan

__all__ = ["TrainingJob", "describe_job", "model_config", "plan_job"]

BERT_VOCABULARY = 30522


@dataclass(frozen=True)
class TrainingJob:
    """What is known of a run before anything is built."""

    settings: PipelineSettings
    source: DataSource
    evaluation_source: DataSource | None
    config: BertConfig
    communicator: Communicator
    plan: RunPlan
    out: Path


def plan_job(
    settings: PipelineSettings,
    data: Path,
    evaluation_data: Path | None,
    out: Path,
    on_the_fly: Path | None,
    communicator: Communicator,
    dry_run: bool,
    copies: Mirror,
) -> TrainingJob:
    """Open the data, settle the model and the batches; refuse what does not fit.

    Args:
        settings: the pipeline's.
        data: a packed folder, or unpacked records.
        evaluation_data: held-out data, packed or not; None for none.
        out: the folder of the run.
        on_the_fly: the plan.json by which `data`, unpacked records, is packed while training.
        communicator: the processes that train together.
        dry_run: plan the run that the settings describe, with all their workers, wherever this is asked.
        copies: of what lies in an object store.

    Raises:
        InputError: data and model do not fit.
    """
    from gaudi_bert.stages.training.on_the_fly import on_the_fly_source
    from gaudi_bert.training.input.source import check_fits
    from gaudi_bert.training.run_plan import plan_run

    if on_the_fly is None:
        source = open_data(data, copies)
    else:
        source = on_the_fly_source(copies.fetch(data), copies.fetch(on_the_fly))
    evaluation_source = open_data(evaluation_data, copies) if evaluation_data is not None else None
    if evaluation_source is None and settings.training.target_masked_lm_accuracy is not None:
        raise InputError("training.target_masked_lm_accuracy: there is no evaluation data to reach it on; give some")
    config = model_config(settings.model, source.vocabulary_size, source.schema.max_sequence_length)
    for each in (source, evaluation_source):
        if each is not None:
            check_fits(each, config)
    resources = settings.resources
    alone = dry_run and communicator.size == 1
    processes = resources.workers * resources.processes_per_worker if alone else communicator.size
    if source.cache is not None:
        source.cache.check_room(processes)
    plan = plan_run(
        settings.training,
        source.packing_factor,
        processes=processes,
        processes_per_worker=resources.processes_per_worker,
        slots_per_pack=source.schema.max_sequence_length,
        packs=source.packs,
    )
    if plan.packs is None:  # nothing says it; whether they are enough for one update is soon known
        packs = source.count_packs(plan.packs_per_update)
        plan = replace(plan, packs=packs if packs < plan.packs_per_update else None)
    return TrainingJob(settings, source, evaluation_source, config, communicator, plan, out)


def model_config(settings: ModelSettings, vocabulary_size: int | None, max_sequence_length: int) -> BertConfig:
    """The model's configuration: what the settings leave open comes from the data."""
    from gaudi_bert.model.config import BertConfig

    values = settings.model_dump()
    if values["vocab_size"] is None:
        values["vocab_size"] = vocabulary_size or BERT_VOCABULARY
    if values["max_position_embeddings"] is None:
        values["max_position_embeddings"] = max_sequence_length
    return BertConfig(**values)


def describe_job(job: TrainingJob, dry_run: bool) -> list[str]:
    """The run as lines for people; all of its figures before a dry run."""
    settings, source, config = job.plan.settings, job.source, job.config
    kind = f"packed, depth {source.depth}" if source.is_packed else "not packed"
    vocabulary = f"vocabulary {config.vocab_size:,}"
    if source.vocabulary_size is None:
        vocabulary += " (the data does not record its own)"
    lines = [
        f"{source.path} ({kind}, length {source.schema.max_sequence_length}, {vocabulary})",
        f"{config.num_hidden_layers} layers, hidden size {config.hidden_size}; {settings.optimizer}, "
        f"learning rate {settings.learning_rate:g}",
        *job.plan.short_lines(),
        *(job.plan.table() if dry_run else []),
    ]
    return [f"train: {line}" for line in lines]
