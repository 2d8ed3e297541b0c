"""Measure training: the speed-up by packing, the speed compared with transformers, the fraction of the processor's peak that
a step uses, and the time that a step waits for its input.

    python benchmarks/training.py                       everything (about ten minutes on two cores)
    python benchmarks/training.py --only speed-up       one section: speed-up, transformers, utilisation, input
    python benchmarks/training.py --rounds 9            more rounds
    python benchmarks/training.py --engine pytorch      the PyTorch engine, also compared with the TensorFlow engine
    python benchmarks/training.py --engine pytorch --vendor PATH
                                                        also Habana's `PyTorch/nlp/bert`, whose code is in PATH

The records have the lengths of Wikipedia at 512 tokens (`gaudi_bert/histograms/wikipedia-512.json`). Dropout is 0.1, the
optimizer is AdamW, and gradients are clipped. Every step of gaudi-bert includes reading its records. The compared programs
run alternately and in both orders, so that the two times of a ratio are measured shortly after each other. Each line gives
the median and the range over the rounds. gaudi-bert runs in one process, and each other program in a process of its own.
Ratios are given for elapsed time and for the CPU time of all threads, which is more reliable on a busy machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from measuring import BenchmarkProcess, describe_processor, measure_seconds, print_figure, print_processor

from gaudi_bert.config.values import EngineName, Precision
from gaudi_bert.engines.tensorflow import set_tensorflow_environment

SECTIONS = ("speed-up", "transformers", "utilisation", "input")
PYTORCH_SECTIONS = ("engines", "speed-up", "transformers", "utilisation", "input")
MATRIX = 4096
BASE_ROWS, SMALL_ROWS = 4, 8


class Times(NamedTuple):
    """The CPU and elapsed seconds of each round."""

    cpu: np.ndarray
    wall: np.ndarray


def measure_alternately(
    functions: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 2, elsewhere: Sequence[str] = ()
) -> dict[str, Times]:
    """Run every function in every round, alternately in forward and backward order, and return their times. The first
    `warm_up` rounds are not measured.

    Functions that are named in `elsewhere` run in another process, and return the seconds that they took.
    """
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
    for number in range(-warm_up, rounds):
        for name in list(functions)[:: 1 if number % 2 else -1]:
            measured = measure_seconds(functions[name]) if name not in elsewhere else functions[name]()
            if number >= 0:
                seconds[name].append(measured)
    return {name: Times(*np.array(values).T) for name, values in seconds.items()}


def print_ratio(label: str, ratios: Times, goal: str) -> None:
    """Print a ratio, once by elapsed time and once by CPU time."""
    print_figure(f"{label} (wall)", list(ratios.wall), "", goal)
    print_figure(f"{label} (CPU time)", list(ratios.cpu), "", goal)


def divide_times(above: Times, below: Times, factor: float = 1.0) -> Times:
    """Return the ratios of the times in each round, multiplied by `factor`."""
    return Times(factor * above.cpu / below.cpu, factor * above.wall / below.wall)


def measure_engines(records: Any, rounds: int) -> None:
    """Compare the PyTorch engine with the TensorFlow engine on the same model and batches."""
    from training_data import BASE_LIKE, Trainer

    kinds = ("float32", "bfloat16") if has_bfloat16() else ("float32",)
    names = [(engine, kind) for kind in kinds for engine in ("tensorflow", "pytorch")]
    trainers = {name: Trainer(BASE_LIKE, records.packed, BASE_ROWS, name[0], name[1]) for name in names}
    print(f"\nboth engines, {BASE_LIKE.num_hidden_layers} layers of BERT-base, {BASE_ROWS} packed rows an update")
    steps = {f"{engine} {kind}": partial(trainer.run, 1) for (engine, kind), trainer in trainers.items()}
    products = matrix_products("float32")
    seconds = measure_alternately({**steps, **products}, rounds)
    for kind in kinds:
        print_ratio(
            f"{kind}: PyTorch / TensorFlow", divide_times(seconds[f"tensorflow {kind}"], seconds[f"pytorch {kind}"]), "0.9"
        )
    print_ratio("a matrix product: PyTorch / TensorFlow", divide_times(seconds["TensorFlow"], seconds["PyTorch"]), "")
    losses = {engine: trainers[engine, "float32"].losses for engine in ("tensorflow", "pytorch")}
    print(
        "  loss after each update, dropout on: "
        + "; ".join(f"{engine} {format_losses(losses[engine])}" for engine in losses)
    )


def measure_vendor(records: Any, rounds: int, vendor: Path) -> None:
    """Compare the packs per second with those of the model that Habana uses for packed BERT."""
    import torch
    from training_data import SMALL, Trainer, read_first_batches
    from training_peers import VendorTrainer

    torch.set_num_threads(os.cpu_count() or 1)
    ours = Trainer(SMALL, records.packed, SMALL_ROWS, "pytorch")
    theirs = BenchmarkProcess(VendorTrainer, vendor, SMALL, read_first_batches(records.packed, SMALL_ROWS, 8))
    print(f"\n{SMALL.num_hidden_layers} layers, hidden {SMALL.hidden_size}, {SMALL_ROWS} packed rows an update, by PyTorch")
    steps = {"ours": lambda: ours.run(2), "vendor": lambda: theirs.measure_run(2)}
    seconds = measure_alternately(steps, rounds, elsewhere=("vendor",))
    print_ratio("ours / the vendor's model", divide_times(seconds["vendor"], seconds["ours"]), "2")


def measure_speed_up(records: Any, rounds: int, engine: EngineName) -> None:
    """Measure the speed-up by packing, and which fraction of the packing factor it reaches."""
    from training_data import BASE_LIKE, Trainer

    print(f"\nrealized speed-up, {BASE_LIKE.num_hidden_layers} layers of BERT-base, {BASE_ROWS} rows an update")
    trainers = {
        name: Trainer(BASE_LIKE, source, BASE_ROWS, engine)
        for name, source in (("packed", records.packed), ("unpacked", records.unpacked))
    }
    seconds = measure_alternately(
        {name: lambda trainer=trainer: trainer.run(1) for name, trainer in trainers.items()}, rounds
    )
    factor = records.metadata.packing_factor
    print(f"  packing factor {factor:.4f}, efficiency {records.metadata.efficiency:.4%}")
    print_figure("sequences/s packed", list(BASE_ROWS * factor / seconds["packed"].wall), "/s")
    print_figure("sequences/s unpacked", list(BASE_ROWS / seconds["unpacked"].wall), "/s")
    print_ratio("realized speed-up", divide_times(seconds["unpacked"], seconds["packed"], factor), f"{0.95 * factor:.2f}")
    print_ratio("realized speed-up / packing factor", divide_times(seconds["unpacked"], seconds["packed"]), "0.95")


def measure_transformers(records: Any, rounds: int, engine: EngineName, precision: Precision) -> None:
    """Print the non-padding tokens per second of gaudi-bert and of transformers in the same precision."""
    import torch
    from training_data import SMALL, Trainer, count_training_flops_per_row, read_first_batches
    from training_peers import TransformersTrainer

    torch.set_num_threads(os.cpu_count() or 1)
    batches = read_first_batches(records.unpacked, SMALL_ROWS, 8)
    everywhere, masked = (BenchmarkProcess(TransformersTrainer, SMALL, batches, only, precision) for only in (False, True))
    ours = Trainer(SMALL, records.packed, SMALL_ROWS, engine, precision)
    sizes = f"{SMALL.num_hidden_layers} layers, hidden {SMALL.hidden_size}, length 512"
    print(f"\n{sizes}, {SMALL_ROWS} rows an update, {precision}")
    products = matrix_products(precision)
    steps = {
        "ours": lambda: ours.run(4),
        "everywhere": lambda: everywhere.measure_run(1),
        "masked": lambda: masked.measure_run(2),
    }
    seconds = measure_alternately({**steps, **products}, rounds, elsewhere=("everywhere", "masked"))
    # Every step has the same shapes, so its time does not depend on the lengths in its rows. Therefore use the mean number
    # of tokens per row.
    row = records.tokens_a_sequence
    packed_row = row * records.metadata.packing_factor
    print_figure("real tokens/s, ours, packed", list(4 * SMALL_ROWS * packed_row / seconds["ours"].wall), "/s")
    print_figure("real tokens/s, transformers, padded", list(SMALL_ROWS * row / seconds["everywhere"].wall), "/s")
    print_figure(
        "real tokens/s, its head at masked positions only", list(2 * SMALL_ROWS * row / seconds["masked"].wall), "/s"
    )
    work = 4 * packed_row / row
    print_ratio(
        "ours / transformers",
        divide_times(seconds["everywhere"], seconds["ours"], work),
        "8" if engine == "tensorflow" else "6",
    )
    goal = "3.5 (4)" if engine == "tensorflow" else "3"
    print_ratio("ours / its head at masked positions", divide_times(seconds["masked"], seconds["ours"], work / 2), goal)
    # The next figures are upper bounds of the last ratio: the fraction of the time that the matrix products alone would take
    # at the rate of the fastest library.
    peak, product = select_fastest_times([seconds[library] for library in products]), 2 * MATRIX**3
    for name, side, updates, source, reads_all in (
        ("ours", "ours", 4, records.packed, False),
        ("its head at masked positions", "masked", 2, records.unpacked, True),
    ):
        flops = updates * SMALL_ROWS * count_training_flops_per_row(SMALL, source, reads_all)
        print_ratio(f"{name}: share of the matrix peak", divide_times(peak, seconds[side], flops / product), "")


def has_bfloat16() -> bool:
    """Return whether this processor has instructions for bfloat16 products."""
    return any(name in describe_processor() for name in ("AMX", "BF16"))


def measure_utilisation(records: Any, rounds: int, engine: EngineName) -> None:
    """Measure which fraction of the processor's peak rate for matrix products a step reaches, in float32 and in bfloat16."""
    from training_data import BASE_LIKE, Trainer, count_training_flops_per_row

    kinds = ("float32", "bfloat16") if has_bfloat16() else ("float32",)
    trainers = {kind: Trainer(BASE_LIKE, records.packed, BASE_ROWS, engine, kind) for kind in kinds}
    products = {(kind, library): product for kind in kinds for library, product in matrix_products(kind).items()}
    steps = {kind: lambda trainer=trainer: trainer.run(1) for kind, trainer in trainers.items()}
    print(f"\nutilisation, {BASE_LIKE.num_hidden_layers} layers of BERT-base, {BASE_ROWS} rows an update")
    seconds = measure_alternately({**steps, **products}, rounds)
    work, product = BASE_ROWS * count_training_flops_per_row(BASE_LIKE, records.packed), 2 * MATRIX**3
    peaks = {kind: select_fastest_times([seconds[name] for name in products if name[0] == kind]) for kind in kinds}
    for kind, library in products:
        print_figure(
            f"{kind}: {MATRIX} x {MATRIX} product by {library}", list(product / seconds[kind, library].wall / 1e9), "GFLOP/s"
        )
    for kind, peak in peaks.items():
        print_figure(f"{kind}: peak, the best of them in each round", list(product / peak.wall / 1e9), "GFLOP/s")
        print_figure(f"{kind}: training step", list(work / seconds[kind].wall / 1e9), "GFLOP/s")
        goal = "0.65" if kind == "float32" else ""
        print_ratio(f"{kind}: utilisation", divide_times(peak, seconds[kind], work / product), goal)
    if len(kinds) == 1:
        print("  bfloat16: this processor has no AVX512_BF16")
        return
    print_ratio("bfloat16 / float32: matrix peak", divide_times(peaks["float32"], peaks["bfloat16"]), "")
    print_ratio("bfloat16 / float32: training step", divide_times(seconds["float32"], seconds["bfloat16"]), "1.5")
    losses = {kind: trainer.losses for kind, trainer in trainers.items()}
    print(
        "  loss after each update, the same batches: " + "; ".join(f"{kind} {format_losses(losses[kind])}" for kind in kinds)
    )


