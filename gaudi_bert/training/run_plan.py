"""The plan of a run in figures: what packing makes of the settings, and how an update is put together.

Packing changes how many sequences a batch of packs holds. There are two ways to keep a run's hyperparameters under packing
with factor f (Krell et al. 2021, section 3.3 and appendix D):

- `packing_correction: batch` keeps the *sequences* of an update, with fewer packs: with R processes and b packs per
  micro-batch, max(1, round(global_batch_sequences / (b f R))) accumulation steps. All else stays as it is.
- `packing_correction: betas` keeps as many packs per update as there would be sequences unpacked. An update then holds f
  times as many sequences, so updates, warm-up and cadences are divided by f, and with beta_1 ** f and beta_2 ** f one
  update moves the moments as f updates with the same gradient did (theorem D.1). Learning rates do not change.

Rows may be of several lengths. Each update takes `turns` micro-batches of every row length, in proportion to its packs: of a
length with t turns in an average update, ceil(u t) are done after u updates. A turn is decided when the run begins, so an
update has the same packs whichever processes read it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, NamedTuple

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import format_count
from gaudi_bert.config.sections import LoopSettings, TrainingSettings

_CADENCES = ("updates", "evaluate_every_updates", "save_every_updates", "log_every_updates")
# A batch that differs by more than this share from the requested one gets a note.
_NOTABLE_CHANGE = 0.02
# Rows longer than so many times the mean sequence get a note; in rows of up to 512, attention is a small part of the work.
_LONG_ROWS, _USUAL_SLOTS = 4, 512


class RunSettings(LoopSettings):
    """Settings of the loop in updates and packs; `section` is that of a pipeline file that they came from."""

    section: Literal["training", "finetune"] = "training"
    global_batch_sequences: int
    updates: int
    warmup_updates: int
    evaluate_every_updates: int
    save_every_updates: int
    packing_correction: Literal["batch", "betas"] = "batch"
    loss_normalization: Literal["global", "balanced", "local"] = "global"
    target_masked_lm_accuracy: float | None = None
    shuffle_packs: int = 4096

    @property
    def section_name(self) -> str:  # type: ignore[override]
        """The section, for messages."""
        return self.section

    @classmethod
    def of_training(cls, section: TrainingSettings) -> RunSettings:
        """Return the settings of a run that `training` describes."""
        return cls(**{name: getattr(section, name) for name in cls.model_fields if name != "section"})


class RowPacks(NamedTuple):
    """Packs of rows of one length, in an epoch."""

    length: int
    packs: int


class _RowTurns(NamedTuple):
    """The turns in which packs of rows of one length are taken.

    Attributes:
        packs: of a turn, over all processes.
        turns: in an update, on average.
        most_packs: of a micro-batch on one process.
    """

    length: int
    packs: int
    turns: Fraction | int
    most_packs: int

    def shared_by(self, processes: int) -> tuple[int, int]:
        """Micro-batches of a turn, and packs of one on one process."""
        share = -(-self.packs // processes)
        micro_batches = -(-share // self.most_packs)
        return micro_batches, -(-share // micro_batches)


class MicroBatch(NamedTuple):
    """Rows of one length: the packs `first` .. `end` - 1, of which process r of R takes those whose number mod R is r.

    `which` is the length; each process fills up its share to `packs` with empty ones.
    """

    which: int
    first: int
    end: int
    packs: int


@dataclass(frozen=True)
class RunPlan:
    """A run before it starts.

    Attributes:
        requested: the settings as they were given, for unpacked data.
        packing_factor: sequences of a pack, a mean over the data; `mean_tokens`: of a sequence.
        rows: the packs of each length where there are several, else ().
        begun_by: processes that began the run, where these are others.
        needed: the micro-batches of an update, where not all need as many.
    """

    requested: RunSettings
    packing_factor: float
    processes: int
    slots_per_pack: int
    packs: int | None
    mean_tokens: float | None = None
    rows: tuple[RowPacks, ...] = ()
    begun_by: int | None = None
    needed: Callable[[int], int] | None = None

    @cached_property
    def settings(self) -> RunSettings:
        """The settings to train with: the requested ones, as packing changes them by `packing_correction: betas`."""
        settings, factor = self.requested, self.packing_factor
        if settings.packing_correction == "batch" or factor == 1.0:
            return settings
        changed: dict[str, Any] = {name: max(1, round(getattr(settings, name) / factor)) for name in _CADENCES}
        if settings.warmup_updates:
            changed["warmup_updates"] = max(1, round(settings.warmup_updates / factor))
        changed["global_batch_sequences"] = round(settings.global_batch_sequences * factor)
        changed["beta_1"], changed["beta_2"] = settings.beta_1**factor, settings.beta_2**factor
        return settings.model_copy(update=changed)

    def lines(self) -> list[str]:
        """Return what people read at the end of a dry run."""
        return ["a dry run: nothing was trained or written"]

    def micro_batches_of(self, update: int) -> list[MicroBatch]:
        """The micro-batches of an update, counted from 1.

        The first update has as many of each length as any has, and builds all graphs; the length with the most turns is in
        every update, and comes first.
        """
        before, after = self._turns_after(update - 1), self._turns_after(update)
        most_first = sorted(range(len(after)), key=lambda which: -self.turns[which].turns)
        micro_batches = []
        for which in most_first:
            row = self.turns[which]
            of_turn, packs = row.shared_by(self.processes)
            together = packs * self.processes
            for turn in range(before[which], after[which]):
                for first in range(turn * row.packs, turn * row.packs + of_turn * together, together):
                    end = min(first + together, (turn + 1) * row.packs)
                    micro_batches.append(MicroBatch(which, first, end, packs))
        return micro_batches if self.needed is None else micro_batches[:1] * self.needed(update)

    def _turns_after(self, update: int) -> list[int]:
        return [math.ceil(update * row.turns) for row in self.turns]

    def micro_batches(self, updates_done: int, packs_done: int) -> Iterator[MicroBatch]:
        """Return those after this position, without end; of rows of one length, the packs alone are the position."""
        shift = packs_done - self.packs_after(updates_done)
        if shift and self.rows:
            raise InputError(
                f"update {updates_done} of this run was reached in another sequence of packs; start again with --overwrite"
            )
        for update in itertools.count(updates_done + 1):
            for each in self.micro_batches_of(update):
                yield each._replace(first=each.first + shift, end=each.end + shift)

    def packs_after(self, update: int) -> int:
        """Packs that all processes have read after so many updates."""
        return sum(turns * row.packs for turns, row in zip(self._turns_after(update), self.turns, strict=True))

    def updates_of(self, epochs: int) -> int:
        """Updates after which every pack was read so often."""
        packs = [row.packs for row in self.rows] or [self.packs or 0]
        last_turns = (-(-epochs * each // row.packs) - 1 for each, row in zip(packs, self.turns, strict=True))
        return max(math.floor(last / row.turns) + 1 for last, row in zip(last_turns, self.turns, strict=True))

    @cached_property
    def turns(self) -> tuple[_RowTurns, ...]:
        """The turns of each length."""
        settings, processes = self.settings, self.begun_by or self.processes
        most = settings.micro_batch_packs
        if not self.rows:
            steps = _steps_with(settings.global_batch_sequences, most, self.packing_factor * self.processes)
            return (_RowTurns(self.slots_per_pack, most * processes, steps, most),)
        sequences = round(self.packing_factor * sum(row.packs for row in self.rows))
        turns = []
        for row in self.rows:
            needed = Fraction(settings.global_batch_sequences * row.packs, sequences)
            most_packs = most * self.rows[-1].length // row.length
            packs = processes * min(most_packs, max(1, round(needed / processes)))
            turns.append(_RowTurns(row.length, packs, needed / packs, most_packs))
        most_frequent = max(row.turns for row in turns)
        if most_frequent >= 1:
            return tuple(turns)
        return tuple(row._replace(turns=Fraction(row.turns) / most_frequent) for row in turns)  # no update is without packs

    @cached_property
    def accumulation_steps(self) -> int:
        """The most micro-batches of an update on one process, at least 1."""
        return len(self.micro_batches_of(1))

    @cached_property
    def packs_per_update_and_process(self) -> float:
        """Packs that one process reads for one update, on average."""
        total = sum(row.turns * row.packs for row in self.turns)
        return int(total // self.processes) if total % self.processes == 0 else float(total / self.processes)

    @property
    def packs_per_update(self) -> int:
        """Packs of one update over all processes; of several lengths about so many."""
        return round(self.packs_per_update_and_process * self.processes)

    @property
    def sequences_per_update(self) -> float:
        """Sequences of one update over all processes, on average."""
        return self.packs_per_update_and_process * self.processes * self.packing_factor

    @property
    def change(self) -> float:
        """The distance of the real batch from the requested one: 0.05 is 5 % more."""
        return self.sequences_per_update / self.settings.global_batch_sequences - 1.0

    def short_lines(self) -> list[str]:
        """Return the lines that every run prints."""
        settings, requested = self.settings, self.requested
        packs = self.packs_after(settings.updates)
        epochs = f" ({packs / self.packs:,.1f} times the data)" if self.packs else ""
        lines = self.batch_lines()
        if settings != requested:
            lines.append(
                f"packing_correction betas: beta_1 {requested.beta_1:g} -> {settings.beta_1:.6g}, "
                f"beta_2 {requested.beta_2:g} -> {settings.beta_2:.6g}, "
                f"updates {requested.updates:,} -> {settings.updates:,}, "
                f"warm-up {requested.warmup_updates:,} -> {settings.warmup_updates:,}"
            )
        warmup = f"{settings.warmup_updates:,} of them are warm-up"
        if settings.warmup_updates > settings.updates:
            warmup = f"all of them are warm-up, which takes {settings.warmup_updates:,}"
        sequences = packs * self.packing_factor
        lines.append(f"{settings.updates:,} updates are about {sequences:,.0f} sequences{epochs}; {warmup}")
        times = self.slots_per_pack / self.mean_tokens if self.mean_tokens is not None else 1.0
        if times > _LONG_ROWS and self.slots_per_pack > _USUAL_SLOTS:
            lines.append(
                f"note: rows of {self.slots_per_pack:,} are {times:.1f} times the mean text "
                f"({self.mean_tokens:,.0f} tokens), and attention costs a row's length squared: shorter rows may be faster"
                + ("; finetune.row_lengths = auto chooses them" if settings.section == "finetune" else "")
            )
        return lines

    def batch_lines(self) -> list[str]:
        """Return how an update is put together, and where that differs from the settings."""
        settings, in_training = self.settings, self.settings.section == "training"
        key = "training.global_batch_sequences" if in_training else "finetune.batch_sequences"
        text = f"an update is {self.sequences_per_update:,.1f} sequences on average: "
        if self.rows:
            shared = ((row, *row.shared_by(self.processes)) for row in self.turns)
            text += ", ".join(
                f"{float(row.turns * micro_batches):,.1f} x {format_count(packs, 'pack')} of {row.length:,}"
                for row, micro_batches, packs in shared
            )
        else:
            text += (
                f"{self.accumulation_steps} x {settings.micro_batch_packs} packs x {self.packing_factor:.3f} "
                "sequences per pack"
            )
        if self.processes > 1:
            each = self.sequences_per_update / self.processes
            text += f" x {self.processes} processes ({each:,.1f} sequences per process)"
        lines = [text]
        if abs(self.change) > _NOTABLE_CHANGE:
            more, present = "more" if self.change > 0 else "fewer", settings.micro_batch_packs
            each = self.packing_factor * self.processes
            nearest = nearest_micro_batch(settings.global_batch_sequences, each, 2 * present)
            remedy = "" if in_training else "; every process takes the same number of packs"
            if in_training and nearest != present:
                remedy = f"; training.micro_batch_packs = {nearest} comes nearest to it"
            lines.append(
                f"note: that is {abs(self.change):.1%} {more} than {key} = {settings.global_batch_sequences:,}{remedy}"
            )
        if self.packs is not None and self.packs_per_update > self.packs:
            micro_batch = min(settings.micro_batch_packs, max(1, self.packs // self.processes))
            full_steps = max(1, self.packs // (micro_batch * self.processes))
            sequences = int(full_steps * micro_batch * self.processes * self.packing_factor)
            remedy = f"{key} = {sequences:,}"
            if in_training and micro_batch < settings.micro_batch_packs:
                remedy += f" and training.micro_batch_packs = {micro_batch:,}"
            lines.append(
                f"note: an update takes {self.packs_per_update:,} packs and the data has {self.packs:,}: sequences repeat "
                f"within an update; set {remedy}, or give more data"
            )
        return lines

    def details(self) -> list[str]:
        """Return what a dry run prints besides."""
        settings = self.settings
        lines = []
        for what in ("evaluate", "save", "log"):
            updates = getattr(settings, f"{what}_every_updates")
            sequences = updates * self.sequences_per_update
            lines.append(f"{what} every {updates:,} updates, that is every {sequences:,.0f} sequences")
        return [
            *lines,
            f"{settings.optimizer}, peak learning rate {settings.learning_rate:g}, decay power {settings.decay_power:g} "
            f"counted from the {settings.decay_from}, "
            f"betas {settings.beta_1:.6g} and {settings.beta_2:.6g}, clip norm {settings.clip_norm:g}, "
            f"losses normalized: {settings.loss_normalization}",
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the plan for machines: the result of a dry run."""
        settings = self.settings
        names = (*_CADENCES, "warmup_updates", "learning_rate", "beta_1", "beta_2", "packing_correction")
        return {
            "dry_run": True,
            **{name: getattr(settings, name) for name in names},
            "loss_normalization": settings.loss_normalization,
            "accumulation_steps": self.accumulation_steps,
            "micro_batch_packs": settings.micro_batch_packs,
            "workers": self.processes,
            "packing_factor": self.packing_factor,
            "packs_per_update": self.packs_per_update,
            "sequences_per_update": self.sequences_per_update,
            "sequences_asked_per_update": settings.global_batch_sequences,
            "change": self.change,
            "sequences": self.sequences_per_update * settings.updates,
        }


