"""Small runs with Trainer and with Accelerate on packs, for every head, whole or stopped and resumed: losses and packs read.

    python -m torch.distributed.run --nproc-per-node 2 packed_training.py DATA OUT [stopped]

Each process writes OUT/rank-R.json: for every way and head the loss of each update, and the packs that it read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import Accelerator, DataLoaderConfiguration
from transformers import Trainer, TrainerCallback, TrainingArguments

from gaudi_bert.common.errors import InputError
from gaudi_bert.pytorch import (
    PackCollator,
    PackedBertForSequenceClassification,
    PackedDataset,
    PackedLoader,
    PackedTrainerMixin,
    update_counts,
    update_loss,
)

LENGTH, PACKS, VOCABULARY, LABELS = 24, 24, 50, 3
UPDATES, PACKS_OF_UPDATE, MICRO_BATCH = 6, 4, 2  # one epoch: each pack once
STOP, SEED = 3, 5
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.2,
    "num_labels": LABELS,
}
_BERT = {**_SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_LLAMA = {**_SIZES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADS: dict[str, tuple[Callable[[], Any], str | None]] = {
    "causal": (lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_LLAMA)), None),
    "sequences": (lambda: PackedBertForSequenceClassification(transformers.BertConfig(**_BERT)), "label"),
}


def write_packs(folder: Path) -> None:
    """A packed table: the labels of tokens are few and unequal, those of sequences are `label`."""
    import pyarrow
    from pyarrow import parquet

    random, columns = np.random.default_rng(3), {}
    rows = []
    for _ in range(PACKS):
        lengths = random.permutation([(9, 8, 6), (20,), (12, 11), (6, 6, 6, 5)][random.integers(4)])
        numbers = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        pads = LENGTH - len(numbers)
        ids = random.integers(5, VOCABULARY, len(numbers))
        labels = np.where(random.random(len(ids)) < random.random(), ids % LABELS, -100)
        rows.append(
            {
                "input_ids": np.pad(ids, (0, pads)),
                "position_ids": np.concatenate([np.arange(each) for each in (*lengths, pads)]),
                "sequence_ids": np.pad(numbers, (0, pads)),
                "labels": np.pad(labels, (0, pads), constant_values=-100),
                "seq_lens": lengths,
                "label": random.integers(0, LABELS, len(lengths)),
            }
        )
    for name in rows[0]:
        columns[name] = pyarrow.array([row[name].tolist() for row in rows], pyarrow.list_(pyarrow.int32()))
    folder.mkdir()
    parquet.write_table(pyarrow.table(columns), folder / "packed-00000-00000.parquet")


class Recorder:
    """A collator that notes the packs it gets."""

    def __init__(self, collate: PackCollator) -> None:
        self.collate, self.packs = collate, []

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        self.packs += [row["input_ids"].tolist() for row in rows]
        return self.collate(rows)


class PackedTrainer(PackedTrainerMixin, Trainer):
    """Trainer for packs."""


class _Losses(TrainerCallback):
    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Keep the loss of an update."""
        if "loss" in logs:
            self.losses[state.global_step] = logs["loss"]


def make(head: str, data: Path, rank: int, processes: int, seed: int) -> tuple[Any, PackedDataset, Recorder]:
    """A model with seeded weights, this process's share, and a collator."""
    torch.manual_seed(seed)
    build, column = HEADS[head]
    model = build()
    return model, PackedDataset(data, rank, processes, SEED), Recorder(PackCollator(model=model, sequence_labels=column))


