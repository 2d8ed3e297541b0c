"""Answers and vectors as a user gets them, in the order of the rows: those of transformers' own models, one row at a time;
in each form, from a file and through a pipe.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.tasks.predict import (
    BENCHMARK_SHAPES,
    EmbedOptions,
    build_benchmark_model,
    embed,
    make_benchmark_batch,
    measure_bfloat16_time_ratios,
    predict,
)
from gaudi_bert.tasks.prediction_files import PredictOptions, StreamResult
from tests.builders.agree import agree
from tests.builders.bert_folder import CONFIG, write_bert, write_tokenizer, write_tokenizer_without_special_tokens
from tests.builders.json_lines import lines_of, write_lines
from tests.builders.reporters import QUIET, Listener

TEXTS = ["the cat sat on the mat", "dogs runs", "over the hill, and south!", "the river flows north", "unable mat"] * 4


def write_model(folder: Path, architecture: str, **config: Any) -> Any:
    """A folder as transformers writes it, with random weights that make answers differ; returns the model."""
    import torch
    import transformers

    torch.manual_seed(3)
    wanted = transformers.BertConfig(**{**CONFIG, "initializer_range": 0.3, **config})
    model = getattr(transformers, architecture)(wanted).eval()
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def run(folder: Path, data: Path, out: Path, options: PredictOptions | None = None, **changes: Any) -> list[dict[str, Any]]:
    predict(folder, str(data), str(out), options or PredictOptions(), changes, reporter=QUIET)
    return lines_of(out)


def logits_alone(model: Any, folder: Path, *texts: str) -> Any:
    import torch
    from transformers import AutoTokenizer

    with torch.inference_mode():
        return model(**AutoTokenizer.from_pretrained(folder)(*texts, return_tensors="pt"))


@pytest.mark.parametrize(
    ("config", "pair", "expect"),
    [
        ({"id2label": {0: "bad", 1: "fair", 2: "good"}, "num_labels": 3}, None, lambda logits: logits.softmax(-1)),
        (
            {"id2label": {0: "joy", 1: "fear"}, "num_labels": 2, "problem_type": "multi_label_classification"},
            "the cat",
            lambda logits: logits.sigmoid(),
        ),
        ({"num_labels": 1, "problem_type": "regression"}, None, lambda logits: logits),
    ],
)
def test_texts_and_pairs(tmp_path: Path, config: dict[str, Any], pair: str | None, expect: Any) -> None:
    """Classes, several labels, a number; labels in the rows are ignored."""
    model = write_model(tmp_path / "m", "BertForSequenceClassification", **config)
    more = {"label": "whatever"} if pair is None else {"text_pair": pair}
    data = write_lines(tmp_path / "x.jsonl", [{"text": text, **more} for text in TEXTS])
    names, answers = list(config.get("id2label", {}).values()), run(tmp_path / "m", data, tmp_path / "y.jsonl")
    for text, answer in zip(TEXTS, answers, strict=True):
        texts = (text,) if pair is None else (text, pair)
        expected = expect(logits_alone(model, tmp_path / "m", *texts).logits)[0].numpy()
        agree(list(answer["probabilities"].values()) if names else [answer["value"]], expected, 1e-5, scale=1.0)
        if pair is not None:
            assert answer["labels"] == [names[place] for place in np.flatnonzero(expected >= 0.5)]
        elif names:
            assert (answer["label"], list(answer["probabilities"])) == (names[int(expected.argmax())], names)
    assert len({json.dumps(answer) for answer in answers}) > 1


def test_two_classes_that_transformers_did_not_name(tmp_path: Path) -> None:
    write_model(tmp_path / "m", "BertForSequenceClassification", num_labels=2)
    rows = write_lines(tmp_path / "x.jsonl", [{"text": "cat"}, {"text": "the cat"}])
    answers = run(tmp_path / "m", rows, tmp_path / "y.jsonl", name="classification")
    assert [set(answer["probabilities"]) for answer in answers] == [{"LABEL_0", "LABEL_1"}] * 2
    with pytest.raises(InputError, match=r"task\.name = regression"):
        run(tmp_path / "m", rows, tmp_path / "z.jsonl", name="regression")


def test_what_cannot_be_answered(tmp_path: Path) -> None:
    write_model(tmp_path / "m", "BertForSequenceClassification", num_labels=2, id2label={0: "bad", 1: "good"})
    long = write_lines(tmp_path / "x.jsonl", [{"text": "cat"}, {"text": "cat " * 90}])
    with pytest.raises(
        InputError, match=r"x.jsonl: line 2 [(]row 2[)]: the row has 92 tokens, but a sequence may have at most 64"
    ):
        run(tmp_path / "m", long, tmp_path / "y.jsonl", too_long="error")
    assert len(run(tmp_path / "m", long, tmp_path / "y.jsonl")) == 2
    write_model(tmp_path / "mlm", "BertForMaskedLM")
    with pytest.raises(InputError, match="models for masked-language-modelling make no predictions"):
        run(tmp_path / "mlm", long, tmp_path / "z.jsonl")


def test_a_text_of_nothing_is_the_sequence_of_its_special_tokens(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", "BertForSequenceClassification", num_labels=2)
    data = write_lines(tmp_path / "x.jsonl", [{"text": text} for text in ("", "cat", " ")])
    answers = run(tmp_path / "m", data, tmp_path / "x.out.jsonl")
    for text, answer in zip(["", "cat", " "], answers, strict=True):
        expected = logits_alone(model, tmp_path / "m", text).logits.softmax(-1)[0].numpy()
        agree(list(answer["probabilities"].values()), expected, 1e-5, scale=1.0)
    write_model(tmp_path / "tags", "BertForTokenClassification", num_labels=3)
    rows = write_lines(tmp_path / "y.jsonl", [{"text": ""}, {"tokens": []}, {"text": "the cat"}])
    assert [answer["tags"] for answer in run(tmp_path / "tags", rows, tmp_path / "tags.jsonl")][:2] == [[], []]


def test_rows_that_cannot_be_read_are_named_in_their_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "m", "BertForSequenceClassification", num_labels=2)
    (tmp_path / "x.jsonl").write_bytes(
        b'{"text": "cat"}\n{"text": 3}\nnull\n{"text": "\xff"}\n{"text": "\\ud800"}\n{"text": "'
        + b"cat " * 90
        + b'"}\n{"text": "dog"}\n'
    )
    with pytest.raises(InputError, match=r"x[.]jsonl: line 2 [(]row 2[)]: text is 3"):
        run(tmp_path / "m", tmp_path / "x.jsonl", tmp_path / "y.jsonl")
    answers = run(tmp_path / "m", tmp_path / "x.jsonl", tmp_path / "y.jsonl", on_bad_row="skip", too_long="error")
    problems = [
        "text is 3",
        "null is not an object",
        "the line is not UTF-8",
        "text contains a lone",
        "the row has 92 tokens",
    ]
    assert [next(iter(answer)) for answer in answers] == ["label", *["error"] * 5, "label"]
    for number, (problem, answer) in enumerate(zip(problems, answers[1:6], strict=True), start=2):
        assert answer["error"].startswith(f"line {number} (row {number}): {problem}")
    whole = write_lines(tmp_path / "good.jsonl", [{"text": "cat"}, {"text": "dog"}])
    agree([answers[0], answers[6]], run(tmp_path / "m", whole, tmp_path / "z.jsonl"), 1e-5, scale=1.0)


# --- vectors

SENTENCES = ["the cat sat on the mat", "dogs runs", "over the hill, and south!", "the river flows north", "unable"] * 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_bert(tmp_path_factory.mktemp("bert"))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": CONFIG["hidden_size"], "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    modules = [
        {"idx": number, "name": str(number), "type": f"sentence_transformers.models.{kind}", "path": path}
        for number, (kind, path) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("data") / "texts.jsonl", [{"text": text} for text in SENTENCES])


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    """Mean, normalised, by transformers, one text at a time."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    found = []
    for text in SENTENCES:
        with torch.inference_mode():
            mean = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy().mean(axis=0)
        found.append(mean / np.linalg.norm(mean))
    return np.array(found)


