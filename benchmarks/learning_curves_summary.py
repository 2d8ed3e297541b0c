"""What the learning curves say in numbers: whether packed and unpacked runs overlap within the spread of their seeds."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["curves_of", "print_summary"]


def curves_of(content: dict[str, Any], variant: str, figure: str) -> tuple[np.ndarray, np.ndarray]:
    """Sequences seen, [points], and the figure of every seed there, [seeds, points].

    Packed updates hold a varying number of sequences, so every run is read off at the places of the first unpacked one.
    """
    runs = [run["points"] for run in content["runs"] if run["variant"] == variant]
    reference = next(run["points"] for run in content["runs"] if run["variant"] == "unpacked")
    most = min(points[-1]["sequences"] for points in [reference, *runs])
    places = np.array([min(point["sequences"], most) for point in reference], float)
    values = [
        np.interp(places, [point["sequences"] for point in points], [point[figure] for point in points]) for points in runs
    ]
    return places, np.array(values)


def print_summary(content: dict[str, Any]) -> None:
    """Ends of all curves, and packed against unpacked along the way."""
    print(f"\npacking factor {content['packing_factor']:.3f}, at most {content['depth']} sequences a row; at the end:")
    for variant in dict.fromkeys(run["variant"] for run in content["runs"]):
        ends = [
            curves_of(content, variant, figure)[1][:, -1]
            for figure in ("masked_lm_loss", "masked_lm_accuracy", "next_sentence_accuracy")
        ]
        print(
            f"  {variant:<12} held-out masked-LM loss {span(ends[0])}, accuracy {span(ends[1])}, "
            f"next-sentence accuracy {span(ends[2])}"
        )
    for figure in ("masked_lm_loss", "masked_lm_accuracy"):
        print_overlap(content, figure)


def print_overlap(content: dict[str, Any], figure: str) -> None:
    """At how many points the two means are nearer than their seeds are apart."""
    places, unpacked = curves_of(content, "unpacked", figure)
    _, packed = curves_of(content, "packed", figure)
    apart = np.abs(packed.mean(axis=0) - unpacked.mean(axis=0))
    spread = np.maximum(np.ptp(packed, axis=0), np.ptp(unpacked, axis=0))
    inside = int(np.count_nonzero(apart <= spread))
    print(
        f"  packed and unpacked, {figure}: the means differ by {apart.mean():.4f} on average, {apart[-1]:.4f} at the end; "
        f"seeds by {spread.mean():.4f} and {spread[-1]:.4f}; within the seeds' spread at {inside} of {len(places)} points"
    )


def span(values: np.ndarray) -> str:
    """Mean and range."""
    return f"{values.mean():.4f} [{values.min():.4f} to {values.max():.4f}]"
