"""What clients send and get, as text-embeddings-inference, OpenAI, Jina and Cohere have it; and refusals in their forms."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError

_Ids = Annotated[list[StrictInt], Field(min_length=1)]


class Asked(BaseModel):
    """A request; keys that are not known are passed over, as the others do."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Cut(Asked):
    """Handling of texts that are too long."""

    truncate: StrictBool | None = Field(None, description="cut them; by default the server decides, which refuses them")
    truncation_direction: Literal["left", "right", "Left", "Right"] = "right"

    @property
    def cuts_left(self) -> bool:
        """Whether the beginning of a text goes."""
        return self.truncation_direction.lower() == "left"


class EmbedRequest(Cut):
    """POST /embed."""

    inputs: StrictStr | list[StrictStr] | _Ids | list[_Ids]
    normalize: StrictBool | None = Field(None, description="vectors of length 1; default: as the model's folder says")
    prompt_name: StrictStr | None = None
    dimensions: Annotated[StrictInt, Field(ge=1)] | None = None


class RerankRequest(Cut):
    """POST /rerank."""

    query: StrictStr
    texts: list[StrictStr]
    raw_scores: StrictBool = False
    return_text: StrictBool = False


class PredictRequest(Cut):
    """POST /predict: a text, a pair, or a list of these, each in a list."""

    inputs: StrictStr | list[StrictStr] | list[list[StrictStr]]
    raw_scores: StrictBool = False


class TokenizeRequest(Asked):
    """POST /tokenize."""

    inputs: StrictStr | list[StrictStr]
    add_special_tokens: StrictBool = True
    prompt_name: StrictStr | None = None


class OpenAIEmbeddings(Asked):
    """POST /v1/embeddings."""

    input: StrictStr | list[StrictStr] | _Ids | list[_Ids]
    model: StrictStr | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[StrictInt, Field(ge=1)] | None = None
    user: StrictStr | None = None


class Document(Asked):
    """A document as Cohere's older clients send it."""

    text: StrictStr


class RerankDocuments(Asked):
    """POST /v1/rerank, /v2/rerank."""

    query: StrictStr
    documents: list[StrictStr | Document]
    model: StrictStr | None = None
    top_n: Annotated[StrictInt, Field(ge=1)] | None = None
    return_documents: StrictBool = False


class RefusedError(Exception):
    """A request that is not answered; `kind` is what text-embeddings-inference calls the error."""

    def __init__(self, status: int, kind: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.message, self.retry_after = status, kind, message, retry_after

    def content(self, path: str) -> dict[str, Any]:
        """The body, in the form of the interface that the path is of."""
        if path.startswith(("/v1/", "/v2/")):
            kind = "invalid_request_error" if self.status < 500 and self.status != 429 else self.kind
            error = {"message": self.message, "type": kind, "param": None, "code": self.kind}
            return {"error": error, "message": self.message}
        return {"error": self.message, "error_type": self.kind}


def parsed(kind: type[Asked], body: bytes) -> Any:
    """Return a body as a request; a refusal names the position of the first problem, and no text of the request."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        fields = kind.model_fields
        at = ".".join(str(part) for part in problem["loc"] if isinstance(part, int) or part in fields)
        what = "the body is not JSON" if problem["type"] == "json_invalid" else problem["msg"]
        raise RefusedError(422, "validation", f"`{at}`: {what}" if at else what) from None
