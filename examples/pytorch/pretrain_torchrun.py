"""Pretrain BERT on packs in plain PyTorch, in one or several processes, with checkpoints.

    python examples/pytorch/pretrain_torchrun.py --data packed/ --out run/
    torchrun --standalone --nproc-per-node 2 examples/pytorch/pretrain_torchrun.py --data packed/ --out run/

An update contains `--batch-packs` packs over all processes. Each process computes its packs in micro-batches of
`--micro-batch-packs` packs. The loss is divided by the number of labels in the complete update, so the size of the
micro-batches and the number of processes do not change what the model learns. A stopped run can be resumed with any number
of processes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig

from gaudi_bert.artefacts.packed import RecordMetadata
from gaudi_bert.common.errors import GaudiBertError
from gaudi_bert.pytorch import PackCollator, PackedBertForPreTraining, PackedDataset, PackedLoader, update_counts


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="packed folder")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--batch-packs", type=int, default=32, help="number of packs in an update, over all processes")
    parser.add_argument("--micro-batch-packs", type=int, default=4)
    parser.add_argument("--updates", type=int, default=1000, help="number of updates in the run")
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=12345)
    return parser.parse_args()


def endless(loader: PackedLoader) -> Iterator[Any]:
    """Yield the batches of one epoch after another."""
    while True:
        yield from loader


def train(options: argparse.Namespace, rank: int, processes: int) -> None:
    """Run all updates that follow the checkpoint, or all updates if there is no checkpoint."""
    metadata = RecordMetadata.read(options.data)
    config = BertConfig(
        vocab_size=metadata.vocabulary.size if metadata.vocabulary is not None else 30522,
        hidden_size=options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=max(1, options.hidden_size // 64),
        intermediate_size=4 * options.hidden_size,
        max_position_embeddings=metadata.max_sequence_length,
        hidden_dropout_prob=options.dropout,
        attention_probs_dropout_prob=options.dropout,
    )
    micro_batches, remainder = divmod(options.batch_packs, options.micro_batch_packs * processes)
    if remainder or not micro_batches:
        raise SystemExit(f"--batch-packs {options.batch_packs}: give a multiple of {options.micro_batch_packs * processes}")
    torch.manual_seed(options.seed)
    model = PackedBertForPreTraining(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    dataset = PackedDataset(options.data, rank, processes, options.seed)
    dataset.update_batches = micro_batches
    shapes = {"masked_slots": metadata.masked_slots, "depth": metadata.depth}
    collator = PackCollator("transformers-5", config, gather_heads=True, **shapes)
    loader = PackedLoader(dataset, options.micro_batch_packs, collator)
    checkpoint, first = options.out / "checkpoint.pt", 1
    if checkpoint.exists():
        stored = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(stored["model"])
        optimizer.load_state_dict(stored["optimizer"])
        loader.load_state_dict(stored["packs"])
        first = stored["update"] + 1
    trained = DistributedDataParallel(model) if processes > 1 else model
    batches = endless(loader)
    for update in range(first, options.updates + 1):
        micro = list(islice(batches, micro_batches))
        counts = update_counts(micro)
        if processes > 1:
            dist.all_reduce(counts)
        optimizer.zero_grad()
        losses = []
        for batch in micro:
            loss = trained(**batch, num_items_in_batch=counts).loss
            (loss * processes).backward()  # DistributedDataParallel averages gradients over processes, but the loss is a sum
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss = torch.stack(losses).sum()
        if processes > 1:
            dist.all_reduce(loss)
        if rank == 0:
            print(f"update {update}: loss {loss.item():.6f}, {int(counts[1])} sequences", flush=True)
            if update % options.save_every == 0 or update == options.updates:
                states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "packs": loader.state_dict()}
                save({**states, "update": update}, checkpoint)


def save(content: dict[str, Any], path: Path) -> None:
    """Write a checkpoint, completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.name}.new")
    torch.save(content, hidden)
    os.replace(hidden, path)


def main() -> None:
    """Train in this process, or with those that `torch.distributed.run` started."""
    options, processes = parse_arguments(), int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        dist.init_process_group("gloo")
    train(options, int(os.environ.get("RANK", "0")), processes)
    if processes > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except GaudiBertError as error:
        raise SystemExit(f"error: {error}") from None