def with_trainer(head: str, data: Path, out: Path, rank: int, processes: int, stopped: bool) -> dict[str, Any]:
    """All updates by Trainer; `stopped`: by two, the second of which begins with other weights and loads the checkpoint."""
    losses, packs = _Losses(), []
    for part, until in enumerate((STOP, UPDATES) if stopped else (UPDATES,)):
        model, dataset, collate = make(head, data, rank, processes, SEED + part)
        arguments = TrainingArguments(
            str(out),
            max_steps=until,
            save_steps=STOP,
            logging_steps=1,
            learning_rate=0.01,
            lr_scheduler_type="constant",
            per_device_train_batch_size=MICRO_BATCH,
            per_device_eval_batch_size=3,
            gradient_accumulation_steps=PACKS_OF_UPDATE // MICRO_BATCH // processes,
            remove_unused_columns=False,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = PackedTrainer(
            model=model,
            args=arguments,
            train_dataset=dataset,
            eval_dataset=dataset,
            data_collator=collate,
            callbacks=[losses],
        )
        trainer.train(resume_from_checkpoint=part > 0 or None)
        packs += collate.packs
    evaluation = [trainer.evaluate()["eval_loss"] for _ in range(2)]
    return {"losses": list(losses.losses.values()), "packs": packs, "evaluation": evaluation}


def with_accelerate(head: str, data: Path, out: Path, rank: int, processes: int, stopped: bool) -> dict[str, Any]:
    """The same by a loop with Accelerate."""
    losses, packs = [], []
    for part, until in enumerate((STOP, UPDATES) if stopped else (UPDATES,)):
        accelerator = Accelerator(cpu=True)
        model, dataset, collate = make(head, data, rank, processes, SEED + part)
        dataset.update_batches = PACKS_OF_UPDATE // MICRO_BATCH // processes
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
        loader = PackedLoader(dataset, MICRO_BATCH, collate)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        if part:
            accelerator.load_state(str(out))
        batches = iter(loader)
        for _ in range(until - len(losses)):
            micro_batches = [next(batches) for _ in range(dataset.update_batches)]
            counts = accelerator.reduce(update_counts(micro_batches), "sum")
            total = torch.zeros(())
            for batch in micro_batches:
                loss = update_loss(model, batch, counts, processes)
                accelerator.backward(loss)
                total += loss.detach() / processes
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(total, "sum")))
        accelerator.save_state(str(out))
        packs += collate.packs
    return {"losses": losses, "packs": packs}


def refused(data: Path, out: Path, rank: int, processes: int) -> dict[str, str]:
    """What cannot work with several processes, and the error that says so."""
    model, share, collate = make("causal", data, rank, processes, SEED)

    def train(kind: type, dataset: PackedDataset, **config: Any) -> None:
        arguments = TrainingArguments(
            str(out), max_steps=1, remove_unused_columns=False, report_to="none", use_cpu=True, accelerator_config=config
        )
        kind(model=model, args=arguments, train_dataset=dataset, data_collator=collate).train()

    def prepared(dispatch: bool) -> None:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
        next(iter(accelerator.prepare(torch.utils.data.DataLoader(share, batch_size=2, collate_fn=collate))))

    attempts: dict[str, Callable[[], Any]] = {
        "Trainer without PackedTrainerMixin": lambda: train(Trainer, share),
        "the same, dispatch_batches off": lambda: train(Trainer, share, dispatch_batches=False),
        "PackedTrainerMixin, every pack in every process": lambda: train(PackedTrainer, PackedDataset(data)),
        "a DataLoader that Accelerate dispatches": lambda: prepared(True),
        "a DataLoader that Accelerate deals out": lambda: prepared(False),
        "PackedLoader, every pack in every process": lambda: next(iter(PackedLoader(PackedDataset(data), 2, collate))),
    }
    messages = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except InputError as error:
            messages[name] = str(error)
    return dict.fromkeys(attempts, "") | messages


WAYS = {"trainer": with_trainer, "accelerate": with_accelerate}


def main() -> None:
    """Every way and head in this process group."""
    data, out, stopped = Path(sys.argv[1]), Path(sys.argv[2]), "stopped" in sys.argv[3:]
    accelerator = Accelerator(cpu=True)
    rank, processes = accelerator.process_index, accelerator.num_processes
    found: dict[str, Any] = {
        f"{way} {head}": run(head, data, out / f"{way}-{head}", rank, processes, stopped)
        for way, run in WAYS.items()
        for head in HEADS
    }
    if processes > 1:
        found["refused"] = refused(data, out / "refused", rank, processes)
    (out / f"rank-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    if processes > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
