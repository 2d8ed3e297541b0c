"""Vectors as a user gets them: in each form, from a file and through a pipe, the same as transformers gives alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.tasks import answers
from gaudi_bert.tasks.answers import AnswerFile, StreamResult
from gaudi_bert.tasks.predict import EmbedOptions, embed
from tests.builders.agree import agree
from tests.builders.bert_folder import write_bert
from tests.builders.reporters import QUIET

pytestmark = pytest.mark.slow

TEXTS = ["the cat sat on the mat", "dogs runs", "over the hill, and south!", "the river flows north", "unable"] * 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_bert(tmp_path_factory.mktemp("bert"))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}', encoding="utf-8")
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    """Mean, normalised, by transformers, one text at a time."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    found = []
    for text in TEXTS:
        with torch.inference_mode():
            mean = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy().mean(axis=0)
        found.append(mean / np.linalg.norm(mean))
    return np.array(found)


def run(folder: Path, data: Path | str, out: Path, options: EmbedOptions | None = None, **given: Any) -> StreamResult:
    settings = TaskSettings(too_long="truncate")
    options = EmbedOptions() if options is None else options
    return embed(folder, str(data), str(out), options, settings, reporter=QUIET, **given)


def test_every_form_holds_the_same_vectors(folder: Path, data: Path, expected: Any, tmp_path: Path) -> None:
    from pyarrow import parquet

    result = run(folder, data, tmp_path / "v.npy")
    assert (result.rows, result.cut_rows, result.packed) == (25, 0, True)
    vectors = np.load(tmp_path / "v.npy")
    agree(vectors, expected, 1e-5, scale=1.0)
    run(folder, data, tmp_path / "p.parquet")
    column = parquet.read_table(tmp_path / "p.parquet").column("embedding")
    np.testing.assert_array_equal(np.array(column.to_pylist(), np.float32), vectors)
    run(folder, data, tmp_path / "j.jsonl")
    lines = (tmp_path / "j.jsonl").read_text(encoding="utf-8").splitlines()
    np.testing.assert_array_equal(np.array([json.loads(line)["embedding"] for line in lines], np.float32), vectors)
    assert run(folder, data, tmp_path / "v.npy").skipped


def test_options_differ_from_the_folder_s_own(folder: Path, data: Path, expected: Any, tmp_path: Path) -> None:
    run(folder, data, tmp_path / "v.npy", EmbedOptions(normalize=False, packed=False))
    vectors = np.load(tmp_path / "v.npy")
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    assert abs(lengths - 1).max() > 0.01
    agree(vectors / lengths, expected, 1e-5, scale=1.0)
    with pytest.raises(InputError, match=r"written with --pooling mean, not --pooling cls"):
        run(folder, data, tmp_path / "v.npy", EmbedOptions(pooling="cls", normalize=False, packed=False))
    cut = run(folder, data, tmp_path / "w.npy", EmbedOptions(max_sequence_length=5))
    assert cut.cut_rows == 15


