"""From the one number that matters, `global_batch_sequences`, to packs, micro-batches and what they really amount to.

Packing changes how many sequences a batch of packs holds, so what is kept fixed is the number of *sequences* of an update
(paper 3.3: cut the accumulation by the packing factor and keep every other hyperparameter). With a packing factor f,
W workers and b packs a micro-batch,

    accumulation steps = max(1, round(global_batch_sequences / (b * f * W)))

The predecessor rounded to 0 when the factor was large, and trained on nothing; and it never said that rounding had changed
the batch. Here the figure that results is part of the plan, and a change of more than 2 % is said, with the remedy.
"""

from __future__ import annotations

from dataclasses import dataclass

from gaudi_bert.config import TrainingSettings

__all__ = ["BatchPlan", "plan_batches"]

WORTH_SAYING = 0.02


@dataclass(frozen=True)
class BatchPlan:
    """How an update is put together.

    Attributes:
        accumulation_steps: micro-batches of one update on one worker, at least 1.
        micro_batch_packs: packs of one micro-batch on one worker.
        workers: processes that train together.
        packing_factor: sequences a pack, on average over the data.
        asked_sequences: `global_batch_sequences` of the settings.
    """

    accumulation_steps: int
    micro_batch_packs: int
    workers: int
    packing_factor: float
    asked_sequences: int

    @property
    def packs_per_update_and_worker(self) -> int:
        """Packs that one worker reads for one update."""
        return self.accumulation_steps * self.micro_batch_packs

    @property
    def packs_per_update(self) -> int:
        """Packs of one update over all workers."""
        return self.packs_per_update_and_worker * self.workers

    @property
    def sequences_per_update(self) -> float:
        """Sequences of one update over all workers, on average."""
        return self.packs_per_update * self.packing_factor

    @property
    def change(self) -> float:
        """How far the real batch is from the one asked for: 0.05 is 5 % more."""
        return self.sequences_per_update / self.asked_sequences - 1.0

    def lines(self) -> list[str]:
        """The plan for people."""
        text = (
            f"an update is {self.sequences_per_update:,.1f} sequences on average: {self.accumulation_steps} x "
            f"{self.micro_batch_packs} packs x {self.packing_factor:.3f} sequences a pack"
        )
        if self.workers > 1:
            each = self.sequences_per_update / self.workers
            text += f" x {self.workers} workers ({each:,.1f} sequences a worker)"
        lines = [text]
        if abs(self.change) > WORTH_SAYING:
            more, nearest = "more" if self.change > 0 else "fewer", self.nearest_micro_batch()
            remedy = (
                f"; training.micro_batch_packs = {nearest} comes nearest to it" if nearest != self.micro_batch_packs else ""
            )
            asked = f"global_batch_sequences = {self.asked_sequences:,}"
            lines.append(f"note: that is {abs(self.change):.1%} {more} than {asked}{remedy}")
        return lines

    def nearest_micro_batch(self) -> int:
        """The number of packs up to twice the present one whose update is nearest to what was asked for."""

        def distance(packs: int) -> tuple[float, int]:
            steps = _accumulation_steps(self.asked_sequences, packs, self.packing_factor, self.workers)
            real = steps * packs * self.packing_factor * self.workers
            return round(abs(real / self.asked_sequences - 1.0), 3), abs(packs - self.micro_batch_packs)

        return min(range(1, 2 * self.micro_batch_packs + 1), key=distance)


def plan_batches(settings: TrainingSettings, packing_factor: float, workers: int = 1) -> BatchPlan:
    """Derive the accumulation steps.

    Args:
        settings: `global_batch_sequences` and `micro_batch_packs` are used.
        packing_factor: sequences a pack, at least 1.
        workers: processes that train together.
    """
    packs, asked = settings.micro_batch_packs, settings.global_batch_sequences
    return BatchPlan(
        accumulation_steps=_accumulation_steps(asked, packs, packing_factor, workers),
        micro_batch_packs=packs,
        workers=workers,
        packing_factor=packing_factor,
        asked_sequences=asked,
    )


def _accumulation_steps(sequences: int, packs: int, packing_factor: float, workers: int) -> int:
    return max(1, round(sequences / (packs * packing_factor * workers)))
