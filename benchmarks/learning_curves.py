"""Learning curves of packed training, unpacked training, and training on packs with missing parts (figures 3 and 4 of the
packing paper).

    python benchmarks/learning_curves.py                 train everything, and write docs/learning-curves.json
    python docs/draw_learning_curves.py                  draw the learning curves
    python benchmarks/learning_curves.py pairs           compare losses over many seeds, on a smaller model

The text is the documentation that comes with every CPython. Its examples have at most 40 tokens, and half of them are
shortened at random. Up to 8 sequences are packed into a row of 128, and the mean is more than three, so that mistakes in
packing have a visible effect. All runs of a study have the same number of sequences in an update (`global_batch_sequences`)
and the same settings, and are evaluated on the same unpacked held-out sequences. There are these curves, each for three
seeds:

    unpacked     one sequence per row (of 40 slots, because more padding would only cost time)
    packed       as in the trainer
    no mask      every token attends to all tokens of its row: `input_mask` is 1 for every token
    no restart   positions do not restart in each sequence
    bfloat16     packed, with matrix products in bfloat16 (one seed)

The variants change features of the batch, but never the model. The pairs, with 12 seeds (--seeds), start from the same
weights:

    the rows     packed, and the same sequences of the same updates in rows of their own, without dropout (three seeds)
    dropout      the same with dropout 0.1, whose masks differ because the slots differ
    all of it    packed and unpacked as in the trainer, each in its own order, with dropout 0.1

The benchmark prints the mean difference of the held-out loss over the seeds after each quarter of a run with its 95 %
confidence interval (Student's t), and the difference between two runs of the same kind. The runs use one thread each and run
at the same time. Finished runs are kept in the work folder and are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gaudi_bert.artefacts.results import StageRun
from gaudi_bert.common.files import write_json
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.sections import PackingSettings, PrepareSettings, TrainingSettings
from gaudi_bert.engines.tensorflow import set_tensorflow_environment

DOCS = Path(__file__).resolve().parent.parent / "docs"
QUIET = Reporter(quiet=True)
SHORT, ROW, DEPTH = 40, 128, 8
SHORT_PREDICTIONS, ROW_PREDICTIONS = 6, 20
MOST_SEQUENCES = 104
"""The number of rows in a batch of the pairs whose packs were split into single sequences."""
PREPARE = PrepareSettings(
    text="python-docs",
    train_vocab=2048,
    max_sequence_length=SHORT,
    max_predictions=SHORT_PREDICTIONS,
    short_sequence_probability=0.5,
    duplicates=20,
)
Batch = dict[str, np.ndarray]


# --- what is trained


def without_mask(batch: Batch) -> Batch:
    """Return a batch in which attention treats all tokens of a row as one sequence. The losses do not change."""
    return {**batch, "input_mask": np.minimum(batch["input_mask"], 1)}


def without_restart(batch: Batch) -> Batch:
    """Return a batch in which positions do not restart in each sequence."""
    mask_BL = batch["input_mask"]
    running_BL = np.arange(mask_BL.shape[1], dtype=np.int32) * (mask_BL > 0)
    return {**batch, "positions": running_BL.astype(np.int32)}


def split_packs_into_rows(batch: Batch) -> Batch:
    """Return the sequences of a packed batch in rows of their own. All other rows are empty."""
    from gaudi_bert.training.verify_model import collate_packs, split_packs

    rows = [[placed.sequence] for placed in split_packs(batch)]
    empty = MOST_SEQUENCES - len(rows)
    return collate_packs([*rows, *([[]] * empty)], SHORT, SHORT_PREDICTIONS, 1)


@dataclass(frozen=True)
class Study:
    """The model and the settings that all runs of a study share."""

    sizes: dict[str, int]
    training: TrainingSettings
    evaluations: int
    held_out: int


@dataclass(frozen=True)
class Arm:
    """One kind of run: whether rows are packed, how a batch is changed, the precision, the dropout, and the seeds."""

    packed: bool = True
    change: Callable[[Batch], Batch] = dict
    precision: Literal["float32", "bfloat16"] = "float32"
    dropout: float = 0.1
    seeds: int = 3


CURVES = Study(
    {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512},
    TrainingSettings(learning_rate=2e-3, global_batch_sequences=64, updates=1000, warmup_updates=100),
    evaluations=20,
    held_out=1024,
)
PAIRED = Study(
    {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 256},
    TrainingSettings(learning_rate=4e-3, global_batch_sequences=65, updates=300, warmup_updates=30),
    evaluations=4,
    held_out=512,
)
VARIANTS = {
    "unpacked": Arm(packed=False),
    "packed": Arm(),
    "no mask": Arm(change=without_mask),
    "no restart": Arm(change=without_restart),
    "bfloat16": Arm(precision="bfloat16", seeds=1),
}
ARMS = {
    "packed, no dropout": Arm(dropout=0.0),
    "one to a row, no dropout": Arm(change=split_packs_into_rows, dropout=0.0),
    "packed": Arm(seeds=12),
    "one to a row": Arm(change=split_packs_into_rows, seeds=12),
    "unpacked": Arm(packed=False, seeds=12),
}
PAIRS = {
    "the rows": ("packed, no dropout", "one to a row, no dropout"),
    "dropout": ("packed", "one to a row"),
    "all of it": ("packed", "unpacked"),
}


# --- data and runs


def make_data(work: Path) -> None:
    """Write examples of at most 40 tokens, and pack the same examples into rows of 128."""
    from gaudi_bert.corpus.prepare import prepare_examples
    from gaudi_bert.tfrecords.write import pack_records

    prepare_examples(PREPARE, work / "short", StageRun(QUIET), pipeline_folder=work)
    if not (work / "long").exists():
        write_longer_records(work / "short" / "train", work / "long")
    pack_records(work / "long", work / "packed", PackingSettings(depth=DEPTH), StageRun(QUIET))


def write_longer_records(short: Path, out: Path) -> None:
    """Write every record again with room for 128 tokens and 20 masked positions. The sequences are the same, with more
    padding.
    """
    from gaudi_bert.tfrecords.wire.example import decode_example, encode_example
    from gaudi_bert.tfrecords.wire.framing import frame, read_records

    partial = out.with_name(f".{out.name}")
    partial.mkdir(exist_ok=True)
    for file in sorted(short.iterdir()):
        with (partial / file.name).open("wb") as handle:
            for payload in read_records(file):
                features = decode_example(payload)
                handle.write(frame(encode_example({name: padded(value) for name, value in features.items()})))
    partial.rename(out)


def padded(values: np.ndarray) -> np.ndarray:
    """Pad values with zeros to the longer size."""
    longer = {SHORT: ROW, SHORT_PREDICTIONS: ROW_PREDICTIONS}.get(len(values), len(values))
    return np.pad(values, (0, longer - len(values)))


def use_one_thread() -> None:
    """Limit TensorFlow in a process of the pool to one thread."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def train(work: Path, study: Study, name: str, arm: Arm, seed: int) -> dict[str, Any]:
    """Train one run, and return its metrics."""
    started = time.perf_counter()
    points = [{key: round(value, 5) for key, value in point.items()} for point in iterate_points(work, study, arm, seed)]
    seconds = round(time.perf_counter() - started, 1)
    return {"variant": name, "seed": seed, "updates": study.training.updates, "seconds": seconds, "points": points}


