"""Compare the search quality of models that gaudi-bert and sentence-transformers train on the pairs of `retrieval-demo`,
with several seeds.

    gaudi-bert run retrieval-demo && python benchmarks/retrieval_quality.py --work work/retrieval-demo

Both programs start from the demo's pretrained model and use the demo's settings of `finetune` (number of pairs in an update,
epochs, learning rate, warm-up). Both models are evaluated with the InformationRetrievalEvaluator of sentence-transformers.
sentence-transformers trains with MultipleNegativesRankingLoss on random batches, with AdamW, a weight decay of 0.01, linear
decay, and gradients clipped at 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
from measuring import print_figure, print_processor
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.options import find_pipeline_file
from gaudi_bert.config.pipeline import PipelineSettings, load_pipeline
from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.runs.finetune import finetune
from gaudi_bert.runs.labelled_data import FineTuneFiles
from gaudi_bert.training.loop import compute_learning_rate


def read_pairs(file: Path) -> list[tuple[str, str]]:
    """Read the anchors and positives of a file."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [(row["anchor"], row["positive"]) for row in rows]


def compute_ndcg(model: Any, pairs: list[tuple[str, str]]) -> float:
    """Return ndcg@10 of a search for the positive of each anchor among all positives."""
    queries = {str(number): anchor for number, (anchor, _) in enumerate(pairs)}
    documents = {f"{number:06}": positive for number, (_, positive) in enumerate(pairs)}
    right = {str(number): {f"{number:06}"} for number in range(len(pairs))}
    figures = InformationRetrievalEvaluator(queries, documents, right, write_csv=False)(model)
    return float(figures["cosine_ndcg@10"])


def train_with_sentence_transformers(
    start: Path, pairs: list[tuple[str, str]], settings: PipelineSettings, seed: int
) -> Any:
    """Train a model with the loss of sentence-transformers, and return it."""
    section, random = settings.finetune, np.random.default_rng(seed)
    torch.manual_seed(seed)
    model = SentenceTransformer(str(start), device="cpu")
    model.max_seq_length = section.max_sequence_length
    loss, batch = MultipleNegativesRankingLoss(model).train(), section.batch_sequences
    updates = section.epochs * (len(pairs) // batch)
    plan = TrainingSettings(
        learning_rate=section.learning_rate, updates=updates, warmup_updates=round(section.warmup_share * updates)
    )
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=section.weight_decay, fused=True)
    update = 0
    for _ in range(section.epochs):
        order = random.permutation(len(pairs))
        for first in range(0, len(pairs) - batch + 1, batch):
            update += 1
            optimizer.param_groups[0]["lr"] = compute_learning_rate(update, plan)
            chosen = [pairs[place] for place in order[first : first + batch]]
            value = loss([model.preprocess(list(column)) for column in zip(*chosen, strict=True)], None)
            optimizer.zero_grad()
            value.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), section.clip_norm)
            optimizer.step()
    return model.eval()


def main() -> None:
    """Train both programs with each seed, and print ndcg@10."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="The work folder of the retrieval demo.")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print_processor()
    rows, settings = options.work / "rows", load_pipeline(find_pipeline_file(Path("retrieval-demo")))
    training, held_out = read_pairs(rows / "train.jsonl"), read_pairs(rows / "evaluation.jsonl")
    figures: dict[str, list[float]] = {"ours": [], "sentence-transformers": []}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            section = settings.finetune.model_copy(update={"seed": seed, "learning_rate": settings.finetune.learning_rate})
            out, changed = Path(folder) / f"ours-{seed}", settings.model_copy(update={"finetune": section})
            files = FineTuneFiles(rows / "train.jsonl", None, options.work / "train", options.work / "examples")
            finetune(changed, files, out, reporter=Reporter(quiet=True))
            figures["ours"].append(compute_ndcg(SentenceTransformer(str(out), device="cpu"), held_out))
            # For the model before training, run one epoch with a learning rate of almost zero, which leaves the weights
            # unchanged and writes the same kind of folder.
            if seed == 0:
                still = section.model_copy(update={"learning_rate": 1e-30, "epochs": 1})
                start = Path(folder) / "start"
                finetune(settings.model_copy(update={"finetune": still}), files, start, reporter=Reporter(quiet=True))
                print(
                    f"before: ndcg@10 {compute_ndcg(SentenceTransformer(str(start), device='cpu'), held_out):.4f}",
                    flush=True,
                )
            figures["sentence-transformers"].append(
                compute_ndcg(train_with_sentence_transformers(start, training, settings, seed), held_out)
            )
            print(f"seed {seed}: " + ", ".join(f"{name} {values[-1]:.4f}" for name, values in figures.items()), flush=True)
    for name, values in figures.items():
        print_figure(f"ndcg@10 after training, {name}", values, "")


if __name__ == "__main__":
    main()
