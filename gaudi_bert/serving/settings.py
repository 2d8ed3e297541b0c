"""The settings of `gaudi-bert serve`. They are set on the command line only, and are not part of a pipeline file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from gaudi_bert.config.values import Bytes, InferencePrecision, Settings
from gaudi_bert.model.heads import Pooling


class ServeSettings(Settings):
    """Settings of a served model: where, in which shapes, and how much may wait."""

    host: str = Field("127.0.0.1", description="the address to listen at; 0.0.0.0 for all")
    port: int = Field(8080, ge=0, le=65535, description="the port; 0 for a free one")
    model_id: str | None = Field(None, description="the model's name for clients; default: that of its folder")
    device: Literal["auto", "cpu", "cuda", "hpu"] = Field("auto", description="auto: a card, if there is one")
    precision: InferencePrecision = Field("float32", description="precision of matrix products; see docs/serving.md")
    compile: bool | None = Field(None, description="compile the model; default: on Gaudi")
    pooling: Pooling | None = Field(None, description="of an embedding model; default: the folder's own, or mean")
    max_sequence_length: int | None = Field(None, ge=3, description="most tokens of a text; default: the model's own")
    row_length: int | None = Field(None, ge=3, description="slots of the longest row; default: by the model")
    batch_rows: int | None = Field(None, ge=1, le=4096, description="most rows of a batch; default: by the device")
    auto_truncate: bool = Field(False, description="cut texts that are too long where a request does not say")
    queue_texts: int = Field(8192, ge=1, description="most texts that wait")
    queue_tokens: int | None = Field(None, ge=1, description="most tokens that wait; default: those of `queue_seconds`")
    queue_seconds: float = Field(30.0, gt=0, le=3600, description="longest that a request waits")
    grace_seconds: float = Field(25.0, gt=0, le=3600, description="longest that accepted requests have after SIGTERM")
    request_texts: int = Field(2048, ge=1, description="most texts of a request")
    request_bytes: Bytes = Field(8 * 2**20, description="most bytes of a request's body")
    request_seconds: float = Field(20.0, gt=0, le=3600, description="longest that a request may take to arrive")
    api_key_file: Path | None = Field(None, description="a file with the key that clients send as a bearer token")
