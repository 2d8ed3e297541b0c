"""The command `serve`: a model's answers over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gaudi_bert.cli.model_commands import Model
from gaudi_bert.common.errors import require
from gaudi_bert.common.progress import Reporter

_EXTRA = {"fastapi": "serve", "uvicorn": "serve", "prometheus_client": "serve"}


def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 for a free one.")] = 8080,
    model_id: Annotated[str | None, typer.Option(metavar="NAME", help="The model's name; default: the folder's.")] = None,
    device: Annotated[str | None, typer.Option(metavar="auto|cpu|cuda|hpu", help="Default: a card, if any.")] = None,
    precision: Annotated[str | None, typer.Option(help="Precision of matrix products; default: float32.")] = None,
    compile_: Annotated[bool | None, typer.Option("--compile/--no-compile", help="Default: on Gaudi only.")] = None,
    pooling: Annotated[str | None, typer.Option(help="Default: the folder's own, or mean.")] = None,
    max_sequence_length: Annotated[int | None, typer.Option(help="Most tokens of a text; default: the model's own.")] = None,
    row_length: Annotated[int | None, typer.Option(help="Slots of the longest row; default: by the model.")] = None,
    batch_rows: Annotated[int | None, typer.Option(help="Most rows of a batch; default: by the device.")] = None,
    auto_truncate: Annotated[bool, typer.Option("--auto-truncate", help="Cut texts that are too long.")] = False,
    queue_texts: Annotated[int | None, typer.Option(help="Most texts that wait; default: 8,192.")] = None,
    queue_tokens: Annotated[int | None, typer.Option(help="Most tokens that wait; default: by the device.")] = None,
    queue_seconds: Annotated[float | None, typer.Option(help="Longest that a text waits; default: 30.")] = None,
    grace_seconds: Annotated[float | None, typer.Option(help="To answer what waits after SIGTERM; default: 25.")] = None,
    request_texts: Annotated[int | None, typer.Option(help="Most texts of a request; default: 2,048.")] = None,
    request_bytes: Annotated[str | None, typer.Option(help="Most bytes of a request; default: 8 MiB.")] = None,
    request_seconds: Annotated[float | None, typer.Option(help="For a request to arrive; default: 20.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="A file with the key that clients must send.")] = None,
) -> None:
    """Answer requests for embeddings, scores, labels or tags over HTTP, packed."""
    options = {name: value for name, value in locals().items() if name not in ("model", "compile_")}
    require(_EXTRA, "serve")
    from gaudi_bert.config.pipeline import section_from_options
    from gaudi_bert.serving import server
    from gaudi_bert.serving.settings import ServeSettings

    settings = section_from_options(ServeSettings, **options, compile=compile_)
    server.serve(model, settings, Reporter())
