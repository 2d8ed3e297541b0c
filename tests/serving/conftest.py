"""One server of each kind of model, of small random weights, for all tests of routes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="SERVING NEEDS fastapi: install the extra serve")
pytest.importorskip("torch")

from tests.builders.encoders import LABELS, write_encoder
from tests.builders.served import Served, served_in_thread

ANSWERING = {"classifier": "AutoModelForSequenceClassification", "tagger": "AutoModelForTokenClassification"}


def folder_of(kind: str, folder: Path) -> Path:
    """A folder of a RoBERTa: an embedding model, a reranker, a classifier of three classes or a tagger."""
    if kind == "embedding":
        write_encoder(folder, "roberta")
    elif kind == "reranker":
        own = {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid", "version": "5.0.0"}}
        write_encoder(folder, "roberta", ANSWERING["classifier"], num_labels=1, **own)
    else:
        write_encoder(folder, "roberta", ANSWERING[kind], **LABELS)
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    kinds = ("embedding", "reranker", "classifier", "tagger")
    return {kind: folder_of(kind, tmp_path_factory.mktemp("served") / kind) for kind in kinds}


@pytest.fixture(scope="session")
def embedding(folders: dict[str, Path]) -> Iterator[Served]:
    with served_in_thread(folders["embedding"]) as served:
        yield served


@pytest.fixture(scope="session")
def reranker(folders: dict[str, Path]) -> Iterator[Served]:
    with served_in_thread(folders["reranker"], batch_rows=2) as served:
        yield served


@pytest.fixture(scope="session")
def classifier(folders: dict[str, Path]) -> Iterator[Served]:
    with served_in_thread(folders["classifier"], batch_rows=2) as served:
        yield served


@pytest.fixture(scope="session")
def tagger(folders: dict[str, Path]) -> Iterator[Served]:
    with served_in_thread(folders["tagger"], batch_rows=2) as served:
        yield served
