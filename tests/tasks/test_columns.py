"""Every command that takes rows reads the same columns of the same files."""

from __future__ import annotations

import io
import itertools
import re
import sys
from pathlib import Path

import pytest

from tests.builders.bert_folder import CONFIG, write_tokenizer
from tests.builders.command_line import Done, run_command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model for regression, and rows of which one cannot be read."""
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("columns")
    torch.manual_seed(3)
    config = transformers.BertConfig(**{**CONFIG, "num_labels": 1, "problem_type": "regression"})
    transformers.BertForSequenceClassification(config).save_pretrained(folder / "model")
    write_tokenizer(folder / "model")
    rows = "7;süß;mat;1\n8;größer;9;mat;2\n9;the cat;mat;3\n9;dogs;mat;4\n"
    (folder / "rows.csv").write_bytes(rows.encode("cp1252"))
    return folder


def run(folder: Path, command: str, data: str, *options: str) -> Done:
    options = ("--out", f"{command}.jsonl", *options)
    if command == "finetune":
        options = (*options, "--task", "regression", "--dry-run", "--set", "finetune.max_sequence_length=32")
    else:
        options = (*options, "--max-sequence-length", "32")
    if command == "tokenize":
        return run_command(command, data, "--tokenizer", "model", *options, folder=folder)
    return run_command(command, "--data", data, "--model", "model", *options, folder=folder)


@pytest.mark.parametrize(
    ("command", "data"), [*itertools.product(("tokenize", "embed", "predict"), ("rows.csv", "-")), ("finetune", "rows.csv")]
)
def test_every_option_of_rows(folder: Path, command: str, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if data == "-":
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((folder / "rows.csv").read_bytes())))
    options = ["--text-column", "comment", "--text-pair-column", "other", "--columns", "id,comment,other,stars"]
    options += ["--label-column", "stars"] * (command == "finetune") + ["--format", "csv", "--overwrite"]
    done = run(folder, command, data, *options, "--delimiter", ";", "--encoding", "cp1252", "--on-bad-row", "skip")
    assert done.returncode == 0, done.stderr
    columns = "comment (text), other (text_pair)" + ", stars (label)" * (command == "finetune")
    assert f"{columns}; line 1 (row 1) begins with 'süß'\n" in done.stderr
    assert re.search("1 (of 4 rows|row) cannot be read", done.stderr), done.stderr
    if command in ("embed", "predict"):
        assert len((folder / f"{command}.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize("command", ["embed", "predict"])
def test_a_wrong_column_is_refused_before_the_model_is_opened(
    folder: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*_: object, **__: object) -> None:
        raise AssertionError("the model is opened")

    monkeypatch.setattr("gaudi_bert.tasks.predict.load_engine", opened)
    done = run(folder, command, "rows.csv", "--text-column", "remark")
    assert (done.returncode, "column 'remark' is missing" in done.stderr) == (2, True), done.stderr
