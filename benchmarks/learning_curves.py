"""Learning curves: packed training against unpacked training, and against packing done wrong (the paper's figures 3 and 4).

    python benchmarks/learning_curves.py                 train everything, write docs/learning-curves.json and .svg
    python benchmarks/learning_curves.py --redraw        draw the picture again from the numbers

The text is the documentation that every CPython carries. Its examples are made with at most 40 tokens, half of them shorter
by chance, and packed up to 8 into rows of 128, more than three a row, so that what packing does wrong would show. Every run
sees as many sequences an update (`global_batch_sequences`), has the same settings, and is measured on the same held-out
sequences, which are not packed. Three seeds each:

    unpacked     one sequence a row (of 40 slots: what lies beyond would be padding, which changes nothing but the time)
    packed       as the trainer does it
    no mask      every token attends to all tokens of its row: `input_mask` is 1 wherever there is a token
    no restart   positions run on through the row
    bfloat16     packed, matrix products in bfloat16 (one seed)

The ablations change features of the batch, never the model. Runs go side by side, one thread each; a run that is finished is
kept in the work folder, and not done again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from learning_curves_picture import draw
from learning_curves_summary import print_summary

from gaudi_bert.artefacts.stage_run import StageRun
from gaudi_bert.common.files import write_json, write_text
from gaudi_bert.common.progress import Reporter
from gaudi_bert.common.tensorflow_environment import prepare_tensorflow
from gaudi_bert.config.sections import PackingSettings, PrepareSettings, TrainingSettings

DOCS = Path(__file__).resolve().parent.parent / "docs"
QUIET = Reporter(quiet=True)
SHORT, ROW, DEPTH = 40, 128, 8
SHORT_PREDICTIONS, ROW_PREDICTIONS = 6, 20
SEEDS = (1, 2, 3)
EVALUATIONS, HELD_OUT = 20, 1024
PREPARE = PrepareSettings(
    text="python-docs",
    train_vocab=2048,
    max_sequence_length=SHORT,
    max_predictions=SHORT_PREDICTIONS,
    short_sequence_probability=0.5,
    duplicates=20,
)
MODEL = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
TRAINING = TrainingSettings(learning_rate=2e-3, global_batch_sequences=64, updates=1000, warmup_updates=100)

Batch = dict[str, np.ndarray]


def without_mask(batch: Batch) -> Batch:
    """All tokens of a row as one sequence for the attention; the losses are as before."""
    return {**batch, "input_mask": np.minimum(batch["input_mask"], 1)}


def without_restart(batch: Batch) -> Batch:
    """Positions that run on through the row."""
    mask_BL = batch["input_mask"]
    running_BL = np.arange(mask_BL.shape[1], dtype=np.int32) * (mask_BL > 0)
    return {**batch, "positions": running_BL.astype(np.int32)}


@dataclass(frozen=True)
class Variant:
    """One curve: whether rows are packed, what is changed of a batch, the precision, and the seeds."""

    packed: bool = True
    change: Callable[[Batch], Batch] = dict
    precision: str = "float32"
    seeds: tuple[int, ...] = SEEDS


VARIANTS = {
    "unpacked": Variant(packed=False),
    "packed": Variant(),
    "no mask": Variant(change=without_mask),
    "no restart": Variant(change=without_restart),
    "bfloat16": Variant(precision="bfloat16", seeds=SEEDS[:1]),
}


def make_data(work: Path) -> None:
    """Examples of at most 40 tokens; the same in rows of 128, packed."""
    from gaudi_bert.corpus.prepare import prepare
    from gaudi_bert.tfrecords.pack import pack

    prepare(PREPARE, work / "short", StageRun(QUIET), pipeline_folder=work)
    if not (work / "long").exists():
        lengthen(work / "short" / "train", work / "long")
    pack(work / "long", work / "packed", PackingSettings(depth=DEPTH), StageRun(QUIET))


def lengthen(short: Path, out: Path) -> None:
    """Write every record again with room for 128 tokens and 20 masked positions: the same sequences, more padding."""
    from gaudi_bert.tfrecords.wire.example import decode_example, encode_example
    from gaudi_bert.tfrecords.wire.framing import read_records, write_record

    partial = out.with_name(f".{out.name}")
    partial.mkdir(exist_ok=True)
    for file in sorted(short.iterdir()):
        with (partial / file.name).open("wb") as handle:
            for payload in read_records(file):
                features = decode_example(payload)
                write_record(handle, encode_example({name: padded(value) for name, value in features.items()}))
    partial.rename(out)


def padded(values: np.ndarray) -> np.ndarray:
    """Zeros up to the longer size."""
    longer = {SHORT: ROW, SHORT_PREDICTIONS: ROW_PREDICTIONS}.get(len(values), len(values))
    return np.pad(values, (0, longer - len(values)))


def train(work: Path, name: str, seed: int, updates: int) -> dict[str, Any]:
    """One run; what was measured along it."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    started, variant = time.perf_counter(), VARIANTS[name]
    settings = TRAINING.model_copy(update={"seed": seed, "updates": updates})
    points = [{name: round(value, 5) for name, value in point.items()} for point in points_of_run(work, variant, settings)]
    seconds = time.perf_counter() - started
    return {"variant": name, "seed": seed, "updates": updates, "seconds": round(seconds, 1), "points": points}