def embedded(
    folder: Path, data: Path | str, out: Path, options: EmbedOptions | None = None, on_bad_row: Any = "stop", **given: Any
) -> StreamResult:
    settings = TaskSettings(on_bad_row=on_bad_row)
    options = EmbedOptions() if options is None else options
    return embed(folder, str(data), str(out), options, settings, reporter=QUIET, **given)


def test_every_form_holds_the_same_vectors(folder: Path, data: Path, expected: Any, tmp_path: Path) -> None:
    from pyarrow import parquet

    result = embedded(folder, data, tmp_path / "v.npy")
    assert (result.rows, result.cut_rows, result.packed) == (25, 0, True)
    vectors = np.load(tmp_path / "v.npy")
    agree(vectors, expected, 1e-5, scale=1.0)
    embedded(folder, data, tmp_path / "p.parquet")
    column = parquet.read_table(tmp_path / "p.parquet").column("embedding")
    np.testing.assert_array_equal(np.array(column.to_pylist(), np.float32), vectors)
    embedded(folder, data, tmp_path / "j.jsonl")
    lines = lines_of(tmp_path / "j.jsonl")
    np.testing.assert_array_equal(np.array([line["embedding"] for line in lines], np.float32), vectors)
    assert embedded(folder, data, tmp_path / "v.npy").skipped


