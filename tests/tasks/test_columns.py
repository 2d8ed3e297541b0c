"""Every command that takes rows reads the same columns of the same files."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

from tests.builders.bert_folder import CONFIG, write_tokenizer
from tests.builders.command_line import Done, run_command

TEXTS = ["the cat, sat", "dogs runs", "over the hill"]
TABLE = "id,comment,other,stars\n" + "".join(f'{7 + n},"{text}",mat,{n + 1}\n' for n, text in enumerate(TEXTS))
LENGTH = ("--max-sequence-length", 32)
COMMANDS = ("tokenize", "embed", "predict", "finetune")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model for regression, and the same rows in several files."""
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("columns")
    torch.manual_seed(3)
    config = transformers.BertConfig(**{**CONFIG, "num_labels": 1, "problem_type": "regression"})
    transformers.BertForSequenceClassification(config).save_pretrained(folder / "model")
    write_tokenizer(folder / "model")
    (folder / "rows.csv").write_text(TABLE)
    (folder / "bare.csv").write_text(TABLE.split("\n", 1)[1])
    sheet = "id;comment;other;stars\n7;süß;mat;1\n8;größer;9;mat;2\n9;the cat;mat;3\n9;dogs;mat;4\n"
    (folder / "sheet.csv").write_bytes(sheet.encode("cp1252"))
    (folder / "rows.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    return folder


def run(folder: Path, command: str, data: str, out: str, *options: str) -> Done:
    if command == "tokenize":
        return run_command(command, data, "--tokenizer", "model", "--out", out, *LENGTH, *options, folder=folder)
    if command == "finetune":
        options = (*options, "--task", "regression", "--dry-run", "--set", "finetune.max_sequence_length=32")
    options = (*options, *LENGTH) if command in ("embed", "predict") else options
    return run_command(command, "--data", data, "--model", "model", "--out", out, *options, folder=folder)


@pytest.mark.parametrize("command", COMMANDS)
def test_columns_by_a_header_and_by_names(folder: Path, command: str) -> None:
    named = ("--text-column", "comment", "--text-pair-column", "other")
    named += ("--label-column", "stars") if command == "finetune" else ()
    columns = "comment (text), other (text_pair)" + ", stars (label)" * (command == "finetune")
    for data, options, row in (("rows.csv", (), 2), ("bare.csv", ("--columns", "id,comment,other,stars"), 1)):
        done = run(folder, command, data, f"{command}-{data}.jsonl", *named, *options)
        assert done.returncode == 0, done.stderr
        line = f"{data}: reads CSV, {columns}; line {row} (row 1) begins 'the cat, sat'\n"
        assert line in done.stderr
    form = ("--delimiter", ";", "--encoding", "cp1252", "--on-bad-row", "skip")
    done = run(folder, command, "sheet.csv", f"{command}-sheet.jsonl", *named, *form)
    assert done.returncode == 0, done.stderr
    assert re.search("1 (of 4 rows|row) cannot be read", done.stderr), done.stderr
    if command in ("embed", "predict"):
        answers = [(folder / f"{command}-{name}.csv.jsonl").read_text() for name in ("rows", "bare")]
        assert answers[0] == answers[1]
        assert len(answers[0].splitlines()) == len(TEXTS)


@pytest.mark.parametrize("command", ["tokenize", "embed", "predict"])
def test_a_pipe(folder: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TABLE.encode())))
    done = run(folder, command, "-", f"pipe-{command}.jsonl", "--text-column", "comment", "--format", "csv")
    assert done.returncode == 0, done.stderr
    if command != "tokenize":
        assert len((folder / f"pipe-{command}.jsonl").read_text().splitlines()) == len(TEXTS)


@pytest.mark.parametrize("command", ["embed", "predict"])
def test_a_wrong_column_is_refused_before_the_model_is_opened(
    folder: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*_: object, **__: object) -> None:
        raise AssertionError("the model is opened")

    monkeypatch.setattr("gaudi_bert.tasks.predict.load_engine", opened)
    done = run(folder, command, "rows.csv", "refused.jsonl", "--text-column", "remark")
    assert (done.returncode, "has no column 'remark'" in done.stderr) == (2, True), done.stderr
