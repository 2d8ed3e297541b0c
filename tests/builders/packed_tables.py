"""A packed table of a small text with its tokenizer, and its batches taken apart: every sequence in a row of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gaudi_bert.artefacts.references import NOTES_NAME
from tests.builders.command_line import succeed
from tests.builders.encoders import TOKENIZER, WORDS

LENGTH = 48


def write_table(folder: Path, texts: int, seed: int, *pack_options: object) -> Path:
    """Texts of 1 to 12 words, tokenized and packed; some are split in two."""
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