def test_killed_between_windows(folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of seven rows. A kill while the third is written leaves what is on the disk then, and a part of it."""
    write, calls = AnswerFile.write, []

    def dying(answers: AnswerFile, window: bytes) -> None:
        calls.append(window)
        if len(calls) == 3:
            shutil.copytree(tmp_path / "whole", tmp_path / "killed")
            with (tmp_path / "killed" / ".v.npy.partial").open("ab") as handle:
                handle.write(window[:11])
        write(answers, window)

    monkeypatch.setattr(answers, "WINDOW_ROWS", 7)
    with monkeypatch.context() as patch:
        patch.setattr(AnswerFile, "write", dying)
        run(folder, data, tmp_path / "whole" / "v.npy")
    out = tmp_path / "killed" / "v.npy"
    assert not out.exists()
    assert run(folder, data, out).rows == 25
    assert out.read_bytes() == (tmp_path / "whole" / "v.npy").read_bytes()


@pytest.mark.parametrize("ending", ["npy", "parquet", "jsonl"])
def test_rows_that_cannot_be_read_keep_their_places(folder: Path, tmp_path: Path, ending: str) -> None:
    """An empty text has a vector; a row without a text has none, and its place says so."""
    (tmp_path / "x.jsonl").write_text('{"text": ""}\n{"text": null}\n{"text": "the cat"}\n')
    with pytest.raises(InputError, match="row 2: text is None; it must be a text"):
        run(folder, tmp_path / "x.jsonl", tmp_path / f"v.{ending}")
    result = run(folder, tmp_path / "x.jsonl", tmp_path / f"v.{ending}", EmbedOptions(on_bad_row="skip"))
    assert (result.rows, result.bad_rows) == (3, 1)
    if ending == "jsonl":
        lines = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
        assert [next(iter(line)) for line in lines] == ["embedding", "error", "embedding"]
        assert lines[1]["error"].startswith("row 2: text is None")
        return
    vectors = np.load(tmp_path / "v.npy") if ending == "npy" else _vectors(tmp_path / "v.parquet")
    assert np.isnan(vectors).all(axis=1).tolist() == [False, True, False]


def _vectors(path: Path) -> Any:
    from pyarrow import parquet

    return np.array(parquet.read_table(path).column("embedding").to_pylist())


@pytest.fixture
def prompted(folder: Path, tmp_path: Path) -> Path:
    """The folder as version 6 of sentence-transformers writes it: prompts by name, the cut with the tokenizer."""
    copied = shutil.copytree(folder, tmp_path / "m")
    prompts = {"prompts": {"query": "THE dog: ", "passage": "cat: "}, "default_prompt_name": "query"}
    (copied / "config_sentence_transformers.json").write_text(json.dumps(prompts), encoding="utf-8")
    (copied / "tokenizer_config.json").write_text('{"do_lower_case": true, "model_max_length": 9}', encoding="utf-8")
    return copied


def test_prompts_precede_each_text_before_it_is_cut(folder: Path, data: Path, prompted: Path, tmp_path: Path) -> None:
    prompts = [({}, "the dog: "), ({"prompt_name": "passage"}, "cat: "), ({"prompt": "on "}, "on "), ({"prompt": ""}, "")]
    for number, (options, prompt) in enumerate(prompts):
        result = run(prompted, data, tmp_path / f"{number}.npy", EmbedOptions(**options))
        assert result.max_sequence_length == 9
        rows = "".join(json.dumps({"text": prompt + text}) + "\n" for text in TEXTS)
        (tmp_path / f"{number}.jsonl").write_text(rows, encoding="utf-8")
        plain = tmp_path / f"plain-{number}.npy"
        same = run(folder, tmp_path / f"{number}.jsonl", plain, EmbedOptions(max_sequence_length=9))
        assert same.cut_rows == result.cut_rows
        agree(np.load(tmp_path / f"{number}.npy"), np.load(plain), 1e-6, scale=1.0)
    with pytest.raises(InputError, match="written with prompt = THE dog: , not prompt = nothing"):
        run(prompted, data, tmp_path / "0.npy", EmbedOptions(prompt=""))


def test_texts_and_prompts_are_lower_cased_where_the_folder_does(prompted: Path, tmp_path: Path) -> None:
    (prompted / "tokenizer_config.json").write_text('{"do_lower_case": false}', encoding="utf-8")
    rows = [{"text": "ON THE MAT", "text_pair": "Dogs"}, {"text": "on the mat", "text_pair": "dogs"}]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (prompted / "sentence_bert_config.json").write_text('{"do_lower_case": true}', encoding="utf-8")
    run(prompted, tmp_path / "x.jsonl", tmp_path / "v.npy")
    upper, lower = np.load(tmp_path / "v.npy")
    agree(upper, lower, 1e-6, scale=1.0)


def test_prompts_that_cannot_be_used(prompted: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"prompt 'other': the model's folder has query, passage .*; give --prompt TEXT"):
        run(prompted, data, tmp_path / "v.npy", EmbedOptions(prompt_name="other"))
    with pytest.raises(InputError, match="--prompt and --prompt-name exclude each other"):
        EmbedOptions(prompt="a", prompt_name="b")
    (prompted / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean", "include_prompt": false}')
    with pytest.raises(
        InputError, match="m: leaves the prompt out of the mean, which cannot be done here; give --prompt ''"
    ):
        run(prompted, data, tmp_path / "v.npy")
    assert run(prompted, data, tmp_path / "v.npy", EmbedOptions(prompt="")).rows == 25


@pytest.mark.parametrize(
    ("out", "options", "message"),
    [
        ("v.txt", {}, "vectors are written as .npy, .parquet, .jsonl"),
        ("v.npy", {"max_sequence_length": 65}, "the model has 64 positions; give 3 to 64"),
    ],
)
def test_wrong_usage(folder: Path, data: Path, tmp_path: Path, out: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(folder, data, tmp_path / out, EmbedOptions(**options))
    with pytest.raises(InputError, match="--pooling sum: choose one of cls, mean, max"):
        EmbedOptions(pooling="sum")  # type: ignore[arg-type]


def test_the_data_is_not_written_over(folder: Path, data: Path) -> None:
    before = data.read_bytes()
    with pytest.raises(InputError, match="is the data itself"):
        run(folder, data, data, overwrite=True)
    assert data.read_bytes() == before


def test_a_folder_without_a_tokenizer(folder: Path, data: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(InputError, match="holds no tokenizer"):
        run(bare, data, tmp_path / "v.npy")
