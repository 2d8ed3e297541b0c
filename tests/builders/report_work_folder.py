"""A small work folder as the stages leave it, for tests of the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

MIXTURE = {(13,): 20, (4, 9): 7, (2, 5, 6): 3, (3, 4): 1}
SLOTS = 13


def counts() -> list[int]:
    """Sequences of length 1 .. 13 in `MIXTURE`."""
    lengths = [length for strategy, times in MIXTURE.items() for length in strategy for _ in range(times)]
    return [lengths.count(length) for length in range(1, SLOTS + 1)]


def contents() -> dict[str, Any]:
    """Every file that the report reads, by its name in the work folder."""
    packs = sum(MIXTURE.values())
    sequences = sum(counts())
    tokens = sum(length * count for length, count in enumerate(counts(), start=1))
    totals = {
        "packs": packs,
        "lower_bound": packs - 1,
        "padding_tokens": packs * SLOTS - tokens,
        "efficiency": tokens / (packs * SLOTS),
        "packing_factor": sequences / packs,
        "strategies_used": len(MIXTURE),
        "algorithm": "nnls",
        "algorithms_used": ["iterative-nnls"],
    }
    split = {
        "text_documents": 9,
        "text_sentences": 90,
        "text_tokens": 900,
        "unknown_tokens": 1,
        "sequences": sequences,
        "tokens": tokens,
        "random_next": 20,
        "masked": 41,
    }
    figures = {"masked_lm_loss": 4.5, "masked_lm_accuracy": 0.25, "next_sentence_loss": 0.6, "next_sentence_accuracy": 0.7}
    metrics = [
        {"update": update, "kind": kind, "sequences": 40 * update, **figures, "masked_lm_loss": 9.0 - update}
        for update in (1, 2, 3)
        for kind in ("train", "evaluation")
    ]
    return {
        "examples/examples.json": {
            "splits": {"train": split, "evaluation": split},
            "vocabulary": {"size": 1234, "trained": True},
        },
        "examples/settings.json": {"settings": {"seed": 7, "lower_case": True}},
        "histogram.json": {"max_sequence_length": SLOTS, "counts": counts()},
        "plan.json": {
            "depth": 3,
            "totals": totals,
            "groups": [{"strategies": [[list(strategy), count] for strategy, count in MIXTURE.items()]}],
        },
        "plan.settings.json": {"settings": {"algorithm": "nnls", "masked_slots": None}},
        "packed/train/metadata.json": {**totals, "max_sequence_length": SLOTS, "histogram": counts(), "depth": 3},
        "verify.json": {"sequences": sequences},
        "train/metrics.jsonl": metrics,
        "train/evaluation.json": {**figures, "unigram_baseline": 0.05, "update": 3},
        "train/settings.yaml": {"name": "demo", "training": {"updates": 3, "learning_rate": 0.001}},
    }


def write_workdir(folder: Path, without: tuple[str, ...] = ()) -> Path:
    """Write all files but those in `without`."""
    for name, value in contents().items():
        if name in without:
            continue
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".jsonl"):
            path.write_text("".join(json.dumps(line) + "\n" for line in value))
        elif name.endswith(".yaml"):
            path.write_text(yaml.safe_dump(value))
        else:
            path.write_text(json.dumps(value))
    return folder
