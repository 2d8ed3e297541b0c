"""The routes, as clients of text-embeddings-inference, OpenAI, Jina and Cohere use them, and their refusals."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.builders.agree import agree
from tests.builders.encoders import TEXTS, TOKENIZER
from tests.builders.served import Served, served_in_thread

LONG = " ".join(["alpha"] * 90)


def vectors(served: Served, inputs: Any, **more: Any) -> np.ndarray:
    answer = served.post("/embed", {"inputs": inputs, **more})
    assert answer.status == 200, answer.body
    return np.array(answer.json, np.float64)


def test_a_text_a_list_and_token_ids_give_the_same_vectors(embedding: Served) -> None:
    expected = vectors(embedding, TEXTS[:3])
    assert expected.shape == (3, 32)
    agree(vectors(embedding, TEXTS[1]), expected[1:2])
    ids = [TOKENIZER.encode(text).ids for text in TEXTS[:3]]
    agree(vectors(embedding, ids), expected)
    agree(vectors(embedding, ids[2][1:-1]), expected[2:])
    agree(vectors(embedding, [ids[0], *TEXTS[1:3]]), expected)


def test_normalize_and_dimensions_change_vectors_on_request(embedding: Served) -> None:
    plain, normal = vectors(embedding, TEXTS[:2]), vectors(embedding, TEXTS[:2], normalize=True)
    agree(normal, plain / np.linalg.norm(plain, axis=1, keepdims=True))
    short = vectors(embedding, TEXTS[:2], normalize=True, dimensions=7)
    cut = plain[:, :7]
    agree(short, cut / np.linalg.norm(cut, axis=1, keepdims=True))
    assert embedding.post("/embed", {"inputs": "a", "dimensions": 33}).status == 422


def test_texts_that_are_too_long_are_refused_or_cut_at_either_end(embedding: Served) -> None:
    refused = embedding.post("/embed", {"inputs": ["a", LONG]})
    assert (refused.status, refused.json["error_type"]) == (422, "validation")
    assert "--auto-truncate" in refused.json["error"]
    tokens = TOKENIZER.encode(f"{LONG} beta").ids
    right = vectors(embedding, f"{LONG} beta", truncate=True)
    left = vectors(embedding, f"{LONG} beta", truncate=True, truncation_direction="Left")
    agree(right, vectors(embedding, tokens[:63] + tokens[-1:]))
    agree(left, vectors(embedding, tokens[:1] + tokens[-63:]))
    agree(left, vectors(embedding, tokens, truncate=True, truncation_direction="left"))


def test_texts_of_a_megabyte_are_cut_before_they_are_tokenized(
    embedding: Served, reranker: Served, classifier: Served, tagger: Served
) -> None:
    big = "beta " + "alpha beta " * 90_000 + "gamma"
    agree(vectors(embedding, big, truncate=True), vectors(embedding, big[:2000], truncate=True))
    left = {"truncate": True, "truncation_direction": "left"}
    agree(vectors(embedding, big, **left), vectors(embedding, big[-2000:], **left))
    assert embedding.post("/embed", {"inputs": big}).status == 422
    assert embedding.post("/embed", {"inputs": "a" * 200_000, "truncate": True}).json["error_type"] == "tokenizer"
    for pair, short in ((("gamma", big), ("gamma", big[:2000])), ((big, "gamma"), (big[:2000], "gamma"))):
        found, expected = (
            reranker.post("/rerank", {"query": query, "texts": [text], "truncate": True, "raw_scores": True}).json
            for query, text in (pair, short)
        )
        agree(found[0]["score"], expected[0]["score"])
    assert classifier.post("/predict", {"inputs": big, "truncate": True}).status == 200
    assert tagger.post("/predict", {"inputs": big}).status == 413


def test_openai_embeddings_as_numbers_and_as_base64(embedding: Served) -> None:
    asked = {"input": TEXTS[:2], "model": "any", "user": "someone"}
    answer = embedding.post("/v1/embeddings", asked).json
    numbers = [each["embedding"] for each in answer["data"]]
    assert [each["index"] for each in answer["data"]] == [0, 1]
    agree(numbers, vectors(embedding, TEXTS[:2]))
    tokens = sum(len(TOKENIZER.encode(text).ids) for text in TEXTS[:2])
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    coded = embedding.post("/v1/embeddings", {**asked, "encoding_format": "base64", "dimensions": 5}).json["data"][1]
    agree(struct.unpack("<5f", base64.b64decode(coded["embedding"])), numbers[1][:5])
    cut = embedding.post("/v1/embeddings", {"input": LONG, "truncate": True}).json["data"][0]["embedding"]
    agree([cut], vectors(embedding, LONG, truncate=True))
    refused = embedding.post("/v1/embeddings", {"input": []})
    assert (refused.status, refused.json["error"]["type"]) == (422, "invalid_request_error")
    assert embedding.get("/v1/models").json["data"][0]["id"] == "embedding"


def test_tokens_and_where_they_are(embedding: Served) -> None:
    (tokens,) = embedding.post("/tokenize", {"inputs": "alpha beta"}).json
    encoding = TOKENIZER.encode("alpha beta")
    assert [token["id"] for token in tokens] == encoding.ids
    assert [token["special"] for token in tokens] == [bool(each) for each in encoding.special_tokens_mask]
    assert (tokens[1]["start"], tokens[1]["stop"]) == encoding.offsets[1]
    (bare,) = embedding.post("/tokenize", {"inputs": ["alpha beta"], "add_special_tokens": False}).json
    assert [token["id"] for token in bare] == encoding.ids[1:-1]
    assert embedding.post("/embed", {"inputs": [[10**9]]}).status == 422
    assert [len(each) for each in embedding.post("/tokenize", {"inputs": ["alpha", "alpha beta"]}).json] == [3, 4]
    for inputs in ("a" * 131_073, ["alpha " * 20_000] * 7):
        assert embedding.post("/tokenize", {"inputs": inputs}).status == 413


def test_documents_are_ranked_in_both_forms(reranker: Served) -> None:
    ranked = reranker.post("/rerank", {"query": "alpha", "texts": TEXTS[:7], "return_text": True}).json
    scores = [each["score"] for each in ranked]
    assert scores == sorted(scores, reverse=True)
    assert sorted(each["index"] for each in ranked) == list(range(7))
    assert all(each["text"] == TEXTS[each["index"]] for each in ranked)
    raw = reranker.post("/rerank", {"query": "alpha", "texts": TEXTS[:7], "raw_scores": True}).json
    agree(scores, [1 / (1 + np.exp(-each["score"])) for each in raw])
    documents = [*TEXTS[:6], {"text": TEXTS[6]}]
    jina = reranker.post("/v1/rerank", {"query": "alpha", "documents": documents, "top_n": 2, "return_documents": True})
    agree([each["relevance_score"] for each in jina.json["results"]], scores[:2])
    assert jina.json["results"][0]["document"] == {"text": ranked[0]["text"]}
    cohere = {"query": "alpha", "documents": [LONG]}
    assert reranker.post("/v2/rerank", cohere).status == 422
    assert reranker.post("/v2/rerank", {**cohere, "truncate": True}).status == 200
    assert "`texts`" in reranker.post("/rerank", {"query": "alpha", "texts": []}).json["error"]


def test_labels_with_scores_for_a_text_a_pair_and_a_batch(classifier: Served) -> None:
    one = classifier.post("/predict", {"inputs": "alpha"}).json
    assert [each["score"] for each in one] == sorted((each["score"] for each in one), reverse=True)
    agree(sum(each["score"] for each in one), 1)
    pair = classifier.post("/predict", {"inputs": ["alpha", "beta gamma"]}).json
    batch = classifier.post("/predict", {"inputs": [["alpha"], ["alpha", "beta gamma"]]}).json
    for alone, among in zip((one, pair), batch, strict=True):
        assert [each["label"] for each in alone] == [each["label"] for each in among]
        agree([each["score"] for each in alone], [each["score"] for each in among])
    for inputs in ([["a", "b", "c"]], ["a", "b", "c"], [["a"], "b"], ["a", ["b"]]):
        assert classifier.post("/predict", {"inputs": inputs}).status == 422


@pytest.mark.parametrize(("route", "asked"), [("/rerank", {"query": "a", "texts": ["b"]}), ("/predict", {"inputs": "a"})])
def test_an_embedding_model_has_no_answers_of_a_head(embedding: Served, route: str, asked: Any) -> None:
    refused = embedding.post(route, asked)
    assert (refused.status, refused.json["error_type"]) == (424, "backend")


def test_other_models_have_no_vectors(tagger: Served) -> None:
    for route in ("/embed", "/v1/embeddings", "/rerank"):
        assert tagger.post(route, {"inputs": "a", "input": "a", "query": "a", "texts": ["b"]}).status == 424, route


def test_the_root_is_the_route_of_the_model(embedding: Served, reranker: Served, tagger: Served) -> None:
    agree(embedding.post("/", {"inputs": "alpha"}).json, vectors(embedding, "alpha"))
    assert reranker.post("/", {"query": "alpha", "texts": ["beta"]}).json[0]["index"] == 0
    assert list(tagger.post("/", {"inputs": "alpha"}).json) == ["tags"]


def test_info_names_the_model_and_its_shapes(embedding: Served, classifier: Served) -> None:
    info = embedding.get("/info").json
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert info["served_model_name"] == info["model_id"] == "embedding"
    assert (info["max_input_length"], info["max_client_batch_size"], info["model_dtype"]) == (64, 2048, "float32")
    assert list(info["shapes"])[:2] == ["1x16", "1x32"]
    assert len(info["shapes"]) <= 12
    assert classifier.get("/info").json["model_type"]["classifier"]["id2label"] == {"0": "O", "1": "B-x", "2": "I-x"}
    assert {"/embed", "/v1/embeddings", "/rerank"} <= set(embedding.get("/openapi.json").json["paths"])
    assert embedding.get("/docs").status == 200


BAD: list[tuple[str, Any]] = [
    ("/embed", {}),
    ("/embed", {"inputs": 7}),
    ("/embed", {"inputs": []}),
    ("/embed", {"inputs": [1, "a"]}),
    ("/embed", {"inputs": ["a", None]}),
    ("/embed", {"inputs": [-1]}),
    ("/embed", {"inputs": [[300]]}),
    ("/embed", {"inputs": "a", "truncate": "yes"}),
    ("/embed", {"inputs": "a", "truncation_direction": "up"}),
    ("/embed", {"inputs": "a", "prompt_name": "none"}),
    ("/embed", {"inputs": "a", "dimensions": 0}),
    ("/tokenize", {"inputs": {"a": 1}}),
    ("/tokenize", {"inputs": 5}),
]
NO_JSON = (b"", b"{", b"\xff\xfe", b'{"inputs": "\\ud800"}', b"[" * 100_000, b'{"inputs": NaN}', b"null")


@pytest.mark.parametrize(
    ("route", "body"),
    [*((route, json.dumps(asked).encode()) for route, asked in BAD), *(("/embed", body) for body in NO_JSON)],
    ids=range(len(BAD) + len(NO_JSON)),
)
def test_what_cannot_be_read_is_refused_with_422(embedding: Served, route: str, body: bytes) -> None:
    refused = embedding.send("POST", route, body)
    assert (refused.status, set(refused.json)) == (422, {"error", "error_type"})


def test_unknown_paths_and_methods_are_refused_in_the_same_form(embedding: Served) -> None:
    assert embedding.get("/nothing").status == 404
    assert embedding.get("/embed").status == 405
    assert set(embedding.get("/nothing").json) == {"error", "error_type"}


def test_the_key_is_required_but_for_probes_and_metrics(folders: dict[str, Path]) -> None:
    with served_in_thread(folders["embedding"], api_key="secret", batch_rows=1) as served:
        for authorization in (
            {},
            {"authorization": "Bearer other"},
            {"authorization": "secret"},
            {"authorization": "Bearer "},
            {"authorization": "Basic secret"},
        ):
            assert served.post("/embed", {"inputs": "a"}, **authorization).status == 401
            assert served.get("/info", **authorization).status == 401
        for scheme in ("Bearer", "bearer", "BEARER"):
            assert served.post("/embed", {"inputs": "a"}, authorization=f"{scheme} secret").status == 200
        assert (served.get("/health").status, served.get("/metrics").status) == (200, 200)
