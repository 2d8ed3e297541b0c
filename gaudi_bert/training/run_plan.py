"""The plan of a run: how packing changes the settings, the micro-batches of every update, and the learning rate.

A batch of packs contains more sequences than a batch of unpacked rows. There are two ways to adapt the hyperparameters of a
run to a packing factor f (Krell et al. 2021, section 3.3 and appendix D):

- `packing_correction: batch` keeps the number of *sequences* in an update, and uses fewer packs. With R processes and b
  packs per micro-batch, there are max(1, round(global_batch_sequences / (b f R))) accumulation steps. All other settings are
  unchanged.
- `packing_correction: betas` uses as many packs in an update as an unpacked run has sequences, so that an update contains f
  times as many sequences. Updates, warm-up and intervals are therefore divided by f. The betas become beta_1 ** f and
  beta_2 ** f, so that one update changes the moments as much as f updates with the same gradient (theorem D.1). The learning
  rate is unchanged.

Rows may have several lengths. Packs of one row length are read in *turns*, and each update contains turns of every length in
proportion to its number of packs. If an average update contains t turns of a length, then ceil(u t) turns of this length are
done after u updates. The packs of a turn are fixed when a run begins, so that an update contains the same packs even if
another number of processes continues the run.
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
# If the batch size differs from the requested one by more than this fraction, a note is printed.
_NOTABLE_CHANGE = 0.02
# If rows are longer than this multiple of the mean sequence, a note is printed. In rows of up to 512 tokens, attention is
# only a small part of the work, so that there is no note.
_LONG_ROWS, _USUAL_SLOTS = 4, 512


class RunSettings(LoopSettings):
    """Settings of the training loop, expressed in updates and packs.

    Attributes:
        section: The section of the pipeline file that the settings come from.
        global_batch_sequences: The number of sequences in an update, over all processes.
        updates: The number of updates of the run.
        warmup_updates: The number of updates in which the learning rate rises.
        evaluate_every_updates: The number of updates between two evaluations.
        save_every_updates: The number of updates between two checkpoints.
        packing_correction: How hyperparameters are adapted to packing.
        loss_normalization: The rule by which loss sums are divided (`objective.LossDenominators`).
        target_masked_lm_accuracy: The accuracy at which the run ends early, or None.
        shuffle_packs: The size of the windows in which packs are shuffled.
    """

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
        """The name of the settings section, for messages."""
        return self.section

    @classmethod
    def of_training(cls, section: TrainingSettings) -> RunSettings:
        """Return the settings of a run from the section `training`."""
        return cls(**{name: getattr(section, name) for name in cls.model_fields if name != "section"})


class RowPacks(NamedTuple):
    """The number of packs in an epoch whose rows have a certain length."""

    length: int
    packs: int


class _RowTurns(NamedTuple):
    """How the packs of one row length are divided among the updates.

    Attributes:
        length: The length of the rows, in tokens.
        packs: The number of packs in a turn, over all processes.
        turns: The mean number of turns in an update.
        most_packs: The maximum number of packs in a micro-batch of one process.
    """

    length: int
    packs: int
    turns: Fraction | int
    most_packs: int

    def shared_by(self, processes: int) -> tuple[int, int]:
        """Return the number of micro-batches in a turn, and the number of packs in each of them on one process."""
        share = -(-self.packs // processes)
        micro_batches = -(-share // self.most_packs)
        return micro_batches, -(-share // micro_batches)


class MicroBatch(NamedTuple):
    """A micro-batch over all processes, with rows of one length.

    Process r of R reads those packs whose number mod R is r, and adds empty packs if they are fewer than `packs`.

    Attributes:
        which: The index of the row length.
        first: The number of the first pack.
        end: The number after the last pack.
        packs: The number of packs on one process.
    """

    which: int
    first: int
    end: int
    packs: int


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run, which is computed before the run starts.

    Attributes:
        requested: The settings as the user gave them, for unpacked data.
        packing_factor: The mean number of sequences in a pack.
        processes: The number of processes.
        slots_per_pack: The length of the longest rows, in tokens.
        packs: The number of packs in the data, or None if it is unknown.
        mean_tokens: The mean number of tokens in a sequence, or None if it is unknown.
        rows: The packs of each row length, ascending. Empty if all rows have the same length.
        begun_by: The number of processes that began the run, if it differs from `processes`.
        needed: A function from the number of an update to its number of micro-batches. None if all updates have equally
            many.
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
        """The settings to train with. They differ from the requested ones only for `packing_correction: betas`."""
        settings, factor = self.requested, self.packing_factor
        if settings.packing_correction == "batch" or factor == 1.0:
            return settings
        changed: dict[str, Any] = {name: max(1, round(getattr(settings, name) / factor)) for name in _CADENCES}
        if settings.warmup_updates:
            changed["warmup_updates"] = max(1, round(settings.warmup_updates / factor))
        changed["global_batch_sequences"] = round(settings.global_batch_sequences * factor)
        changed["beta_1"], changed["beta_2"] = settings.beta_1**factor, settings.beta_2**factor
        return settings.model_copy(update=changed)

    def format_lines(self) -> list[str]:
        """Return the lines that are printed at the end of a dry run."""
        return ["a dry run: nothing was trained or written"]

    def micro_batches_of(self, update: int) -> list[MicroBatch]:
        """Return the micro-batches of an update.

        No update has more micro-batches of any row length than the first one, which therefore builds all graphs. The row
        length with the most turns occurs in every update and comes first.

        Args:
            update: The number of the update, from 1.
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
        """Return the number of turns of each row length that are done after `update` updates."""
        return [math.ceil(update * row.turns) for row in self.turns]

    def micro_batches(self, updates_done: int, packs_done: int) -> Iterator[MicroBatch]:
        """Yield the micro-batches after a position, without end.

        Args:
            updates_done: The number of updates that are done.
            packs_done: The number of packs that were read. If all rows have the same length, it alone determines the
                position.

        Raises:
            InputError: Rows have several lengths, and the plan reads another number of packs in this number of updates.
        """
        shift = packs_done - self.packs_after(updates_done)
        if shift and self.rows:
            raise InputError(
                f"update {updates_done} of this run was reached in another sequence of packs; start again with --overwrite"
            )
        for update in itertools.count(updates_done + 1):
            for each in self.micro_batches_of(update):
                yield each._replace(first=each.first + shift, end=each.end + shift)

    def packs_after(self, update: int) -> int:
        """Return the number of packs that all processes together have read after `update` updates."""
        return sum(turns * row.packs for turns, row in zip(self._turns_after(update), self.turns, strict=True))

    def updates_of(self, epochs: int) -> int:
        """Return the number of updates after which every pack has been read `epochs` times."""
        packs = [row.packs for row in self.rows] or [self.packs or 0]
        last_turns = (-(-epochs * each // row.packs) - 1 for each, row in zip(packs, self.turns, strict=True))
        return max(math.floor(last / row.turns) + 1 for last, row in zip(last_turns, self.turns, strict=True))

    @cached_property
    def turns(self) -> tuple[_RowTurns, ...]:
        """How the packs of each row length are divided among the updates."""
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
        return tuple(
            row._replace(turns=Fraction(row.turns) / most_frequent) for row in turns
        )  # so that every update contains packs

    @cached_property
    def accumulation_steps(self) -> int:
        """The maximum number of micro-batches in an update on one process. It is at least 1."""
        return len(self.micro_batches_of(1))

    @cached_property
    def packs_per_update_and_process(self) -> float:
        """The mean number of packs that one process reads for an update."""
        total = sum(row.turns * row.packs for row in self.turns)
        return int(total // self.processes) if total % self.processes == 0 else float(total / self.processes)

    @property
    def packs_per_update(self) -> int:
        """The number of packs in an update over all processes. If rows have several lengths, it is a rounded mean."""
        return round(self.packs_per_update_and_process * self.processes)

    @property
    def sequences_per_update(self) -> float:
        """The mean number of sequences in an update, over all processes."""
        return self.packs_per_update_and_process * self.processes * self.packing_factor

    @property
    def change(self) -> float:
        """The relative difference between the planned and the requested batch size. 0.05 means 5 % more sequences."""
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
        """Return lines that describe an update, with notes if it differs from the settings or is larger than the data."""
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
        """Return the lines that only a dry run prints: the intervals and the optimizer."""
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
        """Return the plan as JSON, which is the result of a dry run."""
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
    """Return the micro-batch size that brings an update closest to the requested number of sequences.

    Differences are compared in percent. Among equally good sizes, the one with the fewest accumulation steps is chosen, and
    then the smallest.

    Args:
        sequences: The requested number of sequences in an update.
        each: The mean number of sequences in one pack of each process, over all processes.
        most: The largest allowed micro-batch, in packs.

    Returns:
        The number of packs in a micro-batch of one process.
    """

    def distance(packs: int) -> tuple[float, int]:
        """Return the relative distance of an update from the requested size, rounded to percent, and its steps."""
        steps = _steps_with(sequences, packs, each)
        return round(abs(steps * packs * each / sequences - 1.0), 2), steps

    return min(range(1, most + 1), key=distance)


def _steps_with(sequences: int, packs: int, each: float) -> int:
    """Return the number of accumulation steps for micro-batches of `packs` packs with `each` sequences per pack."""
    return max(1, round(sequences / (packs * each)))


# --- The learning rate: linear warm-up, then polynomial decay to zero
#
# Updates are counted from 1. With W warm-up updates, N updates, peak rate r and power p, the rate of update t is
#
#     rate(t) = r * t / W                                  for t <= W
#     rate(t) = r * (1 - (t - W) / (N - W + 1)) ** p       for t > W, `decay_from: warmup`
#     rate(t) = r * (1 - (t - 1) / N) ** p                 for t > W, `decay_from: start`
#
# No update has a rate of zero. `start` decays as if there had been no warm-up, so that the rate drops when the warm-up ends.
# google-research/bert (p = 1) and LAMB in Habana's Model-References (p = 0.5) do the same, whereas Adam in Model-References
# decays from the end of the warm-up. All of them count updates from 0, so their warm-up is one update behind ours.


def learning_rate_at(update: int, settings: RunSettings) -> float:
    """Return the learning rate of an update. After the last update, the rate is 0.

    Args:
        update: The number of the update, from 1.
        settings: The schedule.
    """
    peak, warmup, updates = settings.learning_rate, settings.warmup_updates, settings.updates
    if update <= warmup:
        return peak * update / warmup
    if settings.decay_from == "start":
        remaining = 1.0 - (update - 1) / updates
    else:
        remaining = 1.0 - (update - warmup) / (updates - warmup + 1)
    return float(peak * max(remaining, 0.0) ** settings.decay_power)
