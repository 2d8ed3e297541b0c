"""Every command of README.md and of the pages below docs/, typed in order: it ends well and prints what the page says."""

from __future__ import annotations

import contextlib
import glob
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.builders.bert_folder import make_row, sentence, write_bert, write_rows, write_tokenizer
from tests.builders.command_line import Done, run_command
from tests.builders.effort import once
from tests.builders.pages import PAGES, ROOT, Block, blocks, name, write_program
from tests.builders.tables import random_rows, write_parquet

POSITIONS = 128
# What a training is made of where a page's own would take hours.
SMALL_MODEL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
FEW_UPDATES = {"updates": 3, "warmup_updates": 1, "global_batch_sequences": 16, "micro_batch_packs": 4}
FEW_UPDATES |= {"log_every_updates": 2, "evaluate_every_updates": 2, "save_every_updates": 2}
FEW_UPDATES |= {"evaluate_packs": 8, "measure_speedup": False}
SMALL = [
    *(f"--set=model.{key}={value}" for key, value in SMALL_MODEL.items()),
    *(f"--set=training.{key}={value}" for key, value in FEW_UPDATES.items()),
]
SMALL_TEXT = ["--set=prepare.train_vocab=150", "--set=prepare.duplicates=2", "--set=prepare.shards=3"]


def make_page_data(folder: Path) -> None:
    """Everything that some page presupposes, in `folder`, which becomes the checkout as far as pages know it."""
    for part in ("pipelines", "k8s"):
        (folder / part).symlink_to(ROOT / part)
    random = np.random.default_rng(1)
    (folder / "wiki").mkdir()
    for file in range(2):
        documents = ["\n".join(" ".join(sentence(random)) + " ." for _ in range(9)) for _ in range(30)]
        (folder / "wiki" / f"{file}.txt").write_text("\n\n".join(documents) + "\n")
    shutil.copytree(folder / "wiki", folder / "texts")
    _write_rows(folder)
    _write_searches(folder)
    _write_models(folder)
    (folder / "dataset").mkdir()
    write_parquet(folder / "dataset" / "rows.parquet", random_rows(150, 2048, 3), row_group_size=50)
    shutil.copytree(folder / "dataset", folder / "tokens")
    text = f"--set=prepare.text={folder}/wiki/*.txt"
    stages = "--stages=prepare,histogram,plan,write,verify,train"
    demo = run_command("run", "pipelines/demo.yaml", stages, text, *SMALL_TEXT, *SMALL, folder=folder)
    assert demo.returncode == 0, demo.stderr
    examples = folder / "work" / "demo" / "examples"
    for records in ("my-tfrecords", "records"):
        shutil.copytree(examples / "train", folder / records)
    shutil.copyfile(examples / "vocab.txt", folder / "vocab.txt")
    cluster = next(block.text for block in blocks(ROOT / "docs" / "kubernetes.md") if block.language == "yaml")
    (folder / "wiki.yaml").write_text(cluster)
    (folder / "my.yaml").write_text(json.dumps({"name": "my", "model": SMALL_MODEL, "training": FEW_UPDATES}))


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
    long = "".join(f"{' '.join(sentence(random) * times)}\t0\tid\n" for times in (11, 11, 33))
    (folder / "train.tsv").write_text("".join(f"{text}\t{labels}\tid\n" for text, labels in lines) + long)


def _write_searches(folder: Path) -> None:
    """Pairs, triplets and judged documents."""
    random = np.random.default_rng(3)
    for file, rows in (("pairs.jsonl", 130), ("held-out.jsonl", 9)):
        write_rows(folder / file, "embedding", rows, rows)
    for file, rows in (("judged.jsonl", 40), ("judged-held-out.jsonl", 20), ("candidates.jsonl", 20)):
        write_rows(folder / file, "reranking", rows, rows)
    for file in ("passages.jsonl", "queries.jsonl"):
        write_rows(folder / file, "masked-language-modelling", 20, 4)
    for file in ("triplets.parquet", "triplets-held-out.parquet"):
        texts = [[" ".join(sentence(random)) + end for end in (" ,", " .", "")] for _ in range(20)]
        rows = [dict(zip(("query", "positive", "negative"), text, strict=True)) for text in texts]
        write_parquet(folder / file, rows)


