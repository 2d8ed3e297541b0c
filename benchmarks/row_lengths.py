"""Compare training a long encoder in rows of several lengths with rows of one length and with dynamic padding, by CPU time.

    python benchmarks/row_lengths.py [--cases pairs texts | all] [--rounds 3] [--sequences 32 | --tokens 8192]

A random ModernBERT with 8,192 positions (4 layers of size 256, with local and global attention) classifies random sequences.
Each method processes the same sequences in one update (the first loss of each method is printed), in a process of its own on
one thread, and the methods run in turn. Padded batches are computed as in `transformers`: in random order, eight sequences
at a time, each batch padded to its longest sequence.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from measuring import BenchmarkProcess, print_figure, print_processor

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.packing.row_lengths import RowLengths, choose_row_lengths, estimate_row_cost
from gaudi_bert.rows.types import Sequences

HIDDEN, POSITIONS, VOCABULARY, BATCH, RATE = 256, 8192, 8000, 8, 1e-9
_Lengths = Callable[[np.random.Generator, int], IntArray]


def log_uniform(low: int, high: int) -> _Lengths:
    """Return a function that draws lengths with a log-uniform distribution, so that each doubling of the length is equally
    likely.
    """
    return lambda random, count: np.exp(random.uniform(np.log(low), np.log(high), count)).astype(np.int64)


def uniform(low: int, high: int) -> _Lengths:
    """Return a function that draws lengths with a uniform distribution."""
    return lambda random, count: random.integers(low, high + 1, count)


def lognormal(median: int, spread: float) -> _Lengths:
    """Return a function that draws log-normal lengths, like those of documents, up to the model's number of positions."""
    return lambda random, count: np.clip(random.lognormal(np.log(median), spread, count), 8, POSITIONS).astype(np.int64)


def mixed(share: float, one: _Lengths, other: _Lengths) -> _Lengths:
    """Return a function that draws a fraction `share` of the lengths from one distribution, and the rest from another."""
    return lambda random, count: np.where(random.random(count) < share, one(random, count), other(random, count))


# For each case, a function that draws the lengths, and the single row lengths with which the chosen row lengths are
# compared.
CASES: dict[str, tuple[_Lengths, tuple[int, ...]]] = {
    "pairs": (log_uniform(50, 6000), ()),
    "texts": (uniform(100, 400), (512,)),
    "short": (log_uniform(8, 512), (512,)),
    "long": (uniform(2000, 4000), ()),
    "equal": (uniform(256, 256), ()),
    "titles": (uniform(5, 40), ()),
    "even": (uniform(10, 2000), ()),
    "doublings": (log_uniform(16, 2048), ()),
    "articles": (lognormal(300, 1.0), ()),
    "reports": (lognormal(1200, 0.5), ()),
    "few long": (mixed(0.9, uniform(20, 60), uniform(1000, 2000)), ()),
    "few short": (mixed(0.1, uniform(10, 100), uniform(1500, 2000)), ()),
}


def make_random_sequences(lengths: IntArray) -> Sequences:
    """Return sequences of random tokens with the given lengths, each with one of two labels."""
    random, tokens = np.random.default_rng(1), int(lengths.sum())
    return Sequences(
        row=np.arange(len(lengths)),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        input_ids=random.integers(10, VOCABULARY, tokens).astype(np.int32),
        segment_ids=np.zeros(tokens, np.int8),
        target=random.integers(0, 2, len(lengths)).astype(np.int32),
    )


def write_model(folder: Path) -> None:
    """Write a model folder with random weights and without dropout."""
    import torch
    import transformers

    torch.manual_seed(1)
    config = transformers.ModernBertConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        cls_token_id=0,
        sep_token_id=2,
    )
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)


def pack_into_row_lengths(lengths: IntArray, given: tuple[int, ...] | None) -> RowLengths:
    """Pack the sequences into rows of the given lengths, or into rows of the cheapest lengths, and return the packings."""
    counts = np.bincount(lengths)[1:]
    return choose_row_lengths(
        counts,
        partial(estimate_row_cost, hidden_size=HIDDEN),
        row_lengths=given,
        max_row_length=POSITIONS,
        batch_sequences=BATCH,
    )


