"""The device's thread: small requests are computed between the layers of a batch, which changes no output."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from gaudi_bert.rows.types import RowPosition, TextRow
from gaudi_bert.serving import device
from gaudi_bert.serving.batch_shapes import Shape, list_batch_shapes
from gaudi_bert.serving.device import (
    DeviceThread,
    compute_rows,
    make_full_batch,
    measure_longest_single_thread_row,
    trim_shape_to_tokens,
)
from gaudi_bert.serving.model import ServedModel, open_served_model
from gaudi_bert.serving.queue import Batch, PendingRequest, Queue
from gaudi_bert.serving.settings import ServeSettings
from tests.builders.agree import agree, identical
from tests.builders.encoders import TEXTS, write_encoder

COSTS = {shape: 0.001 + 0.0001 * shape.slots for shape in list_batch_shapes(64, 1)}


@pytest.fixture(params=["minilm", "roberta"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> ServedModel:
    write_encoder(tmp_path / "model", request.param)
    return open_served_model(tmp_path / "model", ServeSettings(device="cpu"))


def pending(model: ServedModel, texts: list[str], finished: list[PendingRequest]) -> PendingRequest:
    sequences = model.tokenize([TextRow(RowPosition(number), text) for number, text in enumerate(texts)])
    outputs = np.zeros((len(sequences), model.output_size), np.float32)
    return PendingRequest(sequences, outputs, lambda request, error: finished.append(request))


def test_a_query_is_computed_between_the_layers_of_a_bulk(model: ServedModel) -> None:
    expected = compute_rows(model, *make_full_batch(model, Shape(1, 64)), Shape(1, 64))
    finished: list[PendingRequest] = []
    batches: list[Batch] = []
    bulk, query = pending(model, TEXTS[:30], finished), pending(model, TEXTS[5:6], finished)
    queue = Queue(1000)
    queue.batch_seconds, queue.max_tokens = COSTS, 10_000

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

    DeviceThread(lambda: (model, COSTS), queue, on_ready=begin, on_computed=count, on_ended=lambda reason: None).run()
    assert finished == [query, bulk]
    assert batches[0].list_requests() == [query]
    assert batches[1].list_requests() == [bulk]
    agree(query.outputs[0], bulk.outputs[5])
    identical(compute_rows(model, *make_full_batch(model, Shape(1, 64)), Shape(1, 64)), expected)


@pytest.mark.parametrize("max_single_thread_slots", [0, 64])
def test_empty_slots_of_a_row_are_left_out_on_a_cpu(model: ServedModel, max_single_thread_slots: int) -> None:
    model = replace(model, max_single_thread_slots=max_single_thread_slots)
    sequences = pending(model, ["a"] * 12, []).sequences  # rows of so short texts are as deep as a complete row may be
    tokens = len(sequences.input_ids)
    assert tokens <= trim_shape_to_tokens(model, Shape(1, 64), tokens).slots < min(tokens + 5, 64)
    static = replace(model, is_eager_on_cpu=False)
    assert trim_shape_to_tokens(static, Shape(1, 64), tokens) == Shape(1, 64)
    import torch

    threads = torch.get_num_threads()
    agree(*(compute_rows(each, sequences, [12], Shape(1, 64)) for each in (model, static)))
    assert torch.get_num_threads() == threads


def test_a_shortened_row_has_one_of_few_lengths(model: ServedModel) -> None:
    lengths = {trim_shape_to_tokens(model, Shape(1, 250), tokens).length for tokens in range(1, 251)}
    assert max(lengths) == 250
    assert len(lengths) < 40


@pytest.mark.parametrize(("slower_from", "slots"), [(16, 0), (32, 16), (64, 32), (1000, 64)])
def test_single_rows_are_computed_on_one_thread_up_to_the_first_that_is_too_slow(
    slower_from: int, slots: int, model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the clock is replaced: one thread takes 1.2 times as long as all threads, and more from a length on."""
    measured: list[Shape] = []

    def seconds(model: ServedModel, shape: Shape) -> float:
        measured.append(shape)
        on_one_thread = shape.slots <= model.max_single_thread_slots
        return (1.2 if shape.length < slower_from else 1.3) if on_one_thread else 1.0

    monkeypatch.setattr(device, "_measure_seconds", seconds)
    assert measure_longest_single_thread_row(model, [Shape(1, 16), Shape(1, 32), Shape(1, 64), Shape(2, 64)]) == slots
    assert all(shape.rows == 1 for shape in measured), "several rows are never computed on one thread"