def iterate_points(work: Path, study: Study, arm: Arm, seed: int) -> Iterator[dict[str, float]]:
    """Train, and yield the metrics on the held-out sequences at regular intervals."""
    from gaudi_bert.artefacts.training import LossMetrics
    from gaudi_bert.engines.protocol import Communicator, ModelSpec
    from gaudi_bert.engines.tensorflow import engine
    from gaudi_bert.model.config import BertConfig
    from gaudi_bert.model.heads import PretrainingHead
    from gaudi_bert.training.batches import TrainingOrder, read_training_batches
    from gaudi_bert.training.evaluate import RecordsEvaluation
    from gaudi_bert.training.loop import compute_learning_rate
    from gaudi_bert.training.objective import PretrainingObjective, TrainingStep
    from gaudi_bert.training.sources import open_local_records

    settings, alone = study.training.model_copy(update={"seed": seed}), Communicator()
    source = open_local_records(work / "packed" if arm.packed else work / "short" / "train")
    rows = round(settings.global_batch_sequences / source.packing_factor)
    dropout = {"hidden_dropout_prob": arm.dropout, "attention_probs_dropout_prob": arm.dropout}
    config = BertConfig(vocab_size=PREPARE.train_vocab, max_position_embeddings=ROW, **dropout, **study.sizes)
    spec = ModelSpec(config, PretrainingHead(settings.loss))
    model = engine.build_model(spec, seed=seed, compute_dtype=arm.precision, compiled=True)
    updates = engine.create_updates(model, settings, alone, 1)
    step = TrainingStep(updates, alone, settings, PretrainingObjective(settings.loss))
    held_out = RecordsEvaluation(open_local_records(work / "short" / "evaluation"), config, 64, study.held_out)
    order = TrainingOrder(seed=seed, shuffle_packs=settings.shuffle_packs)
    batches = read_training_batches(source, config, rows, order)
    sequences, sums = 0, np.zeros(8)
    for update in range(1, settings.updates + 1):
        batch = next(batches)
        sequences += int(np.count_nonzero(batch["next_sentence_weights"]))
        sums += step.run_update([arm.change(batch)], update, compute_learning_rate(update, settings))()[:8]
        if update % (settings.updates // study.evaluations) == 0:
            measured = held_out.evaluate_model(model, alone).model_dump(include=set(LossMetrics.model_fields))
            yield {"sequences": sequences, "training_loss": float(sums[0] / sums[1]), **measured}
            sums[:] = 0


def run_all(work: Path, study: Study, arms: dict[str, Arm], processes: int) -> list[dict[str, Any]]:
    """Train all runs that are not in the work folder yet, `processes` at a time, and return all runs."""
    kind = "run" if study.evaluations == CURVES.evaluations else "paired"
    files = {
        (name, seed): work / f"{kind}-{name.replace(' ', '-').replace(',', '')}-{seed}-{study.training.updates}.json"
        for name, arm in arms.items()
        for seed in range(1, arm.seeds + 1)
    }
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=use_one_thread) as pool:
        missing = [(name, seed) for (name, seed), file in files.items() if not file.exists()]
        waiting = {pool.submit(train, work, study, name, arms[name], seed): (name, seed) for name, seed in missing}
        for done in as_completed(waiting):
            result = done.result()
            write_json(files[waiting[done]], result)
            last = result["points"][-1]
            print(
                f"{result['variant']}, seed {result['seed']}: held-out masked-LM loss {last['masked_lm_loss']:.4f}, "
                f"accuracy {last['masked_lm_accuracy']:.4f} after {last['sequences']:,} sequences "
                f"({result['seconds']:.0f} s)",
                flush=True,
            )
    return [json.loads(file.read_text(encoding="utf-8")) for file in files.values()]