@pytest.mark.parametrize(("precision", "notes", "differs"), [("bfloat16", 1, False), ("bfloat16-always", 0, True)])
def test_bfloat16_on_a_processor_without_its_instructions(
    precision: Any, notes: int, differs: bool, folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")  # oneDNN itself has read it before
    listener, settings = Listener(), TaskSettings()
    embedded(folder, data, tmp_path / "wide.npy", EmbedOptions(engine="pytorch"))
    options = EmbedOptions(precision=precision, engine="pytorch")
    embed(folder, str(data), str(tmp_path / "v.npy"), options, settings, reporter=listener)
    assert listener.text.count("does not multiply in bfloat16, so float32 is used") == notes
    assert np.array_equal(np.load(tmp_path / "v.npy"), np.load(tmp_path / "wide.npy")) != differs


def test_vectors_have_the_values_that_the_folder_keeps(folder: Path, data: Path, expected: Any, tmp_path: Path) -> None:
    """As in sentence-transformers, which normalises first and then cuts; `--normalize` is of what is left."""
    cut = shutil.copytree(folder, tmp_path / "m")
    (cut / "config_sentence_transformers.json").write_text('{"truncate_dim": 8}')
    library = pytest.importorskip("sentence_transformers", reason="SENTENCE-TRANSFORMERS MISSING: install it --no-deps")
    opened = library.SentenceTransformer(str(cut), device="cpu")
    for normalize, name in ((None, "v.npy"), (True, "w.npy")):
        embedded(cut, data, tmp_path / name, EmbedOptions(normalize=normalize))
        theirs = opened.encode(SENTENCES, normalize_embeddings=bool(normalize))
        assert theirs.shape == (25, 8)
        agree(np.load(tmp_path / name), theirs, 1e-5, scale=1.0)
    agree(np.load(tmp_path / "v.npy"), expected[:, :8], 1e-5, scale=1.0)


def test_outputs_that_are_no_numbers(folder: Path, data: Path, tmp_path: Path) -> None:
    """Weights that are finite, and so large that some texts overflow: the first of them is named, nothing is written."""
    from safetensors.numpy import load_file, save_file

    broken = shutil.copytree(folder, tmp_path / "m")
    tensors = load_file(broken / "model.safetensors")
    (name,) = (name for name in tensors if name.endswith("layer.0.attention.self.value.weight"))
    tensors[name] = np.full_like(tensors[name], 3e38)
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    for out in (tmp_path / "v.jsonl", tmp_path / "v.npy"):
        with pytest.raises(InputError, match=r"line 1 \(row 1\) are not finite"):
            embedded(broken, data, out)
        assert not out.exists()


def test_a_table_is_read_as_that_of_the_training(tmp_path: Path) -> None:
    """Its separator, encoding and columns are defaults: of other files of its kind, and of no others."""
    settings = {"text": "Satz", "label": "Art", "delimiter": ";", "encoding": "cp1252"}
    write_model(tmp_path / "m", "BertForSequenceClassification", num_labels=2)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["gaudi_bert"] = {"task": "classification", "settings": settings}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    (tmp_path / "x.csv").write_bytes("Nr;Satz\n1;über the cat\n".encode("cp1252"))
    (tmp_path / "x.jsonl").write_text('{"Satz": "über the cat"}\n', encoding="utf-8")
    (tmp_path / "y.csv").write_text("text\nüber the cat\n", encoding="utf-8")
    given = {"delimiter": ",", "encoding": "utf-8", "text": "text"}
    answers = [
        run(tmp_path / "m", tmp_path / data, tmp_path / f"{data}.out", **changes)
        for data, changes in (("x.csv", {}), ("x.jsonl", {}), ("y.csv", given))
    ]
    assert answers[0] == answers[1] == answers[2]


def test_options_differ_from_the_folder_s_own(folder: Path, data: Path, expected: Any, tmp_path: Path) -> None:
    embedded(folder, data, tmp_path / "v.npy", EmbedOptions(normalize=False, packed=False))
    vectors = np.load(tmp_path / "v.npy")
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    assert abs(lengths - 1).max() > 0.01
    agree(vectors / lengths, expected, 1e-5, scale=1.0)
    with pytest.raises(InputError, match=r"pooling: .mean. in the file, .cls. now"):
        embedded(folder, data, tmp_path / "v.npy", EmbedOptions(pooling="cls", normalize=False, packed=False))
    cut = embedded(folder, data, tmp_path / "w.npy", EmbedOptions(max_sequence_length=5))
    assert cut.cut_rows == 15


def test_rows_that_cannot_be_read_keep_their_places(folder: Path, tmp_path: Path) -> None:
    """An empty text has a vector; a row without a text has none, and its place says so."""
    (tmp_path / "x.jsonl").write_text('{"text": ""}\n{"text": null}\n{"text": "the cat"}\n')
    result = embedded(folder, tmp_path / "x.jsonl", tmp_path / "v.npy", on_bad_row="skip")
    assert (result.rows, result.bad_rows) == (3, 1)
    assert np.isnan(np.load(tmp_path / "v.npy")).all(axis=1).tolist() == [False, True, False]


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
    rows = write_lines(tmp_path / "x.jsonl", [{"text": prompt + text} for _, prompt in prompts for text in SENTENCES])
    same = embedded(folder, rows, tmp_path / "plain.npy", EmbedOptions(max_sequence_length=9))
    found = [embedded(prompted, data, tmp_path / f"{n}.npy", EmbedOptions(**each)) for n, (each, _) in enumerate(prompts)]
    assert [result.max_sequence_length for result in found] == [9] * 4
    assert sum(result.cut_rows for result in found) == same.cut_rows
    vectors = np.concatenate([np.load(tmp_path / f"{number}.npy") for number in range(4)])
    agree(vectors, np.load(tmp_path / "plain.npy"), 1e-6, scale=1.0)
    with pytest.raises(InputError, match=r"prompt: .THE dog: . in the file"):
        embedded(prompted, data, tmp_path / "0.npy", EmbedOptions(prompt=""))


def test_texts_and_prompts_are_lower_cased_where_the_folder_does(prompted: Path, tmp_path: Path) -> None:
    (prompted / "tokenizer_config.json").write_text('{"do_lower_case": false}', encoding="utf-8")
    rows = [{"text": "ON THE MAT", "text_pair": "Dogs"}, {"text": "on the mat", "text_pair": "dogs"}]
    data = write_lines(tmp_path / "x.jsonl", rows)
    (prompted / "sentence_bert_config.json").write_text('{"do_lower_case": true}', encoding="utf-8")
    embedded(prompted, data, tmp_path / "v.npy")
    upper, lower = np.load(tmp_path / "v.npy")
    agree(upper, lower, 1e-6, scale=1.0)


def test_tokenizer_settings_of_a_folder_as_sentence_transformers_applies_them(folder: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers", reason="SENTENCE-TRANSFORMERS MISSING: install it --no-deps")
    from transformers import AutoTokenizer

    copied = shutil.copytree(folder, tmp_path / "m")
    AutoTokenizer.from_pretrained(folder).save_pretrained(copied)
    texts = ["The Cat [SEP] sat on THE mat", "unable ΑΣ dogs run south over the hill", "cat"]
    data, seen = write_lines(tmp_path / "x.jsonl", [{"text": text} for text in texts]), []
    for number, settings in enumerate(
        (
            {},
            {"do_lower_case": True},
            {"tokenizer_args": {"do_lower_case": False, "model_max_length": 5}, "max_seq_length": 9},
        )
    ):
        (copied / "sentence_bert_config.json").write_text(json.dumps(settings))
        embedded(copied, data, tmp_path / f"{number}.npy")
        theirs = library.SentenceTransformer(str(copied), device="cpu").encode(texts)
        agree(np.load(tmp_path / f"{number}.npy"), theirs, 1e-5, scale=1.0)
        seen.append(theirs)
    assert abs(seen[2] - seen[0]).max() > 0.01


def test_rows_without_any_token_are_named(folder: Path, tmp_path: Path) -> None:
    bare = write_tokenizer_without_special_tokens(shutil.copytree(folder, tmp_path / "m"))
    rows = [{"text": text} for text in ("the cat", "", "dogs", *[" "] * 6)]
    empty = write_lines(tmp_path / "y.jsonl", [{"text": ""}])
    with pytest.raises(
        InputError, match=r"y\.jsonl: line 1 \(row 1\): the text has no tokens, and the tokenizer adds no special tokens"
    ):
        embedded(bare, empty, tmp_path / "v.npy")
    data = write_lines(tmp_path / "x.jsonl", rows)
    with pytest.raises(
        InputError, match=r"line 2 \(row 2\), line 4 \(row 4\), .*line 7 \(row 7\) and 2 more rows: the text"
    ):
        embedded(bare, data, tmp_path / "v.npy")
    result = embedded(bare, data, tmp_path / "v.npy", on_bad_row="skip")
    assert (result.rows, result.bad_rows) == (9, 7)
    write_model(tmp_path / "c", "BertForSequenceClassification", num_labels=2)
    with pytest.raises(InputError, match=r"y\.jsonl: line 1 \(row 1\): the text has no token"):
        run(write_tokenizer_without_special_tokens(tmp_path / "c"), empty, tmp_path / "a.jsonl")


def test_prompts_that_cannot_be_used(prompted: Path, data: Path, tmp_path: Path) -> None:
    (prompted / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean", "include_prompt": false}')
    with pytest.raises(
        InputError, match="m: the model excludes prompts from mean pooling, which is not supported; pass --prompt ''"
    ):
        embedded(prompted, data, tmp_path / "v.npy")
    assert embedded(prompted, data, tmp_path / "v.npy", EmbedOptions(prompt="")).rows == 25


def test_wrong_usage(folder: Path, data: Path, tmp_path: Path) -> None:
    for out, options in (("v.txt", {}), ("v.npy", {"max_sequence_length": 65})):
        with pytest.raises(InputError, match=r"\.parquet|between 3 and 64"):
            embedded(folder, data, tmp_path / out, EmbedOptions(**options))
    for wrong in ({"pooling": "sum"}, {"precision": "float16"}, {"prompt": "a", "prompt_name": "b"}):
        with pytest.raises(InputError, match=r"--(pooling|precision|prompt)"):
            EmbedOptions(**wrong)  # type: ignore[arg-type]


def test_the_data_is_not_written_over(folder: Path, data: Path) -> None:
    before = data.read_bytes()
    with pytest.raises(InputError, match="is also the input"):
        embedded(folder, data, data, overwrite=True)
    assert data.read_bytes() == before


# --- bfloat16 beside float32 on this processor


def test_time_ratios_are_measured_for_each_shape() -> None:
    ratios = measure_bfloat16_time_ratios()
    assert ratios.keys() == BENCHMARK_SHAPES.keys()
    assert all(np.isfinite(ratio) and ratio > 0 for ratio in ratios.values())


def test_both_precisions_compute_the_same() -> None:
    batch = make_benchmark_batch(3, 16)
    wide, narrow = (build_benchmark_model(kind).compute_outputs(batch) for kind in ("float32", "bfloat16"))
    assert wide.shape == (3, 1, 384)
    assert 0 < np.abs(wide - narrow).max() < 0.01
