"""Does packed training learn as unpacked training does? Beyond the noise of seeds, by pairs on a small model.

    python benchmarks/learning_curves_paired.py                   12 seeds, about 8 minutes of CPU time
    python benchmarks/learning_curves_paired.py --seeds 40        a narrower interval

Both runs of a pair start from the same weights. There are three kinds of pairs:

    the rows     packed, and the very same sequences of the very same updates one to a row, without dropout. Until
                 rounding has grown, both losses are the same numbers: the arithmetic of packing changes nothing
    dropout      the same with dropout 0.1, which falls on other slots: only its noise differs
    all of it    packed and unpacked as the trainer does it: each in its own order, dropout 0.1, as many sequences an update

What is compared is the loss on the same held-out sequences after each quarter of the run: the mean difference over the
seeds with its 95 % interval (Student's t), and beside it how far two runs of one kind lie apart.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from learning_curves import PREPARE, ROW, SHORT, SHORT_PREDICTIONS, TRAINING, Batch, make_data

from gaudi_bert.common.files import write_json
from gaudi_bert.common.tensorflow_environment import prepare_tensorflow

SEEDS, ROWS_SEEDS, UPDATES, QUARTERS, HELD_OUT = 12, 3, 300, 4, 512
PACKS_PER_UPDATE, SEQUENCES_PER_UPDATE, MOST_SEQUENCES = 20, 65, 104
EARLY_UPDATES = (1, 10, 30)
LEARNING_RATE, WARMUP_UPDATES = 4e-3, 30
MODEL = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 256}
Arm = tuple[str, float]
Run = dict[str, list[float]]

# A pair: two kinds of rows, each with its dropout.
PAIRS: dict[str, tuple[Arm, Arm]] = {
    "the rows": (("packed", 0.0), ("same order", 0.0)),
    "dropout": (("packed", 0.1), ("same order", 0.1)),
    "all of it": (("packed", 0.1), ("unpacked", 0.1)),
}
ARMS = tuple(dict.fromkeys(itertools.chain.from_iterable(PAIRS.values())))


def one_to_a_row(batch: Batch) -> Batch:
    """The sequences of a batch of packs, each in a row of its own; the rows that are left hold nothing."""
    from gaudi_bert.model.features import join_sequences, split_packs

    rows = [[placed.sequence] for placed in split_packs(batch)]
    empty = MOST_SEQUENCES - len(rows)
    return join_sequences([*rows, *([[]] * empty)], SHORT, SHORT_PREDICTIONS, 1)


class Runner:
    """Trains one arm from any seed, with graphs that are built once.

    Args:
        work: the folder of the data.
        kind: `packed`, `same order` or `unpacked`.
        dropout: the rate.
        updates: of a run.
    """

    def __init__(self, work: Path, kind: str, dropout: float, updates: int) -> None:
        from gaudi_bert.engines.protocol import Communicator, ModelSpec
        from gaudi_bert.engines.tensorflow import engine
        from gaudi_bert.model.config import BertConfig
        from gaudi_bert.model.heads import PretrainingHead
        from gaudi_bert.training.evaluate import RecordsEvaluation
        from gaudi_bert.training.input.source import open_source
        from gaudi_bert.training.objective import PretrainingObjective, TrainingStep

        self._kind, self._updates = kind, updates
        self._source = open_source(work / "short" / "train" if kind == "unpacked" else work / "packed")
        self._config = BertConfig(
            vocab_size=PREPARE.train_vocab,
            max_position_embeddings=ROW,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            **MODEL,
        )
        self._model = engine.build(ModelSpec(self._config, PretrainingHead()), seed=0, compiled=True)
        held_out = open_source(work / "short" / "evaluation")
        alone = Communicator()
        self._held_out = RecordsEvaluation(held_out, self._config, 64, HELD_OUT)
        settings = TRAINING.model_copy(update={"loss": "token", "seed": 1})
        updates = engine.updates(self._model, TRAINING, alone, 1)
        self._step = TrainingStep(updates, alone, settings, PretrainingObjective())

    def run(self, seed: int) -> Run:
        """The training loss of some early updates, and the held-out loss after each quarter."""
        from gaudi_bert.engines.protocol import Communicator
        from gaudi_bert.training.loop import learning_rate_at

        self._start_from(seed)
        shape = {"learning_rate": LEARNING_RATE, "warmup_updates": WARMUP_UPDATES, "decay_power": 1.0}
        schedule = TRAINING.model_copy(update={**shape, "updates": self._updates})
        early, quarters = [], []
        for update, batch in zip(range(1, self._updates + 1), self._batches(seed), strict=False):
            rate = learning_rate_at(update, schedule)
            sums = self._step.run([batch], update, rate).numpy()
            if update in EARLY_UPDATES:
                early.append(float(sums[0] / sums[1]))
            if update % (self._updates // QUARTERS) == 0:
                quarters.append(self._held_out.evaluate(self._model, Communicator()).masked_lm_loss)
        return {"early": early, "quarters": quarters}

    def _start_from(self, seed: int) -> None:
        """The weights of `seed`, and an optimizer that has seen nothing."""
        from gaudi_bert.model.config import initial_value, parameter_specs

        specs, deviation = parameter_specs(self._config), self._config.initializer_range
        self._model.load_values({name: initial_value(name, spec, deviation, seed) for name, spec in specs.items()})
        zeros = {name: np.zeros(spec.shape, np.float32) for name, spec in specs.items()}
        self._step.updates.load_moments(zeros, zeros)

    def _batches(self, seed: int) -> Iterator[Batch]:
        from gaudi_bert.training.input.batches import TrainingOrder, training_batches, value_limits

        rows = SEQUENCES_PER_UPDATE if self._kind == "unpacked" else PACKS_PER_UPDATE
        order = TrainingOrder(seed=seed, shuffle_packs=TRAINING.shuffle_packs)
        batches = training_batches(self._source, value_limits(self._source, self._config), rows, order)
        return map(one_to_a_row, batches) if self._kind == "same order" else batches


def train(work: Path, seeds: int, updates: int) -> dict[Arm, list[Run]]:
    """Every arm from every seed that is not in `work` yet."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    runners = {arm: Runner(work, *arm, updates) for arm in ARMS}
    runs: dict[Arm, list[Run]] = {arm: [] for arm in ARMS}
    for seed in range(1, seeds + 1):
        for (kind, dropout), runner in runners.items():
            if dropout == 0.0 and seed > ROWS_SEEDS:
                continue
            file = work / f"paired-{kind.replace(' ', '-')}-{dropout}-{seed}-{updates}.json"
            if not file.exists():
                write_json(file, runner.run(seed))
            run = json.loads(file.read_text(encoding="utf-8"))
            runs[kind, dropout].append(run)
            print(f"{kind}, dropout {dropout}, seed {seed}: held-out loss {run['quarters'][-1]:.4f}", flush=True)
    return runs


