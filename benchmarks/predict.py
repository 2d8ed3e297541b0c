"""Compare embedding texts in packs with embedding unpacked rows, both with gaudi-bert, for four distributions of lengths.

    python benchmarks/predict.py [--layers 2] [--rounds 3]

The same random model (layers of size 256) processes 512 rows. Unpacked rows are computed in batches of 64 in input order,
each padded to its longest row. The figures are ratios of CPU time on one thread. The goals of the first, second and fourth
distribution are ratios that another packer reached on its own data (GLiNER#292). `encoder.py` compares gaudi-bert with
sentence-transformers.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from measuring import measure_seconds, print_figure, print_processor

MIX_ROWS, MIX_BATCH = 512, 64
MIX_GOALS = (">= 1.94", ">= 5.55", ">= 0.98", ">= 1.42")


def use_one_thread() -> None:
    """Limit all libraries to one thread. Call this function before heavy modules are imported."""
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        os.environ[name] = "1"


def draw_length_mixes(seed: int = 1) -> dict[str, np.ndarray]:
    """Return the lengths of 512 rows with at most 512 tokens, for each of four distributions."""
    random = np.random.default_rng(seed)
    one_long = random.integers(8, 48, MIX_ROWS)
    one_long[::17] = random.integers(448, 513, len(one_long[::17]))
    found = {
        "Zipf, most under 64": random.zipf(1.6, MIX_ROWS) + 7,
        "one long row in 16 short ones": one_long,
        "all between 384 and 512": random.integers(384, 513, MIX_ROWS),
        "normal about 128": random.normal(128, 40, MIX_ROWS).round().astype(np.int64),
    }
    return {name: np.clip(lengths, 4, 512).astype(np.int64) for name, lengths in found.items()}


def compare_mixes(rounds: int, layers: int) -> None:
    """Compare packs with unpacked batches, which are padded to their longest row, in input order."""
    from gaudi_bert.engines.tensorflow import set_tensorflow_environment

    set_tensorflow_environment()
    from gaudi_bert.common.sampling import SampledPacks
    from gaudi_bert.engines.protocol import ModelSpec
    from gaudi_bert.engines.tensorflow import engine
    from gaudi_bert.model.config import BertConfig, parameter_specs
    from gaudi_bert.model.heads import VectorHead
    from gaudi_bert.rows.types import Sequences
    from gaudi_bert.rows.window_plan import PackRunner, RowLengthPacks, WindowPlan, plan_window

    config = BertConfig(
        vocab_size=1000, hidden_size=256, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=1024
    )
    random = np.random.default_rng(1)
    weights = {name: random.normal(0, 0.05, spec.shape).astype(np.float32) for name, spec in parameter_specs(config).items()}
    model = ModelSpec(config, VectorHead("mean", normalize=True))
    embedder = engine.build_model(model, seed=None, compute_dtype="float32")
    embedder.load_variables({name: weights[name] for name in embedder.variable_shapes()})

    def runner(batch_tokens: int | None = None) -> PackRunner:
        given = {} if batch_tokens is None else {"batch_tokens": batch_tokens}
        return PackRunner(embedder.compute_outputs, per_token=False, width=config.hidden_size, **given)

    for goal, (name, lengths) in zip(MIX_GOALS, draw_length_mixes().items(), strict=True):
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        ids = random.integers(5, 1000, offsets[-1]).astype(np.int32)
        sequences = Sequences(np.arange(MIX_ROWS), offsets, ids, np.zeros(len(ids), np.int8))
        plan = plan_window(lengths, hidden_size=config.hidden_size)
        batches = []
        for first in range(0, MIX_ROWS, MIX_BATCH):
            members = np.arange(first, first + MIX_BATCH)
            part = RowLengthPacks(int(lengths[members].max()), 1, SampledPacks(members, np.arange(MIX_BATCH + 1)))
            batches.append((runner(MIX_BATCH * part.length), WindowPlan((part,), 0, MIX_BATCH * part.length, 1.0)))
        ratios, difference = measure_mix(sequences, (runner(), plan), batches, rounds)
        rows = ", ".join(f"{len(part.packs)} x {part.length}" for part in plan.parts)
        padding = 100 * (1 - len(ids) / sum(batch.slots for _, batch in batches))
        print(f"mixes: {name}; rows {rows}; padding {100 * (1 - plan.tokens / plan.slots):.1f} %, unpacked {padding:.1f} %")
        print_figure("speed beside unpacked (CPU time)", ratios, "times", goal)
        print_figure("largest difference of a vector's value", [difference], "", "1e-5")


def measure_mix(sequences: Any, packed: Any, batches: Any, rounds: int) -> tuple[list[float], float]:
    """Return the ratios of the CPU time of unpacked batches to that of packs, measured in turn, and the largest difference
    between their outputs.
    """

    def run_packed() -> np.ndarray:
        return packed[0].run(sequences, packed[1])

    def run_unpacked() -> np.ndarray:
        return sum(each.run(sequences, plan) for each, plan in batches)  # each batch sets all other rows to 0

    difference = float(np.abs(run_packed() - run_unpacked()).max())
    ratios = []
    for number in range(rounds):
        order = (run_packed, run_unpacked) if number % 2 else (run_unpacked, run_packed)
        seconds = {job: measure_seconds(job)[0] for job in order}
        ratios.append(seconds[run_unpacked] / seconds[run_packed])
    return ratios, difference


def main() -> None:
    """Parse the command line, and measure all distributions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=2, help="number of layers of the model")
    options = parser.parse_args()
    use_one_thread()
    print_processor()
    compare_mixes(options.rounds, options.layers)


if __name__ == "__main__":
    main()