# --- the pairs in numbers


def print_pairs(runs: list[dict[str, Any]]) -> None:
    """Print the mean differences with their confidence intervals."""
    losses = {
        name: np.array([[point["masked_lm_loss"] for point in run["points"]] for run in runs if run["variant"] == name])
        for name in ARMS
    }
    for label, (one, other) in PAIRS.items():
        print(f"{label}: {one} minus {other}")
        for quarter, differences in enumerate((losses[one] - losses[other]).T, start=1):
            print(f"  after {quarter}/{PAIRED.evaluations} of the updates: {format_interval(differences)}")
    for name, values in losses.items():
        print(
            f"{name}: held-out loss at the end {format_range(values[:, -1])}, "
            f"standard deviation {values[:, -1].std(ddof=1):.4f}"
        )


def format_interval(differences: np.ndarray) -> str:
    """Format the mean and the 95 % confidence interval over seeds."""
    from scipy.stats import t

    count, mean = len(differences), differences.mean()
    half = t.ppf(0.975, count - 1) * differences.std(ddof=1) / np.sqrt(count)
    return f"{mean:+.4f} [{mean - half:+.4f} to {mean + half:+.4f}], {count} seeds"


# --- the curves in numbers


def interpolate_curves(content: dict[str, Any], variant: str, figure: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of sequences, [points], and the metric of every seed at these points, [seeds, points].

    The number of sequences in a packed update varies, so the metrics of every run are interpolated at the points of the
    first unpacked run.
    """
    runs = [run["points"] for run in content["runs"] if run["variant"] == variant]
    reference = next(run["points"] for run in content["runs"] if run["variant"] == "unpacked")
    most = min(points[-1]["sequences"] for points in [reference, *runs])
    places = np.array([min(point["sequences"], most) for point in reference], float)
    values = [
        np.interp(places, [point["sequences"] for point in points], [point[figure] for point in points]) for points in runs
    ]
    return places, np.array(values)


def print_curves(content: dict[str, Any]) -> None:
    """Print the ends of all curves, and at how many points the difference between packed and unpacked is smaller than the
    spread of the seeds.
    """
    print(f"\npacking factor {content['packing_factor']:.3f}, at most {content['depth']} sequences a row; at the end:")
    for variant in VARIANTS:
        loss, accuracy, sentences = (
            format_range(interpolate_curves(content, variant, figure)[1][:, -1])
            for figure in ("masked_lm_loss", "masked_lm_accuracy", "next_sentence_accuracy")
        )
        print(f"  {variant:<12} held-out masked-LM loss {loss}, accuracy {accuracy}, next-sentence accuracy {sentences}")
    for figure in ("masked_lm_loss", "masked_lm_accuracy"):
        places, unpacked = interpolate_curves(content, "unpacked", figure)
        _, packed = interpolate_curves(content, "packed", figure)
        apart = np.abs(packed.mean(axis=0) - unpacked.mean(axis=0))
        spread = np.maximum(np.ptp(packed, axis=0), np.ptp(unpacked, axis=0))
        inside = int(np.count_nonzero(apart <= spread))
        print(
            f"  packed and unpacked, {figure}: the means differ by {apart.mean():.4f} on average, {apart[-1]:.4f} at the "
            f"end; seeds by {spread.mean():.4f} and {spread[-1]:.4f}; within the seeds' spread at {inside} of {len(places)}"
        )


def format_range(values: np.ndarray) -> str:
    """Format the mean and the range."""
    return f"{values.mean():.4f} [{values.min():.4f} to {values.max():.4f}]"


def main() -> None:
    """Parse the command line, train, and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("curves", "pairs"), default="curves")
    parser.add_argument("--seeds", type=int, default=12, help="number of seeds for the pairs with dropout")
    parser.add_argument("--updates", type=int, help="number of updates in a run; default: 1,000, or 300 for the pairs")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--work", type=Path, help="keep data and finished runs here; default: a temporary folder")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder for learning-curves.json")
    arguments = parser.parse_args()
    set_tensorflow_environment()
    study, arms = (CURVES, VARIANTS) if arguments.what == "curves" else (PAIRED, ARMS)
    arms = {name: replace(arm, seeds=arguments.seeds if arm.seeds == 12 else arm.seeds) for name, arm in arms.items()}
    if arguments.updates is not None:
        study = replace(study, training=study.training.model_copy(update={"updates": arguments.updates}))
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        make_data(work)
        metadata = json.loads((work / "packed" / "metadata.json").read_text(encoding="utf-8"))
        runs = run_all(work, study, arms, arguments.processes)
    if arguments.what == "pairs":
        print_pairs(runs)
        return
    content = {"packing_factor": metadata["packing_factor"], "depth": DEPTH, "runs": runs}
    write_json(arguments.out / "learning-curves.json", content)
    print_curves(content)


if __name__ == "__main__":
    main()
