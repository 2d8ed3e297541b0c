"""The first hour of six strangers: what the pages tell them to type is right at the first attempt, and wrong turns say why.

Each script has the commands of one of them, as the page that it names has them; the data are made here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders.command_line import refusal
from tests.builders.pages import ROOT
from tests.journeys.home import EPOCH, SMALL, make_home

pytest.importorskip("torch", exc_type=ImportError)

SCRIPTS = sorted(Path(__file__).parent.glob("*.sh"))
# What each must have in the end.
RESULTS = {
    "records": ["packed/metadata.json", "run/training.json"],
    "lengths": [],
    "roberta": ["words/config.json", "words/model.safetensors", "words/tokenizer.json"],
    "classifier": ["tuned/config.json", "answers.jsonl"],
    "vectors": ["vectors.npy"],
    "cluster": ["manifests-wiki/data/kustomization.yaml", "manifests-wiki/training/kustomization.yaml"],
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    make_home(folder)
    (folder / "rows.jsonl").write_text('{"comment": "a", "mood": "b"}\n')
    (folder / "ids.jsonl").write_text('{"input_ids": [1, 2, 3]}\n')
    (folder / "texts.jsonl").write_text('{"text": "a"}\n')
    (folder / "empty").mkdir()
    return folder


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_each_command_stands_on_the_page_that_the_script_names(script: Path) -> None:
    page = ""
    for line in script.read_text(encoding="utf-8").splitlines():
        if match := re.fullmatch(r"# (\S+\.md)", line):
            page = " ".join((ROOT / match[1]).read_text(encoding="utf-8").replace("\\\n", " ").split())
        elif line.startswith("gaudi-bert "):
            assert re.sub(r" \$\w+", "", line) in page, line
    assert page


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_journey_ends_well_at_the_first_attempt(script: Path, home: Path, tmp_path: Path) -> None:
    for item in home.iterdir():
        (tmp_path / item.name).symlink_to(item)
    program = tmp_path / "bin" / "gaudi-bert"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m gaudi_bert "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {"PATH": path, "PYTHONPATH": str(ROOT), "SMALL": SMALL, "EPOCH": EPOCH}
    words = ["bash", "-e", str(script)]
    done = subprocess.run(words, cwd=tmp_path, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [name for name in RESULTS[script.stem] if not (tmp_path / name).exists()] == []
    if script.stem in ("records", "roberta", "classifier"):
        assert "\nNext: gaudi-bert " in f"\n{done.stdout}"
    if script.stem == "classifier":
        assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 24


ROWS, FOLDER = (
    "rows.jsonl: line 1 (row 1): has no 'text', only 'comment', 'mood'; name the column",
    "nowhere: no folder here; download",
)
FOLDER_MODEL = "--model my-model: a model's folder is trained on a packed table, and --data is not one; make it by"
NOTHING = "no such folder or file, and no file matches it as a pattern; check the path"
TUNE = "finetune --task classification --data"
WRONG_TURNS = {
    "pack nowhere/ --out packed/": f"nowhere/: {NOTHING}",
    "pack empty/ --out packed/": "empty/: the folder holds no record files, names that begin with _ or . aside; check the",
    "pack ids.jsonl --out packed/": "ids.jsonl: is a table: say how many slots a pack has, for example --max",
    "pack rows.jsonl --out packed/ --max-sequence-length 8": "rows.jsonl: has no column input_ids (it has comment, mood)",
    "train --data nowhere --out run --model my-model": f"nowhere: {NOTHING}",
    "train --data ids.jsonl --out run --model roberta": "ids.jsonl: is a table that is not packed; run `gaudi-bert pack",
    "train --data texts --out run --model my-model": FOLDER_MODEL,
    "train --data my-tfrecords --out run --model my-model": FOLDER_MODEL,
    "tokenize texts/ --tokenizer my-model --out t": "Missing option '--max-sequence-length'; see: ",
    f"{TUNE} texts.jsonl --model MODEL --out t": "texts.jsonl: line 1 (row 1): has no 'label', only 'text'; name the column",
    f"{TUNE} rows.jsonl --model MODEL --out t": ROWS,
    f"{TUNE} train.jsonl --model nowhere --out t": FOLDER,
    "finetune --task classify --data train.jsonl --model MODEL --out t": "--task classify: must be classification, ",
    "predict --model MODEL --data new.jsonl --out a.jsonl": "MODEL: its architecture is BertModel, which has no head for a",
    "embed --model MODEL --data texts --out v.npy": "texts: cannot read: Is a directory; give a file in it",
    "embed --model MODEL --data rows.jsonl --out v.npy": ROWS,
    "embed --model nowhere --data new.jsonl --out v.npy": FOLDER,
    "embed --model MODEL --data new.jsonl --out v.bin": "v.bin: vectors are written as .npy, .parquet, .jsonl; give it",
    "run wiki.yaml --on k8s": "--on k8s: choose one of local, docker, kubernetes",
    "run wiki": "wiki: cannot read the pipeline file",
}


@pytest.mark.parametrize("words", WRONG_TURNS)
def test_a_wrong_turn_is_one_line_with_the_remedy(words: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    assert refusal(*words.split()).startswith(WRONG_TURNS[words])
    assert not {"packed", "run", "t", "a.jsonl", "v.npy", "v.bin"} & {path.name for path in home.iterdir()}