def points_of_run(work: Path, variant: Variant, settings: TrainingSettings) -> Iterator[dict[str, float]]:
    """Train, and measure on the held-out sequences every so many updates."""
    from gaudi_bert.artefacts.training import LossFigures
    from gaudi_bert.engines.protocol import Communicator, ModelSpec
    from gaudi_bert.engines.tensorflow import engine
    from gaudi_bert.model.config import BertConfig
    from gaudi_bert.model.heads import PretrainingHead
    from gaudi_bert.training.evaluate import RecordsEvaluation
    from gaudi_bert.training.input.batches import TrainingOrder, training_batches, value_limits
    from gaudi_bert.training.input.source import open_source
    from gaudi_bert.training.loop import learning_rate_at
    from gaudi_bert.training.objective import PretrainingObjective, TrainingStep

    source = open_source(work / "packed" if variant.packed else work / "short" / "train")
    rows = round(settings.global_batch_sequences / source.packing_factor)
    config = BertConfig(vocab_size=PREPARE.train_vocab, max_position_embeddings=ROW, **MODEL)
    spec = ModelSpec(config, PretrainingHead(settings.loss))
    model = engine.build(spec, seed=settings.seed, compute_dtype=variant.precision, compiled=True)
    updates, alone = engine.updates(model, settings, Communicator(), 1), Communicator()
    step = TrainingStep(updates, alone, settings, PretrainingObjective(settings.loss))
    held_out = RecordsEvaluation(open_source(work / "short" / "evaluation"), config, 64, HELD_OUT)
    order = TrainingOrder(seed=settings.seed, shuffle_packs=settings.shuffle_packs)
    batches = training_batches(source, value_limits(source, config), rows, order)
    sequences, sums = 0, np.zeros(8)
    for update in range(1, settings.updates + 1):
        batch = next(batches)
        sequences += int(np.count_nonzero(batch["next_sentence_weights"]))
        rate = learning_rate_at(update, settings)
        sums += step.run([variant.change(batch)], update, rate).numpy()[:8]
        if update % (settings.updates // EVALUATIONS) == 0:
            measured = held_out.evaluate(model, alone).model_dump(include=set(LossFigures.model_fields))
            yield {"sequences": sequences, "training_loss": float(sums[0] / sums[1]), **measured}
            sums[:] = 0


def run_all(work: Path, updates: int, processes: int) -> list[dict[str, Any]]:
    """Every run that is not there yet, `processes` at a time."""
    wanted = [(name, seed) for name, variant in VARIANTS.items() for seed in variant.seeds]
    files = {run: work / f"run-{run[0].replace(' ', '-')}-{run[1]}-{updates}.json" for run in wanted}
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        waiting = {pool.submit(train, work, *run, updates): run for run in wanted if not files[run].exists()}
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


def main() -> None:
    """Train, or read what was trained; draw and summarise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redraw", action="store_true", help="train nothing")
    parser.add_argument("--updates", type=int, default=TRAINING.updates)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--work", type=Path, help="keep data and finished runs here; default: a temporary folder")
    parser.add_argument("--out", type=Path, default=DOCS, help="where the picture and the numbers go")
    arguments = parser.parse_args()
    prepare_tensorflow()
    numbers, picture = arguments.out / "learning-curves.json", arguments.out / "learning-curves.svg"
    if not arguments.redraw:
        with tempfile.TemporaryDirectory() as temporary:
            work = arguments.work or Path(temporary)
            work.mkdir(parents=True, exist_ok=True)
            make_data(work)
            metadata = json.loads((work / "packed" / "metadata.json").read_text(encoding="utf-8"))
            runs = run_all(work, arguments.updates, arguments.processes)
        write_json(numbers, {"packing_factor": metadata["packing_factor"], "depth": DEPTH, "runs": runs})
    content = json.loads(numbers.read_text(encoding="utf-8"))
    write_text(picture, draw(content))
    print_summary(content)
    print(f"{picture}: {picture.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
