"""Runs the stages of a pipeline in this process, one after the other.

Every stage decides for itself whether its artefact is already there; the runner only knows the order and the paths. Rooms
that need TensorFlow are imported when their stage runs, so that packing works where there is none.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gaudi_bert.artefacts.names import histogram_part
from gaudi_bert.artefacts.store.location import shown_place
from gaudi_bert.artefacts.store.workplace import found_histograms, local_copy
from gaudi_bert.artefacts.work_folder import SplitPaths, WorkFolder
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import write_text
from gaudi_bert.common.launch import find_launch
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import PipelineSettings
from gaudi_bert.runners.stage_table import SHARED_STAGES, STAGES, check_stages, select_stages
from gaudi_bert.runners.task_files import (
    check_work_folder,
    finetuning_files,
    has_built_in_rows,
    rows_to_predict,
    settings_for_finetuning,
)
from gaudi_bert.stages.tasks.finetune_job import FineTuneInput
from gaudi_bert.stages.training.model_results import FineTuneResult, TrainResult

__all__ = ["LocalRun", "run_stages"]

TASK_STAGES = frozenset({"finetune", "predict"})

Summary = Any  # a typed result of a stage, or one per split


@dataclass(frozen=True)
class LocalRun:
    """One run of a pipeline in this process.

    Args:
        settings: the pipeline.
        work: the folder that holds the work folders of all pipelines.
        pipeline_folder: where relative paths in the pipeline file start.
        reporter: where progress goes.
        overwrite: make again what other settings made.
        shard: (K, N): part K of N of one of the stages that many machines share (prepare, histogram, write).
        finish: `write` only: put together what all shards wrote.
        workers: processes or threads of prepare, histogram, write and verify; None for one per core.
    """

    settings: PipelineSettings
    work: Path
    pipeline_folder: Path
    reporter: Reporter
    overwrite: bool = False
    shard: tuple[int, int] | None = None
    finish: bool = False
    workers: int | None = None

    @property
    def folder(self) -> WorkFolder:
        """The work folder of this pipeline."""
        return WorkFolder.of(self.settings, self.work, self.pipeline_folder)


def run_stages(run: LocalRun, stages: Sequence[str]) -> dict[str, Summary]:
    """Run `stages` in the pipeline's order.

    Returns:
        What each stage says of itself: one summary per stage, or one per split (`train`, `evaluation`) below the stage.

    Raises:
        InputError: a stage is unknown or cannot be shared out, or what it needs has not been made.
    """
    summaries: dict[str, Summary] = {}
    _check_sharing(run, stages)
    check_stages(run.settings, stages)
    if TASK_STAGES.intersection(stages):
        check_work_folder(run.folder)
    for stage in select_stages(stages):
        run.reporter.say(f"--- {stage}")
        _check_needs(run, stage)
        summaries[stage] = _STAGE_FUNCTIONS[stage](run)
    return summaries


def _check_sharing(run: LocalRun, stages: Sequence[str]) -> None:
    if run.shard is not None and run.finish:
        raise InputError("--finish and --shard exclude each other; run the shards first, then --finish once")
    if run.shard is not None and (len(stages) != 1 or stages[0] not in SHARED_STAGES):
        raise InputError(f"--shard: give one stage that can be shared out, --stages {' or '.join(SHARED_STAGES)}")
    finished = [stage.name for stage in STAGES.values() if stage.parts is not None]
    if run.finish and (len(stages) != 1 or stages[0] not in finished):
        names = " or ".join(finished)
        raise InputError(f"--finish: only `{names}` is finished in a step of its own; give --stages {names}")


def _check_needs(run: LocalRun, stage: str) -> None:
    for needed in STAGES[stage].needs:
        for path in STAGES[needed].missing_products(run.folder, run.settings.store):
            raise InputError(f"{shown_place(path)}: is not there; run the stage `{needed}` first")


def _each_split(run: LocalRun, make: Callable[[SplitPaths], Summary]) -> Summary:
    return {name: make(run.folder.split(name)) for name in run.folder.splits}


def _common(run: LocalRun) -> dict[str, Any]:
    return {"reporter": run.reporter, "overwrite": run.overwrite, "store": run.settings.store}


def _prepare(run: LocalRun) -> Summary:
    from gaudi_bert.stages.data.prepare import prepare

    if run.folder.records is not None:
        run.reporter.say(f"prepare: nothing to do, the pipeline names its own records: {run.folder.records}")
        return {"records": str(run.settings.prepare.records)}
    return prepare(
        run.settings.prepare,
        run.folder.examples,
        pipeline_folder=run.pipeline_folder,
        shard=run.shard,
        reporter=run.reporter,
        overwrite=run.overwrite,
        workers=run.workers,
        store=run.settings.store,
    )


def _histogram(run: LocalRun) -> Summary:
    from gaudi_bert.stages.data.counted_records import histogram_shard
    from gaudi_bert.stages.data.histogram import histogram

    def make(paths: SplitPaths) -> Summary:
        shard, out, store = run.shard, paths.histogram, run.settings.store
        if shard is not None:
            shard = histogram_shard(paths.records, shard, store)
            if shard is None:
                run.reporter.say(f"{paths.records}: nothing to do, there are fewer files than shards")
                return {"files": 0}
            out = histogram_part(out, shard)
        return histogram(paths.records, out, shard=shard, workers=run.workers, **_common(run))

    return _each_split(run, make)


def _plan(run: LocalRun) -> Summary:
    from gaudi_bert.stages.data.plan import plan

    def make(paths: SplitPaths) -> Summary:
        counted = found_histograms(paths.histogram, run.settings.store)
        return plan(counted, paths.plan, run.settings.packing, **_common(run))

    return _each_split(run, make)


def _write(run: LocalRun) -> Summary:
    from gaudi_bert.stages.data.write import write, write_shard

    def make(paths: SplitPaths) -> Summary:
        where = (paths.records, paths.plan, paths.packed)
        if run.shard is not None:
            return write_shard(*where, run.shard, workers=run.workers, **_common(run))
        return write(*where, finish=run.finish, workers=run.workers, **_common(run))

    return _each_split(run, make)


def _verify(run: LocalRun) -> Summary:
    from gaudi_bert.stages.data.verify import verify

    def make(paths: SplitPaths) -> Summary:
        return verify(paths.records, paths.packed, workers=run.workers, **_common(run))

    return _each_split(run, make)


def _train(run: LocalRun) -> Summary:
    folder, resources = run.folder, run.settings.resources
    data = folder.split("train").packed
    evaluation_data = folder.split("evaluation").packed if folder.has_evaluation else None
    if resources.workers * resources.processes_per_worker > 1 and find_launch() is None:
        return _train_together(run, data, evaluation_data)

    from gaudi_bert.stages.training.train import train

    return train(
        run.settings,
        data=data,
        evaluation_data=evaluation_data,
        out=folder.train,
        reporter=run.reporter,
        resume=not run.overwrite,
        overwrite=run.overwrite,
    )


def _train_together(run: LocalRun, data: Path, evaluation_data: Path | None) -> Summary:
    """Train in several processes on this machine; each of them is the command `train`."""
    from gaudi_bert.artefacts.training import read_training
    from gaudi_bert.runners.processes import run_training_processes

    arguments = ["--data", str(data), "--out", str(run.folder.train), "--overwrite" if run.overwrite else "--resume"]
    arguments += ["--evaluation-data", str(evaluation_data)] if evaluation_data is not None else []
    with _pipeline_file(run.settings) as pipeline:
        command = [sys.executable, "-m", "gaudi_bert", "train", "--pipeline", str(pipeline), *arguments]
        run_training_processes(run.settings, "train", command)
    with local_copy(run.folder.training_result, run.settings.store) as path:
        return TrainResult(read_training(path))


@contextmanager
def _pipeline_file(settings: PipelineSettings) -> Iterator[Path]:
    """The pipeline as it is run, as a file for other processes."""
    with tempfile.TemporaryDirectory(prefix="gaudi-bert-") as folder:
        pipeline = Path(folder) / f"{settings.name}.yaml"
        write_text(pipeline, yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False))
        yield pipeline


def _evaluate(run: LocalRun) -> Summary:
    from gaudi_bert.stages.training.evaluate import evaluate

    folder = run.folder
    if not folder.has_evaluation:
        run.reporter.say("evaluate: nothing to do, the pipeline holds no evaluation data out")
        return {}
    return evaluate(
        data=folder.split("evaluation").packed,
        checkpoint=folder.train,
        unpacked=folder.split("evaluation").records,
        out=folder.evaluation_result,
        reporter=run.reporter,
        store=run.settings.store,
    )


def _finetune(run: LocalRun) -> Summary:
    folder, resources = run.folder, run.settings.resources
    if has_built_in_rows(run.settings):
        from gaudi_bert.stages.tasks.built_in_rows import make_built_in_rows

        made = folder.rows("train"), folder.rows("evaluation")
        make_built_in_rows(*made, reporter=run.reporter, overwrite=run.overwrite)
    settings = settings_for_finetuning(run.settings, run.pipeline_folder)
    files = finetuning_files(settings, folder, run.pipeline_folder)
    if resources.workers * resources.processes_per_worker > 1 and find_launch() is None:
        return _finetune_together(run, settings, files)

    from gaudi_bert.stages.tasks.finetune import finetune

    return finetune(settings, files, folder.finetune, reporter=run.reporter, overwrite=run.overwrite)


def _finetune_together(run: LocalRun, settings: PipelineSettings, files: FineTuneInput) -> Summary:
    """Fine-tune in several processes on this machine; each of them is the command `finetune`."""
    from gaudi_bert.artefacts.finetuning import read_finetuning
    from gaudi_bert.runners.processes import run_training_processes

    arguments = ["--data", str(files.data), "--model", str(files.model), "--out", str(run.folder.finetune)]
    arguments += ["--evaluation", str(files.evaluation_data)] if files.evaluation_data is not None else []
    arguments += ["--vocab", str(files.vocabulary)] if files.vocabulary is not None else []
    arguments += ["--overwrite"] if run.overwrite else []
    with _pipeline_file(settings) as pipeline:
        command = [sys.executable, "-m", "gaudi_bert", "finetune", "--pipeline", str(pipeline), *arguments]
        run_training_processes(settings, "finetune", command)
    return FineTuneResult(read_finetuning(run.folder.finetuning_result))


def _predict(run: LocalRun) -> Summary:
    from gaudi_bert.stages.tasks.predict import PredictOptions, predict

    asked, folder = run.settings.predict, run.folder
    data = rows_to_predict(run.settings, folder, run.pipeline_folder)
    options = PredictOptions(asked.max_sequence_length, asked.precision)
    return predict(
        folder.finetune,
        str(data),
        str(folder.predictions),
        options,
        {},
        reporter=run.reporter,
        overwrite=run.overwrite,
        store=run.settings.store,
    )


def _report(run: LocalRun) -> Summary:
    from gaudi_bert.stages.report import report

    return report(run.folder.root, reporter=run.reporter, store=run.settings.store)


_STAGE_FUNCTIONS: dict[str, Callable[[LocalRun], Summary]] = {
    "prepare": _prepare,
    "histogram": _histogram,
    "plan": _plan,
    "write": _write,
    "verify": _verify,
    "train": _train,
    "evaluate": _evaluate,
    "finetune": _finetune,
    "predict": _predict,
    "report": _report,
}
