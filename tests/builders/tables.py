"""Tables to pack, in every format; and a packed one with its tokenizer, whose batches can be taken apart."""

from __future__ import annotations

import functools
import gzip
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gaudi_bert.artefacts.base import NOTES_NAME
from gaudi_bert.config.sections import TableSettings
from tests.builders.command_line import succeed

Row = dict[str, Any]


def settings(**changes: Any) -> TableSettings:
    """Of packs that are soon made."""
    return TableSettings(**{"max_sequence_length": 61, "shard_multiple": 2, "algorithm": "lpfhp", **changes})


def random_rows(count: int, longest: int, seed: int) -> list[Row]:
    """Rows with labels, a loss mask of truths, weights and two scalars (some null)."""
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        size = rng.randint(1, longest)
        ids = [rng.randrange(50_000) for _ in range(size)]
        row = {
            "input_ids": ids,
            "labels": [id_ if rng.random() < 0.4 else -100 for id_ in ids],
            "loss_mask": [rng.random() < 0.5 for _ in ids],
            "weights": [rng.random() for _ in ids],
            "name": None if rng.random() < 0.1 else f"row {number} \u00e4",
            "score": rng.random(),
        }
        rows.append(row)
    return rows


def as_table(rows: Sequence[Row] | Any) -> Any:
    """Rows as a table; what is one already stays as it is."""
    import pyarrow

    return rows if isinstance(rows, pyarrow.Table) else pyarrow.Table.from_pylist(list(rows))


def write_parquet(path: Path, rows: Sequence[Row], row_group_size: int = 7) -> None:
    from pyarrow import parquet

    parquet.write_table(as_table(rows), path, row_group_size=row_group_size)


def write_stream(path: Path, rows: Sequence[Row], batch: int = 7) -> None:
    """As Hugging Face datasets do."""
    import pyarrow

    table = as_table(rows)
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)


def write_file(path: Path, rows: Sequence[Row], batch: int = 7) -> None:
    import pyarrow

    table = as_table(rows)
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)


def write_lines(path: Path, rows: Sequence[Row], batch: int = 0) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def write_dataset(folder: Path, rows: Sequence[Row], batch: int = 7, files: int = 2) -> None:
    """What `Dataset.save_to_disk` leaves: Arrow streams, and state.json with their names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"data-{number:05d}-of-{files:05d}.arrow" for number in range(files)]
    for number, name in enumerate(names):
        write_stream(folder / name, rows[len(rows) * number // files : len(rows) * (number + 1) // files], batch)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


# --- packed, and every sequence in a row of its own again


LENGTH = 48


def write_table(folder: Path, texts: int, seed: int, *pack_options: object) -> Path:
    """Texts of 1 to 12 words, tokenized and packed; some are split in two."""
    from tests.builders.encoders import TOKENIZER, WORDS

    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    lines = [" ".join(random.choice(WORDS, size)) for size in random.integers(1, 13, texts)]
    (folder / "texts.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    TOKENIZER.save(str(folder / "tokenizer.json"))
    limit = ("--max-sequence-length", LENGTH)
    succeed("tokenize", folder / "texts.txt", "--tokenizer", folder / "tokenizer.json", "--out", folder / "tokens", *limit)
    succeed("pack", folder / "tokens", "--out", folder / "packed", *limit, *pack_options)
    assert (folder / "packed" / NOTES_NAME / "tokenizer.json").is_file()
    return folder / "packed"


class SingleRow(NamedTuple):
    """A sequence alone: what the model sees, and what it has to predict, -100 where nothing."""

    input_ids: np.ndarray
    labels: np.ndarray


def single_rows(batch: dict[str, Any]) -> list[SingleRow]:
    """Every sequence of a batch of packs, one after the other, by plain loops."""
    rows = []
    for pack, numbers in enumerate(batch["input_mask"]):
        wanted = np.full(len(numbers), -100)
        if "masked_positions" in batch:
            for slot, weight in enumerate(batch["target_weights"][pack]):
                if weight:
                    wanted[batch["masked_positions"][pack, slot]] = batch["targets"][pack, slot]
        else:  # of a model of next tokens: transformers itself shifts them
            wanted = batch["input_ids"][pack]
        for number in range(1, numbers.max() + 1):
            rows.append(SingleRow(batch["input_ids"][pack][numbers == number], wanted[numbers == number]))
    return rows


def loss_of_rows(model: Any, rows: Sequence[SingleRow]) -> Any:
    """The loss that `transformers` itself computes, of padded rows, a sequence each."""
    import torch

    longest = max(len(row.input_ids) for row in rows)
    ids, labels = torch.zeros((len(rows), longest), dtype=torch.long), torch.full((len(rows), longest), -100)
    for number, row in enumerate(rows):
        ids[number, : len(row.input_ids)] = torch.as_tensor(row.input_ids.astype(np.int64))
        labels[number, : len(row.labels)] = torch.as_tensor(row.labels.astype(np.int64))
    ids[(real := torch.arange(longest) < torch.tensor([[len(row.input_ids)] for row in rows])).logical_not()] = 1  # padding
    return model(input_ids=ids, attention_mask=real.long(), labels=labels).loss


def table_batches(source: Any, targets: Any, batch_packs: int, order: Any) -> Any:
    """Batches of a packed table without end, of so many packs each."""
    from gaudi_bert.training.batches import read_batches_in_order
    from gaudi_bert.training.run_plan import MicroBatch

    each = batch_packs * order.size
    micro_batches = (MicroBatch(0, first, first + each, batch_packs) for first in itertools.count(order.packs_done, each))
    return read_batches_in_order(
        source.stored, functools.partial(source.read_batch, targets), micro_batches, order, source.path
    )
