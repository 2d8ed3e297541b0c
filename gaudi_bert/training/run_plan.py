"""The plan of a run: how packing changes the settings, and the micro-batches of every update.

A batch of packs contains more sequences than a batch of unpacked rows. There are two ways to adapt the hyperparameters of a
run to a packing factor f (Krell et al. 2021, section 3.3 and appendix D):

- `packing_correction: batch` keeps the number of *sequences* in an update, and uses fewer packs. With R processes and b
  packs per micro-batch, there are max(1, round(global_batch_sequences / (b f R))) accumulation steps. All other settings are
  unchanged.
- `packing_correction: betas` uses as many packs in an update as an unpacked run has sequences, so that an update contains f
  times as many sequences. Updates, warm-up and intervals are therefore divided by f. The betas become beta_1 ** f and
  beta_2 ** f, so that one update changes the moments as much as f updates with the same gradient (theorem D.1). The learning
  rate is unchanged.

Rows may have several lengths. Packs of one row length are read in *blocks* of equally many packs, and each update contains
blocks of every length in proportion to its number of packs. If an average update contains k blocks of a length, then
ceil(u k) blocks of this length have been read after u updates. The size of a block is fixed when a run begins, so that an
update contains the same packs even if another number of processes continues the run.
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

# Settings that are given as numbers of updates.
CADENCE_SETTINGS = ("updates", "evaluate_every_updates", "save_every_updates", "log_every_updates")


class RunSettings(LoopSettings):
    """The settings of the training loop, for pretraining and for fine-tuning. All intervals are numbers of updates.

    Attributes:
        section: The section of the pipeline file that the settings come from.
        global_batch_sequences: The number of sequences in an update, over all processes.
        updates: The number of updates of the run.
        warmup_updates: The number of updates in which the learning rate rises.
        evaluate_every_updates: The number of updates between two evaluations.
        save_every_updates: The number of updates between two checkpoints.
        packing_correction: How hyperparameters are adapted to packing.
        loss_normalization: The rule for the denominators of the loss sums (`objective.LossDenominators`).
        target_masked_lm_accuracy: The accuracy that ends the run early, or None.
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
        """The name of the settings section, for error messages."""
        return self.section

    @classmethod
    def from_training_section(cls, section: TrainingSettings) -> RunSettings:
        """Convert the settings section `training` to the settings of a run."""
        return cls(**{name: getattr(section, name) for name in cls.model_fields if name != "section"})


class RowPacks(NamedTuple):
    """A row length, and the number of packs with this row length in an epoch."""

    length: int
    packs: int


class _BlockMicroBatches(NamedTuple):
    """The number of micro-batches that a block of packs is divided into, and the number of packs per micro-batch on one
    process.
    """

    micro_batches: int
    packs: int


