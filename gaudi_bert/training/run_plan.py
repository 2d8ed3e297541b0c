"""The whole plan of a run in figures: what packing makes of the settings, and what each process, worker and all together do.

Two ways to keep a run's hyperparameters under packing with factor f (Krell et al. 2021, section 3.3 and appendix D):

- `packing_correction: batch` cuts the packs of an update by f, so that it still holds `global_batch_sequences`; updates,
  warm-up and all else stay as they are (`hyperparameters.py`).
- `packing_correction: betas` keeps as many packs an update as there would be sequences unpacked, which fills devices better.
  An update then holds f times as many sequences, so the same number of sequences takes 1/f of the updates, of the warm-up
  and of the updates between evaluations, checkpoints and reports; and with beta_1 ** f and beta_2 ** f, one update moves the
  moments as f updates with the same gradient did (theorem D.1). Learning rates are left alone, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gaudi_bert.config import TrainingSettings
from gaudi_bert.training.hyperparameters import BatchPlan, plan_batches

__all__ = ["RunPlan", "correct_for_packing", "plan_run"]

CADENCES = ("updates", "evaluate_every_updates", "save_every_updates", "log_every_updates")


def correct_for_packing(settings: TrainingSettings, packing_factor: float) -> TrainingSettings:
    """The settings to train packed data with; the same ones for `packing_correction: batch`, and for unpacked data.

    Args:
        settings: as for unpacked data.
        packing_factor: sequences a pack, at least 1.
    """
    if settings.packing_correction == "batch" or packing_factor == 1.0:
        return settings
    changed: dict[str, Any] = {name: max(1, round(getattr(settings, name) / packing_factor)) for name in CADENCES}
    if settings.warmup_updates:
        changed["warmup_updates"] = max(1, round(settings.warmup_updates / packing_factor))
    changed["global_batch_sequences"] = round(settings.global_batch_sequences * packing_factor)
    changed["beta_1"], changed["beta_2"] = settings.beta_1**packing_factor, settings.beta_2**packing_factor
    return settings.model_copy(update=changed)


@dataclass(frozen=True)
class RunPlan:
    """A run before it starts.

    Attributes:
        asked: the settings as they were given.
        settings: what packing makes of them: train with these.
        batches: how an update is put together.
        processes_per_worker: processes of one worker, one a card.
        slots_per_pack: the length of a pack.
        packs: of the data; None where nothing says it.
    """

    asked: TrainingSettings
    settings: TrainingSettings
    batches: BatchPlan
    processes_per_worker: int
    slots_per_pack: int
    packs: int | None

    @property
    def shares(self) -> dict[str, int]:
        """How many processes there are in one of them, in one worker, and in all."""
        processes = self.batches.workers
        return {"process": 1, "worker": min(self.processes_per_worker, processes), "all": processes}

    def short_lines(self) -> list[str]:
        """What every run says of itself."""
        settings, batches = self.settings, self.batches
        packs = batches.packs_per_update * settings.updates
        epochs = f" ({packs / self.packs:,.1f} times the data)" if self.packs else ""
        lines = batches.lines()
        if settings != self.asked:
            asked = self.asked
            lines.append(
                f"packing_correction betas: beta_1 {asked.beta_1:g} -> {settings.beta_1:.6g}, "
                f"beta_2 {asked.beta_2:g} -> {settings.beta_2:.6g}, updates {asked.updates:,} -> {settings.updates:,}, "
                f"of them warm-up {asked.warmup_updates:,} -> {settings.warmup_updates:,}"
            )
        lines.append(
            f"{settings.updates:,} updates are about {packs * batches.packing_factor:,.0f} sequences{epochs}; "
            f"{settings.warmup_updates:,} of them are warm-up"
        )
        return lines

    def table(self) -> list[str]:
        """Every figure a process, a worker and in all, for people."""
        rows = list(self._figures().items())
        title = f"{'':22}" + "".join(f"{name:>16}" for name in ("a process", "a worker", "all together"))
        lines = [title, f"{'processes':22}" + "".join(f"{count:>16,}" for count in self.shares.values())]
        for name, one in rows:
            values = (one * count for count in self.shares.values())
            lines.append(f"{name.replace('_', ' '):22}" + "".join(f"{value:>16,.6g}" for value in values))
        settings = self.settings
        every = self.batches.sequences_per_update
        for what in ("evaluate", "save", "log"):
            updates = getattr(settings, f"{what}_every_updates")
            lines.append(f"{what} every {updates:,} updates, that is every {updates * every:,.0f} sequences")
        lines.append(
            f"{settings.optimizer}, peak learning rate {settings.learning_rate:g}, decay power {settings.decay_power:g} "
            f"counted from the {settings.decay_from}, "
            f"beta_1 {settings.beta_1:.6g}, beta_2 {settings.beta_2:.6g}, clip norm {settings.clip_norm:g}, "
            f"losses normalized: {settings.loss_normalization}"
        )
        return lines

    def as_json(self) -> dict[str, Any]:
        """The same for machines."""
        settings, batches = self.settings, self.batches
        names = (
            *CADENCES,
            "warmup_updates",
            "learning_rate",
            "beta_1",
            "beta_2",
            "packing_correction",
            "loss_normalization",
        )
        return {
            **{name: getattr(settings, name) for name in names},
            "accumulation_steps": batches.accumulation_steps,
            "micro_batch_packs": batches.micro_batch_packs,
            "workers": batches.workers,
            "packing_factor": batches.packing_factor,
            "packs_per_update": batches.packs_per_update,
            "sequences_per_update": batches.sequences_per_update,
            "sequences_asked_per_update": batches.asked_sequences,
            "change": batches.change,
            "sequences": batches.sequences_per_update * settings.updates,
            "shares": {
                share: {"processes": count, **{name: one * count for name, one in self._figures().items()}}
                for share, count in self.shares.items()
            },
        }

    def _figures(self) -> dict[str, float]:
        """What one process does."""
        batches = self.batches
        packs = batches.packs_per_update_and_worker
        return {
            "packs_per_micro_batch": batches.micro_batch_packs,
            "packs_per_update": packs,
            "slots_per_update": packs * self.slots_per_pack,
            "sequences_per_update": packs * batches.packing_factor,
        }


def plan_run(
    settings: TrainingSettings,
    packing_factor: float,
    *,
    processes: int,
    processes_per_worker: int,
    slots_per_pack: int,
    packs: int | None,
) -> RunPlan:
    """Plan a run.

    Args:
        settings: of training, as for unpacked data.
        packing_factor: sequences a pack, at least 1.
        processes: that train together.
        processes_per_worker: of them, in one worker.
        slots_per_pack: the length of a pack.
        packs: of the data; None where nothing says it.
    """
    corrected = correct_for_packing(settings, packing_factor)
    batches = plan_batches(corrected, packing_factor, processes)
    return RunPlan(settings, corrected, batches, processes_per_worker, slots_per_pack, packs)
