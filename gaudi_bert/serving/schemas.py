"""The request types of text-embeddings-inference, OpenAI, Jina and Cohere, and errors in their formats.

The types describe the requests in `/docs`. Fields that contain texts are read and checked in `bodies.py` according to their
`AllowedTextTypes`, and pydantic skips them. Pydantic validates all other fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, StrictBool, StrictInt, StrictStr


class AllowedTextTypes(NamedTuple):
    """Specifies which JSON values are allowed in a request field with texts, such as a single text or a list of texts.

    Attributes:
        description: A description of the allowed values, for error messages.
        list_element_types: The allowed types of list elements. They are "text", "ids" (a list of token ids), "texts" (a list
            of one or two texts) and "document" (an object with the key `text`). If "ids" is allowed, a list of integers
            counts as one text.
        allows_single_text: Whether a single text is allowed without a list.
    """

    description: str
    list_element_types: tuple[Literal["text", "ids", "texts", "document"], ...] = ()
    allows_single_text: bool = False


_TEXTS_OR_IDS = AllowedTextTypes("a text, a list of token ids, or a list of these", ("text", "ids"), allows_single_text=True)
_TextsOrIds = Annotated[SkipValidation[str | list[int] | list[str | list[int]]], _TEXTS_OR_IDS]
_Query = Annotated[SkipValidation[str], AllowedTextTypes("a text", allows_single_text=True)]


class RequestBody(BaseModel):
    """The base class of all request bodies.

    Unknown keys are ignored, as in other servers.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)


class Truncation(RequestBody):
    """The base class of request bodies with options for truncating long texts."""

    truncate: StrictBool | None = Field(
        None,
        description="truncate texts that are too long; default: only if the server runs with --auto-truncate",
    )
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = Field(
        None, description="the side on which texts are truncated; default: that of the model's tokenizer"
    )


class EmbedRequest(Truncation):
    """The body of POST /embed."""

    inputs: _TextsOrIds
    normalize: StrictBool | None = Field(
        None, description="scale vectors to length 1; default: the setting in the model folder"
    )
    prompt_name: StrictStr | None = None
    dimensions: Annotated[StrictInt, Field(ge=1)] | None = None


class RerankRequest(Truncation):
    """The body of POST /rerank."""

    query: _Query
    texts: Annotated[SkipValidation[list[str]], AllowedTextTypes("a list of texts", ("text",))]
    raw_scores: StrictBool = False
    return_text: StrictBool = False


class PredictRequest(Truncation):
    """The body of POST /predict.

    The input is one text, a list of one or two texts, or a list of such lists.
    """

    inputs: Annotated[
        SkipValidation[str | list[str] | list[list[str]]],
        AllowedTextTypes(
            "a text, a list of one or two texts, or a list of such lists", ("text", "texts"), allows_single_text=True
        ),
    ]
    raw_scores: StrictBool = False


class TokenizeRequest(RequestBody):
    """The body of POST /tokenize."""

    inputs: Annotated[
        SkipValidation[str | list[str]], AllowedTextTypes("a text or a list of texts", ("text",), allows_single_text=True)
    ]
    add_special_tokens: StrictBool = True
    prompt_name: StrictStr | None = None


class OpenAIEmbeddings(Truncation):
    """The body of POST /v1/embeddings."""

    input: _TextsOrIds
    model: StrictStr | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[StrictInt, Field(ge=1)] | None = None
    user: StrictStr | None = None


class Document(RequestBody):
    """A JSON object that contains a document under the key `text`. Older Cohere clients send documents in this form."""

    text: StrictStr


class RerankDocuments(Truncation):
    """The body of POST /v1/rerank and POST /v2/rerank."""

    query: _Query
    documents: Annotated[SkipValidation[list[str | Document]], AllowedTextTypes("a list of texts", ("text", "document"))]
    model: StrictStr | None = None
    top_n: Annotated[StrictInt, Field(ge=1)] | None = None
    return_documents: StrictBool = False


class RequestError(Exception):
    """Raised to reject a request. It contains the HTTP status and the message for the client.

    Attributes:
        status: The HTTP status.
        kind: The type of the error, with the names of text-embeddings-inference.
        message: The message for the client.
        retry_after: The seconds after which the client may try again, or None.
    """

    def __init__(self, status: int, kind: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.message, self.retry_after = status, kind, message, retry_after

    def to_json_content(self, path: str) -> dict[str, Any]:
        """Return the body of the error response, in the format of the API that the path belongs to."""
        if path.startswith(("/v1/", "/v2/")):
            kind = "invalid_request_error" if self.status < 500 and self.status != 429 else self.kind
            return {
                "error": {"message": self.message, "type": kind, "param": None, "code": self.kind},
                "message": self.message,
            }
        return {"error": self.message, "error_type": self.kind}
