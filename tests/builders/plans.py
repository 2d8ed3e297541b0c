"""Plans as their files have them, or made from the strategies of the groups; and the work folder that a report reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from gaudi_bert.common.features import PackingMetrics

StrategyCounts = Mapping[tuple[int, ...], int]


def write_plan(path: Path, groups: Sequence[StrategyCounts], max_sequence_length: int, gap: int = 0) -> None:
    """A plan that can only be looked at: no files, nothing proven; each group uses `gap` packs more than its bound."""
    stored = [_group(group, gap) for group in groups]
    depth = max(len(strategy) for group in groups for strategy in group)
    masked = {"masked_slots": None, "masked_slots_needed": None}
    packs = sum(group["packs"] for group in stored)
    tokens = [_tokens(group) for group in groups]
    sequences = sum(group["sequences"] for group in stored)
    bound = packs - gap * len(groups)
    totals = {
        **PackingMetrics(sequences, packs, sum(tokens), packs * max_sequence_length, bound).to_json_fields(),
        "depth_used": depth, "strategies_used": len({strategy for group in groups for strategy in group}),
        "algorithm": "nnls", "algorithms_used": ["iterative-nnls"],
        "token_bound": sum(-(-each // max_sequence_length) for each in tokens), "groups": len(groups), **masked,
    }  # fmt: skip
    plan = {
        "format_version": 2, "algorithm": "nnls", "depth": depth, "max_sequence_length": max_sequence_length,
        "max_predictions": None, "masked_slots": None, "seed": 5, "shard_multiple": 32, "shard_bytes": 1000,
        "histogram_sha256": "0" * 64, "vocabulary": None, "writable": False, "totals": totals, "groups": stored,
    }  # fmt: skip
    path.write_text(json.dumps(plan))


def _tokens(group: StrategyCounts) -> int:
    return sum(sum(strategy) * count for strategy, count in group.items())


def _group(group: StrategyCounts, gap: int) -> dict[str, Any]:
    packs, sequences = (
        sum(group.values()),
        sum(len(strategy) * count for strategy, count in group.items()),
    )
    return {
        "files": [], "sequences": sequences, "packs": packs, "lower_bound": packs - gap,
        "algorithm_used": "iterative-nnls", "strategies": [[list(strategy), count] for strategy, count in group.items()],
        "bound_prices": None,
    }  # fmt: skip


# --- a work folder as the stages leave it


STRATEGY_COUNTS = {(13,): 20, (4, 9): 7, (2, 5, 6): 3, (3, 4): 1}
SLOTS = 13
SETTINGS = {"name": "demo", "training": {"updates": 3, "learning_rate": 0.001}}


def counts() -> list[int]:
    """Sequences of length 1 .. 13 in `STRATEGY_COUNTS`."""
    lengths = [length for strategy, times in STRATEGY_COUNTS.items() for length in strategy for _ in range(times)]
    return [lengths.count(length) for length in range(1, SLOTS + 1)]


def contents() -> dict[str, Any]:
    """Every file that the report reads, by its name in the work folder."""
    packs, sequences = sum(STRATEGY_COUNTS.values()), sum(counts())
    tokens = sum(length * count for length, count in enumerate(counts(), start=1))
    proven = {"sequences": sequences, "tokens": tokens, "packs": packs}
    split = {
        "text_documents": 9, "text_sentences": 90, "text_tokens": 900, "unknown_tokens": 1, "sequences": sequences,
        "tokens": tokens, "random_next": 20, "masked": 41,
        "files": [{"name": "part-00000-of-00001.tfrecord", "sequences": sequences, "bytes": 9000}],
    }  # fmt: skip
    metadata = {
        **PackingMetrics(sequences, packs, tokens, packs * SLOTS, packs - 1).to_json_fields(), "format_version": 2,
        "tool_version": "0.3.0", "max_sequence_length": SLOTS, "max_predictions": 2, "masked_slots": 5, "depth": 3,
        "seed": 5, "algorithm": "nnls", "vocabulary": None, "shard_multiple": 32, "input_files": 0, "groups": [],
        "histogram": counts(),
    }  # fmt: skip
    return {
        "examples/examples.json": {
            "format_version": 1,
            "vocabulary": {"size": 1234, "sha256": "ab", "trained": True},
            "sources": [{"name": "a.txt", "format": "plain text", "documents": 18}],
            "splits": {"train": split, "evaluation": split},
        },
        "examples/settings.json": {"stage": "prepare", "settings": {"seed": 7, "lower_case": True}, "inputs": {}},
        "histogram.json": {"max_sequence_length": SLOTS, "counts": counts()},
        "plan.json": partial(write_plan, groups=[STRATEGY_COUNTS], max_sequence_length=SLOTS, gap=1),
        "plan.settings.json": {
            "stage": "plan",
            "settings": {"algorithm": "nnls", "masked_slots": None},
            "inputs": {"histogram_sha256": "0" * 64},
        },
        "packed/train/metadata.json": metadata,
        "packed/train/verification.json": {
            **proven,
            "shards": 0,
            "groups": 0,
            "lower_bound": packs - 1,
            "fingerprint": "0123456789abcdef",
            "packs_sha256": hashlib.sha256(b"[]").hexdigest(),
        },
        **_training(),
        **_task(),
    }


def _training() -> dict[str, Any]:
    figures = {
        "loss": 5.1, "masked_lm_loss": 4.5, "masked_lm_accuracy": 0.25, "next_sentence_loss": 0.6,
        "next_sentence_accuracy": 0.7,
    }  # fmt: skip
    metrics = [
        {"update": update, "kind": kind, "sequences": 40 * update, **figures, "masked_lm_loss": 9.0 - update}
        for update in (1, 2, 3)
        for kind in ("train", "evaluation")
    ]
    training = {
        "updates": 3, "sequences": 120, "tokens": 900, "processes": 1, "packing_factor": 1.452, "sequences_per_update": 40.0,
        "reached_target": False, "training": figures, "evaluation": None, "realized_speedup": 1.4,
    }  # fmt: skip
    evaluation = {
        "update": 3, "loss_per": "token", **figures, "unigram_baseline": 0.05, "next_sentence_baseline": 0.52,
        "sequences": 7, "masked_tokens": 20,
    }  # fmt: skip
    return {
        "train/metrics.jsonl": metrics,
        "train/training.json": training,
        "train/evaluation.json": evaluation,
        "train/settings.yaml": SETTINGS,
    }


def _task() -> dict[str, Any]:
    learnt = {
        "task": "classification", "model": "update-00000003.safetensors", "labels": ["email", "xml"],
        "max_sequence_length": SLOTS, "sequences": 45, "packs": 31, "lower_bound": 30, "packing_factor": 1.452, "depth": 3,
        "algorithm": "optimal", "epochs": 2, "updates": 7, "best_metric": "accuracy", "best_update": 5, "evaluated_rows": 12,
        "metrics": {"loss": 0.5, "accuracy": 0.75, "f1_macro": 0.7}, "baseline": {"accuracy": 0.25},
    }  # fmt: skip
    lines = [
        {"update": 5, "kind": "evaluation", "loss": 0.5, "accuracy": 0.75},
        {"update": 7, "kind": "train", "loss": 0.4, "sequences_per_second": 1234.5, "tokens_per_second": 9876.5},
    ]
    return {
        "finetune/metrics.json": learnt,
        "finetune/metrics.jsonl": lines,
        "finetune/settings.yaml": {**SETTINGS, "finetune": {"epochs": 2}},
        "predict/predictions.jsonl": [{"label": "xml"}] * 4321,
    }


def write_workdir(folder: Path, without: tuple[str, ...] = ()) -> Path:
    for name, value in contents().items():
        if name in without:
            continue
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(value):
            value(path)
        elif name.endswith(".jsonl"):
            path.write_text("".join(json.dumps(line) + "\n" for line in value))
        elif name.endswith(".yaml"):
            path.write_text(yaml.safe_dump(value))
        else:
            path.write_text(json.dumps(value))
    return folder