class _BlockPlan(NamedTuple):
    """Divides all packs with the same row length into blocks of equal size. Each weight update reads complete blocks.

    Attributes:
        row_length: The length of the rows, in tokens.
        packs: The number of packs in a block, over all processes.
        blocks_per_update: The mean number of blocks in an update.
        max_micro_batch_packs: The maximum number of packs in a micro-batch of one process.
    """

    row_length: int
    packs: int
    blocks_per_update: Fraction | int
    max_micro_batch_packs: int

    def divide_among_processes(self, processes: int) -> _BlockMicroBatches:
        """Divide a block of packs evenly among processes, and the packs of each process into micro-batches of equal size."""
        packs_of_process = -(-self.packs // processes)
        micro_batches = -(-packs_of_process // self.max_micro_batch_packs)
        return _BlockMicroBatches(micro_batches, -(-packs_of_process // micro_batches))


class MicroBatch(NamedTuple):
    """A micro-batch that is distributed over all processes. All its rows have the same length.

    Process r of R reads those packs whose number mod R is r, and adds empty packs if they are fewer than `packs`.

    Attributes:
        row_length_index: The index of the row length, from 0.
        first: The number of the first pack.
        end: The number after the last pack.
        packs: The number of packs on one process.
    """

    row_length_index: int
    first: int
    end: int
    packs: int


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run. It determines the packs of each weight update, and adapts the settings to packing.

    Attributes:
        requested: The settings as the user gave them, for unpacked data.
        packing_factor: The mean number of sequences in a pack.
        processes: The number of processes.
        slots_per_pack: The length of the longest rows, in tokens.
        packs: The number of packs in the data, or None if it is unknown.
        mean_tokens: The mean number of tokens in a sequence, or None if it is unknown.
        packs_by_row_length: The number of packs of each row length, by ascending length. Empty if all rows have the same
            length.
        initial_processes: The number of processes that began the run, or None if it equals `processes`. Only data with
            several row lengths needs it: the sizes of the blocks are computed from it, so that they stay the same when
            another number of processes resumes the run.
        count_micro_batches: A function from the number of an update, from 1, to its number of micro-batches. None if all
            updates have equally many.
    """

    requested: RunSettings
    packing_factor: float
    processes: int
    slots_per_pack: int
    packs: int | None
    mean_tokens: float | None = None
    packs_by_row_length: tuple[RowPacks, ...] = ()
    initial_processes: int | None = None
    count_micro_batches: Callable[[int], int] | None = None

    @cached_property
    def settings(self) -> RunSettings:
        """The settings of the run, adapted to packing.

        They differ from the requested settings only for `packing_correction: betas`.
        """
        settings, factor = self.requested, self.packing_factor
        if settings.packing_correction == "batch" or factor == 1.0:
            return settings
        changed: dict[str, Any] = {name: max(1, round(getattr(settings, name) / factor)) for name in CADENCE_SETTINGS}
        if settings.warmup_updates:
            changed["warmup_updates"] = max(1, round(settings.warmup_updates / factor))
        changed["global_batch_sequences"] = round(settings.global_batch_sequences * factor)
        changed["beta_1"], changed["beta_2"] = settings.beta_1**factor, settings.beta_2**factor
        return settings.model_copy(update=changed)

    def list_micro_batches(self, update: int) -> list[MicroBatch]:
        """Return the micro-batches of one weight update.

        No update has more micro-batches of any row length than the first one, which therefore builds all graphs. The row
        length with the most blocks occurs in every update and comes first.

        Args:
            update: The number of the update, from 1.
        """
        before, after = self._count_blocks_read(update - 1), self._count_blocks_read(update)
        most_frequent_first = sorted(
            range(len(after)), key=lambda index: -self.block_plan_by_row_length[index].blocks_per_update
        )
        micro_batches = []
        for index in most_frequent_first:
            blocks = self.block_plan_by_row_length[index]
            per_block, packs = blocks.divide_among_processes(self.processes)
            packs_of_all = packs * self.processes
            for block in range(before[index], after[index]):
                begin, block_end = block * blocks.packs, (block + 1) * blocks.packs
                for first in range(begin, begin + per_block * packs_of_all, packs_of_all):
                    micro_batches.append(MicroBatch(index, first, min(first + packs_of_all, block_end), packs))
        return micro_batches if self.count_micro_batches is None else micro_batches[:1] * self.count_micro_batches(update)

    def _count_blocks_read(self, updates_done: int) -> list[int]:
        """For each row length, return how many blocks of packs the run has read after `updates_done` weight updates."""
        return [math.ceil(updates_done * blocks.blocks_per_update) for blocks in self.block_plan_by_row_length]

    def iterate_micro_batches(self, updates_done: int, packs_done: int) -> Iterator[MicroBatch]:
        """Yield an endless stream of micro-batches, starting at a position in the run.

        Args:
            updates_done: The number of updates that are done.
            packs_done: The number of packs that were read. If all rows have the same length, this number alone determines
                the position.

        Raises:
            InputError: Rows have several lengths, and the plan reads another number of packs in this number of updates.
        """
        shift = packs_done - self.count_packs_read(updates_done)
        if shift and self.packs_by_row_length:
            raise InputError(
                f"update {updates_done}: the run has read more or fewer packs up to this update than its plan states; start "
                "again with --overwrite"
            )
        for update in itertools.count(updates_done + 1):
            for micro_batch in self.list_micro_batches(update):
                yield micro_batch._replace(first=micro_batch.first + shift, end=micro_batch.end + shift)

    def count_packs_read(self, updates_done: int) -> int:
        """Return how many packs all processes together have read after `updates_done` weight updates."""
        counts = zip(self._count_blocks_read(updates_done), self.block_plan_by_row_length, strict=True)
        return sum(count * blocks.packs for count, blocks in counts)

    def count_updates(self, epochs: int) -> int:
        """Return the smallest number of updates that read every pack at least `epochs` times."""
        packs = [row.packs for row in self.packs_by_row_length] or [self.packs or 0]
        return max(
            math.floor((-(-epochs * packs_of_length // blocks.packs) - 1) / blocks.blocks_per_update) + 1
            for packs_of_length, blocks in zip(packs, self.block_plan_by_row_length, strict=True)
        )

    @cached_property
    def block_plan_by_row_length(self) -> tuple[_BlockPlan, ...]:
        """For each row length, how the packs are divided into blocks. Each weight update reads complete blocks."""
        settings, most = self.settings, self.settings.micro_batch_packs
        if not self.packs_by_row_length:
            steps = _compute_accumulation_steps(settings.global_batch_sequences, most, self.packing_factor * self.processes)
            return (_BlockPlan(self.slots_per_pack, most * self.processes, steps, most),)
        processes = self.initial_processes or self.processes
        sequences_of_data = round(self.packing_factor * sum(row.packs for row in self.packs_by_row_length))
        all_blocks = []
        for row_length, row_packs in self.packs_by_row_length:
            packs_per_update = Fraction(settings.global_batch_sequences * row_packs, sequences_of_data)
            max_packs = most * self.packs_by_row_length[-1].length // row_length
            packs = processes * min(max_packs, max(1, round(packs_per_update / processes)))
            all_blocks.append(_BlockPlan(row_length, packs, packs_per_update / packs, max_packs))
        highest_rate = max(blocks.blocks_per_update for blocks in all_blocks)
        # If no row length has a block in every update, an update could be empty. Raise all rates until one row length has.
        divisor = min(Fraction(highest_rate), Fraction(1))
        return tuple(
            blocks._replace(blocks_per_update=Fraction(blocks.blocks_per_update) / divisor) for blocks in all_blocks
        )

    @cached_property
    def accumulation_steps(self) -> int:
        """The maximum number of micro-batches that one process computes for an update. It is at least 1."""
        return len(self.list_micro_batches(1))

    @cached_property
    def packs_per_update_and_process(self) -> float:
        """The mean number of packs that one process reads for an update."""
        total = sum(blocks.blocks_per_update * blocks.packs for blocks in self.block_plan_by_row_length)
        return int(total // self.processes) if total % self.processes == 0 else float(total / self.processes)

    @property
    def packs_per_update(self) -> int:
        """The number of packs that all processes together read for an update.

        If rows have several lengths, it is a rounded mean.
        """
        return round(self.packs_per_update_and_process * self.processes)

    @property
    def sequences_per_update(self) -> float:
        """The mean number of sequences in an update, over all processes."""
        return self.packs_per_update_and_process * self.processes * self.packing_factor

    @property
    def relative_batch_size_deviation(self) -> float:
        """The relative difference between the batch size of this plan and the requested one, such as 0.05 for 5 % more
        sequences.
        """
        return self.sequences_per_update / self.settings.global_batch_sequences - 1.0


def find_micro_batch_size(sequences_per_update: int, sequences_per_pack: float, max_packs: int) -> int:
    """Return the number of packs per micro-batch that brings the number of sequences per update closest to the requested
    number.

    Differences are compared in percent. Among equally good sizes, the one with the fewest accumulation steps is chosen, and
    then the smallest.

    Args:
        sequences_per_update: The requested number of sequences in an update.
        sequences_per_pack: The mean number of sequences in one pack of each process, added over all processes.
        max_packs: The largest allowed micro-batch, in packs.

    Returns:
        The number of packs in a micro-batch of one process.
    """

    def compute_error_and_steps(packs: int) -> tuple[float, int]:
        """For micro-batches of `packs` packs, return (relative error of the batch size, accumulation steps).

        The error is the difference between the resulting and the requested number of sequences per update, divided by the
        requested number and rounded to whole percent.
        """
        steps = _compute_accumulation_steps(sequences_per_update, packs, sequences_per_pack)
        return round(abs(steps * packs * sequences_per_pack / sequences_per_update - 1.0), 2), steps

    return min(range(1, max_packs + 1), key=compute_error_and_steps)


def _compute_accumulation_steps(sequences_per_update: int, micro_batch_packs: int, sequences_per_pack: float) -> int:
    """Return the number of micro-batches per update that brings the number of sequences per update closest to the requested
    number.
    """
    return max(1, round(sequences_per_update / (micro_batch_packs * sequences_per_pack)))


# --- The plan as text for people, and as JSON for programs

# Print a note if the batch size differs from the requested size by more than this fraction.
_NOTABLE_CHANGE = 0.02
# If the rows are more than 4 times as long as the mean sequence, a note suggests shorter rows. Rows of up to 512 tokens need
# no note, because attention takes only a small part of their time.
_LONG_ROWS, _USUAL_SLOTS = 4, 512


@dataclass(frozen=True)
class DryRun:
    """The result of a dry run, which plans a run without training."""

    plan: RunPlan

    def format_lines(self) -> list[str]:
        """Return the lines that are printed at the end of a dry run."""
        return ["this was a dry run: nothing was trained or written"]

    def as_json(self) -> dict[str, Any]:
        """Return the plan as a JSON object."""
        plan, settings = self.plan, self.plan.settings
        names = (*CADENCE_SETTINGS, "warmup_updates", "learning_rate", "beta_1", "beta_2", "packing_correction")
        return {
            "dry_run": True,
            **{name: getattr(settings, name) for name in names},
            "loss_normalization": settings.loss_normalization,
            "accumulation_steps": plan.accumulation_steps,
            "micro_batch_packs": settings.micro_batch_packs,
            "workers": plan.processes,
            "packing_factor": plan.packing_factor,
            "packs_per_update": plan.packs_per_update,
            "sequences_per_update": plan.sequences_per_update,
            "sequences_asked_per_update": settings.global_batch_sequences,
            "change": plan.relative_batch_size_deviation,
            "sequences": plan.sequences_per_update * settings.updates,
        }


def format_plan(plan: RunPlan) -> list[str]:
    """Return lines about the size and the number of updates in a run, with notes on possible problems."""
    settings, requested = plan.settings, plan.requested
    lines = _format_update_size(plan)
    if settings != requested:
        lines.append(
            f"packing_correction betas: beta_1 {requested.beta_1:g} -> {settings.beta_1:.6g}, "
            f"beta_2 {requested.beta_2:g} -> {settings.beta_2:.6g}, "
            f"updates {requested.updates:,} -> {settings.updates:,}, "
            f"warm-up {requested.warmup_updates:,} -> {settings.warmup_updates:,}"
        )
    packs = plan.count_packs_read(settings.updates)
    epochs = f" ({packs / plan.packs:,.1f} times the data)" if plan.packs else ""
    warmup = f"{settings.warmup_updates:,} of them are warm-up"
    if settings.warmup_updates > settings.updates:
        warmup = f"all of them are warm-up, which takes {settings.warmup_updates:,} updates"
    lines.append(f"{settings.updates:,} updates read about {packs * plan.packing_factor:,.0f} sequences{epochs}; {warmup}")
    times = plan.slots_per_pack / plan.mean_tokens if plan.mean_tokens is not None else 1.0
    if times > _LONG_ROWS and plan.slots_per_pack > _USUAL_SLOTS:
        lines.append(
            f"note: rows of {plan.slots_per_pack:,} tokens are {times:.1f} times as long as an average text "
            f"({plan.mean_tokens:,.0f} tokens), and the cost of attention grows with the square of the row length, so "
            "shorter rows may be faster"
            + ("; set finetune.row_lengths = auto to use them" if settings.section == "finetune" else "")
        )
    return lines


def _format_update_size(plan: RunPlan) -> list[str]:
    """Return a line that states how many sequences and packs an update contains, and notes on possible problems.

    There are notes if the size differs from the settings, or if an update is larger than the data.
    """
    settings, in_training = plan.settings, plan.settings.section == "training"
    key = "training.global_batch_sequences" if in_training else "finetune.batch_sequences"
    text = f"an update contains {plan.sequences_per_update:,.1f} sequences on average: "
    if plan.packs_by_row_length:
        shared = ((row, *row.divide_among_processes(plan.processes)) for row in plan.block_plan_by_row_length)
        text += ", ".join(
            f"{float(row.blocks_per_update * micro_batches):,.1f} x {format_count(packs, 'pack')} of {row.row_length:,}"
            for row, micro_batches, packs in shared
        )
    else:
        text += (
            f"{plan.accumulation_steps} x {settings.micro_batch_packs} packs x {plan.packing_factor:.3f} sequences per pack"
        )
    if plan.processes > 1:
        text += f" x {plan.processes} processes ({plan.sequences_per_update / plan.processes:,.1f} sequences per process)"
    lines = [text]
    if abs(plan.relative_batch_size_deviation) > _NOTABLE_CHANGE:
        more, present = "more" if plan.relative_batch_size_deviation > 0 else "fewer", settings.micro_batch_packs
        sequences = settings.global_batch_sequences
        nearest = find_micro_batch_size(sequences, plan.packing_factor * plan.processes, 2 * present)
        remedy = "" if in_training else "; every process takes the same number of packs"
        if in_training and nearest != present:
            remedy = f"; training.micro_batch_packs = {nearest} would come closest to it"
        lines.append(
            f"note: that is {abs(plan.relative_batch_size_deviation):.1%} {more} than {key} = {sequences:,}{remedy}"
        )
    if plan.packs is not None and plan.packs_per_update > plan.packs:
        micro_batch = min(settings.micro_batch_packs, max(1, plan.packs // plan.processes))
        full_steps = max(1, plan.packs // (micro_batch * plan.processes))
        sequences = int(full_steps * micro_batch * plan.processes * plan.packing_factor)
        remedy = f"{key} = {sequences:,}"
        if in_training and micro_batch < settings.micro_batch_packs:
            remedy += f" and training.micro_batch_packs = {micro_batch:,}"
        lines.append(
            f"note: an update reads {plan.packs_per_update:,} packs, but the data contains only {plan.packs:,}, so "
            f"sequences repeat within an update; set {remedy}, or pass more data"
        )
    return lines


def format_schedule(plan: RunPlan) -> list[str]:
    """Return lines that only a dry run prints, about the optimizer and about how often the run evaluates, saves and logs."""
    settings = plan.settings
    actions = {
        "evaluate": settings.evaluate_every_updates,
        "save": settings.save_every_updates,
        "log": settings.log_every_updates,
    }
    return [
        *(
            f"{action} every {updates:,} updates, which is every {updates * plan.sequences_per_update:,.0f} sequences"
            for action, updates in actions.items()
        ),
        f"{settings.optimizer}, peak learning rate {settings.learning_rate:g}, decay power {settings.decay_power:g} "
        f"counted from the {settings.decay_from}, "
        f"betas {settings.beta_1:.6g} and {settings.beta_2:.6g}, clip norm {settings.clip_norm:g}, "
        f"loss normalization: {settings.loss_normalization}",
    ]
