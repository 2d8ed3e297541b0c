"""The plan of a run as text for people, and as JSON for programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gaudi_bert.common.progress import format_count
from gaudi_bert.training.run_plan import CADENCE_SETTINGS, RunPlan, find_micro_batch_size

# A note is printed if the batch size differs from the requested size by more than this fraction.
_NOTABLE_CHANGE = 0.02
# A note is printed if rows are longer than this multiple of the mean sequence. In rows of up to 512 tokens, attention takes
# only a small part of the time, so no note is printed for them.
_LONG_ROWS, _USUAL_SLOTS = 4, 512


@dataclass(frozen=True)
class DryRun:
    """The result of a dry run, which plans a run without training.

    Attributes:
        plan: The plan of the run.
    """

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
            "change": plan.batch_size_change,
            "sequences": plan.sequences_per_update * settings.updates,
        }


def format_plan(plan: RunPlan) -> list[str]:
    """Return the lines that describe the plan of a run: the size of an update, the number of updates, and notes on both."""
    settings, requested = plan.settings, plan.requested
    lines = _format_update(plan)
    if settings != requested:
        lines.append(
            f"packing_correction betas: beta_1 {requested.beta_1:g} -> {settings.beta_1:.6g}, "
            f"beta_2 {requested.beta_2:g} -> {settings.beta_2:.6g}, "
            f"updates {requested.updates:,} -> {settings.updates:,}, "
            f"warm-up {requested.warmup_updates:,} -> {settings.warmup_updates:,}"
        )
    packs = plan.count_packs_after(settings.updates)
    epochs = f" ({packs / plan.packs:,.1f} times the data)" if plan.packs else ""
    warmup = f"{settings.warmup_updates:,} of them are warm-up"
    if settings.warmup_updates > settings.updates:
        warmup = f"all of them are warm-up, which would take {settings.warmup_updates:,}"
    sequences = packs * plan.packing_factor
    lines.append(f"{settings.updates:,} updates read about {sequences:,.0f} sequences{epochs}; {warmup}")
    times = plan.slots_per_pack / plan.mean_tokens if plan.mean_tokens is not None else 1.0
    if times > _LONG_ROWS and plan.slots_per_pack > _USUAL_SLOTS:
        lines.append(
            f"note: rows of {plan.slots_per_pack:,} tokens are {times:.1f} times as long as the mean text "
            f"({plan.mean_tokens:,.0f} tokens), and the cost of attention grows with the square of the row length, so that "
            "shorter rows may be faster"
            + ("; finetune.row_lengths = auto chooses them" if settings.section == "finetune" else "")
        )
    return lines


def _format_update(plan: RunPlan) -> list[str]:
    """Return the line that states how many sequences and packs an update contains.

    Notes follow if the size differs from the settings, or if an update is larger than the data.
    """
    settings, in_training = plan.settings, plan.settings.section == "training"
    key = "training.global_batch_sequences" if in_training else "finetune.batch_sequences"
    text = f"an update contains {plan.sequences_per_update:,.1f} sequences on average: "
    if plan.packs_by_row_length:
        shared = ((row, *row.divide_among(plan.processes)) for row in plan.pack_blocks)
        text += ", ".join(
            f"{float(row.blocks_per_update * micro_batches):,.1f} x {format_count(packs, 'pack')} of {row.row_length:,}"
            for row, micro_batches, packs in shared
        )
    else:
        text += (
            f"{plan.accumulation_steps} x {settings.micro_batch_packs} packs x {plan.packing_factor:.3f} sequences per pack"
        )
    if plan.processes > 1:
        sequences_per_process = plan.sequences_per_update / plan.processes
        text += f" x {plan.processes} processes ({sequences_per_process:,.1f} sequences per process)"
    lines = [text]
    if abs(plan.batch_size_change) > _NOTABLE_CHANGE:
        more, present = "more" if plan.batch_size_change > 0 else "fewer", settings.micro_batch_packs
        sequences = settings.global_batch_sequences
        nearest = find_micro_batch_size(sequences, plan.packing_factor * plan.processes, 2 * present)
        remedy = "" if in_training else "; every process takes the same number of packs"
        if in_training and nearest != present:
            remedy = f"; training.micro_batch_packs = {nearest} would come nearest to it"
        lines.append(f"note: that is {abs(plan.batch_size_change):.1%} {more} than {key} = {sequences:,}{remedy}")
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
    """Return the lines about intervals and the optimizer, which only a dry run prints.

    The intervals are those between evaluations, between checkpoints and between log lines.
    """
    settings = plan.settings
    lines = []
    for action in ("evaluate", "save", "log"):
        updates = getattr(settings, f"{action}_every_updates")
        sequences = updates * plan.sequences_per_update
        lines.append(f"{action} every {updates:,} updates, that is every {sequences:,.0f} sequences")
    return [
        *lines,
        f"{settings.optimizer}, peak learning rate {settings.learning_rate:g}, decay power {settings.decay_power:g} "
        f"counted from the {settings.decay_from}, "
        f"betas {settings.beta_1:.6g} and {settings.beta_2:.6g}, clip norm {settings.clip_norm:g}, "
        f"losses normalized: {settings.loss_normalization}",
    ]
