"""What the six strangers bring with them: `python -m tests.journeys.home FOLDER` writes it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.builders.bert_folder import write_bert, write_rows
from tests.builders.packing_case import make_case
from tests.builders.pages import ROOT, blocks

_SIZES = "hidden_size=16 num_hidden_layers=1 num_attention_heads=2 intermediate_size=16"
_UPDATES = "updates=3 warmup_updates=1 global_batch_sequences=8 micro_batch_packs=4 save_every_updates=3"
# Variables of the scripts: what makes a training take seconds.
SMALL = " ".join(
    [f"--set=model.{pair}" for pair in _SIZES.split()] + [f"--set=training.{pair}" for pair in _UPDATES.split()]
)
EPOCH = "--set=finetune.epochs=1"


def make_home(folder: Path) -> None:
    from tests.builders.encoders import write_encoder

    make_case(folder / "case", files=2)
    (folder / "my-tfrecords").symlink_to(folder / "case" / "records")
    write_bert(folder / "MODEL", layers=1, positions=128)
    write_encoder(folder / "my-model", "roberta")
    for seed, name in enumerate(("train", "dev", "new")):
        write_rows(folder / f"{name}.jsonl", "classification", 24, seed)
    (folder / "texts").mkdir()
    lines = [json.loads(line)["text"] for line in (folder / "train.jsonl").read_text().splitlines()]
    (folder / "texts" / "one.txt").write_text("\n".join(lines) + "\n")
    yaml = next(block.text for block in blocks(ROOT / "docs" / "kubernetes.md") if "name: wiki" in block.text)
    (folder / "wiki.yaml").write_text(yaml)


if __name__ == "__main__":
    make_home(Path(sys.argv[1]))
