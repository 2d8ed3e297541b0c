"""What the pages presuppose, small: each file and folder under the name that a page gives it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

from tests.builders.bert_folder import WORDS, write_bert, write_tokenizer
from tests.builders.command_line import run_command
from tests.builders.pages import ROOT
from tests.builders.tables import random_rows, write_parquet
from tests.builders.task_files import make_row, sentence, write_rows

POSITIONS = 128
# What a training is made of where a page's own would take hours.
SMALL_MODEL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
FEW_UPDATES = {"updates": 3, "warmup_updates": 1, "global_batch_sequences": 16, "micro_batch_packs": 4}
FEW_UPDATES |= {
    "log_every_updates": 2,
    "evaluate_every_updates": 2,
    "save_every_updates": 2,
    "evaluate_packs": 8,
    "measure_speedup": False,
}
SMALL = [
    *(f"--set=model.{key}={value}" for key, value in SMALL_MODEL.items()),
    *(f"--set=training.{key}={value}" for key, value in FEW_UPDATES.items()),
]
SMALL_TEXT = ["--set=prepare.train_vocab=150", "--set=prepare.duplicates=2", "--set=prepare.shards=3"]


def make_page_data(folder: Path) -> None:
    """Everything that some page presupposes, in `folder`, which becomes the checkout as far as pages know it."""
    for part in ("pipelines", "k8s"):
        (folder / part).symlink_to(ROOT / part)
    _write_text(folder)
    _write_rows(folder)
    _write_models(folder)
    _write_tables(folder)
    text = f"--set=prepare.text={folder}/wiki/*.txt"
    stages = "--stages=prepare,histogram,plan,write,verify,train"
    demo = run_command("run", "pipelines/demo.yaml", stages, text, *SMALL_TEXT, *SMALL, folder=folder)
    assert demo.returncode == 0, demo.stderr
    examples = folder / "work" / "demo" / "examples"
    for name in ("my-tfrecords", "records"):
        shutil.copytree(examples / "train", folder / name)
    shutil.copyfile(examples / "vocab.txt", folder / "vocab.txt")
    (folder / "my.yaml").write_text(json.dumps({"name": "my", "model": SMALL_MODEL, "training": FEW_UPDATES}))


def _write_text(folder: Path) -> None:
    random = np.random.default_rng(1)
    (folder / "wiki").mkdir()
    for file in range(2):
        documents = ["\n".join(" ".join(sentence(random)) + " ." for _ in range(9)) for _ in range(30)]
        (folder / "wiki" / f"{file}.txt").write_text("\n\n".join(documents) + "\n")
    shutil.copytree(folder / "wiki", folder / "texts")


def _write_rows(folder: Path) -> None:
    """Labelled rows in every form that a page names."""
    for seed, file in enumerate(("train.jsonl", "dev.jsonl", "new.jsonl", "comments.jsonl")):
        write_rows(folder / file, "classification", 40, seed)
    random = np.random.default_rng(2)
    texts = [str(make_row("masked-language-modelling", random)["text"]) for _ in range(300)]
    (folder / "comments.tsv").write_text("".join(f"{text}\n" for text in texts))
    (folder / "names.txt").write_text("joy\nlove\nfear\n")
    numbers = [",".join(map(str, sorted({int(number) for number in random.integers(0, 3, 2)}))) for _ in texts]
    lines = zip(texts, numbers, strict=True)
    (folder / "train.tsv").write_text("".join(f"{text}\t{labels}\tid\n" for text, labels in lines))


def _write_models(folder: Path) -> None:
    for name in ("MODEL", "my-bert", "all-MiniLM-L6-v2", "bert-base-cased"):
        write_bert(folder / name, layers=1, positions=POSITIONS)
    _write_classifier(folder / "finetuned")
    _write_tokenizer_json(folder / "my-model")


def _write_classifier(folder: Path) -> None:
    """A model with a head, as `transformers` saves it."""
    import transformers

    config = transformers.BertConfig.from_pretrained(folder.parent / "MODEL", id2label={0: "bad", 1: "good"})
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    write_tokenizer(folder)


def _write_tokenizer_json(folder: Path) -> None:
    """A model that is not a BERT, with its own tokenizer."""
    from tests.builders.encoders import write_encoder

    write_encoder(folder, "roberta")


def _write_tables(folder: Path) -> None:
    (folder / "dataset").mkdir()
    write_parquet(folder / "dataset" / "rows.parquet", random_rows(150, 2048, 3), row_group_size=50)
    (folder / "bert-rows").mkdir()
    rows = [[WORDS.index(word) + 5 for word in sentence(np.random.default_rng(seed))] for seed in range(90)]
    for file in range(2):
        write_parquet(folder / "bert-rows" / f"{file}.parquet", [{"input_ids": row} for row in rows[file::2]])
