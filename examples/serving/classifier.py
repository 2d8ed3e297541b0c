"""Serve a classifier: a batch of texts in, packed, an answer for each out, in their order.

    pip install fastapi uvicorn
    python examples/serving/classifier.py --model tuned/
    curl localhost:8000/predict -H 'content-type: application/json' -d '{"texts": ["a good one", "a bad one"]}'

`--model` is a folder of `gaudi-bert finetune`, or any of `transformers` with a head for texts or tokens. Answers are those
of `gaudi-bert predict`. For more cores or cards, start more processes behind a load balancer.
"""

from __future__ import annotations

import argparse
import threading
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, Field

from gaudi_bert.common.errors import GaudiBertError
from gaudi_bert.pytorch import PackedEncoder
from gaudi_bert.pytorch.encoder import open_encoder
from gaudi_bert.rows.tokenizer import open_tokenizer

MOST_TEXTS = 8192  # packed together


class Batch(BaseModel):
    """What a client sends."""

    texts: list[str] = Field(min_length=1, max_length=MOST_TEXTS)


class Answers(BaseModel):
    """What it gets: an answer for each text."""

    answers: list[dict[str, Any]]


def open_classifier(folder: Path, device: str) -> PackedEncoder:
    """The model of a folder, tried on a text.

    Raises:
        InputError: the folder is damaged, or its model has no head or cannot be fed packs.
    """
    encoder = open_encoder(folder, open_tokenizer(folder), device)
    encoder.predict([""])
    return encoder


def make_app(encoder: PackedEncoder) -> FastAPI:
    """The service. Requests wait for one another: a model computes one batch at a time."""
    app, one_at_a_time = FastAPI(title="gaudi-bert classifier"), threading.Lock()

    @app.get("/ready")
    def ready() -> dict[str, Any]:
        """For a probe, and for those who want to know the labels."""
        return {"task": encoder.task, "labels": encoder.labels}

    @app.post("/predict")
    def predict(batch: Batch) -> Answers:
        with one_at_a_time:
            return Answers(answers=encoder.predict(batch.texts))

    return app


def main() -> None:
    """Open the model, and serve until stopped."""
    import uvicorn

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="the folder of a model with a head")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    uvicorn.run(make_app(open_classifier(options.model, options.device)), host=options.host, port=options.port)


if __name__ == "__main__":
    try:
        main()
    except GaudiBertError as error:
        raise SystemExit(f"error: {error}") from None