def print_summary(runs: dict[Arm, list[Run]]) -> None:
    """Mean differences with their intervals."""
    values = {arm: np.array([run["quarters"] for run in done]) for arm, done in runs.items()}
    for label, (one, other) in PAIRS.items():
        differences = values[one] - values[other]
        print(f"{label}: {one[0]} minus {other[0]}, dropout {one[1]}")
        for quarter in range(QUARTERS):
            print(f"  after {quarter + 1}/{QUARTERS} of the updates: {interval(differences[:, quarter])}")
    one, other = (np.array([run["early"] for run in runs[arm]]) for arm in PAIRS["the rows"])
    for update, largest in zip(EARLY_UPDATES, np.abs(one - other).max(axis=0), strict=True):
        print(f"without dropout, the training losses of update {update} differ by {largest:.1e} at most")
    for (kind, dropout), ends in values.items():
        mean, deviation = ends[:, -1].mean(), ends[:, -1].std(ddof=1)
        print(f"{kind}, dropout {dropout}: held-out loss at the end {mean:.4f}, standard deviation {deviation:.4f}")


def interval(differences: np.ndarray) -> str:
    """Mean and 95 % interval over seeds."""
    from scipy.stats import t

    count = len(differences)
    half = t.ppf(0.975, count - 1) * differences.std(ddof=1) / np.sqrt(count)
    mean = differences.mean()
    return f"{mean:+.4f} [{mean - half:+.4f} to {mean + half:+.4f}], {count} seeds"


def main() -> None:
    """Train what is not there yet, and summarise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--work", type=Path, help="keep data and finished runs here; default: a temporary folder")
    arguments = parser.parse_args()
    prepare_tensorflow()
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        make_data(work)
        print_summary(train(work, arguments.seeds, max(arguments.updates, EARLY_UPDATES[-1])))


if __name__ == "__main__":
    main()
