"""Wrong turns of the first hour with the commands of the pages: each is one line, and leaves nothing behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.builders.bert_folder import write_bert, write_rows
from tests.builders.command_line import refusal, succeed
from tests.builders.packing_case import make_case

pytest.importorskip("torch", exc_type=ImportError)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.builders.encoders import write_encoder

    folder = tmp_path_factory.mktemp("home")
    make_case(folder / "case", files=2)
    (folder / "my-tfrecords").symlink_to(folder / "case" / "records")
    write_bert(folder / "MODEL", layers=1, positions=128)
    write_encoder(folder / "my-model", "roberta")
    for name in ("train", "new"):
        write_rows(folder / f"{name}.jsonl", "classification", 24, 0)
    (folder / "rows.jsonl").write_text('{"comment": "a", "mood": "b"}\n')
    (folder / "ids.jsonl").write_text('{"input_ids": [1, 2, 3]}\n')
    (folder / "texts.jsonl").write_text('{"text": "a"}\n')
    shutil.copytree(folder / "case" / "packed", folder / "half-records")
    succeed("pack", "ids.jsonl", "--out", "half-table", "--max-sequence-length", 8, folder=folder)
    lengths = (5, 12, 3, 16)
    (folder / "longer.jsonl").write_text("".join(f'{{"input_ids": {[7] * length}}}\n' for length in lengths))
    succeed("pack", "longer.jsonl", "--out", "half-rows", "--row-lengths", "8,16", folder=folder)
    notes = "__gaudi_bert__"
    for last in ("half-records/metadata.json", f"half-table/{notes}/metadata.json", f"half-rows/{notes}/row_lengths.json"):
        (folder / last).unlink()
    return folder


ROWS, FOLDER = (
    "rows.jsonl: line 1 (row 1): the row has no column 'text', only 'comment', 'mood'; name the column",
    "nowhere: no such folder; download it with `hf download nowhere --local-dir nowhere`",
)
FOLDER_MODEL = "--model my-model: a model folder can only be trained on a packed table, but --data is not a"
NOTHING = "the path does not exist, and no file matches it as a pattern; check the path"
TUNE = "finetune --task classification --data"
WRONG_TURNS = {
    "pack nowhere/ --out packed/": f"nowhere/: {NOTHING}",
    "pack ids.jsonl --out packed/": "ids.jsonl: the pack size is unknown; pass it, for example",
    "pack ids.jsonl --out packed/ --row-lengths 512,128": "--row-lengths 512,128: must be auto, or 1 to 3 ",
    "pack rows.jsonl --out packed/ --max-sequence-length 8": "rows.jsonl: the table has no column input_ids, only",
    "train --data my-tfrecords --out run --model my-model": FOLDER_MODEL,
    "train --data half-records --out run": "half-records: packing has not finished; run the same `gaudi-bert write",
    "train --data half-table --out run --model my-model": "half-table: packing has not finished; run the same `gaudi-bert",
    "train --data half-rows --out run --model my-model": "half-rows: packing has not finished; run the same `gaudi-bert",
    f"{TUNE} texts.jsonl --model MODEL --out t": "texts.jsonl: line 1 (row 1): the row has no column 'label', only 'text'; ",
    "finetune --task classify --data train.jsonl --model MODEL --out t": "--task classify: must be classification, ",
    "embed --model MODEL --data case --out v.npy": "case: this is a folder; ",
    "embed --model MODEL --data rows.jsonl --out v.npy": ROWS,
    "embed --model nowhere --data new.jsonl --out v.npy": FOLDER,
    "embed --model MODEL --data new.jsonl --out v.bin": "v.bin: embeddings can be written only as .npy, .parquet, .jsonl; ",
}


@pytest.mark.parametrize("words", WRONG_TURNS)
def test_a_wrong_turn_is_one_line_with_the_remedy(words: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    assert refusal(*words.split()).startswith(WRONG_TURNS[words])
    assert not {"packed", "run", "t", "a.jsonl", "v.npy", "v.bin"} & {path.name for path in home.iterdir()}