def _write_models(folder: Path) -> None:
    import transformers

    from tests.builders.encoders import write_encoder

    for model in ("MODEL", "my-bert", "all-MiniLM-L6-v2", "bert-base-cased"):
        write_bert(folder / model, layers=1, positions=512 if "MiniLM" in model else POSITIONS)
    config = transformers.BertConfig.from_pretrained(folder / "MODEL", id2label={0: "bad", 1: "good"})
    transformers.BertForSequenceClassification(config).save_pretrained(folder / "finetuned")
    write_tokenizer(folder / "finetuned")
    write_encoder(folder / "my-model", "roberta")
    write_encoder(folder / "ModernBERT-base", "modernbert", max_position_embeddings=8192)


# Each page has a folder of its own, which holds what the page presupposes (`make_page_data`) and nothing else.
PRESUPPOSED = {
    "README.md": "my-tfrecords train.jsonl dev.jsonl new.jsonl MODEL",
    "docs/docker.md": "pipelines",
    "docs/finetuning.md": "train.jsonl dev.jsonl train.tsv names.txt MODEL bert-base-cased ModernBERT-base pipelines work",
    "docs/object-stores.md": "",
    "docs/pack.md": "my-tfrecords wiki vocab.txt dataset texts my-model",
    "docs/predicting.md": "finetuned comments.jsonl comments.tsv all-MiniLM-L6-v2 train.tsv names.txt my-model",
    "docs/pytorch.md": "my-tfrecords my-bert texts",
    "docs/retrieval.md": "pairs.jsonl held-out.jsonl judged.jsonl judged-held-out.jsonl candidates.jsonl passages.jsonl "
    "queries.jsonl triplets.parquet triplets-held-out.parquet all-MiniLM-L6-v2 my-bert MODEL",
    "docs/serving.md": "pairs.jsonl MODEL",
    "docs/train.md": "my.yaml records work pipelines texts my-model train.jsonl dev.jsonl new.jsonl",
    "docs/what-packing-changes.md": "my-bert",
}
# `make test-all` types these too.
MORE = ("docs/pack.md", "docs/pytorch.md", "docs/train.md")
TYPED = [pytest.param(ROOT / page, id=page, marks=[pytest.mark.slow] if page in MORE else []) for page in PRESUPPOSED]
# Pages whose commands another test runs, or this one on another page.
ELSEWHERE = {
    "docs/start.md": "README.md",  # which has them all
    "docs/kubernetes.md": "tests/k8s/test_commands.py",  # and test_many_machines.py
}
# What is not run here, by pattern, and why. tests/test_documentation.py parses each `gaudi-bert` among them.
NOT_HERE = {
    r"pip install .*|make test": "installs or downloads: .ci/run does it on a clean clone",
    r".*s3://.*|export AWS_.*|kubectl .*|gaudi-bert run mine.yaml --on .*": "needs a bucket or a cluster",
    r"gaudi-bert run mine.yaml --render manifests/": "of a pipeline in a bucket: tests/runners/kubernetes/test_manifests.py",
    r"gaudi-bert (doctor --cluster --pipeline|run) wiki.yaml( --on kubernetes)?": "tests/k8s/test_commands.py",
    r"gaudi-bert train --data rows/ --out run/ --model MODEL": "rows of 2,048: tests/runs/test_records.py",
    r"gaudi-bert serve .*|curl localhost.*": "tests/serving/test_server.py",
    r"python -m mlperf_logging\..*": "needs MLPerf's package",
}
# Programs that the requirements of `make test` leave out, and how to get them; without one, its commands are not typed.
OPTIONAL = {"mpirun": "OPEN MPI MISSING: install Debian's openmpi-bin"}
# What is added to a command so that it takes seconds: fewer updates, a smaller model; containers are only planned.
ADDED = {
    r"gaudi-bert run demo": ["--dry-run"],
    r"gaudi-bert train .*": SMALL,
    r"gaudi-bert finetune .*triplets.*": ["--set=finetune.epochs=1", "--set=finetune.batch_sequences=7"],
    r"gaudi-bert finetune .*": ["--set=finetune.epochs=1"],
    r".*gaudi-bert run .* --on docker.*|gaudi-bert run pipelines/wnut17.*": ["--dry-run"],
}
# Root may run mpirun, and each of two processes on two cores computes with one thread.
PROCESSES = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
# Exact only where the data ship with the package; of other data, numbers are masked.
SHIPPED = "wikipedia-512"
TWO_FILES = "--set finetune.data=../train.jsonl --set finetune.evaluation_data=../dev.jsonl --set finetune.epochs=2"
# What is run in place of a command: what `make` runs where a page shows what it prints, on less; but in the long form, less.
INSTEAD = {
    r"make pack train finetune": f"gaudi-bert run pipelines/finetune-demo.yaml --stages finetune {TWO_FILES}",
}
# Python that runs without TensorFlow and PyTorch too, is a fragment, or trains for hours.
PYTHON_ELSEWHERE = {
    "README.md": "tests/test_documentation.py",
    "docs/python.md": "tests/test_documentation.py",
    "docs/finetuning.md": "tests/runs/test_rows.py",
    "docs/serving.md": "tests/serving/test_server.py",
}
PRINTS = re.compile(r"^ *print\(.*\)  # (.*)$", re.MULTILINE)
TRAINERS_OWN = re.compile(r"\{'train_runtime': ")  # its time and its loss, at the end


