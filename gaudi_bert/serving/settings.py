"""The settings of `gaudi-bert serve`. They are set on the command line only, and are not part of a pipeline file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from gaudi_bert.config.values import Bytes, InferencePrecision, Settings
from gaudi_bert.model.heads import Pooling


class ServeSettings(Settings):
    """The settings of `gaudi-bert serve`, such as the address, the maximum text length and the size of the queue."""

    host: str = Field("127.0.0.1", description="the address to listen on; 0.0.0.0 listens on all addresses")
    port: int = Field(8080, ge=0, le=65535, description="the port to listen on; 0 chooses a free port")
    model_id: str | None = Field(None, description="the model name that clients see; default: the name of the model folder")
    device: Literal["auto", "cpu", "cuda", "hpu"] = Field(
        "auto", description="the device; auto uses a card if one is present"
    )
    precision: InferencePrecision = Field("float32", description="the precision of matrix products; see docs/serving.md")
    compile: bool | None = Field(None, description="compile the model; default: on Gaudi")
    pooling: Pooling | None = Field(
        None, description="the pooling of an embedding model; default: the setting in the model folder, or mean"
    )
    max_sequence_length: int | None = Field(
        None, ge=3, description="the maximum number of tokens in a text; default: that of the model"
    )
    row_length: int | None = Field(
        None, ge=3, description="the number of slots in the longest row; default: depends on the model"
    )
    batch_rows: int | None = Field(
        None, ge=1, le=4096, description="the maximum number of rows in a batch; default: depends on the device"
    )
    auto_truncate: bool = Field(False, description="truncate texts that are too long, unless the request says otherwise")
    queue_texts: int = Field(8192, ge=1, description="the maximum number of waiting texts")
    queue_tokens: int | None = Field(
        None, ge=1, description="the maximum number of waiting tokens; default: what is computed within `queue_seconds`"
    )
    queue_seconds: float = Field(30.0, gt=0, le=3600, description="the maximum number of seconds that a request waits")
    grace_seconds: float = Field(
        25.0, gt=0, le=3600, description="the maximum number of seconds for accepted requests after SIGTERM"
    )
    request_texts: int = Field(2048, ge=1, description="the maximum number of texts in a request")
    request_bytes: Bytes = Field(8 * 2**20, description="the maximum number of bytes in the body of a request")
    request_seconds: float = Field(
        20.0, gt=0, le=3600, description="the maximum number of seconds in which a request must arrive"
    )
    api_key_file: Path | None = Field(None, description="a file that contains the key, which clients send as a bearer token")
