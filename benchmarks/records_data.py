"""Create files of unpacked examples for the benchmarks. The examples have random tokens, and lengths from a published
histogram.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from gaudi_bert.artefacts.results import StageRun
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.sections import PackingSettings
from gaudi_bert.tfrecords.wire.example import encode_example
from gaudi_bert.tfrecords.wire.framing import frame

FILES, SEQUENCES_PER_FILE, SEED = 8, 20_000, 7
LENGTH, DEPTH = 512, 3
QUIET = Reporter(quiet=True)
HISTOGRAM = Path(__file__).resolve().parent.parent / "gaudi_bert" / "histograms" / "wikipedia-512.json"
MAX_PREDICTIONS = 76
MASKED_SHARE = 0.15
CLS, SEP, VOCABULARY = 101, 102, 30522


def draw_lengths(count: int, seed: int) -> np.ndarray:
    """Draw `count` independent sequence lengths from the histogram."""
    counts = np.array(json.loads(HISTOGRAM.read_text(encoding="utf-8"))["counts"], float)
    return np.random.default_rng(seed).choice(np.arange(1, counts.size + 1), size=count, p=counts / counts.sum())


def make_example(length: int, max_sequence_length: int, rng: np.random.Generator, vocabulary: int = VOCABULARY) -> bytes:
    """Return a serialized example with `length` random tokens, of which 15 % are masked."""
    masked = min(MAX_PREDICTIONS, max(1, round(length * MASKED_SHARE)))
    boundary = int(rng.integers(1, max(2, length - 1)))
    positions = np.sort(rng.permutation(np.arange(1, max(2, length)))[:masked])
    masked = positions.size
    features = {name: np.zeros(max_sequence_length, np.int64) for name in ("input_ids", "input_mask", "segment_ids")}
    features |= {name: np.zeros(MAX_PREDICTIONS, np.int64) for name in ("masked_lm_positions", "masked_lm_ids")}
    features["input_ids"][:length] = rng.integers(1000, vocabulary, length)
    features["input_ids"][[0, min(boundary, length - 1), length - 1]] = CLS, SEP, SEP
    features["input_mask"][:length] = 1
    features["segment_ids"][boundary:length] = 1
    features["masked_lm_positions"][:masked] = np.minimum(positions, length - 1)
    features["masked_lm_ids"][:masked] = rng.integers(1000, vocabulary, masked)
    weights = np.zeros(MAX_PREDICTIONS, np.float32)
    weights[:masked] = 1
    features["masked_lm_weights"] = weights
    features["next_sentence_labels"] = rng.integers(0, 2, 1)
    return encode_example(features)


def write_record_files(
    folder: Path, files: int, sequences_per_file: int, seed: int, max_sequence_length: int = 512
) -> list[Path]:
    """Write `files` TFRecord files, and return their paths. Files from an earlier run are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(files):
        path = folder / f"part-{number:05d}-of-{files:05d}.tfrecord"
        paths.append(path)
        if path.exists():
            continue
        rng = np.random.default_rng([seed, number])
        temporary = path.with_name(f".{path.name}.tmp")
        with temporary.open("wb") as handle:
            for length in draw_lengths(sequences_per_file, seed * 1_000_003 + number):
                handle.write(frame(make_example(int(length), max_sequence_length, rng)))
        temporary.rename(path)
    return paths


def write_records_and_plan(folder: Path, group_sequences: int = 500_000) -> tuple[Path, Path]:
    """Write unpacked records and a packing plan for them, and return the paths of both."""
    from gaudi_bert.tfrecords.plan import count_records, plan_packs

    records = folder / "unpacked"
    write_record_files(records, FILES, SEQUENCES_PER_FILE, SEED)
    counts, planned = folder / "histogram.json", folder / f"plan-{group_sequences}.json"
    count_records(records, counts, StageRun(QUIET, overwrite=True))
    settings = PackingSettings(group_sequences=group_sequences)
    plan_packs([counts], planned, settings, StageRun(QUIET, overwrite=True))
    return records, planned
