"""The routes: what text-embeddings-inference, OpenAI, Jina and Cohere have, each over the same service."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from gaudi_bert import __version__
from gaudi_bert.common.arrays import Float32Array
from gaudi_bert.common.errors import InputError
from gaudi_bert.rows.fields import words_of_text
from gaudi_bert.rows.types import Row, RowPosition, TextRow
from gaudi_bert.serving.model import ServedModel
from gaudi_bert.serving.schemas import (
    Asked,
    Cut,
    EmbedRequest,
    OpenAIEmbeddings,
    PredictRequest,
    RefusedError,
    RerankDocuments,
    RerankRequest,
    TokenizeRequest,
    parsed,
)
from gaudi_bert.serving.service import Service

_OPEN = ("/health", "/ping", "/metrics")
_VECTORS_AT_ONCE = 32  # that become JSON on the thread of all requests
_Answer = Callable[[Service, ServedModel, Request, Any], Awaitable[Any]]


def make_app(service: Service, api_key: str | None) -> FastAPI:
    """Return the application; with a key, all routes but those of probes and metrics require it."""
    app = FastAPI(title="gaudi-bert", version=__version__, description="Encoders over packed requests.")
    for path in ("/", *_ROUTES):
        _add_post(app, service, path)

    async def health() -> Response:
        return Response(status_code=200 if service.is_healthy else 503)

    async def metrics() -> Response:
        return Response(service.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def info() -> Response:
        return _json(_info(service, service.require_open()))

    async def models() -> Response:
        listed = {"id": service.model_id, "object": "model", "created": 0, "owned_by": "gaudi-bert"}
        return _json({"object": "list", "data": [listed]})

    routes = {"/health": health, "/ping": health, "/metrics": metrics, "/info": info, "/v1/models": models}
    for path, route in routes.items():
        app.add_api_route(path, route, methods=["GET"], response_class=Response, response_model=None)

    async def refused(http: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            error = RefusedError(error.status_code, "validation", error.detail)
        return _refusal(http.url.path, error) if isinstance(error, RefusedError) else Response(status_code=500)

    app.add_exception_handler(RefusedError, refused)
    app.add_exception_handler(HTTPException, refused)
    app.add_middleware(_Gate, service=service, key=api_key)
    return app


class _Gate:
    """Refuses requests without the key, and those that find no room, before anything of them is read.

    The comparison of the key takes the same time whatever is sent.
    """

    def __init__(self, app: ASGIApp, service: Service, key: str | None) -> None:
        self._app, self._service = app, service
        self._digest = None if key is None else hashlib.sha256(f"Bearer {key}".encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http" and scope["path"] not in _OPEN:
                self._check(scope)
        except RefusedError as refusal:
            await _refusal(scope["path"], refusal)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        sent = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if self._digest is not None and not hmac.compare_digest(hashlib.sha256(sent).digest(), self._digest):
            raise RefusedError(401, "unauthorized", "send the key as `Authorization: Bearer KEY`")
        if scope["method"] == "POST" and (scope["path"] == "/" or scope["path"] in _ROUTES):
            self._service.metrics.requests.labels(_counted(scope["path"])).inc()
            try:
                self._service.require_open()
            except RefusedError as refusal:
                self._service.metrics.failed.labels(refusal.kind).inc()
                raise


def _add_post(app: FastAPI, service: Service, path: str) -> None:
    """Add a route that reads a body; `/docs` describes it. That of `/` is the one for the kind of the model."""
    counted = _counted(path)

    async def endpoint(http: Request) -> Response:
        begun = time.monotonic()
        service.requests += 1
        try:
            model = service.require_open()
            kind, answer = _ROUTES[_BY_KIND[model.kind] if path == "/" else path]
            request = parsed(kind, await service.body(http))
            response = await _encoded(await answer(service, model, http, request))
        except RefusedError as refusal:
            service.metrics.failed.labels(refusal.kind).inc()
            return _refusal(path, refusal)
        except ClientDisconnect:
            service.metrics.disconnects.inc()
            return Response(status_code=499)
        finally:
            service.requests -= 1
        service.metrics.answered.labels(counted).inc()
        service.metrics.request_seconds.observe(time.monotonic() - begun)
        return response

    described = _ROUTES.get(path, _ROUTES["/embed"])[0]
    schema = {"requestBody": {"required": True, "content": {"application/json": {"schema": described.model_json_schema()}}}}
    app.add_api_route(path, endpoint, methods=["POST"], openapi_extra=schema, response_model=None, name=counted)


def _counted(path: str) -> str:
    """The name of a path in the metrics."""
    return path.strip("/").replace("/", "_") or "root"


def _json(content: object) -> Response:
    return Response(to_json(content), media_type="application/json")


def _refusal(path: str, refusal: RefusedError) -> Response:
    headers = {} if refusal.retry_after is None else {"retry-after": str(refusal.retry_after)}
    if refusal.status in (408, 413):
        headers["connection"] = "close"  # the rest of the body is not read
    content = to_json(refusal.content(path))
    return Response(content, refusal.status, headers, media_type="application/json")


async def _encoded(content: Any) -> Response:
    """Return an answer as JSON; many vectors are written on another thread."""
    if isinstance(content, np.ndarray):
        write = partial(_written, content)
        body = write() if len(content) <= _VECTORS_AT_ONCE else await asyncio.to_thread(write)
        return Response(body, media_type="application/json")
    if isinstance(content, bytes):
        return Response(content, media_type="application/json")
    return _json(content)


def _written(vectors: Float32Array) -> bytes:
    """Return vectors as JSON, one at a time, so that other threads get their turn."""
    return b"[" + b",".join(to_json(vector.tolist()) for vector in vectors) + b"]"


# --- vectors


def _no_answer(model: ServedModel, path: str) -> RefusedError:
    kind = "an embedding model" if model.kind == "embedding" else f"a {model.kind}"
    return RefusedError(424, "backend", f"this model is {kind}: it has no answer to `{path}`")


def _listed(inputs: Any) -> list[Any]:
    """Return one text, or the token ids of one, as a list of one."""
    is_one = isinstance(inputs, str) or (len(inputs) > 0 and isinstance(inputs[0], int))
    return [inputs] if is_one else inputs


async def _pooled(
    service: Service,
    model: ServedModel,
    http: Request,
    inputs: Any,
    dimensions: int | None,
    cut: Cut,
    prompt_name: str | None = None,
) -> tuple[Float32Array, int]:
    """Compute what is pooled of texts, or of texts as token ids; and count their tokens."""
    if model.kind != "embedding":
        raise _no_answer(model, "embed")
    if dimensions is not None and dimensions > model.width:
        raise RefusedError(422, "validation", f"`dimensions` is {dimensions}: vectors have {model.width} values")
    texts = _listed(inputs)
    if texts and not isinstance(texts[0], str):
        sequences = await service.tokenized(texts, partial(model.of_ids, cuts_left=cut.cuts_left), cut.truncate)
    else:
        try:
            prompt = model.prompt(prompt_name)
        except InputError as error:
            raise RefusedError(422, "validation", str(error)) from None
        rows = [TextRow(RowPosition(number), text) for number, text in enumerate(texts)]
        tokenize = partial(model.tokenized, prompt=prompt, cuts_left=cut.cuts_left)
        sequences = await service.tokenized(rows, tokenize, cut.truncate)
    return (await service.computed(http, model, sequences)).outputs, len(sequences.input_ids)


async def _embed(service: Service, model: ServedModel, http: Request, request: EmbedRequest) -> Any:
    outputs, _ = await _pooled(service, model, http, request.inputs, request.dimensions, request, request.prompt_name)
    return model.vectors(outputs, request.normalize, request.dimensions)


async def _openai(service: Service, model: ServedModel, http: Request, request: OpenAIEmbeddings) -> Any:
    outputs, tokens = await _pooled(service, model, http, request.input, request.dimensions, Cut())
    vectors = model.vectors(outputs, None, request.dimensions)

    def write() -> bytes:
        data = []
        for index, vector in enumerate(vectors):
            is_text = request.encoding_format == "base64"
            value = base64.b64encode(vector.astype("<f4").tobytes()).decode() if is_text else vector.tolist()
            data.append(to_json({"object": "embedding", "index": index, "embedding": value}))
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        rest = to_json({"model": service.model_id, "usage": usage})
        return b'{"object":"list","data":[' + b",".join(data) + b"]," + rest[1:]

    return write() if len(vectors) <= _VECTORS_AT_ONCE else await asyncio.to_thread(write)


# --- the answers of heads


async def _answers(
    service: Service, model: ServedModel, http: Request, rows: Sequence[Row], cut: Cut
) -> tuple[Float32Array, list[dict[str, Any]]]:
    """Compute the outputs of a head for texts, and what `predict` writes for them."""
    sequences = await service.tokenized(rows, partial(model.tokenized, cuts_left=cut.cuts_left), cut.truncate)
    work = await service.computed(http, model, sequences)
    return work.outputs, model.answers(work.outputs, sequences, rows)


async def _scores(
    service: Service, model: ServedModel, http: Request, query: str, documents: Sequence[str], *, cut: Cut, raw: bool = False
) -> list[tuple[int, float]]:
    """Return the number and the score of each document, the best one first."""
    if model.kind == "embedding" or model.width != 1 or model.is_per_token:
        raise _no_answer(model, "rerank")
    rows = [TextRow(RowPosition(number), query, document) for number, document in enumerate(documents)]
    outputs, _ = await _answers(service, model, http, rows, cut)
    values = outputs[:, 0].astype(np.float64)
    scores = (values if raw else 1.0 / (1.0 + np.exp(-values))).astype(np.float32).tolist()
    return sorted(enumerate(scores), key=lambda each: -each[1])


async def _rerank(service: Service, model: ServedModel, http: Request, request: RerankRequest) -> Any:
    ranked = await _scores(service, model, http, request.query, request.texts, cut=request, raw=request.raw_scores)
    if request.return_text:
        return [{"index": index, "text": request.texts[index], "score": score} for index, score in ranked]
    return [{"index": index, "score": score} for index, score in ranked]


async def _rerank_documents(service: Service, model: ServedModel, http: Request, request: RerankDocuments) -> Any:
    texts = [document if isinstance(document, str) else document.text for document in request.documents]
    ranked = await _scores(service, model, http, request.query, texts, cut=Cut())
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": score} for index, score in ranked[: request.top_n]]
    if request.return_documents:
        results = [{**result, "document": {"text": texts[result["index"]]}} for result in results]
    return {"model": service.model_id, "results": results}


async def _predict(service: Service, model: ServedModel, http: Request, request: PredictRequest) -> Any:
    if model.kind == "embedding":
        raise _no_answer(model, "predict")
    inputs: Any = request.inputs
    is_batch = not isinstance(inputs, str) and len(inputs) > 0 and not isinstance(inputs[0], str)
    listed = inputs if is_batch else [inputs]
    rows = [_row(model, number, [texts] if isinstance(texts, str) else texts) for number, texts in enumerate(listed)]
    outputs, answers = await _answers(service, model, http, rows, request)
    if model.kind != "tagger":
        chosen = zip(outputs.tolist(), answers, strict=True)
        answers = [_labelled(model, values if request.raw_scores else None, answer) for values, answer in chosen]
    return answers if is_batch else answers[0]


def _row(model: ServedModel, number: int, texts: Sequence[str]) -> Row:
    """Return a text or a pair as a row; a text for tags is split into words."""
    most = 1 if model.kind == "tagger" else 2
    if not 1 <= len(texts) <= most:
        raise RefusedError(422, "validation", f"`inputs`: {len(texts)} texts belong together, 1 to {most} can")
    if model.kind == "tagger":
        return words_of_text(RowPosition(number), texts[0])
    return TextRow(RowPosition(number), *texts)


def _labelled(model: ServedModel, raw: list[float] | None, answer: dict[str, Any]) -> Any:
    """Return an answer as labels with their scores, the highest first."""
    labels = model.task.labels if model.task is not None and model.task.labels else ("LABEL_0",)
    scores = raw or [*answer["probabilities"].values()] if "probabilities" in answer else raw or [*answer.values()]
    named = [{"label": label, "score": score} for label, score in zip(labels, scores, strict=True)]
    return sorted(named, key=lambda each: -each["score"])


# --- tokens


async def _tokenize(service: Service, model: ServedModel, http: Request, request: TokenizeRequest) -> Any:
    texts = _listed(request.inputs)
    if len(texts) > service.settings.request_texts:
        raise RefusedError(413, "validation", f"`inputs` are {len(texts):,} texts; send fewer")
    try:
        prompt = model.prompt(request.prompt_name) if model.kind == "embedding" and request.prompt_name else ""
    except InputError as error:
        raise RefusedError(422, "validation", str(error)) from None
    return await service.aside(model.tokens, [prompt + text for text in texts], request.add_special_tokens)


_ROUTES: dict[str, tuple[type[Asked], _Answer]] = {
    "/embed": (EmbedRequest, _embed),
    "/rerank": (RerankRequest, _rerank),
    "/predict": (PredictRequest, _predict),
    "/tokenize": (TokenizeRequest, _tokenize),
    "/v1/embeddings": (OpenAIEmbeddings, _openai),
    "/v1/rerank": (RerankDocuments, _rerank_documents),
    "/v2/rerank": (RerankDocuments, _rerank_documents),
}


_BY_KIND = {"embedding": "/embed", "reranker": "/rerank", "classifier": "/predict", "tagger": "/predict"}
"""What `POST /` is, by the kind of model."""


def _info(service: Service, model: ServedModel) -> dict[str, Any]:
    labels = dict(enumerate(model.task.labels)) if model.task is not None else {}
    named = {"id2label": labels, "label2id": {name: number for number, name in labels.items()}}
    kinds = {"embedding": {"embedding": {"pooling": model.folder.pooling}}, "reranker": {"reranker": named}}
    largest = max(service.costs)
    return {
        "model_id": service.model_id,
        "model_sha": None,
        "model_dtype": "float32" if service.settings.precision == "float32" else "bfloat16",
        "model_type": kinds.get(model.kind, {"classifier": named}),
        "max_concurrent_requests": service.settings.queue_texts,
        "max_input_length": model.longest,
        "max_batch_tokens": largest.slots,
        "max_batch_requests": None,
        "max_client_batch_size": service.settings.request_texts,
        "auto_truncate": service.settings.auto_truncate,
        "tokenization_workers": 1,
        "version": __version__,
        "shapes": {str(shape): round(1000 * seconds, 3) for shape, seconds in service.costs.items()},
    }
