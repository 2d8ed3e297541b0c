"""The folder of a training run: whose it is, whether the run in it is finished, and whether it may go on.

A run that was stopped goes on with the same command. With `--resume`, so does a run of fewer updates and otherwise the same
settings: its weights, moments and place in the data are kept, and the learning rate of every later update is that of the
longer run.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from gaudi_bert.artefacts.completion import Signature, begin_artefact, is_finished, remove_artefact, settings_path
from gaudi_bert.artefacts.names import TRAINING_NAME
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import explained_os_errors, read_json, write_json, write_text
from gaudi_bert.common.progress import Reporter

if TYPE_CHECKING:
    from gaudi_bert.stages.training.train_job import TrainingJob

__all__ = ["is_trained", "prepare_folder"]


# Settings that change nothing of the weights: a run may be resumed with others.
FREE_SETTINGS = {
    "device",
    "threads",
    "save_every_updates",
    "keep_checkpoints",
    "evaluate_every_updates",
    "evaluate_packs",
    "log_every_updates",
    "fusion_bytes",
    "measure_speedup",
    "stall_seconds",
    "watch_port",
    "metrics_port",
}


def is_trained(job: TrainingJob) -> bool:
    """Whether the finished run of the same settings and data is there; nothing is written."""
    return is_finished(job.out, job.out / TRAINING_NAME, _signature(job))


def prepare_folder(job: TrainingJob, reporter: Reporter, *, resume: bool, overwrite: bool) -> bool:
    """Whether the run is finished already; otherwise its folder is made ready to begin or to go on.

    Args:
        job: the run.
        reporter: told of a run that goes on to more updates.
        resume: let a run of fewer updates go on.
        overwrite: remove whatever run is there.

    Raises:
        InputError: the folder holds a run of other settings or data, or what is no run.
    """
    from gaudi_bert.training.checkpoint import checkpoint_files

    out, final, signature = job.out, job.out / TRAINING_NAME, _signature(job)
    before = _fewer_updates(out, signature)
    if before is not None and resume:
        _raise_updates(out, final, signature, before, reporter)
    elif before is not None and not overwrite:
        raise InputError(
            f"{out}: is this run with training.updates = {before:,}; pass --resume to go on to "
            f"{job.plan.settings.updates:,}, choose another folder, or pass --overwrite to start anew"
        )
    finished = begin_artefact(out, final, signature, overwrite=overwrite)
    if finished and not overwrite:
        return True
    if overwrite and (finished or checkpoint_files(out / "checkpoints")):
        remove_artefact(out, settings_path(out))
        begin_artefact(out, final, signature)
    write_text(out / "settings.yaml", yaml.safe_dump(job.settings.model_dump(mode="json"), sort_keys=False))
    return False


def _signature(job: TrainingJob) -> Signature:
    """What the weights are a function of."""
    kept = job.settings.training.model_dump(exclude=FREE_SETTINGS)
    # The path of the initial checkpoint is the user's, not the artefact's; its name is enough to notice another one.
    kept["init_checkpoint"] = Path(kept["init_checkpoint"]).name if kept["init_checkpoint"] else None
    if kept["decay_from"] == "warmup":
        del kept["decay_from"]  # a run of the edition that had no such setting can be resumed
    evaluation = job.evaluation_source.identity if job.evaluation_source is not None else None
    inputs = {"data": job.source.identity, "evaluation_data": evaluation}
    return Signature("train", {"model": job.config.to_json(), "training": kept}, inputs)


def _fewer_updates(out: Path, signature: Signature) -> int | None:
    """The updates of the run in the folder, where it is the same run but for having fewer of them."""
    kept = settings_path(out)
    if not kept.exists():
        return None
    made, wanted = read_json(kept), signature.as_json()
    updates = wanted["settings"]["training"]["updates"]
    before = made.get("settings", {}).get("training", {}).get("updates") if isinstance(made, dict) else None
    if not isinstance(before, int) or before >= updates:
        return None
    wanted["settings"]["training"]["updates"] = before
    return before if made == wanted else None


def _raise_updates(out: Path, final: Path, signature: Signature, before: int, reporter: Reporter) -> None:
    """Make the run of `before` updates in the folder one of as many as `signature` has."""
    # First the run stops being finished: a kill between the two leaves one that was stopped.
    with explained_os_errors(final, "remove"):
        final.unlink(missing_ok=True)
    write_json(settings_path(out), signature.as_json())
    updates = signature.settings["training"]["updates"]
    reporter.say(
        f"train: training.updates = {before:,} is raised to {updates:,}: the moments are kept, "
        f"and the learning rate goes on as that of {updates:,} updates"
    )
