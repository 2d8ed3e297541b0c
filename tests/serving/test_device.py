"""The device's thread: small requests are computed between the layers of a batch, which changes no output."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from gaudi_bert.rows.types import RowPosition, TextRow
from gaudi_bert.serving.device import DeviceThread, make_full_batch, run_packs
from gaudi_bert.serving.ladder import Shape, make_ladder
from gaudi_bert.serving.model import ServedModel, open_served_model
from gaudi_bert.serving.queue import Batch, PendingRequest, Queue
from gaudi_bert.serving.settings import ServeSettings
from tests.builders.agree import agree, identical
from tests.builders.encoders import TEXTS, write_encoder

COSTS = {shape: 0.001 + 0.0001 * shape.slots for shape in make_ladder(64, 1)}


@pytest.fixture(params=["minilm", "roberta"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> ServedModel:
    write_encoder(tmp_path / "model", request.param)
    return open_served_model(tmp_path / "model", ServeSettings(device="cpu"))


def pending(model: ServedModel, texts: list[str], finished: list[PendingRequest]) -> PendingRequest:
    sequences = model.tokenized([TextRow(RowPosition(number), text) for number, text in enumerate(texts)])
    outputs = np.zeros((len(sequences), model.width), np.float32)
    return PendingRequest(sequences, outputs, lambda request, error: finished.append(request))


def test_a_query_is_computed_between_the_layers_of_a_bulk(model: ServedModel) -> None:
    expected = run_packs(model, *make_full_batch(model, Shape(1, 64)), Shape(1, 64))
    finished: list[PendingRequest] = []
    batches: list[Batch] = []
    bulk, query = pending(model, TEXTS[:30], finished), pending(model, TEXTS[5:6], finished)
    queue = Queue(1000)
    queue.costs, queue.max_tokens = COSTS, 10_000

    def add_query() -> None:
        if batches == [] and query.accepted_at == 0.0:
            assert queue.add(query)

    def begin(*_: object) -> None:
        assert queue.add(bulk)
        model.call_between_layers(add_query)

    def count(batch: Batch, seconds: float) -> None:
        assert seconds > 0
        batches.append(batch)
        if len(finished) == 1 and not bulk.waiting:
            queue.close()

    DeviceThread(lambda: (model, COSTS), queue, ready=begin, computed=count, ended=lambda reason: None).run()
    assert finished == [query, bulk]
    assert batches[0].requests() == [query]
    assert batches[1].requests() == [bulk]
    agree(query.outputs[0], bulk.outputs[5])
    identical(run_packs(model, *make_full_batch(model, Shape(1, 64)), Shape(1, 64)), expected)
