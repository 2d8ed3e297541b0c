"""The HTTP routes of the server, with the interfaces of text-embeddings-inference, OpenAI, Jina and Cohere.

`make_app` returns the application. For each POST route, the table `_ROUTES` contains the type of its requests and a function
that computes the answer with the `Service`. Bodies and answers of large requests are read and written on other threads, so
that the event loop stays responsive.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import hashlib
import hmac
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gaudi_bert import __version__
from gaudi_bert.common.arrays import Float32Array
from gaudi_bert.common.errors import InputError
from gaudi_bert.rows.fields import split_into_words
from gaudi_bert.rows.types import Row, RowPosition, Sequences, TaggedRow, TextRow, concatenate_sequences
from gaudi_bert.serving.bodies import read_request
from gaudi_bert.serving.model import ServedModel
from gaudi_bert.serving.schemas import (
    EmbedRequest,
    OpenAIEmbeddings,
    PredictRequest,
    RequestBody,
    RequestError,
    RerankDocuments,
    RerankRequest,
    TokenizeRequest,
    Truncation,
)
from gaudi_bert.serving.service import AcceptedRequest, Service

_OPEN_ROUTES = ("/health", "/ping", "/metrics")
_JsonWriter = Callable[[], bytes]
# A function that answers the requests to a route. It returns a second function, which encodes the answer as JSON and may run
# on another thread.
_AnswerFunction = Callable[[Service, ServedModel, AcceptedRequest, Any], Awaitable[_JsonWriter]]
# /tokenize rejects a text with more characters than this, and a request whose texts have more tokens than this. The limit is
# needed because each token takes about 70 bytes in the answer.
_MAX_TOKENIZED = 1 << 17

_LARGE_BODY = 1 << 20  # bytes
_FEW_CHARACTERS = 1 << 10  # the tokens of a text with at most this many characters are written on the event loop
# The maximum number of characters in a request to a tagger. It is limited because the words of a request take up to 50 bytes
# of memory per character.
_MAX_TAGGED_CHARACTERS = 1 << 19


def make_app(service: Service, api_key: str | None) -> FastAPI:
    """Return the web application with all routes of the server.

    Args:
        service: The service that computes the answers.
        api_key: The key that all routes require, except those for probes and metrics. If it is None, no key is required.
    """
    app = FastAPI(title="gaudi-bert", version=__version__, description="Encoders over packed requests.")
    for path in ("/", *_ROUTES):
        _add_post_route(app, service, path)

    async def health() -> Response:
        return Response(status_code=200 if service.is_healthy else 503)

    async def metrics() -> Response:
        return Response(service.metrics.render_page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def info() -> Response:
        return _make_json_response(_describe_model(service, service.require_model()))

    async def models() -> Response:
        model = {"id": service.model_id, "object": "model", "created": 0, "owned_by": "gaudi-bert"}
        return _make_json_response({"object": "list", "data": [model]})

    routes = {"/health": health, "/ping": health, "/metrics": metrics, "/info": info, "/v1/models": models}
    for path, route in routes.items():
        app.add_api_route(path, route, methods=["GET"], response_class=Response, response_model=None)

    async def handle_error(http: Request, error: Exception) -> Response:
        """Return the response for an error that a route raised."""
        if isinstance(error, HTTPException):
            error = RequestError(error.status_code, "validation", error.detail)
        return _make_error_response(http.url.path, error) if isinstance(error, RequestError) else Response(status_code=500)

    app.add_exception_handler(RequestError, handle_error)
    app.add_exception_handler(HTTPException, handle_error)
    app.add_middleware(_RequestGate, service=service, key=api_key)
    return app


class _RequestGate:
    """ASGI middleware that checks the API key and whether the server accepts requests, before the request body is read.

    The key is compared in constant time. While the server stops, every response closes its connection.
    """

    def __init__(self, app: ASGIApp, service: Service, key: str | None) -> None:
        self._app, self._service = app, service
        self._digest = None if key is None else hashlib.sha256(key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""

        async def send_closing(message: Message) -> None:
            """Send an ASGI message. While the server is stopping, add the header `Connection: close` to the response."""
            if message["type"] == "http.response.start" and self._service.stopping:
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        self._service.requests += 1
        try:
            if scope["path"] not in _OPEN_ROUTES:
                self._authorize_and_count(scope)
            await self._app(scope, receive, send_closing)
        except RequestError as error:
            await _make_error_response(scope["path"], error)(scope, receive, send_closing)
        finally:
            self._service.requests -= 1

    def _authorize_and_count(self, scope: Scope) -> None:
        """Check the API key of a request. Also count POST requests in the metrics, and check that the server accepts them.

        Raises:
            RequestError: The key is missing or wrong, or the service does not accept requests now.
        """
        sent = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = sent.partition(b" ")
        is_right = self._digest is None or hmac.compare_digest(hashlib.sha256(key.strip()).digest(), self._digest)
        if self._digest is not None and not (is_right and scheme.lower() == b"bearer"):
            raise RequestError(
                401, "unauthorized", "the API key is missing or wrong; send it in the header `Authorization: Bearer KEY`"
            )
        if scope["method"] == "POST" and (scope["path"] == "/" or scope["path"] in _ROUTES):
            self._service.metrics.requests.labels(_make_metrics_label(scope["path"])).inc()
            try:
                self._service.require_model()
            except RequestError as error:
                self._service.metrics.failed.labels(error.kind).inc()
                raise


def _add_post_route(app: FastAPI, service: Service, path: str) -> None:
    """Add the POST route `path` to the application.

    The path `/` behaves like the main route for the kind of the model.
    """
    counted = _make_metrics_label(path)

    async def compute_answer(accepted: AcceptedRequest, body: bytes) -> bytes:
        """Parse the body of a request, compute the answer, and return it as JSON."""
        model = service.require_model()
        kind, answer = _ROUTES[_MAIN_ROUTES[model.kind] if path == "/" else path]
        read = partial(read_request, kind, body, service.settings.request_texts)
        del body
        request = (
            read()
            if accepted.can_run_on_event_loop
            else await asyncio.get_running_loop().run_in_executor(service.reader, read)
        )
        del read
        write = await answer(service, model, accepted, request)
        return write() if accepted.can_run_on_event_loop else await asyncio.to_thread(write)

    async def endpoint(http: Request) -> Response:
        begun = time.monotonic()
        try:
            service.require_model()
            body = await service.read_body(http)
            with service.accept_request(len(body)) as accepted:
                answering = compute_answer(accepted, body)
                del body
                content = await service.run_while_connected(http, answering)
        except RequestError as error:
            service.metrics.failed.labels(error.kind).inc()
            return _make_error_response(path, error)
        except ClientDisconnect:
            service.metrics.disconnects.inc()
            if int(http.headers.get("content-length", 0)) > _LARGE_BODY:
                gc.collect()  # exceptions and tasks refer to each other, and would keep megabytes of the body in memory
            return Response(status_code=499)
        service.metrics.answered.labels(counted).inc()
        service.metrics.request_seconds.observe(time.monotonic() - begun)
        return Response(content, media_type="application/json")

    described = _ROUTES.get(path, _ROUTES["/embed"])[0]
    schema = {"requestBody": {"required": True, "content": {"application/json": {"schema": described.model_json_schema()}}}}
    app.add_api_route(path, endpoint, methods=["POST"], openapi_extra=schema, response_model=None, name=counted)


def _make_metrics_label(path: str) -> str:
    """Return the label of a route in the metrics, such as `v1_embeddings` for `/v1/embeddings`."""
    return path.strip("/").replace("/", "_") or "root"


def _make_json_response(content: object) -> Response:
    """Return a response with the content as its JSON body."""
    return Response(to_json(content), media_type="application/json")


def _make_error_response(path: str, error: RequestError) -> Response:
    """Return the response to a rejected request, in the error format of the API that the path belongs to."""
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if error.status in (408, 413):
        headers["connection"] = "close"  # because the rest of the body will not be read
    return Response(to_json(error.to_json_content(path)), error.status, headers, media_type="application/json")


def _vectors_to_json(make_vectors: Callable[[], Float32Array]) -> bytes:
    """Encode vectors as a JSON list of lists.

    The vectors are encoded one at a time, so that other threads can run in between.
    """
    return b"[" + b",".join(to_json(vector.tolist()) for vector in make_vectors()) + b"]"


# --- vectors


def _unsupported_route_error(model: ServedModel, path: str) -> RequestError:
    """Return the error for a route that the loaded model does not support, such as `/embed` for a classifier."""
    kind = "an embedding model" if model.kind == "embedding" else f"a {model.kind}"
    return RequestError(
        424, "backend", f"this model is {kind}, which does not support `{path}`; use `{_MAIN_ROUTES[model.kind]}`"
    )


def _wrap_in_list(inputs: Any) -> list[Any]:
    """Return the inputs of a request as a list of texts. A text may be a string or a list of token ids."""
    return inputs if isinstance(inputs, list) else [inputs]


def _find_prompt(model: ServedModel, name: str | None) -> str:
    """Return the text of a named prompt, or the default prompt if the name is None. Raise an error for unknown names."""
    try:
        return model.find_prompt(name)
    except InputError as error:
        raise RequestError(422, "validation", str(error)) from None


async def _compute_pooled_outputs(
    service: Service,
    model: ServedModel,
    accepted: AcceptedRequest,
    inputs: Any,
    dimensions: int | None,
    truncation: Truncation,
    prompt_name: str | None = None,
) -> tuple[Float32Array, int]:
    """Tokenize the texts of a request, and compute their pooled outputs with an embedding model.

    Args:
        service: Computes the outputs.
        model: The model.
        accepted: The request that is answered.
        inputs: One text or several texts. A text may be given as token ids.
        dimensions: The requested number of values per vector, which is only checked here.
        truncation: How to handle texts that are too long.
        prompt_name: The name of the prompt that precedes each text. It does not apply to token ids.

    Returns:
        float32 [N, C], the pooled outputs of N texts before normalization, and the number of tokens of all texts.
    """
    if model.kind != "embedding":
        raise _unsupported_route_error(model, "embed")
    if dimensions is not None and dimensions > model.output_size:
        raise RequestError(422, "validation", f"`dimensions`: must be at most {model.output_size}, but is {dimensions}")
    texts = _wrap_in_list(inputs)
    prompt = _find_prompt(model, prompt_name) if any(isinstance(text, str) for text in texts) else ""
    truncates_left = model.truncates_left(truncation.truncation_direction)

    def tokenize(texts: Sequence[tuple[int, str | array[int]]]) -> Sequences:
        """Convert (index, text) pairs to token sequences. A text may be a string or a list of token ids."""
        parts, counts = [], []
        for is_text, group in groupby(texts, lambda each: isinstance(each[1], str)):
            some: list[Any] = list(group)
            if is_text:
                rows = [TextRow(RowPosition(number), text) for number, text in some]
                parts.append(model.tokenize(rows, prompt, truncates_left=truncates_left))
            else:
                parts.append(model.sequences_from_ids([ids for _, ids in some], truncates_left=truncates_left))
            counts.append(len(some))
        return concatenate_sequences(parts, counts)

    lengths = [min(len(text), model.max_characters) for text in texts]
    sequences = await service.tokenize(accepted, list(enumerate(texts)), tokenize, lengths, truncation.truncate)
    return (await service.queue_and_await_outputs(accepted, model, sequences)).outputs, len(sequences.input_ids)


async def _answer_embed(
    service: Service, model: ServedModel, accepted: AcceptedRequest, request: EmbedRequest
) -> _JsonWriter:
    """Answer POST /embed."""
    outputs, _ = await _compute_pooled_outputs(
        service, model, accepted, request.inputs, request.dimensions, request, request.prompt_name
    )
    return partial(_vectors_to_json, partial(model.make_vectors, outputs, request.normalize, request.dimensions))


async def _answer_openai_embeddings(
    service: Service, model: ServedModel, accepted: AcceptedRequest, request: OpenAIEmbeddings
) -> _JsonWriter:
    """Answer POST /v1/embeddings."""
    outputs, tokens = await _compute_pooled_outputs(service, model, accepted, request.input, request.dimensions, request)
    is_base64 = request.encoding_format == "base64"

    def write() -> bytes:
        """Encode the answer as JSON."""
        data = []
        for index, vector in enumerate(model.make_vectors(outputs, None, request.dimensions)):
            value = base64.b64encode(vector.astype("<f4").tobytes()).decode() if is_base64 else vector.tolist()
            data.append(to_json({"object": "embedding", "index": index, "embedding": value}))
        rest = to_json({"model": service.model_id, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}})
        return b'{"object":"list","data":[' + b",".join(data) + b"]," + rest[1:]

    return write


# --- scores and labels


async def _compute_head_outputs(
    service: Service, model: ServedModel, accepted: AcceptedRequest, rows: Sequence[Row], truncation: Truncation
) -> tuple[Float32Array, Sequences]:
    """Tokenize the input rows of a request, and compute the outputs of the model's task head.

    Returns:
        float32 [N, C] for N texts, or [T, C] for T tokens if the model is a tagger, and the sequences of the texts.
    """
    lengths = [min(_count_characters(row), model.max_characters) for row in rows]
    tokenize = partial(model.tokenize, truncates_left=model.truncates_left(truncation.truncation_direction))
    sequences = await service.tokenize(accepted, rows, tokenize, lengths, truncation.truncate)
    return (await service.queue_and_await_outputs(accepted, model, sequences)).outputs, sequences


def _count_characters(row: Row) -> int:
    """Count the characters of an input row, which contains texts or words."""
    if isinstance(row, TaggedRow):
        return sum(map(len, row.tokens))
    return len(row.text) + len(row.text_pair or "") if isinstance(row, TextRow) else 0


async def _rank_documents(
    service: Service,
    model: ServedModel,
    accepted: AcceptedRequest,
    query: str,
    documents: Sequence[str],
    *,
    truncation: Truncation,
    raw_scores: bool = False,
) -> list[tuple[int, float]]:
    """Score documents by their relevance to a query. Return (index, score) pairs, sorted by descending relevance.

    Documents are sorted by their logits, because two different logits may have the same rounded score.

    Args:
        service: Computes the logits.
        model: The model, which must have one output per text.
        accepted: The request that is answered.
        query: The query.
        documents: The documents.
        truncation: How to handle texts that are too long.
        raw_scores: Whether to return logits instead of scores.
    """
    if model.kind == "embedding" or model.output_size != 1 or model.is_per_token:
        raise _unsupported_route_error(model, "rerank")
    rows = [TextRow(RowPosition(number), query, document) for number, document in enumerate(documents)]
    outputs, _ = await _compute_head_outputs(service, model, accepted, rows, truncation)
    logits = outputs[:, 0]
    scores = (logits if raw_scores else model.compute_scores(logits)).tolist()
    return [(number, scores[number]) for number in np.argsort(-logits, kind="stable").tolist()]


async def _answer_rerank(
    service: Service, model: ServedModel, accepted: AcceptedRequest, request: RerankRequest
) -> _JsonWriter:
    """Answer POST /rerank."""
    ranked = await _rank_documents(
        service, model, accepted, request.query, request.texts, truncation=request, raw_scores=request.raw_scores
    )
    if request.return_text:
        return lambda: to_json([{"index": index, "text": request.texts[index], "score": score} for index, score in ranked])
    return lambda: to_json([{"index": index, "score": score} for index, score in ranked])


async def _answer_rerank_documents(
    service: Service, model: ServedModel, accepted: AcceptedRequest, request: RerankDocuments
) -> _JsonWriter:
    """Answer POST /v1/rerank and POST /v2/rerank."""
    documents: Any = request.documents
    ranked = await _rank_documents(service, model, accepted, request.query, documents, truncation=request)
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": score} for index, score in ranked[: request.top_n]]
    if request.return_documents:
        results = [{**result, "document": {"text": documents[result["index"]]}} for result in results]
    return lambda: to_json({"model": service.model_id, "results": results})


async def _answer_predict(
    service: Service, model: ServedModel, accepted: AcceptedRequest, request: PredictRequest
) -> _JsonWriter:
    """Answer POST /predict."""
    if model.kind == "embedding":
        raise _unsupported_route_error(model, "predict")
    inputs: Any = request.inputs
    kinds = {type(each) for each in inputs} if isinstance(inputs, list) else {str}
    if len(kinds) > 1:
        raise RequestError(422, "validation", "`inputs`: must not mix texts and lists of texts; send each text in a list")
    is_batch = kinds == {list}
    listed = inputs if is_batch else [inputs]
    if model.kind == "tagger" and sum(len(text) for texts in listed for text in texts) > _MAX_TAGGED_CHARACTERS:
        raise RequestError(
            413,
            "validation",
            f"`inputs`: must not contain more than {_MAX_TAGGED_CHARACTERS:,} characters; send fewer texts in a request",
        )

    def make_rows() -> list[Row]:
        """Convert all inputs of the request to rows for the tokenizer."""
        return [
            _make_row(model, number, [texts] if isinstance(texts, str) else texts) for number, texts in enumerate(listed)
        ]

    rows = make_rows() if accepted.can_run_on_event_loop else await asyncio.to_thread(make_rows)
    outputs, sequences = await _compute_head_outputs(service, model, accepted, rows, request)

    def write() -> bytes:
        """Encode the answer as JSON."""
        answers: list[Any] = model.make_answers(outputs, sequences, rows)
        if model.kind != "tagger":
            answers = [
                _sort_labels_by_score(model, logits, answer, raw_scores=request.raw_scores)
                for logits, answer in zip(outputs.tolist(), answers, strict=True)
            ]
        return to_json(answers if is_batch else answers[0])

    return write


def _make_row(model: ServedModel, number: int, texts: Sequence[str]) -> Row:
    """Convert one text or a pair of texts to an input row. For a tagger, split the text into words."""
    most = 1 if model.kind == "tagger" else 2
    if not 1 <= len(texts) <= most:
        raise RequestError(422, "validation", f"`inputs`: a list must contain 1 to {most} texts, but contains {len(texts)}")
    if model.kind == "tagger":
        return split_into_words(RowPosition(number), texts[0])
    return TextRow(RowPosition(number), *texts)


def _sort_labels_by_score(
    model: ServedModel, logits: list[float], prediction: dict[str, Any], *, raw_scores: bool
) -> list[dict[str, Any]]:
    """Return the labels of one text and their scores, sorted by descending score.

    Args:
        model: The model.
        logits: The logit of each label.
        prediction: The prediction that `gaudi-bert predict` would write, which contains the probability of each label.
        raw_scores: Whether to return logits instead of probabilities.
    """
    labels = model.task.labels if model.task is not None and model.task.labels else ("LABEL_0",)
    scores = logits if raw_scores else [*prediction.get("probabilities", prediction).values()]
    return [
        {"label": labels[number], "score": scores[number]}
        for number in sorted(range(len(labels)), key=lambda number: -logits[number])
    ]


# --- tokens


async def _answer_tokenize(
    service: Service, model: ServedModel, accepted: AcceptedRequest, request: TokenizeRequest
) -> _JsonWriter:
    """Answer POST /tokenize."""
    prompt = _find_prompt(model, request.prompt_name) if model.kind == "embedding" and request.prompt_name else ""
    written, tokens = list[bytes](), 0
    for number, text in enumerate(_wrap_in_list(request.inputs)):
        if len(text) > _MAX_TOKENIZED:
            raise RequestError(
                413,
                "validation",
                f"`inputs.{number}`: must have at most {_MAX_TOKENIZED:,} characters, but has {len(text):,}; send the text "
                "in parts",
            )
        encoding = await service.run_in_tokenizer_thread(
            accepted, len(text), model.encode_text, prompt + text, request.add_special_tokens
        )
        tokens += len(encoding)
        if tokens > _MAX_TOKENIZED:
            raise RequestError(
                413,
                "validation",
                f"`inputs`: the texts have more than {_MAX_TOKENIZED:,} tokens; send fewer texts in a request",
            )
        write = partial(_tokens_to_json, encoding)
        written.append(write() if len(text) <= _FEW_CHARACTERS else await asyncio.to_thread(write))
    return lambda: b"[" + b",".join(written) + b"]"


def _tokens_to_json(encoding: Any) -> bytes:
    """Encode the tokens of a text and their positions as JSON.

    The tokens are encoded one at a time, so that other threads can run in between.
    """
    parts = []
    columns = (encoding.ids, encoding.tokens, encoding.special_tokens_mask, encoding.offsets)
    for number, text, is_special, (start, stop) in zip(*columns, strict=True):
        positions = {"start": None, "stop": None} if is_special else {"start": start, "stop": stop}
        parts.append(to_json({"id": number, "text": text, "special": bool(is_special), **positions}))
    return b"[" + b",".join(parts) + b"]"


_ROUTES: dict[str, tuple[type[RequestBody], _AnswerFunction]] = {
    "/embed": (EmbedRequest, _answer_embed),
    "/rerank": (RerankRequest, _answer_rerank),
    "/predict": (PredictRequest, _answer_predict),
    "/tokenize": (TokenizeRequest, _answer_tokenize),
    "/v1/embeddings": (OpenAIEmbeddings, _answer_openai_embeddings),
    "/v1/rerank": (RerankDocuments, _answer_rerank_documents),
    "/v2/rerank": (RerankDocuments, _answer_rerank_documents),
}


# The main route of each kind of model. `POST /` behaves like this route.
_MAIN_ROUTES = {"embedding": "/embed", "reranker": "/rerank", "classifier": "/predict", "tagger": "/predict"}


def _describe_model(service: Service, model: ServedModel) -> dict[str, Any]:
    """Return the answer to GET /info, which describes the model and the limits. The keys match text-embeddings-inference."""
    labels = dict(enumerate(model.task.labels)) if model.task is not None else {}
    named = {"id2label": labels, "label2id": {name: number for number, name in labels.items()}}
    kinds = {"embedding": {"embedding": {"pooling": model.folder.pooling}}, "reranker": {"reranker": named}}
    return {
        "model_id": service.model_id,
        "served_model_name": service.model_id,
        "model_sha": None,
        "model_dtype": model.loaded.precision,
        "model_type": kinds.get(model.kind, {"classifier": named}),
        "max_concurrent_requests": service.settings.queue_texts,
        "max_input_length": model.max_tokens,
        "max_batch_tokens": max(service.batch_seconds).slots,
        "max_batch_requests": None,
        "max_client_batch_size": service.settings.request_texts,
        "auto_truncate": service.settings.auto_truncate,
        "tokenization_workers": 1,
        "version": __version__,
        "shapes": {str(shape): round(1000 * seconds, 3) for shape, seconds in service.batch_seconds.items()},
    }
