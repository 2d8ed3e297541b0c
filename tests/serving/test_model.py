"""Served answers are those of `embed` and `predict`, whoever shares the row; and folders that cannot be served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.builders.agree import agree
from tests.builders.bert_folder import shift_logits, write_tokenizer_without_special_tokens
from tests.builders.command_line import refusal, succeed
from tests.builders.effort import LONG
from tests.builders.encoders import WORDS, write_encoder
from tests.builders.served import Served, served_in_thread


def texts_of(count: int, seed: int, longest: int = 30) -> list[str]:
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, size)) for size in random.integers(0, longest, count)]


def in_company(ask: Callable[[Sequence[Any]], list[Any]], texts: Sequence[Any], seed: int) -> list[Any]:
    """Answers for all texts, asked for by many clients at once in requests of any size, in any order."""
    random = np.random.default_rng(seed)
    order = random.permutation(len(texts))
    cuts = np.sort(random.choice(np.arange(1, len(texts)), len(texts) // 5, replace=False))
    requests = [part.tolist() for part in np.split(order, cuts)]
    with ThreadPoolExecutor(17) as clients:
        answers = clients.map(lambda numbers: ask([texts[number] for number in numbers]), requests)
        found = {
            number: each
            for numbers, part in zip(requests, answers, strict=True)
            for number, each in zip(numbers, part, strict=True)
        }
    return [found[number] for number in range(len(texts))]


def asked(served: Served, route: str, content: dict[str, Any]) -> Any:
    answer = served.post(route, {**content, "truncate": True})
    assert answer.status == 200, answer.body
    return answer.json


def predicted(model: Path, rows: Sequence[dict[str, Any]], folder: Path, *options: object) -> list[Any]:
    data, out = folder / "rows.jsonl", folder / "answers.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    succeed("predict", "--model", model, "--data", data, "--out", out, *options)
    return [json.loads(line) for line in out.read_text().splitlines()]


def embedded(model: Path, texts: Sequence[str], folder: Path, *options: object) -> np.ndarray:
    data, out = folder / "rows.jsonl", folder / "vectors.npy"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    succeed("embed", "--model", model, "--data", data, "--out", out, *options)
    return np.asarray(np.load(out))


def test_vectors_are_those_of_embed(embedding: Served, folders: dict[str, Path], tmp_path: Path) -> None:
    texts = texts_of(211, 3)
    expected = embedded(folders["embedding"], texts, tmp_path)
    agree(in_company(lambda some: asked(embedding, "/embed", {"inputs": some}), texts, 5), expected)


def test_texts_are_cut_on_the_side_of_the_tokenizer(folders: dict[str, Path], tmp_path: Path) -> None:
    """A request may name the other side; `embed` and `predict` cut where the folder says."""
    left = {"tokenizer_class": "PreTrainedTokenizerFast", "truncation_side": "left", "pad_token": "<pad>"}
    models = {kind: shutil.copytree(folders[kind], tmp_path / kind) for kind in ("embedding", "reranker")}
    for model in models.values():
        (model / "tokenizer_config.json").write_text(json.dumps(left), encoding="utf-8")
    texts, elsewhere = texts_of(9, 4, 150), tmp_path / "right"
    elsewhere.mkdir()
    with served_in_thread(models["embedding"]) as served:
        agree(asked(served, "/embed", {"inputs": texts}), embedded(models["embedding"], texts, tmp_path))
        right = asked(served, "/embed", {"inputs": texts, "truncation_direction": "right"})
        agree(right, embedded(folders["embedding"], texts, elsewhere))
        assert np.abs(np.subtract(right, asked(served, "/embed", {"inputs": texts}))).max() > 0.01
    rows = [{"query": texts[0], "document": text} for text in texts[1:]]
    expected = [row["score"] for row in predicted(models["reranker"], rows, tmp_path)]
    other = [row["score"] for row in predicted(folders["reranker"], rows, elsewhere)]
    with served_in_thread(models["reranker"]) as served:
        ranked = asked(served, "/rerank", {"query": texts[0], "texts": texts[1:]})
    agree([each["score"] for each in sorted(ranked, key=lambda each: each["index"])], expected)
    assert np.abs(np.subtract(expected, other)).max() > 1e-4


def test_scores_are_those_of_predict(reranker: Served, folders: dict[str, Path], tmp_path: Path) -> None:
    queries, documents = texts_of(41, 7, 5), texts_of(41, 8, 40)
    rows = [{"query": query, "document": document} for query, document in zip(queries, documents, strict=True)]
    expected = [row["score"] for row in predicted(folders["reranker"], rows, tmp_path)]

    def score(some: Sequence[dict[str, str]]) -> list[float]:
        asks = ({"query": row["query"], "texts": [row["document"]]} for row in some)
        return [asked(reranker, "/rerank", content)[0]["score"] for content in asks]

    agree(in_company(score, rows, 5), expected)


def test_documents_are_ranked_by_logits_whose_scores_are_equal(folders: dict[str, Path], tmp_path: Path) -> None:
    documents, request = texts_of(15, 21, 20), {"query": "alpha"}
    model = shift_logits(folders["reranker"], tmp_path / "m", 20)
    with served_in_thread(model) as served:
        found = asked(served, "/rerank", {**request, "texts": documents})
        raw = asked(served, "/rerank", {**request, "texts": documents, "raw_scores": True})
        cohere = asked(served, "/v1/rerank", {**request, "documents": documents})["results"]
    assert {each["score"] for each in found} == {1.0}
    assert len({each["score"] for each in raw}) > 5
    assert [each["score"] for each in raw] == sorted((each["score"] for each in raw), reverse=True)
    for ranked in (found, cohere):
        assert [each["index"] for each in ranked] == [each["index"] for each in raw]


def test_a_cross_encoder_of_version_6(folders: dict[str, Path], tmp_path: Path) -> None:
    """Its prompt precedes the query, and its activation makes the scores, as in `predict`."""
    model = Path(shutil.copytree(folders["reranker"], tmp_path / "m"))
    text = {"method": "forward", "method_output_name": "logits"}
    contents: dict[str, Any] = {
        "modules.json": [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.Transformer"}],
        "sentence_bert_config.json": {"transformer_task": "sequence-classification", "modality_config": {"text": text}},
        "config_sentence_transformers.json": {
            "model_type": "CrossEncoder",
            "activation_fn": "torch.nn.modules.activation.Tanh",
            "prompts": {"x": "eta theta "},
            "default_prompt_name": "x",
        },
    }
    for name, content in contents.items():
        (model / name).write_text(json.dumps(content))
    documents = texts_of(9, 22, 20)
    rows = [{"query": "alpha", "document": document} for document in documents]
    expected = [row["score"] for row in predicted(model, rows, tmp_path)]
    prompted = [{**row, "query": "eta theta alpha"} for row in rows]
    logits = [
        np.log(row["score"] / (1 - row["score"]))
        for row in predicted(folders["reranker"], prompted, tmp_path, "--overwrite")
    ]
    agree(expected, np.tanh(logits), 1e-5, scale=1.0)
    with served_in_thread(model) as served:
        ranked = asked(served, "/rerank", {"query": "alpha", "texts": documents})
    agree([each["score"] for each in sorted(ranked, key=lambda each: each["index"])], expected)


def test_a_text_without_any_token_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    model = write_tokenizer_without_special_tokens(Path(shutil.copytree(folders["embedding"], tmp_path / "m")))
    with served_in_thread(model) as served:
        for direction in ("right", "left"):
            answer = served.post("/embed", {"inputs": ["alpha", ""], "truncate": True, "truncation_direction": direction})
            assert (answer.status, answer.json["error_type"]) == (422, "tokenizer")
            assert "the request: row 1: the text has no token" in answer.json["error"]


def test_labels_are_those_of_predict(classifier: Served, folders: dict[str, Path], tmp_path: Path) -> None:
    texts = texts_of(101, 9)
    expected = predicted(folders["classifier"], [{"text": text} for text in texts], tmp_path)
    found = in_company(lambda some: asked(classifier, "/predict", {"inputs": [[text] for text in some]}), texts, 5)
    for labels, row in zip(found, expected, strict=True):
        assert labels[0]["label"] == row["label"]
        agree({each["label"]: each["score"] for each in labels}, row["probabilities"])


def test_tags_are_those_of_predict_for_texts_of_several_windows(
    tagger: Served, folders: dict[str, Path], tmp_path: Path
) -> None:
    texts = [*texts_of(61, 10), " ".join(texts_of(12, 11, 40))]
    expected = predicted(folders["tagger"], [{"text": text} for text in texts], tmp_path)
    found = in_company(lambda some: asked(tagger, "/predict", {"inputs": [[text] for text in some]}), texts, 5)
    for mine, row in zip(found, expected, strict=True):
        assert [(tag["start"], tag["end"], tag["tag"]) for tag in mine["tags"]] == [
            (tag["start"], tag["end"], tag["tag"]) for tag in row["tags"]
        ]
        agree([tag["score"] for tag in mine["tags"]], [tag["score"] for tag in row["tags"]])


def test_a_folder_says_how_vectors_are_made(folders: dict[str, Path], tmp_path: Path) -> None:
    model = Path(shutil.copytree(folders["embedding"], tmp_path / "sentences"))
    (model / "1_Pooling").mkdir()
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(kinds.items())
    ]
    contents = {
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": 32, "pooling_mode_cls_token": True},
        "sentence_bert_config.json": {"max_seq_length": 21, "do_lower_case": True},
        "config_sentence_transformers.json": {"prompts": {"query": "beta: ", "x": "eta "}, "default_prompt_name": "x"},
    }
    for name, content in contents.items():
        (model / name).write_text(json.dumps(content))
    texts = ["Alpha BETA", *texts_of(13, 12, 40)]
    with served_in_thread(model, batch_rows=1) as served:
        agree(asked(served, "/embed", {"inputs": texts}), embedded(model, texts, tmp_path))
        named = asked(served, "/embed", {"inputs": texts, "prompt_name": "query"})
        agree(named, embedded(model, texts, tmp_path, "--prompt-name", "query", "--overwrite"))
        plain = np.array(asked(served, "/embed", {"inputs": texts[:1], "normalize": False}))
        assert abs(np.linalg.norm(plain) - 1) > 0.1


@pytest.mark.slow
def test_texts_of_a_trained_model_in_random_company(minilm: Path, tmp_path: Path) -> None:
    words = (minilm / "vocab.txt").read_text().split()[2000:9000]
    random = np.random.default_rng(13)
    texts = [
        " ".join(random.choice(words, size)) for size in np.exp(random.uniform(0, 6, 2000 if LONG else 200)).astype(int)
    ]
    expected = embedded(minilm, texts, tmp_path)
    with served_in_thread(minilm, queue_seconds=600) as served:
        found = in_company(lambda some: asked(served, "/embed", {"inputs": some, "truncate": True}), texts, 17)
    agree(found, expected, 1e-6, scale=1.0)  # vectors of length 1


# --- folders that cannot be served


def test_folders_that_cannot_be_served_are_refused_in_one_line(folders: dict[str, Path], tmp_path: Path) -> None:
    def changed(change: Callable[[Path], object], name: str) -> Path:
        model = Path(shutil.copytree(folders["embedding"], tmp_path / name))
        change(model)
        return model

    def set_config(**values: Any) -> Callable[[Path], object]:
        def change(model: Path) -> None:
            file = model / "config.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

        return change

    def pickle(model: Path) -> None:
        (model / "model.safetensors").rename(model / "pytorch_model.bin")

    cases = {
        "tokenizer": changed(lambda model: (model / "tokenizer.json").unlink(), "no-tokenizer"),
        "safetensors": changed(pickle, "pickled"),
        "config.json": changed(lambda model: (model / "config.json").unlink(), "no-config"),
        "question-answering": changed(set_config(architectures=["RobertaForQuestionAnswering"]), "answers"),
    }
    write_encoder(tmp_path / "deberta", "deberta")
    cases["run it with transformers or sentence-transformers"] = tmp_path / "deberta"
    for named, model in cases.items():
        assert named in refusal("serve", "--model", model, "--port", 0)
    model = folders["embedding"]
    assert "row-length 65" in refusal("serve", "--model", model, "--port", 0, "--row-length", 65)
    assert "max-sequence-length 65" in refusal("serve", "--model", model, "--port", 0, "--max-sequence-length", 65)
    assert "row-length 20" in refusal("serve", "--model", model, "--port", 0, "--row-length", 20)
    assert "no-such" in refusal("serve", "--model", tmp_path / "no-such", "--port", 0)