def format_losses(losses: list[float]) -> str:
    """Format about six of the losses, evenly spaced."""
    return " ".join(f"{loss:.3f}" for loss in losses[:: max(1, len(losses) // 6)])


def select_fastest_times(times: list[Times]) -> Times:
    """Return the smallest CPU and elapsed seconds of each round."""
    return Times(*np.min(times, axis=0))


def matrix_products(kind: str) -> dict[str, Callable[[], Any]]:
    """Return for each library a function that multiplies two large square matrices. The fastest of them defines the
    processor's peak.
    """
    import tensorflow as tf
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    numbers = np.random.default_rng(1).standard_normal((2, MATRIX, MATRIX), np.float32)
    left, right = (tf.cast(matrix, kind) for matrix in numbers)
    torch_left, torch_right = (torch.from_numpy(matrix).to(getattr(torch, kind)) for matrix in numbers)
    product = tf.function(lambda: tf.reduce_max(tf.matmul(left, right)), autograph=False)
    products: dict[str, Callable[[], Any]] = {
        "TensorFlow": lambda: product().numpy(),
        "PyTorch": lambda: torch.mm(torch_left, torch_right),
    }
    if kind == "float32":
        products["numpy"] = lambda: numbers[0] @ numbers[1]
    return products


def measure_input(records: Any, rounds: int, engine: EngineName) -> None:
    """Measure which fraction of the time a step waits for its batch."""
    from training_data import SMALL, TINY, Trainer

    print("\ninput: share of the time spent waiting for the next batch (reading, parsing, checking)")
    for name, config, updates in (("2 layers, hidden 128", TINY, 20), ("4 layers, hidden 256", SMALL, 5)):
        for source in (records.packed, records.unpacked):
            trainer = Trainer(config, source, SMALL_ROWS, engine)
            trainer.run(3)
            shares = []
            for _ in range(rounds):
                waited = trainer.seconds_waited
                _, wall = measure_seconds(lambda trainer=trainer, updates=updates: trainer.run(updates))
                shares.append(100 * (trainer.seconds_waited - waited) / wall)
            print_figure(f"{name}, {'packed' if source.is_packed else 'unpacked'}", shares, "%")


def main() -> None:
    """Parse the command line, and print the selected sections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("tensorflow", "pytorch"), default="tensorflow")
    parser.add_argument("--only", nargs="+", choices=tuple(dict.fromkeys(SECTIONS + PYTORCH_SECTIONS)))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--precision", choices=("float32", "bfloat16"), default="float32", help="precision in the section transformers"
    )
    parser.add_argument("--vendor", type=Path, metavar="PATH", help="folder that contains Habana's modeling.py")
    arguments = parser.parse_args()
    engine, rounds = arguments.engine, arguments.rounds
    sections = SECTIONS if engine == "tensorflow" else PYTORCH_SECTIONS
    if arguments.vendor is not None and engine != "pytorch":
        parser.error("--vendor needs --engine pytorch")
    if unknown := set(arguments.only or ()) - set(sections):
        parser.error(f"--engine {engine} has no section {' '.join(sorted(unknown))}; it has {' '.join(sections)}")
    set_tensorflow_environment()
    from training_data import make_records

    print_processor()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        records = make_records(folder)
        measures: dict[str, Callable[[], None]] = {
            "engines": lambda: measure_engines(records, rounds),
            "speed-up": lambda: measure_speed_up(records, rounds, engine),
            "transformers": lambda: measure_transformers(records, rounds, engine, arguments.precision),
            "utilisation": lambda: measure_utilisation(records, rounds, engine),
            "input": lambda: measure_input(records, rounds, engine),
        }
        for section in arguments.only or sections:
            measures[section]()
        if arguments.vendor is not None:
            measure_vendor(records, rounds, arguments.vendor)


if __name__ == "__main__":
    main()
