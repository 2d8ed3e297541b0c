"""The request types of text-embeddings-inference, OpenAI, Jina and Cohere, and errors in their formats.

The types describe the requests in `/docs`. Fields that contain texts are read and checked in `bodies.py` according to their
`Shape`, and pydantic skips them. Pydantic validates all other fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, StrictBool, StrictInt, StrictStr


class Shape(NamedTuple):
    """The forms in which a field may contain texts.

    Attributes:
        described: A description of the forms, for error messages.
        items: The allowed kinds of list elements: "text", "ids" (a list of token ids), "texts" (a list of one or two texts)
            and "document" (an object with the key `text`). If "ids" is allowed, a list of integers counts as one text.
        is_alone: Whether a single text is allowed without a list.
    """

    described: str
    items: tuple[Literal["text", "ids", "texts", "document"], ...] = ()
    is_alone: bool = False


_TEXTS_OR_IDS = Shape("a text, a list of token ids, or a list of these", ("text", "ids"), is_alone=True)
_TextsOrIds = Annotated[SkipValidation[str | list[int] | list[str | list[int]]], _TEXTS_OR_IDS]
_Query = Annotated[SkipValidation[str], Shape("a text", is_alone=True)]


class Asked(BaseModel):
    """The base class of all requests. Unknown keys are ignored, as in other servers."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Cut(Asked):
    """The base class of requests that say how to handle texts that are too long."""

    truncate: StrictBool | None = Field(None, description="cut them; by default they are refused, unless --auto-truncate")
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = Field(
        None, description="the side on which a text is cut; default: that of the model's tokenizer"
    )


class EmbedRequest(Cut):
    """POST /embed."""

    inputs: _TextsOrIds
    normalize: StrictBool | None = Field(None, description="vectors of length 1; default: as the model's folder says")
    prompt_name: StrictStr | None = None
    dimensions: Annotated[StrictInt, Field(ge=1)] | None = None


class RerankRequest(Cut):
    """POST /rerank."""

    query: _Query
    texts: Annotated[SkipValidation[list[str]], Shape("a list of texts", ("text",))]
    raw_scores: StrictBool = False
    return_text: StrictBool = False


class PredictRequest(Cut):
    """POST /predict: a text, a pair, or a list of these, each in a list."""

    inputs: Annotated[
        SkipValidation[str | list[str] | list[list[str]]],
        Shape("a text, a list of one or two texts, or a list of such lists", ("text", "texts"), is_alone=True),
    ]
    raw_scores: StrictBool = False


class TokenizeRequest(Asked):
    """POST /tokenize."""

    inputs: Annotated[SkipValidation[str | list[str]], Shape("a text or a list of texts", ("text",), is_alone=True)]
    add_special_tokens: StrictBool = True
    prompt_name: StrictStr | None = None


class OpenAIEmbeddings(Cut):
    """POST /v1/embeddings."""

    input: _TextsOrIds
    model: StrictStr | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[StrictInt, Field(ge=1)] | None = None
    user: StrictStr | None = None


class Document(Asked):
    """A document as Cohere's older clients send it."""

    text: StrictStr


class RerankDocuments(Cut):
    """POST /v1/rerank, /v2/rerank."""

    query: _Query
    documents: Annotated[SkipValidation[list[str | Document]], Shape("a list of texts", ("text", "document"))]
    model: StrictStr | None = None
    top_n: Annotated[StrictInt, Field(ge=1)] | None = None
    return_documents: StrictBool = False


class RefusedError(Exception):
    """An error that rejects a request.

    Attributes:
        status: The HTTP status.
        kind: The type of the error, with the names of text-embeddings-inference.
        message: The message for the client.
        retry_after: The seconds after which the client may try again, or None.
    """

    def __init__(self, status: int, kind: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.message, self.retry_after = status, kind, message, retry_after

    def content(self, path: str) -> dict[str, Any]:
        """Return the JSON content of the response, in the format of the interface that the path belongs to."""
        if path.startswith(("/v1/", "/v2/")):
            kind = "invalid_request_error" if self.status < 500 and self.status != 429 else self.kind
            error = {"message": self.message, "type": kind, "param": None, "code": self.kind}
            return {"error": error, "message": self.message}
        return {"error": self.message, "error_type": self.kind}