def nearest_micro_batch(sequences: int, each: float, most: int) -> int:
    """Packs of a micro-batch, at most so many, with which an update is nearest to so many sequences, in the fewest steps.

    `each` are the sequences that all processes take while each takes one pack.
    """

    def distance(packs: int) -> tuple[float, int]:
        steps = _steps_with(sequences, packs, each)
        return round(abs(steps * packs * each / sequences - 1.0), 2), steps

    return min(range(1, most + 1), key=distance)


def _steps_with(sequences: int, packs: int, each: float) -> int:
    return max(1, round(sequences / (packs * each)))


# --- The learning rate: linear warm-up, then polynomial decay to zero
#
# Updates are counted from 1. With W warm-up updates, N updates, peak rate r and power p,
#
#     rate(t) = r * t / W                                  for t <= W
#     rate(t) = r * (1 - (t - W) / (N - W + 1)) ** p       for t > W, `decay_from: warmup`
#     rate(t) = r * (1 - (t - 1) / N) ** p                 for t > W, `decay_from: start`
#
# so no update has a rate of zero. `start` decays as if there had been no warm-up, so the rate falls at its end, as in
# google-research/bert (p = 1) and the reference models' LAMB (p = 0.5); their Adam decays from the warm-up. All of them
# count updates from 0, so their warm-up is behind ours by one update.


def learning_rate_at(update: int, settings: RunSettings) -> float:
    """The learning rate of update number `update`, counted from 1; updates after the last one get 0."""
    peak, warmup, updates = settings.learning_rate, settings.warmup_updates, settings.updates
    if update <= warmup:
        return peak * update / warmup
    if settings.decay_from == "start":
        remaining = 1.0 - (update - 1) / updates
    else:
        remaining = 1.0 - (update - warmup) / (updates - warmup + 1)
    return float(peak * max(remaining, 0.0) ** settings.decay_power)