class Packed:
    """Trains with gaudi-bert. One update contains all sequences."""

    def __init__(self, model: Path, lengths: IntArray, given: tuple[int, ...] | None) -> None:
        from gaudi_bert.config.sections import FineTuneSettings, TaskSettings
        from gaudi_bert.engines import load_engine
        from gaudi_bert.engines.protocol import Communicator, ModelSpec
        from gaudi_bert.runs.rows import plan_epochs
        from gaudi_bert.tasks.task import TaskObjective, import_task_class
        from gaudi_bert.tasks.task_data import TaskData, iterate_training_batches
        from gaudi_bert.tasks.task_models import load_initial_weights
        from gaudi_bert.training.batches import TrainingOrder
        from gaudi_bert.training.objective import TrainingStep

        task = import_task_class("classification")(TaskSettings(name="classification"), ("yes", "no"))
        start, alone = load_initial_weights(model, task), Communicator()
        data = TaskData(model, "", (), make_random_sequences(lengths), pack_into_row_lengths(lengths, given).packings)
        most = max(1, 4096 // data.row_lengths[-1])
        section = FineTuneSettings(batch_sequences=len(lengths), epochs=1, micro_batch_packs=most, seed=1)
        plan = plan_epochs(section, data, 1, 1)
        engine = load_engine("pytorch")
        network = engine.build_model(ModelSpec(start.config, task.head), seed=None)
        network.load_variables(start.variables)
        updates = engine.create_updates(network, section, alone, plan.accumulation_steps)
        self._step, self._name = TrainingStep(updates, alone, section, TaskObjective(task)), data.row_lengths
        order = TrainingOrder(1, 1)
        batches = iterate_training_batches(data, task, plan, 1, order)
        self._batches = [next(batches) for _ in plan.list_micro_batches(1)]
        assert sum(int(batch["sequence_weights"].sum()) for batch in self._batches) == len(lengths)

    def run(self, updates: int) -> None:
        """Run a number of updates."""
        for update in range(updates):
            sums = self._step.run_update(self._batches, update + 1, RATE)()
            print(f"    rows of {self._name}: loss {sums[0] / sums[1]:.6f}", flush=True)


class Padded:
    """Trains with `transformers`. An update accumulates the gradients of batches of eight sequences, each padded to its
    longest.
    """

    def __init__(self, model: Path, lengths: IntArray) -> None:
        import torch
        import transformers

        sequences = make_random_sequences(lengths)
        self._model = transformers.AutoModelForSequenceClassification.from_pretrained(model).train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=RATE, fused=True)
        order = np.random.default_rng(2).permutation(len(lengths))
        self._batches = []
        for first in range(0, len(order), BATCH):
            chosen = order[first : first + BATCH]
            ids = np.ones((len(chosen), lengths[chosen].max()), np.int64)
            for row, number in enumerate(chosen):
                ids[row, : lengths[number]] = sequences.input_ids[sequences.offsets[number] : sequences.offsets[number + 1]]
            mask = np.arange(ids.shape[1]) < lengths[chosen, np.newaxis]
            labels = np.asarray(sequences.target)[chosen].astype(np.int64)
            self._batches.append([torch.from_numpy(array) for array in (ids, mask.astype(np.int64), labels)])
        self._count = len(lengths)

    def run(self, updates: int) -> None:
        """Run a number of updates."""
        import torch

        for _ in range(updates):
            total = 0.0
            for ids, mask, labels in self._batches:
                output = self._model(input_ids=ids, attention_mask=mask, labels=labels)
                loss = output.loss * len(labels) / self._count
                loss.backward()
                total += float(loss.detach())
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()
            print(f"    padded: loss {total:.6f}", flush=True)


def compare(name: str, count: int, rounds: int, model: Path) -> None:
    """Measure and print one case with a number of sequences."""
    make, given = CASES[name]
    lengths = make(np.random.default_rng(5), count)
    rows = pack_into_row_lengths(lengths, None)
    print(f"{name}: {count} sequences, {lengths.sum():,} tokens; {rows.format_row_cost_comparison()}", flush=True)
    ways = {"padded": BenchmarkProcess(Padded, model, lengths), "chosen": BenchmarkProcess(Packed, model, lengths, None)}
    ways |= {f"rows of {length}": BenchmarkProcess(Packed, model, lengths, (length,)) for length in given}
    taken = [{way: process.measure_run(1)[0] for way, process in ways.items()} for _ in range(rounds)]
    for way in ways:
        print_figure(f"{name}, {way}, CPU time", [each[way] for each in taken], "s")
    for way in ways.keys() - {"chosen"}:
        goal = {"padded": ">= 1.5" if name == "pairs" else ">= 1"}.get(way, ">= 0.9")
        print_figure(f"{name}, chosen compared with {way}", [each[way] / each["chosen"] for each in taken], "times", goal)


def main() -> None:
    """Parse the command line, and measure the selected cases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", nargs="+", choices=[*CASES, "all"], default=["pairs", "texts"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tokens", type=int, help="approximate number of tokens in a case, but at least two padded batches")
    options = parser.parse_args()
    print_processor()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        for name in CASES if "all" in options.cases else options.cases:
            compare(name, _count_sequences(name, options), options.rounds, Path(folder))


def _count_sequences(name: str, options: argparse.Namespace) -> int:
    """Return the number of sequences from the command line, or the number that contains about the given number of tokens."""
    mean = CASES[name][0](np.random.default_rng(5), 1000).mean()
    return int(options.sequences if options.tokens is None else max(2 * BATCH, options.tokens // mean))


if __name__ == "__main__":
    main()
