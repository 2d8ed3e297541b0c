"""Bodies of requests: what is read, what is rejected at which value, and how much memory reading takes."""

from __future__ import annotations

import json
import tracemalloc
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.serving.bodies import read_request
from gaudi_bert.serving.schemas import (
    EmbedRequest,
    PredictRequest,
    RequestBody,
    RequestError,
    RerankDocuments,
    RerankRequest,
    TokenizeRequest,
)

SIZE = 1 << 20


def read(content: Any, kind: type[RequestBody] = EmbedRequest, max_texts: int = 2048) -> Any:
    return read_request(kind, content if isinstance(content, bytes) else json.dumps(content).encode(), max_texts)


def refused(content: Any, kind: type[RequestBody] = EmbedRequest, max_texts: int = 2048) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(content, kind, max_texts)
    return caught.value


@given(st.lists(st.one_of(st.text(), st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1)), min_size=1), st.booleans())
def test_texts_and_token_ids_are_read_as_they_are(inputs: list[Any], escaped: bool) -> None:
    body = json.dumps({"other": inputs, "inputs": inputs, "truncate": escaped}, ensure_ascii=escaped)
    if any(0xD800 <= ord(character) < 0xE000 for text in inputs if isinstance(text, str) for character in text):
        assert refused(body.encode("utf-8", "surrogatepass")).status == 422
        return
    found = read(body.encode())
    assert [list(each) if isinstance(each, array) else each for each in found.inputs] == inputs
    assert found.truncate is escaped


def test_one_text_and_one_list_of_ids_stay_alone() -> None:
    assert read({"inputs": 'a "quoted" \\ text'}).inputs == 'a "quoted" \\ text'
    assert read(b' { "inputs" : [ 7 , 70000 ] } ').inputs == array("i", [7, 70000])
    many = list(range(100_000))
    assert read({"inputs": many}).inputs.tolist() == many


def test_documents_are_texts_or_objects_with_a_text() -> None:
    documents = ["a", {"title": ["x", {"y": None}], "text": "b", "z": -1.5e3}]
    assert read({"query": "q", "documents": documents}, RerankDocuments).documents == ["a", "b"]
    assert "documents.1.text" in refused({"query": "q", "documents": ["a", {"text": 5}]}, RerankDocuments).message


def test_the_message_names_the_first_problem() -> None:
    assert "`inputs.1`" in refused({"inputs": ["a", None, 3]}).message
    assert "`inputs`" in refused({"inputs": {"a": "b"}}).message
    assert "`inputs.0`" in refused({"inputs": [["a", "b", "c"]]}, PredictRequest).message
    assert "`texts`: must not be empty" in refused({"query": "a", "texts": []}, RerankRequest).message
    assert "`query`" in refused({"texts": ["a"]}, RerankRequest).message
    assert "`truncate`" in refused({"inputs": "a", "truncate": "yes"}).message
    many = refused({"inputs": ["a"] * 6}, max_texts=5)
    assert (many.status, "at most 5 texts" in many.message) == (413, True)
    assert "secret" not in refused({"secret": [1] * 2000, "inputs": "a"}).message


@pytest.mark.parametrize(
    "body",
    [
        b'{"inputs": "a"} 1', b'{"inputs": "a",}', b'{"inputs" "a"}', b'{"inputs": \\"a"}', b'{inputs: "a"}',
        b'{"inputs": [1,]}',
        b'{"inputs": [1 2]}', b'{"inputs": ["a" "b"]}', b'{"x": [1 2], "inputs": "a"}', b'{"inputs": "a\n"}', b'["inputs"]',
        b'{"inputs": "a', b'{"x": NaN, "inputs": "a"}', b'{"x": ]', b'{"inputs": "\xff"}', b"",
    ],
)  # fmt: skip
def test_what_is_not_json_is_rejected(body: bytes) -> None:
    assert refused(body).status == 422


LISTS = {
    "objects": b"{},",
    "lists": b"[],",
    "lists of one": b"[1],",
    "numbers": b"0.5,",
    "ids": b"1,",
    "large ids": b"300,",
    "empty texts": b'"",',
    "nested": b"[",
    "keys": b'"a":1},{"b":2},',
    "one text": b'"%s",' % (b"a" * (SIZE // 2)),
    "a wide text": b'"%s",' % (b"a " * (SIZE // 4) + "\U0001f600".encode()),
    "escapes": b'"%s",' % (b'\\"' * (SIZE // 4) + b"\\ud83d\\ude00"),
}


@pytest.mark.parametrize("item", LISTS)
@pytest.mark.parametrize(
    ("kind", "head"),
    [
        (EmbedRequest, b'{"inputs":['),
        (TokenizeRequest, b'{"inputs":['),
        (PredictRequest, b'{"inputs":['),
        (RerankDocuments, b'{"query":"a","documents":['),
        (RerankDocuments, b'{"query":"a","documents":[{"text":"b","c":['),
        (EmbedRequest, b'{"inputs":"a","unknown":['),
        (EmbedRequest, b'{"inputs":"a","truncate":['),
        (EmbedRequest, b"[{"),
    ],
)
def test_reading_takes_at_most_eight_times_the_bytes(kind: type[RequestBody], head: bytes, item: str) -> None:
    body = head + LISTS[item] * (SIZE // len(LISTS[item]))
    body = body.rstrip(b",") + b"]" * head.count(b"[") + b"}" * head.count(b"{")
    tracemalloc.start()
    try:
        read(body, kind)
    except RequestError as refusal:
        assert refusal.status in (413, 422)  # noqa: PT017 - some of them are right
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most <= 7 * len(body)  # the body itself is the eighth
