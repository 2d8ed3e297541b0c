"""Pretrain BERT on packs with the Trainer of `transformers`, or with GaudiTrainer on Gaudi cards.

    python examples/pytorch/pretrain_trainer.py --data packed/ --out run/ --max-steps 1000
    torchrun --standalone --nproc-per-node 2 examples/pytorch/pretrain_trainer.py --data packed/ --out run/
    python examples/pytorch/pretrain_trainer.py --gaudi --data packed/ --out run/

The options are those of training on padded rows, and `translate_arguments` translates them for packs. The same command
resumes a stopped run, with any number of processes. `--gaudi` follows the documentation of optimum-habana, and has never run
on a Gaudi card.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from gaudi_bert.artefacts.packed import RecordMetadata
from gaudi_bert.common.errors import GaudiBertError
from gaudi_bert.pytorch import (
    PackCollator,
    PackedBertForPreTraining,
    PackedDataset,
    PackedTrainerMixin,
    translate_arguments,
)


class PackedTrainer(PackedTrainerMixin, Trainer):
    """Trainer for packs."""


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="packed folder")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and the model")
    parser.add_argument(
        "--batch-sequences", type=int, default=64, help="number of sequences in an update, over all processes"
    )
    parser.add_argument("--batch-packs", type=int, default=4, help="number of packs in a micro-batch")
    parser.add_argument("--max-steps", type=int, default=1000)
    parser.add_argument("--save-steps", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--seed", type=int, default=12345)
    parser.add_argument("--gaudi", action="store_true", help="train on Gaudi with optimum-habana")
    return parser.parse_args()


def training_arguments(options: argparse.Namespace, packing_factor: float, processes: int) -> dict[str, Any]:
    """Return Trainer's arguments for `--batch-sequences` rows of one sequence, translated for packs."""
    padded = {
        "output_dir": str(options.out),
        "per_device_train_batch_size": max(1, options.batch_sequences // processes),
        "max_steps": options.max_steps,
        "save_steps": options.save_steps,
        "warmup_steps": options.max_steps // 10,
        "learning_rate": options.learning_rate,
        "logging_steps": 10,
        "seed": options.seed,
        "report_to": "none",
    }
    return translate_arguments(padded, packing_factor, processes=processes, batch_packs=options.batch_packs)


def make_trainer(options: argparse.Namespace) -> Any:
    """Return the trainer with its model and the packs of this process."""
    rank, processes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    metadata = RecordMetadata.read(options.data)
    arguments = training_arguments(options, metadata.packing_factor, processes)
    torch.manual_seed(options.seed)
    config = BertConfig(
        vocab_size=metadata.vocabulary.size if metadata.vocabulary is not None else 30522,
        hidden_size=options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=max(1, options.hidden_size // 64),
        intermediate_size=4 * options.hidden_size,
        max_position_embeddings=metadata.max_sequence_length,
    )
    if options.gaudi:
        from optimum.habana import GaudiConfig, GaudiTrainer, GaudiTrainingArguments
        from optimum.habana.transformers.modeling_utils import adapt_transformers_to_gaudi

        class PackedGaudiTrainer(PackedTrainerMixin, GaudiTrainer):
            """GaudiTrainer for packs."""

        adapt_transformers_to_gaudi()
        kind, target = PackedGaudiTrainer, "optimum-habana"
        trainer_arguments = {
            "args": GaudiTrainingArguments(**arguments, use_habana=True, use_lazy_mode=True),
            "gaudi_config": GaudiConfig(use_fused_adam=True, use_fused_clip_norm=True),
        }
    else:
        kind, target = PackedTrainer, "transformers-5"
        trainer_arguments = {"args": TrainingArguments(**arguments, use_cpu=not torch.cuda.is_available())}
    collator = PackCollator(
        target, config, gather_heads=True, masked_slots=metadata.masked_slots, depth=metadata.depth
    )  # with the sizes from the metadata, all batches have the same static shape
    model = PackedBertForPreTraining(config)
    dataset = PackedDataset(options.data, rank, processes, options.seed)
    return kind(model=model, train_dataset=dataset, data_collator=collator, **trainer_arguments)


def main() -> None:
    """Train, starting from the last checkpoint if there is one."""
    options = parse_arguments()
    trainer = make_trainer(options)
    last = get_last_checkpoint(str(options.out)) if options.out.is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model()
    if trainer.is_world_process_zero():
        dropped = trainer.train_dataset.dropped_packs
        print(f"done: {trainer.state.global_step} updates; an epoch of {trainer.train_dataset.packs} packs drops {dropped}")


if __name__ == "__main__":
    try:
        main()
    except GaudiBertError as error:
        raise SystemExit(f"error: {error}") from None