@pytest.fixture(scope="module")
def page_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "page-data", make_page_data)


def matching(patterns: dict[str, Any], command: str) -> Any:
    return next((value for pattern, value in patterns.items() if re.fullmatch(pattern, command)), None)


def masked(line: str, exact: bool) -> str:
    """A line without the width of its columns and, unless `exact`, without its numbers, which are those of other data."""
    line = " ".join(line.split())
    return line if exact else re.sub(r"\d[\d,]*(\.\d+)?", "#", line)


def typed(command: str, folder: Path) -> Done:
    """Run a command as in a shell; `gaudi-bert` in this process, smaller where it would take hours."""
    command = command.partition("  #")[0].removeprefix(".venv/bin/").strip()
    if command.startswith("make "):
        planned = subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False)
        if command not in INSTEAD or planned.returncode:
            return Done(planned.returncode, "", planned.stderr)
    command = INSTEAD.get(command, command)
    if not command.startswith("gaudi-bert "):
        write_program(folder / "bin" / "gaudi-bert")
        path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, **PROCESSES, "PATH": path, "PYTHONPATH": str(ROOT)}
        words = ["bash", "-c", command]
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        return Done(done.returncode, done.stdout, done.stderr)
    words = [file for word in shlex.split(command)[1:] for file in sorted(glob.glob(word, root_dir=folder)) or [word]]
    return run_command(*words, *(matching(ADDED, command) or []), folder=folder)


def run_python(block: Block, page: str) -> None:
    """A script, complete in itself, whose `print` say in a comment what they print."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block.text, page, "exec"), {})
    lines = [line for line in printed.getvalue().splitlines() if not TRAINERS_OWN.match(line)]
    assert lines == PRINTS.findall(block.text)


@pytest.mark.parametrize("page", TYPED)
def test_what_a_page_says_to_type_works_and_prints_what_it_says(
    page: Path, page_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for item in PRESUPPOSED[name(page)].split():
        copy = shutil.copytree if (page_data / item).is_dir() else shutil.copyfile
        copy(page_data / item, tmp_path / item)
    printed, exact = "", False
    left_out: dict[str, str] = {}
    for block in blocks(page):
        where = f"{name(page)}:{block.line}"
        if block.language == "python" and name(page) not in PYTHON_ELSEWHERE:
            run_python(block, where)
        for number, command in enumerate(block.commands):
            if number == 0:
                printed, exact = "", SHIPPED in command
            if matching(NOT_HERE, command):
                continue
            program = command.split()[0]
            if program in OPTIONAL and shutil.which(program) is None:
                left_out[where] = OPTIONAL[program]
                continue
            done = typed(command, tmp_path)
            assert done.returncode == 0, f"{where}: {command}\n{done.stdout}{done.stderr}"
            printed += done.stdout + done.stderr
        seen = {masked(line, exact) for line in printed.splitlines()}
        missing = [line for line in block.output if masked(line, exact) not in seen]
        assert missing == [], f"{where}: not printed, but: {printed}"
    if left_out:
        pytest.skip("; ".join(f"{reason}, to type {where}" for where, reason in left_out.items()))


def test_each_page_with_commands_is_run() -> None:
    commands = {name(page): {command for block in blocks(page) for command in block.commands} for page in PAGES}
    assert {page for page, typed in commands.items() if typed} == {*PRESUPPOSED, *ELSEWHERE}
    assert commands["docs/start.md"] <= commands["README.md"]
    for page, test in {**ELSEWHERE, **PYTHON_ELSEWHERE}.items():
        assert (ROOT / page).exists()
        assert (ROOT / test).exists()
